//! What belongs to a connection rather than to a message: sizes, tickets, and refusals of whole calls.

use prost::Message as _;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Code, Status};

use super::invalid;
use crate::error::{Refusal, WireError};
use crate::wire;

/// The largest message that either end of the control plane accepts, in bytes. Both ends set it on
/// their gRPC library, whose own default is 4 MiB: a batch of 20,000 long keys is larger.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The most keys in one request: with this many, no answer exceeds [`MAX_MESSAGE_BYTES`] for any
/// sensible number of replicas. Clients split larger batches.
pub const MAX_KEYS_PER_REQUEST: usize = 128 << 10;

/// Name of the metadata entry that carries the ticket.
pub const TICKET_METADATA: &str = "layercake-ticket";

/// What a connection got for its proof, and shows with every later call.
pub type Ticket = [u8; 16];

/// The ticket as a metadata value: 32 hexadecimal digits.
#[expect(
    clippy::missing_panics_doc,
    reason = "hexadecimal digits are always a valid value"
)]
pub fn encode_ticket(ticket: &Ticket) -> MetadataValue<Ascii> {
    let mut text = format!("{:032x}", u128::from_be_bytes(*ticket))
        .parse::<MetadataValue<Ascii>>()
        .expect("hexadecimal digits are ASCII");
    // Header compression must not keep it, nor a log show it.
    text.set_sensitive(true);
    text
}

/// The ticket that came with a call; `None`: there is none.
pub fn decode_ticket(metadata: &MetadataMap) -> Result<Option<Ticket>, WireError> {
    let Some(value) = metadata.get(TICKET_METADATA) else {
        return Ok(None);
    };
    value
        .to_str()
        .ok()
        .filter(|text| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .and_then(|text| u128::from_str_radix(text, 16).ok())
        .map(|ticket| Some(ticket.to_be_bytes()))
        .ok_or_else(|| invalid(TICKET_METADATA, "32 hexadecimal digits are needed"))
}

/// The gRPC code nearest to a refusal, for clients that know nothing else.
fn status_code(refusal: &Refusal) -> Code {
    match refusal {
        Refusal::InvalidArgument { .. } => Code::InvalidArgument,
        Refusal::NotFound | Refusal::UnknownMember | Refusal::UnknownTenant => Code::NotFound,
        Refusal::AlreadyExists => Code::AlreadyExists,
        Refusal::InProgress | Refusal::Superseded => Code::Aborted,
        Refusal::NotReady
        | Refusal::Leased
        | Refusal::LeaseExpired
        | Refusal::WrongTerm
        | Refusal::Version { .. } => Code::FailedPrecondition,
        Refusal::NoSpace { .. } | Refusal::TooLarge { .. } | Refusal::QuotaExceeded => {
            Code::ResourceExhausted
        }
        Refusal::Unreachable | Refusal::ShuttingDown => Code::Unavailable,
        Refusal::Unauthenticated => Code::Unauthenticated,
        Refusal::Unknown { .. } => Code::Unknown,
    }
}

impl From<&Refusal> for Status {
    /// The refusal of a whole call, with the typed one in the status's details.
    fn from(refusal: &Refusal) -> Self {
        let details = wire::Error::from(refusal).encode_to_vec();
        Self::with_details(status_code(refusal), refusal.to_string(), details.into())
    }
}

/// The refusal inside a gRPC status; `None` if the status came from somewhere else, such as a broken
/// connection.
pub fn decode_status(status: &Status) -> Option<Refusal> {
    if status.details().is_empty() {
        return None;
    }
    wire::Error::decode(status.details())
        .ok()
        .and_then(|error| error.try_into().ok())
}
