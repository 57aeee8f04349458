//! Integer codes as results, with their reasons left for whoever writes them down. Which error has which is said in
//! [`table`].

use layercake_protocol::code::ResultCode;
use layercake_store::StoreError;

use super::buffers::Unresolved;
pub(crate) use super::table::Call;
use super::{reasons, table};
use crate::memory::Unusable;

/// The code for an error, whose text is left as the reason.
pub(crate) fn of(error: &StoreError, call: Call) -> i64 {
    reasons::because(table::of(error, call).as_result(), error)
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
