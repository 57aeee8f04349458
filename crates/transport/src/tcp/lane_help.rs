//! A thread that waits for a small transfer waits for the lane's socket itself.
//!
//! Otherwise the answer would wake the event loop, and the event loop that thread: two turns of the
//! scheduler where one does. For as long as somebody waits so, the event loop is not told of the
//! socket; afterwards it is told at once of what has come meanwhile. One thread per lane does this;
//! others wait for their results as usual, which the first one delivers too.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Weak;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::lane::{Lane, Readiness, TURN_BYTES};
use crate::job::{Job, WaitHelper};

/// How long to wait at a time: deadlines of this lane are the event loop's business, and what it
/// decides wakes nobody here.
const SLICE: Duration = Duration::from_millis(20);

pub(super) struct LaneHelper(pub(super) Weak<Lane>);

impl WaitHelper for LaneHelper {
    fn help(&self, job: &Job, until: Option<Instant>) -> bool {
        if let Some(lane) = self.0.upgrade() {
            lane.wait_for(job, until);
        }
        false
    }
}

impl Lane {
    fn wait_for(&self, job: &Job, until: Option<Instant>) {
        let Some(stream) = self.state.lock().hand_over(self, job) else {
            return;
        };
        let mut more = false;
        while !job.is_done() {
            let now = Instant::now();
            let left = until.map_or(SLICE, |until| {
                until.saturating_duration_since(now).min(SLICE)
            });
            let blocked = self.state.lock().is_handed_over(&stream);
            let Some(blocked) = blocked.filter(|_| !left.is_zero()) else {
                break;
            };
            let mut flags = PollFlags::IN | PollFlags::RDHUP;
            if blocked {
                flags |= PollFlags::OUT;
            }
            let left = if more { Duration::ZERO } else { left };
            let ready = wait(stream.as_fd(), flags, left);
            let mut state = self.state.lock();
            if state.is_handed_over(&stream).is_none() {
                break;
            }
            state.note(ready);
            more = self.drive(state, Instant::now(), TURN_BYTES);
        }
        let mut state = self.state.lock();
        if let Err(error) = state.take_back(self, &stream) {
            self.give_up(state, error);
        } else if more {
            drop(state);
            self.notify();
        }
    }
}

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, left: Duration) -> Readiness {
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(left.subsec_nanos()),
    };
    let mut fds = [PollFd::from_borrowed_fd(socket, flags)];
    // An interrupted wait is a short one.
    let _count = poll(&mut fds, Some(&timeout));
    let events = fds[0].revents();
    let ends = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP | PollFlags::NVAL;
    Readiness {
        readable: events.contains(PollFlags::IN),
        writable: events.contains(PollFlags::OUT),
        closed: events.intersects(ends),
    }
}
