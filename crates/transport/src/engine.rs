//! The engine: owner of memory, threads and transports, and the place where a transport is chosen.
//!
//! A handle is cheap to clone. The last one to go, or [`Engine::shutdown`], stops the threads; what
//! is in flight then ends with [`PieceError::ShutDown`]. A back end that finds that it can't serve a
//! peer hands the pieces back, and the next one takes them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use layercake_protocol::ids::{EngineId, MemoryKind};

use crate::backend::{Backend, Context, Router};
use crate::batch::Batch;
use crate::config::{EngineConfig, TransportKind};
use crate::endpoint::Endpoint;
use crate::error::{Error, PieceError};
use crate::job::{Caller, Job, PieceSet};
use crate::memory::{Access, AllocateOptions, HostBuffer, Mark, Memory};
use crate::shm::UnderWay;
use crate::stats::Stats;
use crate::tcp::TcpBackend;
use crate::transfer::{Kept, Transfer};
use crate::transports::Transports;

/// A transfer engine. See the module's and the crate's text.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    core: Arc<Core>,
}

/// What back ends may come back to; it does not keep the engine alive.
struct Core {
    context: Arc<Context>,
    endpoint: Endpoint,
    transports: Transports,
    closed: AtomicBool,
}

impl Core {
    fn choose(&self, peer: &Endpoint, after: Option<TransportKind>) -> Option<&Arc<dyn Backend>> {
        self.transports.choose(&self.endpoint, peer, after)
    }

    fn route(&self, job: Arc<Job>, pieces: PieceSet, after: Option<TransportKind>) {
        match self.choose(job.peer(), after) {
            _ if self.closed.load(Ordering::SeqCst) => job.fail(&pieces, PieceError::ShutDown),
            Some(backend) => {
                job.set_transport(backend.kind());
                backend.submit(job, pieces);
            }
            None => job.fail(&pieces, PieceError::NoTransport),
        }
    }
}

impl Router for Core {
    fn fall_back(&self, job: Arc<Job>, pieces: PieceSet, from: TransportKind) {
        self.route(job, pieces, Some(from));
    }
}

impl Engine {
    /// Starts an engine. Its threads run and its listeners are bound when this returns.
    pub fn start(config: EngineConfig) -> Result<Self, Error> {
        config.validate()?;
        if config.transports.contains(TransportKind::Mock) {
            return Err(Error::NoNetwork);
        }
        let context = Context::new(config);
        let transports = Transports::start(&context)?;
        Ok(Self::assemble(context, transports))
    }

    /// Starts an engine on a made-up network.
    #[cfg(feature = "mock")]
    pub(crate) fn start_on(
        config: EngineConfig,
        network: Arc<crate::mock::Network>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let context = Context::new(config);
        let mock = crate::mock::MockBackend::start(&context, network);
        Ok(Self::assemble(context, Transports::only(mock)))
    }

    fn assemble(context: Arc<Context>, transports: Transports) -> Self {
        let advertised = |tcp: &Arc<TcpBackend>| {
            let local = tcp.local_addr();
            let mut address = context.config.advertise.unwrap_or(local);
            if address.port() == 0 {
                address.set_port(local.port());
            }
            address.to_string()
        };
        let endpoint = Endpoint {
            engine: context.engine,
            tcp: transports.tcp.as_ref().map(advertised).unwrap_or_default(),
            host: context.host,
            shm: transports.shm.as_ref().map(|shm| shm.name().to_owned()),
            pid: std::process::id(),
        };
        let closed = AtomicBool::new(false);
        let core = Arc::new(Core {
            context,
            endpoint,
            transports,
            closed,
        });
        let router: Arc<dyn Router> = Arc::clone(&core) as Arc<dyn Router>;
        let first = core.context.router.set(Arc::downgrade(&router)).is_ok();
        debug_assert!(first, "an engine has one router");
        Self {
            inner: Arc::new(Inner { core }),
        }
    }

    /// What a peer needs to reach this engine.
    pub fn endpoint(&self) -> &Endpoint {
        &self.inner.core.endpoint
    }

