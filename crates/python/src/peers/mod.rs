//! Transfer engines that name each other by an address, and memory by its address in its owner.
//!
//! The transport names memory by region and capability, which only the owner can hand out. Here each engine
//! listens on one more port, where a peer that knows the shared token is told the engine's endpoint and
//! which regions it shows (`proto/layercake/v1/peer.proto`). `host:port` of that listener is the
//! engine's name.
//!
//! | module | what it does |
//! |---|---|
//! | `engine` | the engine: starting, submitting, notifying |
//! | `table` | from an address to a region, pure |
//! | `link` | one stream to a peer, opened anew when it broke |
//! | `server` | the other end |
//!
//! A peer's table is asked for when its stream opens and again when an address is not in it or its owner does
//! not know the region any more, so registering costs no message. Every wait has a deadline; tasks
//! belong to the engine and end with it.

mod engine;
mod link;
mod server;
mod table;

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::version::VersionMismatch;
use layercake_transport::PieceError;
use thiserror::Error;

pub(crate) use self::engine::{Move, PeerEngine, Submitted};

/// How long connecting to a peer, or one request to it, may take.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// Bytes of a notification's name and message together. Peers end a stream on which a longer one comes.
const NOTIFICATION: usize = 64 << 10;

/// Refuses what peers would not take.
pub(crate) fn check_notification(name: &str, message: &[u8]) -> Result<(), PeerError> {
    let len = name.len().saturating_add(message.len());
    if len > NOTIFICATION {
        return Err(PeerError::TooLong { len });
    }
    Ok(())
}

/// Why something with a peer failed.
#[derive(Clone, Debug, Error)]
pub(crate) enum PeerError {
    #[error("{peer:?} is no peer: host:port is needed")]
    Address { peer: String },
    #[error("the peer at {peer} can't be reached: {reason}")]
    Unreachable { peer: String, reason: String },
    #[error(
        "what listens at {peer} is no Layercake transfer engine ({detail}): check the address and the port"
    )]
    NotAPeer { peer: String, detail: String },
    #[error("the peer at {peer} asks for the shared token: set the one it was started with")]
    TokenRequired { peer: String },
    #[error(
        "the peer at {peer} does not hold this side's shared token: both sides need the same one"
    )]
    Untrusted { peer: String },
    #[error("the peer at {peer}: {mismatch}")]
    Version {
        peer: String,
        mismatch: VersionMismatch,
    },
    #[error("the peer at {peer} refused: {refusal}")]
    Refused { peer: String, refusal: Refusal },
    #[error("the peer at {peer} shows no memory at {address:#x}..+{len}: is it registered there?")]
    UnknownMemory {
        peer: String,
        address: u64,
        len: u64,
    },
    #[error("{failed} of {pieces} pieces failed: {first}")]
    Pieces {
        failed: usize,
        pieces: usize,
        first: PieceError,
    },
    #[error("a notification of {len} bytes: {NOTIFICATION} are accepted, its name included")]
    TooLong { len: usize },
    #[error("the engine was closed")]
    Closed,
}
