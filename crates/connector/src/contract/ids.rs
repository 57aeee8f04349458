//! Names of requests and blocks.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// A request as the engine names it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RequestId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let id = Cow::<'de, str>::deserialize(deserializer)?;
        Ok(Self(id.as_ref().into()))
    }
}

/// A block of the engine's paged cache, counted from 0. A plain number, so that lists of them are
/// applied to a layer's template as they are.
pub type BlockId = u64;

/// The engine's chained hash of the tokens up to a block's end. Cheap to clone; hexadecimal digits
/// wherever it is written.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(Arc<[u8]>);

/// A text is not an even number of hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{text:?} is no block hash: an even number of digits 0-9 and a-f, at least two, is expected"
)]
pub struct HashTextError {
    /// The text given.
    pub text: String,
}

/// Bytes that are written as digits in one go.
const HEX_AT_ONCE: usize = 32;

impl BlockHash {
    /// Takes a copy.
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Reads hexadecimal digits.
    pub fn from_hex(text: &str) -> Result<Self, HashTextError> {
        let error = || HashTextError {
            text: text.to_owned(),
        };
        if text.is_empty() || !text.len().is_multiple_of(2) {
            return Err(error());
        }
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(error()),
        };
        // With its length known: collecting results would grow it step by step.
        let mut bytes = Vec::with_capacity(text.len() / 2);
        for pair in text.as_bytes().chunks_exact(2) {
            bytes.push(digit(pair[0])? << 4 | digit(pair[1])?);
        }
        Ok(Self(bytes.into()))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Many digits at a time: a step's metadata has hundreds of hashes, and formatting byte by byte makes all of it
        // cost seven times as much.
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 2 * HEX_AT_ONCE];
        for part in self.0.chunks(HEX_AT_ONCE) {
            for (byte, pair) in part.iter().zip(text.chunks_exact_mut(2)) {
                pair[0] = DIGITS[usize::from(byte >> 4)];
                pair[1] = DIGITS[usize::from(byte & 15)];
            }
            let text = str::from_utf8(&text[..2 * part.len()]);
            f.write_str(text.expect("digits are ASCII"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

impl Serialize for BlockHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        Self::from_hex(&text).map_err(serde::de::Error::custom)
    }
}
