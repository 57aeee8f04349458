//! What a transport is to the engine, and what the engine is to a transport.
//!
//! A back end is handed a job and some of its pieces. It owes each of these pieces a result, given by
//! [`Job::finish`] once no byte of it can move, and inside the job's deadline (plus what it needs to
//! be sure). If it finds that it can't serve the peer at all, or some pieces, it hands them back with
//! [`Context::fall_back`], as long as none of their bytes moved.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use layercake_protocol::ids::EngineId;

use crate::config::{EngineConfig, TransportKind};
use crate::endpoint::{HostId, current_host};
use crate::error::PieceError;
use crate::job::{Job, PieceSet};
use crate::memory::Registry;
use crate::stats::StatsTable;

/// One transport.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// Which transport this is.
    fn kind(&self) -> TransportKind;

    /// Starts moving these pieces. Never blocks and never fails: results are given to the job.
    fn submit(&self, job: Arc<Job>, pieces: PieceSet);

    /// Stops: pieces in flight end with [`PieceError::ShutDown`], threads are joined, all by
    /// `deadline`. Jobs submitted afterwards end at once.
    fn shutdown(&self, deadline: Instant);
}

/// Takes pieces that a back end could not serve.
pub(crate) trait Router: Send + Sync {
    fn fall_back(&self, job: Arc<Job>, pieces: PieceSet, from: TransportKind);
}

/// What all back ends of one engine share.
pub(crate) struct Context {
    pub(crate) config: EngineConfig,
    pub(crate) engine: EngineId,
    pub(crate) host: HostId,
    pub(crate) registry: Arc<Registry>,
    pub(crate) stats: Arc<StatsTable>,
    /// Set once, when the engine is complete.
    pub(crate) router: OnceLock<Weak<dyn Router>>,
}

impl Context {
    pub(crate) fn new(config: EngineConfig) -> Arc<Self> {
        Arc::new(Self {
            config,
            engine: EngineId::draw(),
            host: current_host(),
            registry: Arc::new(Registry::new()),
            stats: Arc::new(StatsTable::default()),
            router: OnceLock::new(),
        })
    }

    /// Hands back pieces of which no byte moved: the next transport that is allowed takes them, or
    /// they fail with [`PieceError::NoTransport`].
    pub(crate) fn fall_back(&self, job: Arc<Job>, pieces: PieceSet, from: TransportKind) {
        match self.router.get().and_then(Weak::upgrade) {
            Some(router) => router.fall_back(job, pieces, from),
            None => job.fail(&pieces, PieceError::ShutDown),
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}
