//! Between the messages of the wire and the domain types.
//!
//! Master and client both stand on this module; nothing behind a connection sees a generated type.
//! What arrives is suspect: `TryFrom` checks every field that the domain type promises something
//! about, and a [`WireError`] names the field as the `.proto` file does. What is sent is a domain
//! value already, so that way is `From` and can't fail.
//!
//! A batch is converted key by key, so that one bad key fails alone (requirement S3); lists that must
//! align with the caller's keys are checked for their length. Numbers that newer peers may add to an
//! enum are refused, never taken for something else. Nothing here allocates more than the message
//! that came.
//!
//! - `members`: ids, endpoints, segments.
//! - `objects`: who asks, keys, replicas, reservations, object references.
//! - `refusals`: refusals, alone and per key.
//! - `batches`, `lists`: requests about many keys, into bytes and out of them.
//! - `answers`: the composite answers of a get or put start, and presence lists.
//! - `holds`: places in advance.
//! - `connection`: message sizes, tickets, and whole calls that are refused.
//! - `commands`: fences and dropped sessions; `reports`: what tools ask for.

mod answers;
mod batches;
mod commands;
mod connection;
mod holds;
mod lists;
mod members;
mod objects;
mod refusals;
mod reports;

pub use answers::{GetStartAnswer, PutStartAnswer, decode_presences, encode_presences};
pub use batches::{Batch, encode_batch, encode_upserts};
pub use connection::{
    MAX_KEYS_PER_REQUEST, MAX_MESSAGE_BYTES, TICKET_METADATA, Ticket, decode_status, decode_ticket,
    encode_ticket,
};
pub use holds::PutSlotsAnswer;
pub use lists::{KeyList, ListedFrame};
pub use objects::Context;
pub use refusals::{decode_key_results, decode_refusals, encode_key_results, encode_refusals};

use crate::error::WireError;

/// A field that must be there.
pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or(WireError::Missing { field })
}

/// A field of exactly `N` bytes.
pub(crate) fn array<const N: usize>(
    field: &'static str,
    bytes: &[u8],
) -> Result<[u8; N], WireError> {
    bytes.try_into().map_err(|_| WireError::Invalid {
        field,
        detail: format!("{} bytes, {N} are needed", bytes.len()),
    })
}

/// A refusal of a field's value.
pub(crate) fn invalid(field: &'static str, detail: impl Into<String>) -> WireError {
    WireError::Invalid {
        field,
        detail: detail.into(),
    }
}

/// A list that must have one entry per key of the request.
pub(crate) fn aligned(field: &'static str, len: usize, keys: usize) -> Result<(), WireError> {
    if len == keys {
        Ok(())
    } else {
        Err(invalid(field, format!("{len} entries for {keys} keys")))
    }
}
