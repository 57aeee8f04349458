//! One connection to a peer, seen from the side that asks.
//!
//! A lane connects when there is work, takes frames from its peer's queue as long as its window has
//! room, sends them, and gives each operation its result when the owner's answer has come. Whoever
//! holds its lock may drive it: its event loop on socket events and ticks, a thread that submits
//! something small, a thread that waits. All socket calls are non-blocking, so the lock is held for
//! a bounded number of bytes.
//!
//! A lane that fails closes its socket first and gives results after that: no byte of local memory
//! moves once a piece has its result. Bytes of a write that were handed to a peer which is then given
//! up may still reach its memory; generations are what makes them harmless.

use std::fmt;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use mio::Token;
use parking_lot::{Mutex, MutexGuard};

use super::event_loop::LoopShared;
use super::lane_state::{LaneState, Settled};
use super::lead::LaneHelper;
use super::patience::Patience;
use super::peer::PeerShared;
use crate::backend::Context;
use crate::error::PieceError;
use crate::job::{Job, WaitHelper};

pub(super) struct Lane {
    peer: Arc<PeerShared>,
    context: Arc<Context>,
    home: Arc<LoopShared>,
    token: Token,
    pub(super) state: Mutex<LaneState>,
    /// What others want to know without the lock: how it stands, and the bytes in flight.
    up: AtomicBool,
    load: AtomicU64,
    busy: AtomicBool,
    aside: AtomicBool,
    /// A notice is on its way to the event loop.
    notified: AtomicBool,
    helper: Arc<LaneHelper>,
    pub(super) patience: Patience,
}

/// Bytes that are moved in one turn before others get theirs.
pub(super) const TURN_BYTES: usize = 4 << 20;

/// The same for a thread that only came to submit something small.
const VISIT_BYTES: usize = 128 << 10;

/// What a socket event says.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) closed: bool,
}

/// Who drives a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    /// Its event loop.
    Loop,
    /// A thread that came to submit something small.
    Visitor,
    /// A thread that waits.
    Leader,
}

impl Lane {
    pub(super) fn new(
        peer: Arc<PeerShared>,
        context: Arc<Context>,
        home: Arc<LoopShared>,
        token: Token,
    ) -> Arc<Self> {
        Arc::new_cyclic(|lane| Self {
            helper: Arc::new(LaneHelper(Weak::clone(lane))),
            patience: Patience::new(),
            peer,
            context,
            home,
            token,
            state: Mutex::new(LaneState::new()),
            up: AtomicBool::new(false),
            load: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            aside: AtomicBool::new(false),
            notified: AtomicBool::new(false),
        })
    }

    /// What lets a thread that waits for a job on this lane wait for the socket itself.
    pub(super) fn helper(&self) -> Arc<dyn WaitHelper> {
        Arc::clone(&self.helper) as Arc<dyn WaitHelper>
    }

    pub(super) fn token(&self) -> Token {
        self.token
    }

    pub(super) fn peer(&self) -> &Arc<PeerShared> {
        &self.peer
    }

