//! The transports that one engine has, and the choice among them.
//!
//! The same engine: local; the same host, and both serve it: shm; else tcp. Always within what the
//! configuration allows, and shared memory only as long as it works with that peer.

use std::sync::Arc;
use std::time::Instant;

use crate::backend::{Backend, Context};
use crate::config::TransportKind;
use crate::copy_pool::CopyPool;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::local::LocalBackend;
use crate::shm::Shm;
use crate::tcp::TcpBackend;

#[derive(Default)]
pub(crate) struct Transports {
    /// All of them, in the order in which they were started.
    pub(crate) backends: Vec<Arc<dyn Backend>>,
    pub(crate) tcp: Option<Arc<TcpBackend>>,
    pub(crate) shm: Option<Arc<Shm>>,
    pool: Option<Arc<CopyPool>>,
}

impl Transports {
    /// Starts what the configuration asks for. What was started is stopped again if the rest fails.
    pub(crate) fn start(context: &Arc<Context>) -> Result<Self, Error> {
        let mut transports = Self::default();
        match transports.start_all(context) {
            Ok(()) => Ok(transports),
            Err(error) => {
                transports.shutdown(Instant::now() + context.config.deadlines.progress);
                Err(error)
            }
        }
    }

    /// One transport and no other.
    #[cfg(feature = "mock")]
    pub(crate) fn only(backend: Arc<dyn Backend>) -> Self {
        Self {
            backends: vec![backend],
            ..Self::default()
        }
    }

    fn start_all(&mut self, context: &Arc<Context>) -> Result<(), Error> {
        let wanted = |kind| context.config.transports.contains(kind);
        if wanted(TransportKind::Local) || wanted(TransportKind::Shm) {
            let pool = CopyPool::start(context.config.copy_threads);
            let pool =
                Arc::new(pool.map_err(|error| Error::system("starting a copy thread", error))?);
            self.pool = Some(Arc::clone(&pool));
            if wanted(TransportKind::Local) {
                let local = LocalBackend::new(Arc::clone(context), Arc::clone(&pool));
                self.backends.push(Arc::new(local));
            }
            if wanted(TransportKind::Shm)
                && let Some(shm) = start_shm(context, &pool)?
            {
                self.backends.push(Arc::clone(&shm) as Arc<dyn Backend>);
                self.shm = Some(shm);
            }
        }
        if wanted(TransportKind::Tcp) {
            let tcp = TcpBackend::start(context)?;
            self.backends.push(Arc::clone(&tcp) as Arc<dyn Backend>);
            self.tcp = Some(tcp);
        }
        Ok(())
    }

    /// The best transport from the engine at `here` to `peer`, among those less preferred than
    /// `after`.
    pub(crate) fn choose(
        &self,
        here: &Endpoint,
        peer: &Endpoint,
        after: Option<TransportKind>,
    ) -> Option<&Arc<dyn Backend>> {
        let same = peer.engine == here.engine;
        let reaches = |kind: TransportKind| match kind {
            TransportKind::Local => same,
            TransportKind::Shm => {
                let usable = |shm: &Arc<Shm>| !shm.is_unusable(peer.engine);
                let offered = peer.host == here.host && peer.shm.is_some();
                !same && offered && self.shm.as_ref().is_some_and(usable)
            }
            TransportKind::Tcp => !peer.tcp.is_empty(),
            TransportKind::Mock => true,
        };
        TransportKind::ALL
            .into_iter()
            .filter(|kind| after.is_none_or(|after| *kind > after) && reaches(*kind))
            .find_map(|kind| self.backends.iter().find(|backend| backend.kind() == kind))
    }

    pub(crate) fn shutdown(&self, until: Instant) {
        for backend in &self.backends {
            backend.shutdown(until);
        }
        if let Some(pool) = &self.pool
            && !pool.shutdown(until)
        {
            tracing::warn!("copy threads did not stop within the deadline");
        }
    }
}

/// Starts shared memory. Where the system does not allow it, the engine goes without if it has tcp.
fn start_shm(context: &Arc<Context>, pool: &Arc<CopyPool>) -> Result<Option<Arc<Shm>>, Error> {
    match Shm::start(Arc::clone(context), Arc::clone(pool)) {
        Ok(shm) => {
            context.registry.set_observer(shm.observer());
            Ok(Some(shm))
        }
        Err(error) if context.config.transports.contains(TransportKind::Tcp) => {
            tracing::warn!(%error, "no shared memory on this system: peers on this host use tcp");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
