//! Who is told of what comes in on a lane's socket: its event loop, or a thread that leads. See the module
//! `lead`.

use std::net::TcpStream;
use std::sync::Arc;

use super::super::lane::{Driver, Lane};
use super::super::lead::LaneHelper;
use super::{LaneState, lost};
use crate::error::PieceError;
use crate::job::Job;

/// What the event loop is told of a lane's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Both,
    /// That it became readable. Once a socket was full, both are told again.
    Reading,
    /// Its end only.
    End,
}

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    told: Told,
    led: bool,
}

impl Watch {
    /// As a socket is watched that was just made.
    pub(super) fn new() -> Self {
        Self {
            told: Told::Both,
            led: false,
        }
    }

    /// Whether the event loop is left out.
    pub(super) fn is_aside(self) -> bool {
        self.told == Told::End
    }

    /// Whether the event loop is not told of room that a full socket gets.
    pub(super) fn misses_room(self) -> bool {
        self.told != Told::Both && !self.led
    }
}

impl LaneState {
    /// Whether the lane lies aside: nobody waits for what comes in.
    pub(in crate::tcp) fn is_aside(&self) -> bool {
        self.watch.is_aside() && !self.watch.led
    }

    /// Leaves the socket to a thread that waits for an answer to this job, if that is under way here
    /// and nobody else leads.
    pub(in crate::tcp) fn begin_lead(&mut self, lane: &Lane, job: &Job) -> Option<Arc<TcpStream>> {
        let here = |job: *const Job| self.frames.iter().any(|it| Arc::as_ptr(&it.job) == job);
        let stream = self.link.up()?;
        if self.watch.led || !here(job) {
            return None;
        }
        if self.watch.told != Told::End {
            lane.home().hand_over(stream, lane.token()).ok()?;
        }
        self.watch = Watch {
            told: Told::End,
            led: true,
        };
        Some(Arc::clone(stream))
    }

    /// Whether this socket is still led, and waits for room.
    pub(in crate::tcp) fn is_led(&self, stream: &Arc<TcpStream>) -> Option<bool> {
        let same = self.link.up().is_some_and(|up| Arc::ptr_eq(up, stream));
        (same && self.watch.led).then_some(!self.writable)
    }

    /// Nobody leads any more. `false`: that was so.
    pub(in crate::tcp) fn end_lead(&mut self, stream: &Arc<TcpStream>) -> bool {
        let led = self.is_led(stream).is_some();
        if led {
            self.watch.led = false;
        }
        led
    }

    /// Gives the socket back to the event loop if there is something under way that nobody may look after.
    pub(in crate::tcp) fn mind(
        &mut self,
        lane: &Lane,
        helper: &Arc<LaneHelper>,
        driver: Driver,
    ) -> Result<(), PieceError> {
        let looked_for = match driver {
            Driver::Leader => false,
            Driver::Visitor => !self.frames.iter().all(|it| it.job.is_helped_by(helper)),
            Driver::Loop => self.is_busy(),
        };
        if self.is_aside() && looked_for {
            self.take_back(lane)
        } else {
            Ok(())
        }
    }

    /// The event loop is told of the socket again.
    pub(super) fn take_back(&mut self, lane: &Lane) -> Result<(), PieceError> {
        let Some(stream) = self.link.up() else {
            return Ok(());
        };
        let blocked = !self.writable;
        self.watch.told = if blocked { Told::Both } else { Told::Reading };
        lane.home()
            .take_back(stream, lane.token(), blocked)
            .map_err(lost)
    }
}
