//! Names of objects, and the schemas by which a connector makes them.
//!
//! To the store a key is opaque: any UTF-8 text of 1 to 65,535 bytes, within a [`Tenant`] (K4). What
//! a connector writes into it is a [`KeySchema`]'s business:
//!
//! | schema | compatible | fingerprinted |
//! |---|---|---|
//! | single group (K1) | `model@hash@rank` | `model@layercake_v1:fingerprint@hash@rank` |
//! | hybrid (K2) | `model@mooncake_hybrid_v1:layout@group:g@block:n@hash@head` | `model@layercake_hybrid_v1:layout:fingerprint@group:g@block:n@hash@head` |
//!
//! followed by `@pp:1/4`, `@pcp:0/2` and `@dcp:3/8` (coordinate and number of them), each exactly where
//! that kind of parallelism is wider than one, since only then it changes what is stored (K3).
//!
//! Two identities never make one key. No field holds the separator: in a fingerprinted key an `@` or
//! `%` of the model's name is written as `%40` or `%25`; in a compatible key, whose text others read
//! too, such an `@` is refused; a hash is written as hexadecimal digits. The number of fields and
//! their tags then tell every schema from the others.

use std::borrow::Borrow;
use std::fmt;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};

use thiserror::Error;

use crate::fingerprint::{Fingerprint, LayoutDigest};

/// Why a text can't name an object or a tenant, or a schema can't be made of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key is empty or too long.
    #[error("a key of {len} bytes: 1 to {} bytes are accepted", ObjectKey::MAX_LEN)]
    Length {
        /// Its length in bytes.
        len: usize,
    },
    /// The key's bytes are not UTF-8.
    #[error("the key is not UTF-8 from byte {valid_up_to} on")]
    NotUtf8 {
        /// How many bytes from the start are.
        valid_up_to: usize,
    },
    /// The tenant's name is empty or too long.
    #[error(
        "a tenant's name of {len} bytes: 1 to {} bytes are accepted",
        Tenant::MAX_LEN
    )]
    TenantLength {
        /// Its length in bytes.
        len: usize,
    },
    /// The model's name is empty.
    #[error("the model's name is empty")]
    NoModel,
    /// A compatible key can't carry this model's name.
    #[error(
        "the model name {model:?} holds the separator \"@\": keys in the compatible form can't tell it from other fields, use fingerprinted keys or another name"
    )]
    SeparatorInModel {
        /// The name.
        model: String,
    },
    /// The block hash is empty.
    #[error("the block hash is empty")]
    NoHash,
    /// The block hash's text holds something else than hexadecimal digits.
    #[error("the block hash {hash:?} is not made of the digits 0-9 and a-f")]
    HashDigits {
        /// The text given.
        hash: String,
    },
    /// A coordinate lies outside its kind of parallelism.
    #[error("{kind} coordinate {value}: this schema has {size} of them, counted from 0")]
    Coordinate {
        /// Which kind: `pp`, `pcp` or `dcp`.
        kind: &'static str,
        /// The coordinate given.
        value: u32,
        /// How many there are.
        size: u32,
    },
}

