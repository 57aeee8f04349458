//! Which error is which integer code of the Mooncake interface: the one place where that is decided.
//!
//! Callers read more into a code than what went wrong: for some, a code says whether their memory may still
//! be touched, and the wrong one has them keep it for ever. All calls of this crate return only when no byte of theirs moves
//! any more. So a call on whole objects that failed is answered with a code that says so
//! ([`ResultCode::releases_buffers`]): its own where that does, else −702 for reads and −1700 for writes. Only what
//! is wrong with the arguments of a write stays −600, which programs know. For ranges a failed transfer is −800,
//! which callers of sessions know.

use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use layercake_store::StoreError;

/// What was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Reading a whole object, or ranges of one without a session.
    WholeRead,
    /// Writing a whole object.
    WholeWrite,
    /// Everything about sessions, but for opening one to read.
    Session,
    /// Questions to the master, and opening a session to read.
    Question,
}

impl Call {
    /// The code of a transfer that failed.
    pub(crate) const fn transfer_failed(self) -> ResultCode {
        match self {
            // The table's name is that of another use of the same number.
            Self::WholeRead => ResultCode::NO_RANGES,
            Self::WholeWrite => ResultCode::WRITE_ENDED,
            Self::Session | Self::Question => ResultCode::TRANSFER_FAILED,
        }
    }

    /// The code of what is no fault of the arguments, and has no code of its own.
    const fn other_failure(self) -> ResultCode {
        match self {
            Self::WholeWrite => self.transfer_failed(),
            // Of a read it says no less than that the memory is free, and sessions know it.
            Self::WholeRead | Self::Session | Self::Question => ResultCode::INVALID_ARGUMENT,
        }
    }

    /// The code that a call is answered with for `code`: see the module's text.
    fn settled(self, code: ResultCode) -> ResultCode {
        let write = match self {
            Self::WholeRead => false,
            Self::WholeWrite => true,
            Self::Session | Self::Question => return code,
        };
        if code == ResultCode::INVALID_ARGUMENT || code.releases_buffers(write) {
            code
        } else {
            self.transfer_failed()
        }
    }
}

/// The code for an error.
pub(crate) fn of(error: &StoreError, call: Call) -> ResultCode {
    call.settled(by_itself(error, call))
}

fn by_itself(error: &StoreError, call: Call) -> ResultCode {
    match error {
        StoreError::Refused(refusal) => of_refusal(refusal, call),
        StoreError::MasterTimeout { .. } => ResultCode::MASTER_TIMEOUT,
        StoreError::MasterUnreachable { .. }
        | StoreError::NotAMaster { .. }
        | StoreError::OpenConnection { .. }
        | StoreError::TokenRequired { .. }
        | StoreError::WrongToken { .. }
        | StoreError::MasterUnproven { .. }
        | StoreError::Version { .. }
        | StoreError::BadAnswer { .. } => ResultCode::MASTER_UNREACHABLE,
        StoreError::Transfer { .. }
        | StoreError::ChecksumMismatch { .. }
        | StoreError::HeaderMismatch { .. }
        | StoreError::Incomplete { .. }
        | StoreError::Unconfirmed
        | StoreError::Timeout { .. } => call.transfer_failed(),
        StoreError::FingerprintMismatch { .. } => ResultCode::NOT_FOUND,
        StoreError::InvalidConfig { .. }
        | StoreError::OutOfBounds { .. }
        | StoreError::EmptyRange { .. } => ResultCode::INVALID_ARGUMENT,
        _ => call.other_failure(),
    }
}

fn of_refusal(refusal: &Refusal, call: Call) -> ResultCode {
    match refusal {
        Refusal::NotFound => ResultCode::NOT_FOUND,
        // Known to be out of reach: what can't be served is not promised.
        Refusal::Unreachable if matches!(call, Call::WholeRead | Call::Question) => {
            ResultCode::NOT_FOUND
        }
        Refusal::Unreachable => call.transfer_failed(),
        Refusal::NotReady => ResultCode::NOT_READY,
        Refusal::AlreadyExists | Refusal::InProgress => ResultCode::ALREADY_EXISTS,
        Refusal::Leased => ResultCode::LEASED,
        Refusal::LeaseExpired => ResultCode::LEASE_EXPIRED,
        Refusal::NoSpace { .. } => ResultCode::NO_SPACE,
        Refusal::Superseded => ResultCode::NOT_OWNER,
        Refusal::QuotaExceeded => ResultCode::WRITE_ENDED,
        Refusal::UnknownTenant => ResultCode::UNKNOWN_TENANT,
        Refusal::UnknownMember
        | Refusal::WrongTerm
        | Refusal::Unauthenticated
        | Refusal::Version { .. }
        | Refusal::ShuttingDown => ResultCode::MASTER_UNREACHABLE,
        Refusal::InvalidArgument { .. } | Refusal::TooLarge { .. } => ResultCode::INVALID_ARGUMENT,
        _ => call.other_failure(),
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
