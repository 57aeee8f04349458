//! Why calls are answered with codes, for whoever writes that down.
//!
//! A code is made deep inside a call, where the error is known, and told at its edge, where the name of the
//! method and the keys are. In between there are only integers. So whoever makes a code leaves its reason here, and
//! the edge takes what the call left: both run on the calling thread, which is what keeps the reasons of
//! overlapping calls apart.
//!
//! What runs in the middle of a call, a signal's handler, may make calls of its own: [`apart`] keeps the reasons of
//! both from each other.
//!
//! One reason is kept for each code, the first: a batch that fails as a whole costs one text. Answers that are no
//! failures of a call (no such object, one that is there already, unfinished or leased) leave none.

use std::cell::RefCell;
use std::fmt::Display;

use layercake_protocol::code::ResultCode;

use super::code::INVALID;

thread_local! {
    static LEFT: RefCell<Vec<(i64, String)>> = const { RefCell::new(Vec::new()) };
}

/// Whether a code says that something is wrong, rather than how the store stands.
pub(crate) fn is_failure(code: i64) -> bool {
    const STATES: [ResultCode; 4] = [
        ResultCode::NOT_FOUND,
        ResultCode::NOT_READY,
        ResultCode::ALREADY_EXISTS,
        ResultCode::LEASED,
    ];
    code < 0 && STATES.iter().all(|state| state.as_result() != code)
}

/// Leaves the reason of a code, and gives the code.
pub(crate) fn because(code: i64, reason: impl Display) -> i64 {
    if is_failure(code) {
        LEFT.with_borrow_mut(|left| {
            if left.iter().all(|(known, _)| *known != code) {
                left.push((code, reason.to_string()));
            }
        });
    }
    code
}

/// As [`because`], of a bad argument.
pub(crate) fn invalid(reason: impl Display) -> i64 {
    because(INVALID, reason)
}

/// Takes what was left on this thread: codes and their reasons.
pub(crate) fn take() -> Vec<(i64, String)> {
    LEFT.take()
}

/// Runs what may make other calls, which neither take what was left before nor leave anything themselves.
pub(crate) fn apart<T>(work: impl FnOnce() -> T) -> T {
    let before = take();
    let done = work();
    LEFT.set(before);
    done
}