/// The name of an object within its tenant. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// The longest key, in bytes.
    pub const MAX_LEN: usize = 65_535;

    /// Checks the length and takes a copy.
    pub fn new(key: &str) -> Result<Self, KeyError> {
        Self::check(key)?;
        Ok(Self(key.into()))
    }

    /// Checks that bytes from elsewhere are a key.
    pub fn from_utf8(bytes: &[u8]) -> Result<Self, KeyError> {
        match str::from_utf8(bytes) {
            Ok(key) => Self::new(key),
            Err(error) => Err(KeyError::NotUtf8 {
                valid_up_to: error.valid_up_to(),
            }),
        }
    }

    /// Checks a key that stays where it is.
    pub fn check(key: &str) -> Result<(), KeyError> {
        match key.len() {
            1..=Self::MAX_LEN => Ok(()),
            len => Err(KeyError::Length { len }),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A namespace of keys. Cheap to clone; the default one is named `default`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(Arc<str>);

static DEFAULT_TENANT: LazyLock<Tenant> = LazyLock::new(|| Tenant(Tenant::DEFAULT.into()));

impl Tenant {
    /// The longest name, in bytes.
    pub const MAX_LEN: usize = 255;

    /// The name of the namespace that is used where none is given.
    pub const DEFAULT: &str = "default";

    /// Checks the length and takes a copy.
    pub fn new(name: &str) -> Result<Self, KeyError> {
        match name.len() {
            7 if name == Self::DEFAULT => Ok(Self::default()),
            1..=Self::MAX_LEN => Ok(Self(name.into())),
            len => Err(KeyError::TenantLength { len }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Tenant {
    fn default() -> Self {
        DEFAULT_TENANT.clone()
    }
}

macro_rules! text {
    ($name:ident) => {
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = KeyError;

            fn try_from(text: &str) -> Result<Self, KeyError> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = KeyError;

            fn try_from(text: String) -> Result<Self, KeyError> {
                Self::new(&text)
            }
        }

        impl std::str::FromStr for $name {
            type Err = KeyError;

            fn from_str(text: &str) -> Result<Self, KeyError> {
                Self::new(text)
            }
        }
    };
}

text!(ObjectKey);
text!(Tenant);

/// Whether keys say which deployment they belong to (K3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// The plain form that other implementations write and read. Nothing in it tells two deployments
    /// with equal block hashes apart.
    Compatible,
    /// The deployment's fingerprint is part of every key.
    Fingerprinted(Fingerprint),
}

/// How many pipeline stages and context ranks a deployment has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parallelism {
    /// Pipeline stages.
    pub pp: u32,
    /// Prefill-context ranks.
    pub pcp: u32,
    /// Decode-context ranks.
    pub dcp: u32,
}

impl Default for Parallelism {
    fn default() -> Self {
        Self {
            pp: 1,
            pcp: 1,
            dcp: 1,
        }
    }
}

/// Which part of a block an object holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The storing rank, or in a hybrid layout the storing head or rank.
    pub rank: u32,
    /// The pipeline stage.
    pub pp: u32,
    /// The prefill-context rank.
    pub pcp: u32,
    /// The decode-context rank.
    pub dcp: u32,
}

impl Coordinates {
    /// The rank of a deployment without pipeline or context parallelism.
    pub const fn of_rank(rank: u32) -> Self {
        Self {
            rank,
            pp: 0,
            pcp: 0,
            dcp: 0,
        }
    }
}

/// Makes the keys of one deployment and, in a hybrid layout, of one of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySchema {
    prefix: String,
    parallelism: Parallelism,
}

impl KeySchema {
    /// Namespace of compatible keys of hybrid layouts.
    pub const COMPATIBLE_HYBRID_NAMESPACE: &str = "mooncake_hybrid_v1";
    /// Namespace of fingerprinted keys of hybrid layouts.
    pub const HYBRID_NAMESPACE: &str = "layercake_hybrid_v1";
    /// Namespace of fingerprinted keys of a single group.
    pub const SINGLE_GROUP_NAMESPACE: &str = "layercake_v1";

    /// The schema of a model whose layers form one group (K1).
    pub fn single_group(
        model: &str,
        form: KeyForm,
        parallelism: Parallelism,
    ) -> Result<Self, KeyError> {
        let mut prefix = model_field(model, form)?;
        if let KeyForm::Fingerprinted(fingerprint) = form {
            push(
                &mut prefix,
                format_args!("{}:{fingerprint}@", Self::SINGLE_GROUP_NAMESPACE),
            );
        }
        Ok(Self {
            prefix,
            parallelism,
        })
    }

    /// The schema of one group of a hybrid layout (K2). `block_size` is in raw tokens.
    pub fn hybrid(
        model: &str,
        form: KeyForm,
        layout: LayoutDigest,
        group: u32,
        block_size: u32,
        parallelism: Parallelism,
    ) -> Result<Self, KeyError> {
        let mut prefix = model_field(model, form)?;
        match form {
            KeyForm::Compatible => push(
                &mut prefix,
                format_args!("{}:{layout}", Self::COMPATIBLE_HYBRID_NAMESPACE),
            ),
            KeyForm::Fingerprinted(fingerprint) => push(
                &mut prefix,
                format_args!("{}:{layout}:{fingerprint}", Self::HYBRID_NAMESPACE),
            ),
        }
        push(
            &mut prefix,
            format_args!("@group:{group}@block:{block_size}@"),
        );
        Ok(Self {
            prefix,
            parallelism,
        })
    }

    /// The part of the schema that makes the keys of one rank.
    pub fn rank(&self, at: Coordinates) -> Result<RankKeys, KeyError> {
        let mut suffix = String::new();
        push(&mut suffix, format_args!("@{}", at.rank));
        for (kind, value, size) in [
            ("pp", at.pp, self.parallelism.pp),
            ("pcp", at.pcp, self.parallelism.pcp),
            ("dcp", at.dcp, self.parallelism.dcp),
        ] {
            if value >= size {
                return Err(KeyError::Coordinate { kind, value, size });
            }
            if size > 1 {
                push(&mut suffix, format_args!("@{kind}:{value}/{size}"));
            }
        }
        Ok(RankKeys {
            prefix: self.prefix.clone(),
            suffix,
        })
    }
}

/// Makes the keys of one rank: all but the hash is written beforehand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankKeys {
    prefix: String,
    suffix: String,
}

