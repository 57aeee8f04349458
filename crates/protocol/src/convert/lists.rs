//! Requests about many keys, decoded without memory for each key.
//!
//! The list of such a request is kept apart from it, in two pieces of memory whatever its length; the message
//! itself has its list left empty. What is no request of this kind is decoded as it comes.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};

use super::batches::Batch;
use crate::error::WireError;
use crate::ids::Generation;
use crate::key::ObjectKey;
use crate::replica::{ObjectRef, VersionRef};
use crate::wire::client_frame::Request;
use crate::wire::{self, ClientFrame};

/// Keys, or versions of objects, one behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyList {
    text: String,
    entries: Vec<Listed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Listed {
    /// Where the key ends in the text.
    end: usize,
    /// Zero in a list of keys.
    generation: u64,
}

impl KeyList {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The keys in order, each an error of its own if it can't be one.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = Result<&str, WireError>> {
        self.texts().map(|(key, _)| {
            ObjectKey::check(key)?;
            Ok(key)
        })
    }

    /// The versions in order, each an error of its own if it can't be one.
    pub fn versions(&self) -> impl ExactSizeIterator<Item = Result<VersionRef<'_>, WireError>> {
        self.texts().map(|(key, generation)| {
            if generation == 0 {
                return Err(WireError::Missing {
                    field: "generation",
                });
            }
            ObjectKey::check(key)?;
            Ok(VersionRef {
                key,
                generation: Generation(generation),
            })
        })
    }

    fn texts(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        let mut start = 0;
        self.entries.iter().map(move |entry| {
            let key = &self.text[start..entry.end];
            start = entry.end;
            (key, entry.generation)
        })
    }

    fn push(&mut self, key: &str, generation: u64) {
        self.text.push_str(key);
        let end = self.text.len();
        self.entries.push(Listed { end, generation });
    }

    fn clear(&mut self) {
        self.text.clear();
        self.entries.clear();
    }

    /// Takes a request's bytes apart into its list and the rest.
    fn merge<R>(&mut self, request: &mut R, mut body: &[u8]) -> Result<(), DecodeError>
    where
        R: Batch<Entry: Decode>,
    {
        let context = DecodeContext::default();
        while !body.is_empty() {
            let left = body.len();
            let (field, wire_type) = decode_key(&mut body)?;
            if field != R::LIST || wire_type != WireType::LengthDelimited {
                request.merge_field(field, wire_type, &mut body, context.clone())?;
                continue;
            }
            let entry = delimited(&mut body)?;
            if self.entries.len() == self.entries.capacity() {
                // Nearly always all entries are as long as the first.
                self.entries.reserve(left.div_ceil(left - body.len()));
                self.text.reserve(left);
            }
            R::Entry::decode(entry, self)?;
        }
        Ok(())
    }
}

/// What a list can be made of.
trait Decode {
    /// Appends an entry, which is encoded so, to a list.
    fn decode(bytes: &[u8], list: &mut KeyList) -> Result<(), DecodeError>;
}

impl Decode for ObjectKey {
    fn decode(bytes: &[u8], list: &mut KeyList) -> Result<(), DecodeError> {
        list.push(text(bytes)?, 0);
        Ok(())
    }
}

impl Decode for ObjectRef {
    fn decode(mut bytes: &[u8], list: &mut KeyList) -> Result<(), DecodeError> {
        let (mut key, mut generation) = ("", 0);
        while !bytes.is_empty() {
            match decode_key(&mut bytes)? {
                (1, WireType::LengthDelimited) => key = text(delimited(&mut bytes)?)?,
                (2, WireType::Varint) => generation = decode_varint(&mut bytes)?,
                (1 | 2, _) => return Err(malformed("a field of an object has another type")),
                (field, wire_type) => {
                    skip_field(wire_type, field, &mut bytes, DecodeContext::default())?;
                }
            }
        }
        list.push(key, generation);
        Ok(())
    }
}

/// The bytes of a field with a length in front.
fn delimited<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], DecodeError> {
    let len = decode_varint(bytes)?;
    let taken = usize::try_from(len)
        .ok()
        .and_then(|len| bytes.split_off(..len));
    taken.ok_or_else(|| malformed("a field is longer than what it is part of"))
}

fn text(bytes: &[u8]) -> Result<&str, DecodeError> {
    str::from_utf8(bytes).map_err(|_| malformed("a key is not UTF-8"))
}

#[expect(
    deprecated,
    reason = "meant for implementations of the encoding, of which this is a part"
)]
fn malformed(what: &'static str) -> DecodeError {
    DecodeError::new(what)
}

/// A client's frame whose list of keys, if it has one, stands apart from its request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListedFrame {
    /// The frame; its request's list is empty.
    pub frame: ClientFrame,
    /// The list.
    pub list: KeyList,
}

impl ListedFrame {
    /// Decodes a frame.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut listed = Self::default();
        while !bytes.is_empty() {
            let (field, wire_type) = decode_key(&mut bytes)?;
            if wire_type != WireType::LengthDelimited || !listed.request(field, &mut bytes)? {
                let context = DecodeContext::default();
                let ListedFrame { frame, list } = &mut listed;
                frame.merge_field(field, wire_type, &mut bytes, context)?;
                if !has_list(frame.request.as_ref()) {
                    // Another request came in place of the one that the list was part of.
                    list.clear();
                }
            }
        }
        Ok(listed)
    }
}

macro_rules! listed {
    ($($request:ident: $variant:ident, $list:ident;)*) => {
        impl ListedFrame {
            /// Takes a field if it is a request with a list.
            fn request(&mut self, field: u32, bytes: &mut &[u8]) -> Result<bool, DecodeError> {
                match field {
                    $(<wire::$request as Batch>::REQUEST => {
                        // A request in several parts is the sum of them, as everywhere in this encoding.
                        let mut request = match self.frame.request.take() {
                            Some(Request::$variant(request)) => request,
                            _ => {
                                self.list.clear();
                                wire::$request::default()
                            }
                        };
                        self.list.merge(&mut request, delimited(bytes)?)?;
                        self.frame.request = Some(Request::$variant(request));
                    })*
                    _ => return Ok(false),
                }
                Ok(true)
            }
        }

        fn has_list(request: Option<&Request>) -> bool {
            matches!(request, Some($(Request::$variant(_))|*))
        }

        impl From<ClientFrame> for ListedFrame {
            fn from(mut frame: ClientFrame) -> Self {
                let mut list = KeyList::default();
                match &mut frame.request {
                    $(Some(Request::$variant(request)) => {
                        for entry in std::mem::take(&mut request.$list) {
                            entry.append_to(&mut list);
                        }
                    })*
                    _ => {}
                }
                Self { frame, list }
            }
        }
    };
}

listed! {
    ExistsRequest: Exists, keys;
    GetStartRequest: GetStart, keys;
    RenewRequest: Renew, objects;
    GetEndRequest: GetEnd, objects;
    PutEndRequest: PutEnd, objects;
    PutRevokeRequest: PutRevoke, objects;
    WaitCompleteRequest: WaitComplete, keys;
    RemoveRequest: Remove, keys;
    RemoveVersionsRequest: RemoveVersions, objects;
}

/// What generated messages have in their lists.
trait Append {
    fn append_to(self, list: &mut KeyList);
}

impl Append for String {
    fn append_to(self, list: &mut KeyList) {
        list.push(&self, 0);
    }
}

impl Append for wire::ObjectRef {
    fn append_to(self, list: &mut KeyList) {
        list.push(&self.key, self.generation);
    }
}
