//! What can go wrong in the store, and what the caller can do about it.
//!
//! One enum for the crate. It is cheap to clone, since one failed message can be the answer for many
//! keys. Where an error comes from below (the master's refusal, a piece of a transfer), it is kept as
//! a value; [`StoreError::is_retryable`] says whether the same call may succeed later unchanged.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::ids::{Generation, SegmentId};
use layercake_protocol::version::VersionMismatch;
use layercake_transport::PieceError;
use thiserror::Error;

/// An operation of the store failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A setting can't be used.
    #[error("setting {setting}: {detail}")]
    InvalidConfig {
        /// The setting's name.
        setting: &'static str,
        /// Its value, and what is accepted.
        detail: String,
    },
    /// The master's answer for this key or call.
    #[error(transparent)]
    Refused(#[from] Refusal),

    /// The master can't be reached. Calls answer this at once until it is back.
    #[error("the master at {master} can't be reached: {reason}")]
    MasterUnreachable {
        /// Its address.
        master: Arc<str>,
        /// What happened on the last attempt.
        reason: Arc<str>,
    },
    /// The master is connected, but did not answer in time. The call may have taken effect.
    #[error("the master at {master} did not answer within {after:?}")]
    MasterTimeout {
        /// Its address.
        master: Arc<str>,
        /// How long the call waited.
        after: Duration,
    },
    /// Something listens on the address, but it is no master.
    #[error(
        "what listens at {address} is no Layercake master ({detail}): check the address and the port"
    )]
    NotAMaster {
        /// The address.
        address: Arc<str>,
        /// What it answered.
        detail: Arc<str>,
    },
    /// A connection to another host would be open to everyone on that network.
    #[error(
        "the master at {master} is not on loopback: set a shared token, or insecure to accept an open connection"
    )]
    OpenConnection {
        /// Its address.
        master: Arc<str>,
    },
    /// The master wants a token and this side has none.
    #[error("the master at {master} asks for the shared token: set the one it was started with")]
    TokenRequired {
        /// Its address.
        master: Arc<str>,
    },
    /// The master turned this side's token away.
    #[error(
        "the master at {master} does not accept this side's shared token: both sides need the same one"
    )]
    WrongToken {
        /// Its address.
        master: Arc<str>,
    },
    /// The master could not show that it knows this side's token.
    #[error(
        "the master at {master} did not prove that it knows the shared token: start it with the same one, or check the address"
    )]
    MasterUnproven {
        /// Its address.
        master: Arc<str>,
    },
    /// The two sides speak versions that don't work together.
    #[error("the master at {master}: {mismatch}")]
    Version {
        /// Its address.
        master: Arc<str>,
        /// Both versions.
        mismatch: VersionMismatch,
    },
    /// The master's answer does not make sense: a fault of one of the two programs.
    #[error("the master at {master} sent an answer that makes no sense: {source}")]
    BadAnswer {
        /// Its address.
        master: Arc<str>,
        /// The field.
        source: WireError,
    },
    /// The link to the master was closed by this side.
    #[error("the link to the master is closed")]
    Closed,

    /// A transfer failed.
    #[error("bytes {offset}..+{len} of the object did not arrive: {source}")]
    Transfer {
        /// First byte of the range in the object.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// What the transport says.
        source: PieceError,
    },
    /// Stored bytes do not have the checksum they were written with. They were not served.
    #[error("bytes {offset}..+{len} of the object do not match their checksum")]
    ChecksumMismatch {
        /// First byte of the written range in the object.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The header in the segment does not belong to the object that the master named.
    #[error(
        "the header of generation {generation} in segment {segment} does not fit the object: {detail}"
    )]
    HeaderMismatch {
        /// The segment.
        segment: SegmentId,
        /// The object's version.
        generation: Generation,
        /// What differs.
        detail: String,
    },
    /// The object was written by another deployment than the reader's.
    #[error("the object has fingerprint {}, the reader expects {expected}", found.map_or_else(|| "none".to_owned(), |found| found.to_string()))]
    FingerprintMismatch {
        /// The reader's.
        expected: Fingerprint,
        /// The object's, if it has one.
        found: Option<Fingerprint>,
    },
    /// An object with bytes that were never written can't be committed.
    #[error("the object is not fully written: the first byte that is missing is {first_missing}")]
    Incomplete {
        /// Offset of the first byte that is missing.
        first_missing: u64,
    },
    /// An earlier write of the session ended without an answer from the owner of the memory, who may still
    /// carry it out: what is written now could be overwritten later.
    #[error("an earlier write may still be under way: revoke the session and start again")]
    Unconfirmed,
    /// The bytes were published to early readers: they stay as they are.
    #[error("bytes {offset}..+{len} were published to early readers, and can't be written again")]
    Published {
        /// First byte of the range in the object.
        offset: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The caller withdrew the memory before the write was over: the bytes count as not written.
    #[error("the memory that is written from was withdrawn before the write was over")]
    SourceWithdrawn,
    /// The object was being written when its early reader began, and is not there any more.
    #[error(
        "the writer of generation {generation} gave the object up, or lost it, before it was read"
    )]
    WriterGone {
        /// The writer's reservation.
        generation: Generation,
    },
    /// A range does not fit the object.
    #[error("bytes {offset}..+{len} lie outside the object of {size} bytes")]
    OutOfBounds {
        /// First byte asked for.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The object's size in bytes.
        size: u64,
    },
    /// A range without bytes.
    #[error("a range of 0 bytes at {offset}: at least 1 byte is needed")]
    EmptyRange {
        /// Where.
        offset: u64,
    },
    /// The session was ended, revoked or sealed: it takes no more ranges.
    #[error("the session is over")]
    SessionEnded,
    /// No session of this key is open.
    #[error("no session of this key is open")]
    UnknownSession,

    /// A segment is larger than the memory that can be had.
    #[error(
        "a segment of {} can't be had: {} are free ({limited_by}); use a smaller one",
        size(*len),
        size(*available)
    )]
    SegmentTooLarge {
        /// Bytes asked for.
        len: u64,
        /// Bytes that are free.
        available: u64,
        /// What limits them.
        limited_by: &'static str,
    },
    /// The transfer engine refused a call.
    #[error(transparent)]
    Engine(Arc<layercake_transport::Error>),
    /// The system refused a thread.
    #[error("can't start the thread {name}: {source}")]
    Thread {
        /// Its name.
        name: &'static str,
        /// The system's reason.
        source: Arc<std::io::Error>,
    },
    /// Something did not end in time.
    #[error("{what} did not end within {after:?}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
}

