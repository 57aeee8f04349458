//! Why something was refused.
//!
//! A [`Refusal`] is an answer, given for one key of a batch or for a whole call. That a peer could
//! not be reached, or a transfer failed, is the business of the crates that try.

use thiserror::Error;

/// Why a key or a call was refused, and what the caller can do about it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request makes no sense as it stands: change it.
    #[error("invalid argument: {detail}")]
    InvalidArgument {
        /// The value, and what is accepted.
        detail: String,
    },
    /// No object has this key.
    #[error("no such object")]
    NotFound,
    /// A writer has reserved the key and not finished: wait for it, or treat it as absent.
    #[error("the object is reserved, but not finished")]
    NotReady,
    /// A complete object has this key; it stays as it is.
    #[error("an object of this key exists")]
    AlreadyExists,
    /// Another session is writing this key: follow it, or skip the key.
    #[error("the object is being written by another session")]
    InProgress,
    /// Readers rely on the object: try again after their leases, or use force.
    #[error("the object is leased by a reader")]
    Leased,
    /// The lease ended before it could be renewed: start again.
    #[error("the lease is over")]
    LeaseExpired,
    /// No segment has room, even after eviction.
    #[error("no room: the largest free piece is {largest_free} bytes")]
    NoSpace {
        /// Size of the largest piece that could be had, in bytes.
        largest_free: u64,
    },
    /// The reservation was taken over by another writer or discarded: drop the session.
    #[error("the reservation was taken over or discarded")]
    Superseded,
    /// No live segment holds the object, as far as is known.
    #[error("no reachable replica")]
    Unreachable,
    /// The master does not know this member, segment or tenant: join again.
    #[error("unknown member or segment")]
    UnknownMember,
    /// The caller's term is not the master's: connect anew.
    #[error("the master is in another term")]
    WrongTerm,
    /// The connection has not proven the shared token.
    #[error("the connection has not proven the shared token")]
    Unauthenticated,
    /// The two sides speak versions that don't work together.
    #[error("{detail}")]
    Version {
        /// Both versions, for people.
        detail: String,
    },
    /// The master is going down: try again later.
    #[error("the master is shutting down")]
    ShuttingDown,
    /// The batch exceeds what one message may hold: split it.
    #[error("the batch is too large for one message: {detail}")]
    TooLarge {
        /// The size, and the limit.
        detail: String,
    },
    /// The tenant's objects fill its quota, and none of them can be evicted: remove some, or raise the quota.
    #[error("the tenant's quota is used up")]
    QuotaExceeded,
    /// Only tenants with a quota can store anything, and this one has none: give it one.
    #[error("the tenant has no quota")]
    UnknownTenant,
    /// A refusal that only a later version knows: upgrade this side to learn what it means.
    #[error("refused with code {code}, which this version does not know: upgrade it")]
    Unknown {
        /// The code on the wire.
        code: i32,
    },
}

impl Refusal {
    /// An [`InvalidArgument`](Self::InvalidArgument) with this text.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::InvalidArgument {
            detail: detail.into(),
        }
    }

    /// Whether the same request may succeed later without a change.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::NotReady
                | Self::InProgress
                | Self::Leased
                | Self::NoSpace { .. }
                | Self::Unreachable
                | Self::WrongTerm
                | Self::ShuttingDown
                | Self::QuotaExceeded
        )
    }
}

/// A message from the wire does not hold what it must.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// A field that must be there is not.
    #[error("field `{field}` is missing")]
    Missing {
        /// The field's name in the `.proto` file.
        field: &'static str,
    },
    /// A field holds something else than it may.
    #[error("field `{field}` is invalid: {detail}")]
    Invalid {
        /// The field's name in the `.proto` file.
        field: &'static str,
        /// What it holds, and what is accepted.
        detail: String,
    },
}

impl From<WireError> for Refusal {
    fn from(error: WireError) -> Self {
        Self::InvalidArgument {
            detail: error.to_string(),
        }
    }
}
