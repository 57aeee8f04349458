//! A thread that waits for a small transfer looks after the lane's socket itself.
//!
//! Otherwise the answer would wake the event loop, and the event loop that thread: two turns of the
//! scheduler where one does. One thread per lane leads; others wait for their results as usual, which the
//! leader delivers too. The event loop is not told of what comes in meanwhile.
//!
//! The socket is not given back after each answer, for it would be taken again for the next: as long as
//! nothing is under way on it, nobody has to read it, and its end is told in any case. The lane *lies aside*
//! then, and goes on to do so when a visitor has sent something, until it is seen whether somebody leads. It is
//! given back to the event loop, which takes a system call, by
//! - a leader that leaves while anything is under way,
//! - whoever looks at a transfer without leading: awaits or asks, or drops a handle on it,
//! - whoever sends what others wait for, since they may look elsewhere,
//! - the event loop, when it sees something under way there, at the next tick at the latest.

use std::net::TcpStream;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::lane::{Driver, Lane, Readiness, TURN_BYTES};
use super::patience::LOOK_FOR;
use crate::job::{Job, WaitHelper};
use crate::lead::Lead;

/// How long to wait at a time: deadlines of this lane are the event loop's business, and what it
/// decides wakes nobody here.
const SLICE: Duration = Duration::from_millis(20);

pub(super) struct LaneHelper(pub(super) Weak<Lane>);

impl WaitHelper for LaneHelper {
    fn help(&self, job: &Arc<Job>, until: Option<Instant>) -> bool {
        if let Some(mut lead) = self.lead(job) {
            let slice = || {
                until.map_or(SLICE, |until| {
                    until.saturating_duration_since(Instant::now()).min(SLICE)
                })
            };
            while !slice().is_zero() && lead.turn(|socket, full| sleep(socket, full, slice())) {}
        }
        false
    }

    fn lead(&self, job: &Arc<Job>) -> Option<Lead> {
        let lane = self.0.upgrade()?;
        let stream = lane.begin_lead(job)?;
        Some(Lead::new(LaneLead {
            lane,
            stream,
            job: Arc::clone(job),
            more: false,
            looked: false,
        }))
    }

    fn look(&self) {
        if let Some(lane) = self.0.upgrade() {
            lane.look();
        }
    }
}

/// The lead of one lane, until it is dropped.
pub(crate) struct LaneLead {
    lane: Arc<Lane>,
    stream: Arc<TcpStream>,
    job: Arc<Job>,
    more: bool,
    /// For the answer, before sleeping.
    looked: bool,
}

impl LaneLead {
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether it is this job that is waited for.
    pub(crate) fn is_for(&self, job: &Arc<Job>) -> bool {
        Arc::ptr_eq(&self.job, job)
    }

    /// Whether the job is over.
    pub(crate) fn is_over(&self) -> bool {
        self.job.is_done()
    }

    /// Whether there is more to do at once.
    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    /// Whether to wait for room in the socket too; `None`: there is nothing to wait for.
    pub(crate) fn interest(&self) -> Option<bool> {
        if self.is_over() {
            return None;
        }
        self.lane.state.lock().is_led(&self.stream)
    }

    /// Looks for the answer for a moment, the first time. Returns whether it came.
    pub(crate) fn look(&mut self) -> bool {
        if std::mem::replace(&mut self.looked, true) || !self.lane.patience.is_there() {
            return false;
        }
        let until = Instant::now() + LOOK_FOR;
        let came = loop {
            self.drive(Readiness {
                readable: true,
                ..Readiness::default()
            });
            if self.job.is_done() {
                break true;
            }
            if Instant::now() >= until {
                break false;
            }
            std::thread::yield_now();
        };
        self.lane.patience.learn(came);
        came
    }

    pub(crate) fn drive(&mut self, ready: Readiness) {
        let mut state = self.lane.state.lock();
        if state.is_led(&self.stream).is_some() {
            state.note(ready);
            self.more = self
                .lane
                .drive(state, Instant::now(), TURN_BYTES, Driver::Leader);
        }
    }
}

impl Drop for LaneLead {
    fn drop(&mut self) {
        let mut state = self.lane.state.lock();
        if !state.end_lead(&self.stream) {
            return;
        }
        if self.more {
            // The event loop goes on where this thread stopped.
            self.lane.notify();
        }
        self.lane.mind(state);
    }
}

fn sleep(socket: BorrowedFd<'_>, full: bool, left: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(left.subsec_nanos()),
    };
    let mut events = PollFlags::IN;
    events.set(PollFlags::OUT, full);
    let mut fds = [PollFd::from_borrowed_fd(socket, events)];
    // An interrupted wait is a short one.
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}