    pub(super) fn home(&self) -> &Arc<LoopShared> {
        &self.home
    }

    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Bytes in flight.
    pub(super) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Whether something is owed to it or by it.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst)
    }

    /// Has the event loop look after it.
    pub(super) fn notify(&self) {
        if !self.notified.swap(true, Ordering::AcqRel) {
            self.home.service(self.token);
        }
    }

    /// The event loop has the notice, and looks after the lane next.
    pub(super) fn noticed(&self) {
        self.notified.store(false, Ordering::Release);
    }

    /// Moves what can be moved at once, on the calling thread; leaves the rest to the event loop.
    pub(super) fn push_along(&self) {
        let more = match self.state.try_lock() {
            Some(state) => self.drive(state, Instant::now(), VISIT_BYTES, Driver::Visitor),
            // Whoever holds it may be past looking at the queue.
            None => true,
        };
        if more {
            self.notify();
        } else if self.is_busy() {
            self.home.keep_ticking();
        }
    }

    /// Does what a socket event or a notice allows. Returns whether there is more to do at once.
    pub(super) fn service(&self, ready: Readiness, now: Instant) -> bool {
        let mut state = self.state.lock();
        state.note_event(ready);
        self.drive(state, now, TURN_BYTES, Driver::Loop)
    }

    /// Looks after deadlines. `forgive` says that this process itself stood still. Returns whether there
    /// is more to do at once.
    pub(super) fn tick(&self, now: Instant, forgive: bool) -> bool {
        let mut settled = Settled {
            stopped: self.peer.expired(now),
            ..Settled::default()
        };
        let progress = self.context.config.deadlines.progress;
        let mut state = self.state.lock();
        if forgive {
            state.forgive(now);
        }
        let mut more = false;
        if state.overdue(now, progress).is_some() {
            // What has come meanwhile counts before the verdict.
            state.note(Readiness {
                readable: true,
                writable: true,
                closed: false,
            });
            more = self.run(&mut state, now, TURN_BYTES, &mut settled);
            if let Some(error) = state.overdue(now, progress) {
                state.fail(error, &mut settled);
            }
        }
        self.mind_in(&mut state, Driver::Loop, &mut settled);
        self.publish(&state);
        drop(state);
        self.settle(settled);
        more
    }

    /// Has a thread that waits for this job lead; if it can't, the event loop looks after the job.
    pub(super) fn begin_lead(&self, job: &Job) -> Option<Arc<TcpStream>> {
        let mut state = self.state.lock();
        let stream = state.begin_lead(self, job);
        if stream.is_some() {
            self.publish(&state);
        } else {
            self.mind(state);
        }
        stream
    }

    /// Somebody wants to know what comes in, and does not lead.
    pub(super) fn look(&self) {
        if self.aside.load(Ordering::Acquire) {
            self.mind(self.state.lock());
        }
    }

    /// Sees to it that somebody looks after what is under way.
    pub(super) fn mind(&self, mut state: MutexGuard<'_, LaneState>) {
        let mut settled = Settled::default();
        self.mind_in(&mut state, Driver::Loop, &mut settled);
        self.publish(&state);
        drop(state);
        self.settle(settled);
    }

    fn mind_in(&self, state: &mut LaneState, driver: Driver, settled: &mut Settled) {
        if let Err(error) = state.mind(self, &self.helper, driver) {
            state.fail(error, settled);
        }
    }

    /// Ends everything and takes no more.
    pub(super) fn close(&self) {
        let mut settled = Settled::default();
        let mut state = self.state.lock();
        state.close(&mut settled);
        self.publish(&state);
        drop(state);
        self.settle(settled);
        for run in self.peer.drain() {
            run.fail(PieceError::ShutDown);
        }
    }

    pub(super) fn drive(
        &self,
        mut state: MutexGuard<'_, LaneState>,
        now: Instant,
        budget: usize,
        driver: Driver,
    ) -> bool {
        let mut settled = Settled::default();
        let more = self.run(&mut state, now, budget, &mut settled);
        self.mind_in(&mut state, driver, &mut settled);
        self.publish(&state);
        drop(state);
        self.settle(settled);
        more
    }

    fn run(
        &self,
        state: &mut LaneState,
        now: Instant,
        budget: usize,
        settled: &mut Settled,
    ) -> bool {
        match state.run(self, &self.context, now, budget, settled) {
            Ok(more) => more,
            Err(error) if state.ended_idle(error) => {
                state.fail(error, settled);
                settled.failed = None;
                self.peer.lane_leaves();
                self.peer.has_work()
            }
            Err(error) => {
                state.fail(error, settled);
                false
            }
        }
    }

    fn publish(&self, state: &LaneState) {
        self.up.store(state.is_up(), Ordering::Relaxed);
        self.load.store(state.in_flight(), Ordering::Relaxed);
        self.aside.store(state.is_aside(), Ordering::Release);
        self.busy.store(
            state.is_busy() || (state.is_up() && self.peer.has_work()),
            Ordering::SeqCst,
        );
    }

    /// Gives results, with no lock held.
    fn settle(&self, settled: Settled) {
        let Settled {
            mut answered,
            mut lost,
            stopped,
            failed,
        } = settled;
        for frame in &mut answered {
            frame.deliver(None);
        }
        for (run, error) in stopped {
            run.fail(error);
        }
        if let Some((error, was_up)) = failed {
            for frame in &mut lost {
                frame.deliver(Some(error));
            }
            for run in self.peer.lane_fails(was_up) {
                run.fail(error);
            }
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("peer", &self.peer)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}
