//! What can go wrong: [`enum@Error`] for calls on an engine, [`PieceError`] for one piece of a batch.
//!
//! A piece's error says what the caller may do: a [`Refusal`] is the owner's answer and final for this
//! piece as it is; the others are about the way there and may pass.

use std::net::SocketAddr;
use std::time::Duration;

use layercake_protocol::ids::{MemoryKind, RegionId};
use thiserror::Error;

use crate::config::{MIN_WINDOW_BYTES, TransportKind};

/// A call on an engine or on its memory failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A transport was named that does not exist.
    #[error("unknown transport \"{name}\": accepted are local, shm, tcp and, where built in, mock")]
    UnknownTransport {
        /// The name that was given.
        name: String,
    },
    /// A transport was named that this build does not contain.
    #[error("transport {kind} is not part of this build: enable the crate feature of that name")]
    TransportNotBuilt {
        /// The transport that was named.
        kind: TransportKind,
    },
    /// The set of transports is empty.
    #[error("no transport may be used: accepted are local, shm, tcp")]
    NoTransport,
    /// The mock transport has no network here.
    #[error("the mock transport needs a network: start the engine with MockNetwork::start")]
    NoNetwork,
    /// A listener would be open to everyone who can reach the host.
    #[error(
        "listening on {listen} lets anyone on that network in: set a shared token, or insecure to accept that"
    )]
    OpenListener {
        /// The address that was configured.
        listen: SocketAddr,
    },
    /// Peers can't be told where to connect.
    #[error(
        "listening on {listen} says nothing about where peers reach it: set advertise to an address of this host"
    )]
    NothingToAdvertise {
        /// The address that was configured.
        listen: SocketAddr,
    },
    /// The window is too small to keep a connection busy.
    #[error("window_bytes is {bytes}, at least {MIN_WINDOW_BYTES} are needed")]
    WindowTooSmall {
        /// The value that was configured.
        bytes: u64,
    },
    /// A deadline of zero can't be met.
    #[error("{setting} is zero: a positive duration is needed")]
    ZeroDeadline {
        /// The setting's name.
        setting: &'static str,
    },
    /// The listener could not be opened. Choose another address or port.
    #[error("can't listen on {listen}: {source}")]
    Listen {
        /// The address that was configured.
        listen: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system refused something that the engine needs.
    #[error("{what} failed: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Memory could not be had.
    #[error("can't map {len} bytes ({what}): {source}")]
    Map {
        /// Which step failed.
        what: &'static str,
        /// The length in bytes that was asked for.
        len: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A region can't be empty.
    #[error("a region of 0 bytes can't be registered")]
    EmptyRegion,
    /// The null address can't be registered.
    #[error("the null address can't be registered")]
    NullAddress,
    /// The bytes would reach past the end of the address space.
    #[error("{len} bytes at {addr:#x} reach past the end of the address space")]
    AddressOverflow {
        /// First address.
        addr: usize,
        /// Length in bytes.
        len: u64,
    },
    /// Part of the memory is registered already. Unregister that region first.
    #[error("{len} bytes at {addr:#x} overlap region {region}: unregister it first")]
    Overlap {
        /// First address.
        addr: usize,
        /// Length in bytes.
        len: u64,
        /// The region that is there already.
        region: RegionId,
    },
    /// The memory belongs to a device that this build can't move bytes of.
    #[error("memory of kind \"{kind}\" can't be registered: this build moves host memory only")]
    UnsupportedMemory {
        /// What the memory was said to be.
        kind: MemoryKind,
    },
    /// A range lies outside the region.
    #[error("bytes {offset}..+{len} lie outside region {region} of {region_len} bytes")]
    OutOfBounds {
        /// The region.
        region: RegionId,
        /// Its length in bytes.
        region_len: u64,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
    },
    /// The region was allocated without generation tags.
    #[error("region {region} has no generation tags")]
    NoTags {
        /// The region.
        region: RegionId,
    },
    /// The region was unregistered.
    #[error("region {region} is not registered any more")]
    Withdrawn {
        /// The region.
        region: RegionId,
    },
    /// Transfers were still moving bytes of the region. It is withdrawn; call again to wait on.
    #[error("region {region} is withdrawn, but transfers were still in flight after {waited:?}")]
    StillInFlight {
        /// The region.
        region: RegionId,
        /// How long the call waited.
        waited: Duration,
    },
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

impl Error {
    pub(crate) fn system(what: &'static str, source: impl Into<std::io::Error>) -> Self {
        Self::System {
            what,
            source: source.into(),
        }
    }
}

macro_rules! coded {
    ($(#[$doc:meta])* $vis:vis enum $name:ident { $($(#[$item:meta])* $variant:ident = $code:literal, $label:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
        #[non_exhaustive]
        $vis enum $name { $($(#[$item])* $variant,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub(crate) const fn code(self) -> u8 {
                match self { $(Self::$variant => $code,)* }
            }

            pub(crate) const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// The short name used in metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $label,)* }
            }
        }
    };
}

coded! {
    /// Why an owner turned one operation away. The codes travel on the wire and are never reused.
    pub enum Refusal {
        /// The region was never registered there, or is not any more.
        #[error("the owner has no such region (never registered, or withdrawn)")]
        UnknownRegion = 1, "unknown_region";
        /// Part of the range lies outside the region.
        #[error("the range lies outside the region")]
        OutOfBounds = 2, "out_of_bounds";
        /// The capability does not open this region.
        #[error("the capability does not match the region")]
        BadCapability = 3, "bad_capability";
        /// The region does not allow this direction to peers.
        #[error("the region does not allow this direction to peers")]
        AccessDenied = 4, "access_denied";
        /// The place belongs to a later generation by now.
        #[error("the place was reused: its generation is not the one asked for")]
        StaleGeneration = 5, "stale_generation";
        /// A generation was given, but the region keeps no tags.
        #[error("the region has no generation tags to check against")]
        NoTags = 6, "no_tags";
        /// An operation of zero bytes or of a length that no region has.
        #[error("the length of the operation is not acceptable")]
        BadLength = 7, "bad_length";
    }
}

impl Refusal {
    /// Whether the owner counts it as an attempt to reach what was not handed out. A stale
    /// generation is an ordinary race and not counted.
    pub const fn is_security(self) -> bool {
        !matches!(self, Self::StaleGeneration)
    }
}

/// Why one piece of a batch did not arrive. Bytes at its destination are undefined, but only there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum PieceError {
    /// The owner of the memory turned the piece away.
    #[error("refused by the owner: {0}")]
    Refused(Refusal),
    /// The peer went away while the piece was under way, or another process answers in its place.
    #[error("the peer is gone")]
    PeerGone,
    /// The batch's deadline passed.
    #[error("the transfer's deadline passed")]
    Timeout,
    /// The peer owed progress and showed none for the progress deadline.
    #[error("the peer made no progress within the progress deadline")]
    Stalled,
    /// No connection to the peer came about.
    #[error("the peer can't be reached")]
    Unreachable,
    /// The peer does not hold the same shared token.
    #[error("the peer was not authenticated: both sides need the same shared token")]
    NotTrusted,
    /// The peer speaks a version that this side can't work with.
    #[error("the peer speaks an incompatible version")]
    Incompatible,
    /// The peer broke the protocol; its connection was closed.
    #[error("the peer broke the protocol")]
    Protocol,
    /// The caller cancelled the transfer before the piece was sent.
    #[error("cancelled")]
    Cancelled,
    /// The local slice is not usable: unregistered.
    #[error("the local memory is not registered any more")]
    LocalInvalid,
    /// The local and the remote slice differ in length.
    #[error("the local and the remote slice differ in length")]
    LengthMismatch,
    /// No transport that is allowed here reaches the peer.
    #[error("no allowed transport reaches the peer")]
    NoTransport,
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

impl PieceError {
    const PLAIN: [Self; 12] = [
        Self::PeerGone,
        Self::Timeout,
        Self::Stalled,
        Self::Unreachable,
        Self::NotTrusted,
        Self::Incompatible,
        Self::Protocol,
        Self::Cancelled,
        Self::LocalInvalid,
        Self::LengthMismatch,
        Self::NoTransport,
        Self::ShutDown,
    ];

    /// Refusals lie above this code.
    const REFUSED: u8 = 32;

    /// Codes lie below this number, so that counters can be arrays.
    pub(crate) const CODES: usize = 48;

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Refused(refusal) => Self::REFUSED + refusal.code(),
            Self::PeerGone => 0,
            Self::Timeout => 1,
            Self::Stalled => 2,
            Self::Unreachable => 3,
            Self::NotTrusted => 4,
            Self::Incompatible => 5,
            Self::Protocol => 6,
            Self::Cancelled => 7,
            Self::LocalInvalid => 8,
            Self::LengthMismatch => 9,
            Self::NoTransport => 10,
            Self::ShutDown => 11,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code.checked_sub(Self::REFUSED) {
            Some(refusal) => Refusal::from_code(refusal).map(Self::Refused),
            None => Self::PLAIN.get(usize::from(code)).copied(),
        }
    }

    /// The short name used in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.name(),
            Self::PeerGone => "peer_gone",
            Self::Timeout => "timeout",
            Self::Stalled => "stalled",
            Self::Unreachable => "unreachable",
            Self::NotTrusted => "not_trusted",
            Self::Incompatible => "incompatible",
            Self::Protocol => "protocol",
            Self::Cancelled => "cancelled",
            Self::LocalInvalid => "local_invalid",
            Self::LengthMismatch => "length_mismatch",
            Self::NoTransport => "no_transport",
            Self::ShutDown => "shut_down",
        }
    }

    /// Whether the same piece may succeed later without the caller changing it.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::PeerGone | Self::Timeout | Self::Stalled | Self::Unreachable
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_one_to_one() {
        let refusals = Refusal::ALL.iter().copied().map(PieceError::Refused);
        for error in PieceError::PLAIN.into_iter().chain(refusals) {
            assert!(usize::from(error.code()) < PieceError::CODES);
            assert_eq!(PieceError::from_code(error.code()), Some(error));
        }
        assert_eq!(PieceError::from_code(31), None);
        assert_eq!(PieceError::from_code(255), None);
    }
}
