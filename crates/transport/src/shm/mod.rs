//! Shared memory: both engines are on one host, and the bytes are copied once.
//!
//! The initiator copies, the owner's threads take no part. What an owner would check has its place in
//! files that both map: the owner's table of regions ([`table`]) and the peer's slots ([`slots`]),
//! which hold the argument why an owner may reuse memory after it withdrew a region. Descriptors are
//! passed over a Unix socket ([`socket`], [`greeting`], [`wire`]); its hang-up is how each side learns
//! that the other is gone. Memory that was allocated by an engine is mapped; other registered memory is
//! copied by the kernel ([`cma`]), and where that is forbidden the batch takes the next transport.
//!
//! | part | what it does |
//! | --- | --- |
//! | [`service`] | the thread: greetings, descriptors, hang-ups |
//! | [`owner`] | regions shown, peers attached, waiting for their copies |
//! | [`initiator`], [`attachment`] | owners attached, regions opened, batches that wait for either |
//! | [`mover`] | validate, copy, validate again |
//! | [`raw`], [`cma`], [`alive`] | the unsafe parts |
//!
//! The initiator counts what moves; an owner's counters see the refused pieces that its peers report,
//! and no bytes.
//!
//! What it guards against: stale and wrong addresses, lost capabilities, peers that die at any moment.
//! Not against a hostile process of the same user, which could attach a debugger as well; who needs
//! that uses tcp only.
//!
//! An owner that is stopped: copies of regions that are open go on, since the memory is there and its
//! process is not gone; a new attachment ends as unreachable after the connect deadline, a new region
//! as stalled after the progress deadline.

mod alive;
mod attachment;
mod cma;
mod greeting;
mod initiator;
mod mover;
mod owner;
mod raw;
mod service;
mod slots;
mod socket;
mod table;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use layercake_protocol::ids::EngineId;
use mio::{Poll, Waker};
use parking_lot::Mutex;
use rand::RngExt as _;

use self::initiator::Initiator;
use self::owner::Exports;
pub(crate) use self::owner::UnderWay;
use self::service::{Service, Shared, WAKER};
use crate::backend::{Backend, Context};
use crate::config::TransportKind;
use crate::copy_pool::CopyPool;
use crate::error::Error;
use crate::job::{Job, PieceSet};
use crate::memory::RegionObserver;

/// The shared-memory transport of one engine. See the module's text.
pub(crate) struct Shm {
    name: String,
    shared: Arc<Shared>,
    waker: Arc<Waker>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shm {
    /// Starts the thread and listens for peers on this host.
    pub(crate) fn start(context: Arc<Context>, pool: Arc<CopyPool>) -> Result<Arc<Self>, Error> {
        let failed = |what| move |source| Error::System { what, source };
        let name = format!("layercake-{}", context.engine);
        let listener = socket::listen(&name).map_err(|source| Error::Listen {
            listen: format!("@{name}"),
            source,
        })?;
        let events = Poll::new().map_err(failed("waiting for events"))?;
        let waker = Waker::new(events.registry(), WAKER).map_err(failed("waiting for events"))?;
        let waker = Arc::new(waker);
        if context.config.allow_ptrace_attach {
            allow_attach();
        }
        let initiator = Initiator::new(Arc::clone(&context), pool, Arc::clone(&waker));
        let shared = Arc::new(Shared {
            context,
            exports: Arc::new(
                Exports::create(Some(Arc::clone(&waker))).map_err(failed("sharing memory"))?,
            ),
            initiator,
            stop: AtomicBool::new(false),
            probe: Box::new(rand::rng().random()),
        });
        let service = Service::new(Arc::clone(&shared), events, listener);
        let service = service.map_err(failed("waiting for events"))?;
        let exports = Arc::clone(&shared.exports);
        let thread = std::thread::Builder::new()
            .name("lc-shm".to_owned())
            .spawn(move || exports.while_here(|| service.run()))
            .map_err(failed("starting a thread"))?;
        Ok(Arc::new(Self {
            name,
            shared,
            waker,
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// The socket's name, for the endpoint.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What has to be told of regions as they come and go.
    pub(crate) fn observer(&self) -> Arc<dyn RegionObserver> {
        Arc::clone(&self.shared.exports) as Arc<dyn RegionObserver>
    }

    /// Whether batches to this engine take another transport for now.
    pub(crate) fn is_unusable(&self, engine: EngineId) -> bool {
        self.shared.initiator.is_unusable(engine)
    }

    /// Whether that engine is attached to this one's memory now.
    pub(crate) fn is_attached(&self, engine: EngineId) -> bool {
        self.shared.exports.is_attached(engine)
    }

    /// Waits until that engine is not attached; says whether that came about by `until`. Nothing of
    /// it can write to this engine's memory by itself then.
    pub(crate) fn wait_detached(&self, engine: EngineId, until: Instant) -> bool {
        self.shared.exports.wait_detached(engine, until)
    }

    /// The copies that this engine (or any) has under way by itself. Copies that begin later see what
    /// the caller stored before, raised generation tags in particular.
    pub(crate) fn under_way(&self, engine: Option<EngineId>) -> UnderWay {
        self.shared.exports.under_way(engine)
    }

    /// Whether those copies are over.
    pub(crate) fn are_over(&self, under_way: &UnderWay) -> bool {
        self.shared.exports.are_over(under_way)
    }

    /// Waits until those copies are over; says whether that came about by `until`.
    pub(crate) fn wait_over(&self, under_way: &UnderWay, until: Instant) -> bool {
        self.shared.exports.wait_over(under_way, until)
    }

    fn stop(&self, deadline: Instant) {
        self.shared.initiator.close();
        self.shared.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "the shared-memory thread can't be woken");
            return;
        }
        let thread = self.thread.lock().take();
        // A last handle may be dropped by the thread itself, as it completes a transfer.
        let current = std::thread::current().id();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != current)
            && thread.join().is_err()
        {
            tracing::error!("the shared-memory thread panicked");
        }
        if !self.shared.exports.close(deadline) {
            tracing::warn!("peers were still copying when shared memory was closed");
        }
    }
}

/// Lets other processes of this user reach this one's memory where the kernel asks for consent.
fn allow_attach() {
    use rustix::process::PTracer;
    if let Err(error) = rustix::process::set_ptracer(PTracer::Any) {
        // Kernels without that restriction don't know the call.
        tracing::debug!(%error, "consent to attaching is not needed or not possible");
    }
}

impl Backend for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn submit(&self, job: Arc<Job>, pieces: PieceSet) {
        self.shared.initiator.submit(job, pieces);
    }

    fn shutdown(&self, deadline: Instant) {
        self.stop(deadline);
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.stop(Instant::now());
    }
}

impl fmt::Debug for Shm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shm")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