impl StoreError {
    /// Whether what was read is not what was written.
    fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::ChecksumMismatch { .. } | Self::HeaderMismatch { .. }
        )
    }

    /// Whether the same call may succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.is_retryable(),
            Self::Transfer { source, .. } => source.is_retryable(),
            Self::MasterUnreachable { .. }
            | Self::MasterTimeout { .. }
            | Self::NotAMaster { .. }
            | Self::Timeout { .. } => true,
            _ => false,
        }
    }
}

/// Why an object could not be read from any of its replicas, one after the other: that it is damaged only if all are. Of one
/// that could not be asked nobody knows.
#[derive(Debug, Default)]
pub(crate) struct Failures(Option<Box<StoreError>>);

impl Failures {
    /// Before any replica was tried. `left_out`: there are more of them than can be.
    pub(crate) fn begin(left_out: bool) -> Self {
        Self(left_out.then(|| Box::new(Refusal::Unreachable.into())))
    }

    /// What is to be said after one more replica has failed.
    pub(crate) fn with(&self, last: StoreError) -> StoreError {
        match &self.0 {
            Some(earlier) if last.is_damage() => StoreError::clone(earlier),
            _ => last,
        }
    }

    /// Notes a replica behind which others are tried.
    pub(crate) fn note(&mut self, error: StoreError) {
        if !error.is_damage() {
            self.0.get_or_insert_with(|| Box::new(error));
        }
    }
}

impl From<layercake_transport::Error> for StoreError {
    fn from(error: layercake_transport::Error) -> Self {
        Self::Engine(Arc::new(error))
    }
}

/// A byte count for people, in the largest unit that leaves a number from 1 on.
fn size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "bytes");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    let digits = if unit == "bytes" { 0 } else { 2 };
    format!("{value:.digits$} {unit}")
}
