//! Requests about many keys, encoded without a message that holds a copy of each key.
//!
//! A message is the concatenation of its fields, in any order. So the request is encoded with its list
//! left empty, and the list's entries are put behind it.

use bytes::{BufMut, Bytes};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use crate::key::ObjectKey;
use crate::replica::{ObjectRef, PutStart};
use crate::wire;

/// A request whose keys stand in a list.
pub trait Batch: Message {
    /// What the list is made of.
    type Entry: Entry;
    /// The request's field in a frame.
    const REQUEST: u32;
    /// The list's field in the request.
    const LIST: u32;
}

/// One of many in a request. Only this module's types are.
pub trait Entry: sealed::Encode {}

macro_rules! batches {
    ($($request:ident: $entry:ty, $field:literal, $list:literal;)*) => {
        $(impl Batch for wire::$request {
            type Entry = $entry;
            const REQUEST: u32 = $field;
            const LIST: u32 = $list;
        })*
    };
}

batches! {
    ExistsRequest: ObjectKey, 2, 2;
    GetStartRequest: ObjectKey, 3, 1;
    RenewRequest: ObjectRef, 4, 1;
    GetEndRequest: ObjectRef, 5, 1;
    PutStartRequest: PutStart, 6, 1;
    PutEndRequest: ObjectRef, 7, 1;
    PutRevokeRequest: ObjectRef, 8, 1;
    WaitCompleteRequest: ObjectKey, 9, 1;
    RemoveRequest: ObjectKey, 10, 1;
    RemoveVersionsRequest: ObjectRef, 20, 1;
}

/// A frame without context that asks `request` about `entries`. The request's own list is empty.
pub fn encode_batch<R: Batch>(request: &R, entries: &[R::Entry]) -> Bytes {
    encode_in(&[R::REQUEST], request, entries)
}

/// As [`encode_batch`], for an upsert, which is a put start within its own message.
pub fn encode_upserts(request: &wire::PutStartRequest, entries: &[PutStart]) -> Bytes {
    encode_in(&[UPSERT_START, START], request, entries)
}

/// Fields of an upsert: in a frame, and of the put start in it.
const UPSERT_START: u32 = 18;
const START: u32 = 1;

/// `fields`: those that the request is within, the outermost first.
fn encode_in<R: Batch>(fields: &[u32], request: &R, entries: &[R::Entry]) -> Bytes {
    use sealed::Encode as _;
    let lens = entries
        .iter()
        .map(|entry| delimited(R::LIST, entry.encoded_len()));
    let body = request.encoded_len() + lens.sum::<usize>();
    let within = |fields: &[u32]| {
        let fields = fields.iter().rev();
        fields.fold(body, |len, field| delimited(*field, len))
    };
    let mut buffer = Vec::with_capacity(within(fields));
    for (at, field) in fields.iter().enumerate() {
        begin(*field, within(&fields[at + 1..]), &mut buffer);
    }
    request.encode_raw(&mut buffer);
    for entry in entries {
        begin(R::LIST, entry.encoded_len(), &mut buffer);
        entry.encode(&mut buffer);
    }
    buffer.into()
}

/// The bytes of a field with a length in front.
fn delimited(field: u32, len: usize) -> usize {
    key_len(field) + encoded_len_varint(len as u64) + len
}

/// What stands in front of the bytes of such a field.
fn begin(field: u32, len: usize, buffer: &mut Vec<u8>) {
    encode_key(field, WireType::LengthDelimited, buffer);
    encode_varint(len as u64, buffer);
}

mod sealed {
    pub trait Encode {
        fn encoded_len(&self) -> usize;

        fn encode(&self, buffer: &mut Vec<u8>);
    }
}

impl Entry for ObjectKey {}

impl sealed::Encode for ObjectKey {
    fn encoded_len(&self) -> usize {
        self.as_str().len()
    }

    fn encode(&self, buffer: &mut Vec<u8>) {
        buffer.put_slice(self.as_str().as_bytes());
    }
}

/// The key in an [`ObjectRef`] and in a [`PutStart`], and an [`ObjectRef`]'s other field.
const KEY: u32 = 1;
const GENERATION: u32 = 2;

impl Entry for ObjectRef {}

impl sealed::Encode for ObjectRef {
    fn encoded_len(&self) -> usize {
        let generation = key_len(GENERATION) + encoded_len_varint(self.generation.0);
        delimited(KEY, self.key.as_str().len()) + generation
    }

    fn encode(&self, buffer: &mut Vec<u8>) {
        let key = self.key.as_str().as_bytes();
        begin(KEY, key.len(), buffer);
        buffer.put_slice(key);
        encode_key(GENERATION, WireType::Varint, buffer);
        encode_varint(self.generation.0, buffer);
    }
}

impl Entry for PutStart {}

impl sealed::Encode for PutStart {
    fn encoded_len(&self) -> usize {
        delimited(KEY, self.key.as_str().len()) + self.without_key().encoded_len()
    }

    fn encode(&self, buffer: &mut Vec<u8>) {
        let key = self.key.as_str().as_bytes();
        begin(KEY, key.len(), buffer);
        buffer.put_slice(key);
        self.without_key().encode_raw(buffer);
    }
}
