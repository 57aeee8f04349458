//! The integers that callers of the Mooncake interface compare with (architecture decision 8).
//!
//! They live here as one table and are used at the edge alone, where Python or C gets an answer; all
//! other code speaks [`Refusal`](crate::error::Refusal) and the crates' own errors. A result is one
//! 64-bit integer: non-negative is success, for reads and writes the number of bytes; a negative one
//! is a code of this table.
//!
//! | code | name | meaning |
//! |---|---|---|
//! | 0 | [`OK`](ResultCode::OK) | done; also a put of a key that exists or is being written |
//! | -1 | [`FAILED`](ResultCode::FAILED) | an engine call failed, or no transport could be set up |
//! | -3 | [`NOT_REGISTERED`](ResultCode::NOT_REGISTERED) | the memory is not registered with the engine |
//! | -7 | [`ALREADY_REGISTERED`](ResultCode::ALREADY_REGISTERED) | the memory overlaps a registered range |
//! | -102 | [`NO_PEER`](ResultCode::NO_PEER) | a probed peer is not there |
//! | -200 | [`NO_SPACE`](ResultCode::NO_SPACE) | no room for the object, or no segment |
//! | -600 | [`INVALID_ARGUMENT`](ResultCode::INVALID_ARGUMENT) | a bad argument, no session, a range beyond the object |
//! | -601 | [`NOT_OWNER`](ResultCode::NOT_OWNER) | another client has taken the put session over |
//! | -702 | [`NO_RANGES`](ResultCode::NO_RANGES) | a range write without ranges |
//! | -703 | [`NOT_READY`](ResultCode::NOT_READY) | the object is reserved, but not finished |
//! | -704 | [`NOT_FOUND`](ResultCode::NOT_FOUND) | no such object |
//! | -705 | [`ALREADY_EXISTS`](ResultCode::ALREADY_EXISTS) | the object exists, or another session is writing it |
//! | -706 | [`LEASED`](ResultCode::LEASED) | a reader holds a lease on the object |
//! | -707 | [`LEASE_EXPIRED`](ResultCode::LEASE_EXPIRED) | the lease of the get session ended |
//! | -800 | [`TRANSFER_FAILED`](ResultCode::TRANSFER_FAILED) | the bytes could not be moved |
//! | -900 | [`MASTER_UNREACHABLE`](ResultCode::MASTER_UNREACHABLE) | the master can't be reached |
//! | -901 | [`MASTER_TIMEOUT`](ResultCode::MASTER_TIMEOUT) | the master did not answer in time |
//! | -1400 | [`NO_TASK`](ResultCode::NO_TASK) | no such task |
//! | -1700 | [`WRITE_ENDED`](ResultCode::WRITE_ENDED) | the write failed for good, and no memory of the caller is in use any more; also of a tenant whose quota is used up |
//! | -1701 | [`UNKNOWN_TENANT`](ResultCode::UNKNOWN_TENANT) | the tenant has no quota |
//!
//! Callers of vLLM's kind treat some codes as "the call is over and the caller's buffers are free"
//! and any other as "never touch them again" ([`releases_buffers`](ResultCode::releases_buffers)):
//! which code is answered is a promise about memory.

use std::fmt;

/// One code of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResultCode(i32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $meaning:literal;)*) => {
        impl ResultCode {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// Every code of the table, from 0 downwards.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The code's name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                    _ => "UNKNOWN",
                }
            }

            /// What it means, in words.
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                    _ => "a code that is not in the table",
                }
            }
        }
    };
}

codes! {
    /// Done; also a put of a key that exists or is being written.
    OK = 0, "done";
    /// An engine call failed, or no transport could be set up.
    FAILED = -1, "the call failed";
    /// The memory is not registered with the engine.
    NOT_REGISTERED = -3, "the memory is not registered";
    /// The memory overlaps a registered range.
    ALREADY_REGISTERED = -7, "the memory overlaps a registered range";
    /// A probed peer is not there.
    NO_PEER = -102, "the peer is not there";
    /// No room for the object, or no segment at all.
    NO_SPACE = -200, "no room for the object";
    /// A bad argument, lists of different lengths, no session, or a range beyond the object.
    INVALID_ARGUMENT = -600, "invalid argument";
    /// Another client has taken the put session over.
    NOT_OWNER = -601, "the session was taken over by another client";
    /// A range write with an empty list of ranges.
    NO_RANGES = -702, "no ranges to write";
    /// The object is reserved, but not finished.
    NOT_READY = -703, "the object is not finished";
    /// No such object.
    NOT_FOUND = -704, "no such object";
    /// The object exists, or another session is writing it.
    ALREADY_EXISTS = -705, "the object exists or is being written";
    /// A reader holds a lease on the object.
    LEASED = -706, "the object is leased by a reader";
    /// The lease of the get session ended.
    LEASE_EXPIRED = -707, "the lease ended";
    /// The bytes could not be moved: the owner is gone, or an address is bad.
    TRANSFER_FAILED = -800, "the transfer failed";
    /// The master can't be reached.
    MASTER_UNREACHABLE = -900, "the master can't be reached";
    /// The master did not answer in time.
    MASTER_TIMEOUT = -901, "the master did not answer in time";
    /// No such task.
    NO_TASK = -1400, "no such task";
    /// The write failed for good, and no memory of the caller is in use any more.
    WRITE_ENDED = -1700, "the write failed and has released the caller's memory";
    /// The master stores only for tenants with a quota, and this one has none.
    UNKNOWN_TENANT = -1701, "the tenant has no quota";
}

impl ResultCode {
    /// The code with this value; `None` if the table has none.
    pub fn from_value(value: i64) -> Option<Self> {
        let code = Self(i32::try_from(value).ok()?);
        Self::ALL.contains(&code).then_some(code)
    }

    /// The integer.
    pub const fn value(self) -> i32 {
        self.0
    }

    /// The integer as batch calls return it, where it stands beside byte counts.
    pub fn as_result(self) -> i64 {
        self.0.into()
    }

    /// Whether a batched read (`write`: a batched write) that answers this code tells its caller that
    /// no byte of its buffers will be touched any more. Such an answer must not be given before it is
    /// true.
    pub fn releases_buffers(self, write: bool) -> bool {
        match self {
            Self::OK
            | Self::NO_SPACE
            | Self::NOT_READY
            | Self::NOT_FOUND
            | Self::ALREADY_EXISTS
            | Self::MASTER_UNREACHABLE
            | Self::MASTER_TIMEOUT => true,
            Self::INVALID_ARGUMENT | Self::NO_RANGES | Self::LEASE_EXPIRED => !write,
            Self::WRITE_ENDED => write,
            _ => false,
        }
    }
}

impl From<ResultCode> for i32 {
    fn from(code: ResultCode) -> Self {
        code.0
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.meaning(), self.0)
    }
}

impl fmt::Debug for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}