    /// Allocates and registers memory that peers on this host can map.
    pub fn allocate(&self, len: u64, options: AllocateOptions) -> Result<Memory, Error> {
        let registry = &self.inner.core.context.registry;
        Ok(Memory::new(
            registry.allocate(len, options)?,
            Arc::clone(registry),
        ))
    }

    /// Registers a buffer and owns it from here on.
    pub fn register(&self, buffer: HostBuffer, access: Access) -> Result<Memory, Error> {
        let registry = &self.inner.core.context.registry;
        Ok(Memory::new(
            registry.register(buffer, access)?,
            Arc::clone(registry),
        ))
    }

    /// Registers memory by address.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `addr` must be valid for reads and writes until [`Memory::unregister`]
    /// returned `Ok`, and the program must bear peers reading and writing there as `access` allows.
    #[expect(
        unsafe_code,
        reason = "the caller vouches for memory that the engine does not own"
    )]
    pub unsafe fn register_raw(
        &self,
        addr: usize,
        len: u64,
        kind: MemoryKind,
        access: Access,
    ) -> Result<Memory, Error> {
        let registry = &self.inner.core.context.registry;
        Ok(Memory::new(
            registry.register_foreign(addr, len, kind, access)?,
            Arc::clone(registry),
        ))
    }

    /// Starts moving a batch. Never blocks, and never refuses for size: what does not fit into
    /// flight waits inside.
    pub fn submit(&self, batch: Batch) -> Transfer {
        self.submit_keeping(batch, None)
    }

    /// As [`submit`](Self::submit), by a thread that waits for this transfer next, and for nothing else. Where bytes are
    /// merely copied it moves up to a megabyte by itself, at once: to wake another thread for them takes longer.
    pub fn submit_awaited(&self, batch: Batch) -> Transfer {
        self.start_moving(batch, None, Caller::Waits(thread::current().id()))
    }

    /// As [`submit`](Self::submit), and keeps something until no byte of the batch moves any more: for who must know that also
    /// where nobody is left to wait for the transfer.
    pub fn submit_keeping(&self, batch: Batch, kept: Option<Kept>) -> Transfer {
        self.start_moving(batch, kept, Caller::GoesOn)
    }

    fn start_moving(&self, batch: Batch, kept: Option<Kept>, caller: Caller) -> Transfer {
        let context = &self.inner.core.context;
        let mut batch = batch;
        batch.checksum &= context.config.checksums;
        let job = Job::new(
            batch,
            context.config.deadlines.transfer,
            Arc::clone(&context.stats),
            caller,
        );
        if let Some(kept) = kept {
            job.keep(kept);
        }
        if !job.is_done() {
            self.inner.core.route(Arc::clone(&job), PieceSet::All, None);
        }
        Transfer::new(job)
    }

    /// Asks a peer over tcp whether it is there, and authentic. The transfer has one result, and
    /// resolves within `deadline` or shortly after.
    pub fn probe(&self, peer: &Arc<Endpoint>, deadline: Duration) -> Transfer {
        let stats = Arc::clone(&self.inner.core.context.stats);
        let job = Job::probe(Arc::clone(peer), deadline, stats);
        match &self.inner.core.transports.tcp {
            Some(tcp) if !peer.tcp.is_empty() => {
                job.set_transport(TransportKind::Tcp);
                tcp.probe(Arc::clone(&job));
            }
            _ => job.finish(0, Err(PieceError::NoTransport)),
        }
        Transfer::new(job)
    }

    /// The transport that a batch to this peer would take now.
    pub fn transport_to(&self, peer: &Endpoint) -> Option<TransportKind> {
        self.inner
            .core
            .choose(peer, None)
            .map(|backend| backend.kind())
    }

    /// Which hold a peer on this host has on this engine's memory. Asks the system: a process that
    /// has just died has none.
    pub fn holders(&self, peer: EngineId) -> PeerPresence {
        let shm = self.inner.core.transports.shm.as_ref();
        PeerPresence {
            attached: shm.is_some_and(|shm| shm.is_attached(peer)),
        }
    }

    /// Waits until a peer on this host has no hold on this engine's memory any more; says whether
    /// that came about. Nothing that it began by itself can change the memory then.
    pub fn wait_detached(&self, peer: EngineId, deadline: Duration) -> bool {
        let shm = self.inner.core.transports.shm.as_ref();
        shm.is_none_or(|shm| shm.wait_detached(peer, after(deadline)))
    }

    /// Waits until everything is over that a peer (or any of them) had begun to do to this engine's
    /// memory when this was called, by whatever transport; says whether that came about. What begins
    /// later sees what was stored before: once [`Memory::fence`] has raised tags and this has returned
    /// `true`, no write of an earlier generation can land there, though the peer may still be attached.
    ///
    /// What this engine does on behalf of peers (tcp, local) is waited for whoever the peer is; it ends
    /// within the progress deadline of a peer that stops, and within the deadlines of a transfer and of
    /// progress together in any case. A peer on this host that is stopped in the middle of a copy of its
    /// own keeps this waiting.
    pub fn wait_quiet(&self, peer: Option<EngineId>, deadline: Duration) -> bool {
        self.wait_over(&self.quiet_mark(peer), deadline)
    }

    /// Remembers everything that a peer (or any of them) has begun by now to do to this engine's
    /// memory, as [`Self::wait_quiet`] would wait for it. Who can't wait asks about the mark from time
    /// to time: whatever begins later does not belong to it.
    pub fn quiet_mark(&self, peer: Option<EngineId>) -> QuietMark {
        let core = &self.inner.core;
        QuietMark {
            served: core.context.registry.quiet_mark(),
            copies: core.transports.shm.as_ref().map(|shm| shm.under_way(peer)),
        }
    }

    /// Whether everything is over that a mark of this engine remembers. Does not wait.
    pub fn is_over(&self, mark: &QuietMark) -> bool {
        let core = &self.inner.core;
        core.context.registry.is_over(mark.served)
            && match (&core.transports.shm, &mark.copies) {
                (Some(shm), Some(copies)) => shm.are_over(copies),
                _ => true,
            }
    }

    /// Waits until everything is over that a mark of this engine remembers; says whether that came
    /// about.
    pub fn wait_over(&self, mark: &QuietMark, deadline: Duration) -> bool {
        let until = after(deadline);
        let core = &self.inner.core;
        core.context.registry.wait_over(mark.served, until)
            && match (&core.transports.shm, &mark.copies) {
                (Some(shm), Some(copies)) => shm.wait_over(copies, until),
                _ => true,
            }
    }

    /// Whether generations are checked: by this engine for peers that reach it over tcp, and for what
    /// it does by itself. Without, [`Memory::fence`] keeps nobody out.
    pub fn checks_generations(&self) -> bool {
        self.inner.core.context.config.generation_checks
    }

    /// Regions that were dropped while they were in use, and still are.
    #[cfg(test)]
    pub(crate) fn lingering(&self) -> usize {
        self.inner.core.context.registry.lingering()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let context = &self.inner.core.context;
        context.stats.snapshot(context.registry.len())
    }

    /// Stops the threads. Transfers in flight end with [`PieceError::ShutDown`].
    pub fn shutdown(&self, deadline: Duration) {
        self.inner.shutdown(deadline);
    }
}

/// What a peer on this host can do to this engine's memory without its help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerPresence {
    /// It is attached by shared memory: it may be copying, and may begin to at any time.
    pub attached: bool,
}

/// What peers had begun to do to an engine's memory at one moment: see [`Engine::quiet_mark`].
#[derive(Debug)]
pub struct QuietMark {
    /// What the engine does on their behalf.
    served: Mark,
    /// What they copy by themselves.
    copies: Option<UnderWay>,
}

fn after(duration: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(duration).unwrap_or(now)
}

impl Inner {
    fn shutdown(&self, deadline: Duration) {
        let until = after(deadline);
        self.core.closed.store(true, Ordering::SeqCst);
        self.core.transports.shutdown(until);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown(DROP_DEADLINE);
    }
}

/// How long the last handle waits for the threads.
const DROP_DEADLINE: Duration = Duration::from_secs(5);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("endpoint", self.endpoint())
            .finish_non_exhaustive()
    }
}
