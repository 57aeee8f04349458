//! From errors to the integer codes of the Mooncake interface: the one place where that is decided.
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

use super::buffers::Unresolved;
use super::reasons;
use crate::memory::Unusable;

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

/// The code for an error, whose text is left as the reason.
pub(crate) fn of(error: &StoreError, call: Call) -> i64 {
    reasons::because(call.settled(code_of(error, call)).as_result(), error)
}

fn code_of(error: &StoreError, call: Call) -> ResultCode {
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
        // Nobody gave it that, and it may succeed elsewhere or later.
        StoreError::Closed | StoreError::SessionEnded if call == Call::WholeWrite => {
            call.transfer_failed()
        }
        _ => ResultCode::INVALID_ARGUMENT,
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
        _ => ResultCode::INVALID_ARGUMENT,
    }
}

/// The code for local memory that can't be used.
pub(crate) fn of_memory(error: &Unresolved, call: Call) -> i64 {
    let code = match error {
        Unresolved::Unusable(Unusable::NotMapped { .. }) => call.transfer_failed(),
        _ => ResultCode::INVALID_ARGUMENT,
    };
    reasons::because(code.as_result(), error)
}

/// The code for lists that are not as long as that of the keys.
pub(crate) fn lists_differ(keys: usize, lists: &[usize]) -> i64 {
    let lens: Vec<String> = lists.iter().map(usize::to_string).collect();
    reasons::invalid(format_args!(
        "{keys} keys need lists of as many entries, not of {}",
        lens.join(", ")
    ))
}

/// Refuses the lists of one key if they differ in length.
pub(crate) fn check_row(lens: &[usize]) -> Result<(), i64> {
    let Some(odd) = lens.iter().find(|len| **len != lens[0]) else {
        return Ok(());
    };
    Err(reasons::invalid(format_args!(
        "the lists of one key differ in length: {} and {odd} entries",
        lens[0]
    )))
}

/// The code for a range that is not inside its object.
pub(crate) fn beyond(offset: u64, len: u64, size: u64) -> i64 {
    reasons::invalid(format_args!(
        "{len} bytes from {offset} on reach beyond the end of an object of {size} bytes"
    ))
}

/// A byte count as a result.
pub(crate) fn count(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// No such object, as a result: what can't be a key has none.
pub(crate) const ABSENT: i64 = ResultCode::NOT_FOUND.value() as i64;

/// A bad argument, as a result.
pub(crate) const INVALID: i64 = ResultCode::INVALID_ARGUMENT.value() as i64;
