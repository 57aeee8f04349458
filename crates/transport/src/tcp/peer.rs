//! One peer as this side sees it: what waits for it, and the lanes that take it there.
//!
//! Nothing is shared between peers but the threads, and nothing that a thread does for one of them
//! waits: a dead peer costs its own transfers and nobody else's. A peer without work and connections
//! retires, so that peers which never come back leave nothing behind.
//!
//! Lock order: a lane's state, then its peer's state. Results are delivered with neither held, since
//! that may run foreign wakers.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use layercake_protocol::ids::EngineId;
use parking_lot::Mutex;

use super::lane::Lane;
use super::work::{FrameOp, Next, Run, WireScratch, WorkQueue};
use crate::error::PieceError;
use crate::job::Job;
use crate::stats::{Counted, StatsTable};

/// Which peer: the engine, and where it is reached.
pub(super) type PeerKey = (EngineId, SocketAddr);

/// What a peer's lanes share.
pub(super) struct PeerShared {
    pub(super) engine: EngineId,
    pub(super) addr: SocketAddr,
    _counted: Counted,
    state: Mutex<PeerState>,
}

#[derive(Default)]
struct PeerState {
    queue: WorkQueue,
    /// Lanes that are connected or on the way there.
    live: usize,
    /// Those of them that are connected.
    up: usize,
    /// Set once; a retired peer takes no work.
    retired: bool,
}

impl PeerState {
    fn end(&mut self, was_up: bool) {
        self.live = self.live.saturating_sub(1);
        self.up = self.up.saturating_sub(usize::from(was_up));
    }
}

impl PeerShared {
    pub(super) fn new(engine: EngineId, addr: SocketAddr, stats: &StatsTable) -> Self {
        Self {
            engine,
            addr,
            _counted: stats.peer(),
            state: Mutex::default(),
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.state.lock().queue.is_empty()
    }

    pub(super) fn next(&self, now: Instant, wire: &mut WireScratch, ops: Vec<FrameOp>) -> Next {
        self.state.lock().queue.next(now, wire, ops)
    }

    /// A lane sets out to connect.
    pub(super) fn lane_begins(&self) {
        self.state.lock().live += 1;
    }

    /// A lane that had set out is connected.
    pub(super) fn lane_is_up(&self) {
        self.state.lock().up += 1;
    }

    /// A connected lane has ended, while nothing was in flight on it. Work waits for the next.
    pub(super) fn lane_leaves(&self) {
        self.state.lock().end(true);
    }

    /// A lane has failed. Returns what nobody will carry any more: when no lane is left, and also when
    /// the last connected one failed, since what became of the peer is then known better by it than by
    /// those which still try to connect.
    pub(super) fn lane_fails(&self, was_up: bool) -> Vec<Run> {
        let mut state = self.state.lock();
        state.end(was_up);
        if state.live == 0 || (was_up && state.up == 0) {
            state.queue.drain()
        } else {
            Vec::new()
        }
    }

    pub(super) fn expired(&self, now: Instant) -> Vec<(Run, PieceError)> {
        self.state.lock().queue.expired(now)
    }

    pub(super) fn drain(&self) -> Vec<Run> {
        self.state.lock().queue.drain()
    }

    /// Retires a peer with nothing to do and no connection.
    pub(super) fn try_retire(&self) -> bool {
        let mut state = self.state.lock();
        if state.live == 0 && state.queue.is_empty() {
            state.retired = true;
        }
        state.retired
    }
}

impl fmt::Debug for PeerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerShared")
            .field("engine", &self.engine)
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

/// A peer and its lanes.
#[derive(Debug)]
pub(super) struct Peer {
    shared: Arc<PeerShared>,
    lanes: Box<[Arc<Lane>]>,
}

impl Peer {
    pub(super) fn new(shared: Arc<PeerShared>, lanes: Box<[Arc<Lane>]>) -> Self {
        Self { shared, lanes }
    }

    pub(super) fn lanes(&self) -> &[Arc<Lane>] {
        &self.lanes
    }

    pub(super) fn shared(&self) -> &Arc<PeerShared> {
        &self.shared
    }

    /// Takes work in, unless the peer has retired: then the run comes back. A small run is sent by
    /// the calling thread at once, if a lane is free; that saves waking one up.
    pub(super) fn submit(&self, run: Run) -> Result<(), Run> {
        let small = run.is_small();
        let lane = self.best_lane();
        if small {
            run.job().set_helper(lane.helper());
        }
        {
            let mut state = self.shared.state.lock();
            if state.retired {
                return Err(run);
            }
            state.queue.push(run);
        }
        if small {
            lane.push_along();
        } else {
            for lane in &self.lanes {
                lane.notify();
            }
        }
        Ok(())
    }

    /// Asks the peer for a sign of life. Comes back as [`Peer::submit`] does.
    pub(super) fn probe(&self, job: Arc<Job>) -> Result<(), Arc<Job>> {
        let lane = self.best_lane();
        job.set_helper(lane.helper());
        {
            let mut state = self.shared.state.lock();
            if state.retired {
                return Err(job);
            }
            state.queue.push_probe(job);
        }
        lane.push_along();
        Ok(())
    }

    /// A lane that is up and has little in flight; else the first.
    fn best_lane(&self) -> &Arc<Lane> {
        let up = self.lanes.iter().filter(|lane| lane.is_up());
        up.min_by_key(|lane| lane.load()).unwrap_or(&self.lanes[0])
    }
}
