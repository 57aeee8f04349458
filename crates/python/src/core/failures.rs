//! What a put session must know about its range calls when it ends.
//!
//! The session itself knows which bytes are written; that the others were *tried* is noted here, by the thread
//! that tried. An end waits until no such thread is left: only then is it known which bytes nobody wrote, and
//! which are to be refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::range::{ByteRange, RangeSet};
use layercake_store::StoreError;
use parking_lot::{Condvar, Mutex};

/// The range calls of one session.
#[derive(Debug, Default)]
pub(super) struct Failures {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Calls under way.
    calls: usize,
    /// Bytes whose last write failed.
    failed: RangeSet,
    /// The owner of the memory said that it is not this session's any more.
    lost: bool,
}

/// How the calls of a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Each byte that was tried last is there.
    Whole,
    /// There are bytes whose write failed.
    Failed,
    /// The memory is not the session's any more.
    Lost,
}

/// One entry of a range call. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Entry(Arc<Failures>);

impl Failures {
    /// Notes that an entry is about to be written.
    pub(super) fn begin(self: &Arc<Self>) -> Entry {
        self.state.lock().calls += 1;
        Entry(Arc::clone(self))
    }

    /// Waits until no call is under way.
    pub(super) fn settled(&self, within: Duration) -> Result<Verdict, StoreError> {
        let until = Instant::now() + within;
        let mut state = self.state.lock();
        while state.calls > 0 {
            if self.over.wait_until(&mut state, until).timed_out() {
                return Err(StoreError::Timeout {
                    what: "the session's range calls",
                    after: within,
                });
            }
        }
        Ok(match &*state {
            State { lost: true, .. } => Verdict::Lost,
            State { failed, .. } if failed.is_empty() => Verdict::Whole,
            _ => Verdict::Failed,
        })
    }
}

impl Entry {
    /// Notes how the write of these ranges ended.
    pub(super) fn ended(self, ranges: impl Iterator<Item = ByteRange>, written: bool, lost: bool) {
        let mut state = self.0.state.lock();
        state.lost |= lost;
        if written && state.failed.is_empty() {
            return;
        }
        for range in ranges {
            if written {
                state.failed.remove(range);
            } else {
                state.failed.insert(range);
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.state.lock().calls -= 1;
        self.0.over.notify_all();
    }
}