impl RankKeys {
    /// The key of the block with this hash.
    pub fn key(&self, block_hash: &[u8]) -> Result<ObjectKey, KeyError> {
        if block_hash.is_empty() {
            return Err(KeyError::NoHash);
        }
        let mut key = self.start(block_hash.len().saturating_mul(2))?;
        for byte in block_hash {
            key.push(HEX[usize::from(byte >> 4)]);
            key.push(HEX[usize::from(byte & 0xF)]);
        }
        key.push_str(&self.suffix);
        Ok(ObjectKey(key.into()))
    }

    /// The key of the block whose hash is given as lower-case hexadecimal digits.
    pub fn key_of_hex(&self, block_hash: &str) -> Result<ObjectKey, KeyError> {
        if block_hash.is_empty() {
            return Err(KeyError::NoHash);
        }
        if !block_hash
            .bytes()
            .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        {
            return Err(KeyError::HashDigits {
                hash: block_hash.to_owned(),
            });
        }
        let mut key = self.start(block_hash.len())?;
        key.push_str(block_hash);
        key.push_str(&self.suffix);
        Ok(ObjectKey(key.into()))
    }

    /// The buffer of a key with room for a hash of this many digits, up to the hash.
    fn start(&self, digits: usize) -> Result<String, KeyError> {
        let len = (self.prefix.len() + self.suffix.len()).saturating_add(digits);
        if len > ObjectKey::MAX_LEN {
            return Err(KeyError::Length { len });
        }
        let mut key = String::with_capacity(len);
        key.push_str(&self.prefix);
        Ok(key)
    }
}

const HEX: [char; 16] = [
    '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
];

/// The model's name as a key's first field, with the separator behind it.
fn model_field(model: &str, form: KeyForm) -> Result<String, KeyError> {
    if model.is_empty() {
        return Err(KeyError::NoModel);
    }
    let mut field = match form {
        KeyForm::Compatible if model.contains('@') => {
            return Err(KeyError::SeparatorInModel {
                model: model.to_owned(),
            });
        }
        KeyForm::Compatible => model.to_owned(),
        KeyForm::Fingerprinted(_) => model.replace('%', "%25").replace('@', "%40"),
    };
    field.push('@');
    Ok(field)
}

fn push(text: &mut String, part: fmt::Arguments<'_>) {
    text.write_fmt(part)
        .expect("writing into a string never fails");
}
