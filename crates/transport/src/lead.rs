//! Threads that wait for transfers, and look after the connection meanwhile.
//!
//! An answer that comes in would wake the thread of an event loop, and that one the thread that waits: two
//! turns of the scheduler where one does. A thread that blocks can therefore *lead*: it waits for the
//! connection itself and takes from it what comes, for everybody who uses it. [`Transfer::wait`] does so by
//! itself. Who polls futures on a thread that blocks between the polls polls them inside of
//! [`Awaited::poll`], and asks [`Awaited::lead`] what to wait for.
//!
//! This saves time and changes nothing else: whoever does not lead has the event loop's help, and deadlines
//! are kept by the event loop in any case.
//!
//! [`Transfer::wait`]: crate::Transfer::wait

use std::cell::RefCell;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::job::Job;
use crate::tcp::{LaneLead, Readiness};

thread_local! {
    /// The transfers that this thread found under way, while it polls for an [`Awaited`].
    static FOUND: RefCell<Option<Vec<Arc<Job>>>> = const { RefCell::new(None) };
}

/// The transfers that a thread waits for, among whatever else.
#[derive(Debug, Default)]
pub struct Awaited {
    jobs: Vec<Arc<Job>>,
}

/// Puts back what was polled for before, also if polling panics.
struct Outer(Option<Vec<Arc<Job>>>);

impl Drop for Outer {
    fn drop(&mut self) {
        FOUND.set(self.0.take());
    }
}

impl Awaited {
    /// Polls, and remembers the transfers that are found under way by it; those of before are forgotten.
    /// The thread has to ask for [`Awaited::lead`] before it sleeps, once for each poll.
    pub fn poll<T>(&mut self, poll: impl FnOnce() -> T) -> T {
        let mut found = std::mem::take(&mut self.jobs);
        found.clear();
        let outer = Outer(FOUND.replace(Some(found)));
        let polled = poll();
        self.jobs = FOUND.take().unwrap_or_default();
        drop(outer);
        polled
    }

    /// A connection for this thread to look after while it waits: of one of the transfers that are still under
    /// way, the one `before` if it is among them. The event loop is made to look after the others.
    pub fn lead(&mut self, before: Option<Lead>) -> Option<Lead> {
        let jobs = || self.jobs.iter().filter(|job| !job.is_done());
        let mut lead = before.filter(|lead| jobs().any(|job| lead.lane.is_for(job)));
        for job in self.jobs.drain(..).filter(|job| !job.is_done()) {
            match &lead {
                None => lead = job.lead(),
                Some(lead) if lead.lane.is_for(&job) => {}
                Some(_) => job.look(),
            }
        }
        lead
    }
}

/// Notes that this thread found a transfer under way. `false`: it polls for no [`Awaited`].
pub(crate) fn note(job: &Arc<Job>) -> bool {
    FOUND.with_borrow_mut(|found| match found {
        Some(found) => {
            found.push(Arc::clone(job));
            true
        }
        None => false,
    })
}

/// A connection that a thread looks after while it waits for a transfer. Dropping it leaves the connection
/// to the event loop.
pub struct Lead {
    lane: LaneLead,
}

impl Lead {
    pub(crate) fn new(lane: LaneLead) -> Self {
        Self { lane }
    }

    /// Whether the transfer has come to its end.
    pub fn is_over(&self) -> bool {
        self.lane.is_over()
    }

    /// Has `sleep` wait until the socket has something to read, or room too if its second argument says so, and
    /// moves what can be moved if it says that this came about; it may return for any other reason. `false`:
    /// there is nothing to wait for here any more, and nothing was done.
    pub fn turn(&mut self, sleep: impl FnOnce(BorrowedFd<'_>, bool) -> bool) -> bool {
        let Some(full) = self.lane.interest() else {
            return false;
        };
        if self.lane.has_more() {
            self.lane.drive(Readiness::default());
        } else if !self.lane.look() && sleep(self.lane.socket(), full) {
            self.lane.drive(Readiness {
                readable: true,
                writable: full,
                closed: false,
            });
        }
        true
    }
}

impl fmt::Debug for Lead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lead").field(&self.lane.socket()).finish()
    }
}
