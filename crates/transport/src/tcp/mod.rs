//! Transfers over TCP: any host, our own framed protocol (see [`frame`]).
//!
//! Each peer gets a few connections, "lanes". A batch is cut into frames that many small pieces share
//! and that large pieces are split over; lanes take frames in turn and keep a window of bytes in
//! flight. Bytes go from local memory to the socket and from the socket to registered memory in
//! vectored calls, with no buffer between, except for the few KiB that arrive together with a header.
//! The owner judges every operation (`admit`), and a piece is done when the owner has acknowledged it.
//!
//! The codec (`frame`, `hello`) is pure; `lane` and `conn` are the two ends of a connection;
//! `event_loop` drives them. Unsafe code is in `raw` alone.

mod admit;
mod answer;
mod conn;
mod event_loop;
pub(crate) mod frame;
mod guests;
pub(crate) mod hello;
mod inbuf;
mod lane;
mod lane_state;
mod lead;
mod link;
mod out;
mod patience;
mod payload;
mod peer;
mod peers;
mod raw;
mod socket;
mod work;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use self::event_loop::{EventLoop, LoopShared};
use self::guests::Guests;
pub(crate) use self::lane::Readiness;
pub(crate) use self::lead::LaneLead;
use self::peers::Peers;
use self::work::Run;
use crate::backend::{Backend, Context};
use crate::config::TransportKind;
use crate::error::{Error, PieceError};
use crate::job::{Job, PieceSet};

/// The tcp transport of one engine.
pub(crate) struct TcpBackend {
    peers: Arc<Peers>,
    loops: Vec<Arc<LoopShared>>,
    local: SocketAddr,
    closed: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running: Arc<Running>,
}

/// How many loop threads run, and a way to wait for them.
#[derive(Default)]
struct Running {
    count: Mutex<usize>,
    ended: Condvar,
}

impl TcpBackend {
    /// Binds the listener and starts the threads.
    pub(crate) fn start(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        let wanted = context.config.listen;
        let failed = |source| Error::Listen {
            listen: wanted.to_string(),
            source,
        };
        let listener = socket::listen(wanted).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let peers = Arc::new(Peers::new(Arc::clone(context)));
        let mut listener = Some(listener);
        let guests = Guests::new(&context.config);
        let mut loops = Vec::new();
        for _ in 0..context.config.io_threads.get() {
            loops.push(EventLoop::new(
                Arc::clone(context),
                Arc::clone(&peers),
                Arc::clone(&guests),
                listener.take(),
            )?);
        }
        let shared: Vec<_> = loops
            .iter()
            .map(|event_loop| Arc::clone(event_loop.shared()))
            .collect();
        peers.set_loops(shared.clone());
        let backend = Arc::new(Self {
            peers,
            loops: shared.clone(),
            local,
            closed: AtomicBool::new(false),
            threads: Mutex::default(),
            running: Arc::default(),
        });
        for (number, mut event_loop) in loops.into_iter().enumerate() {
            event_loop.set_loops(shared.clone());
            if let Err(source) = backend.spawn(number, event_loop) {
                backend.shutdown(Instant::now() + context.config.deadlines.progress);
                return Err(Error::system("starting an event loop", source));
            }
        }
        Ok(backend)
    }

    fn spawn(&self, number: usize, event_loop: EventLoop) -> std::io::Result<()> {
        let running = Arc::clone(&self.running);
        *running.count.lock() += 1;
        let ended = Arc::clone(&self.running);
        let thread = std::thread::Builder::new()
            .name(format!("lc-tcp-{number}"))
            .spawn(move || {
                event_loop.run();
                *running.count.lock() -= 1;
                running.ended.notify_all();
            });
        match thread {
            Ok(thread) => {
                self.threads.lock().push(thread);
                Ok(())
            }
            Err(error) => {
                *ended.count.lock() -= 1;
                Err(error)
            }
        }
    }

    /// Where it listens.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Asks a peer for a sign of life.
    pub(crate) fn probe(&self, mut job: Arc<Job>) {
        loop {
            let Some(peer) = self.peer_of(&job) else {
                return job.finish(0, Err(PieceError::Unreachable));
            };
            match peer.probe(job) {
                Ok(()) => return self.after_submit(&peer),
                Err(back) => job = back,
            }
            self.peers.forget(peer.shared());
        }
    }

    fn peer_of(&self, job: &Job) -> Option<Arc<peer::Peer>> {
        let endpoint = job.peer();
        // Endpoints carry numeric addresses: resolving a name would block.
        let addr = endpoint.tcp.parse().ok()?;
        self.peers.find(endpoint.engine, addr)
    }

    /// Work that came in while the backend was shut down has nobody to end it but its submitter.
    fn after_submit(&self, peer: &peer::Peer) {
        if self.closed.load(Ordering::SeqCst) {
            peer.lanes().iter().for_each(|lane| lane.close());
        }
    }
}

impl Backend for TcpBackend {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn submit(&self, job: Arc<Job>, pieces: PieceSet) {
        let Some(mut peer) = self.peer_of(&job) else {
            return job.fail(&pieces, PieceError::Unreachable);
        };
        let mut run = Run::new(Arc::clone(&job), pieces);
        while let Err(back) = peer.submit(run) {
            run = back;
            self.peers.forget(peer.shared());
            match self.peer_of(&job) {
                Some(new) => peer = new,
                None => return run.fail(PieceError::Unreachable),
            }
        }
        self.after_submit(&peer);
    }

    fn shutdown(&self, deadline: Instant) {
        self.closed.store(true, Ordering::SeqCst);
        self.loops.iter().for_each(|event_loop| event_loop.stop());
        let threads = std::mem::take(&mut *self.threads.lock());
        let here = std::thread::current().id();
        // The last handle may have been dropped by something that one of these threads woke: that
        // thread ends by itself.
        let own = usize::from(threads.iter().any(|thread| thread.thread().id() == here));
        let mut count = self.running.count.lock();
        while *count > own {
            if self
                .running
                .ended
                .wait_until(&mut count, deadline)
                .timed_out()
            {
                tracing::warn!(
                    threads = *count,
                    "event loops did not stop within the deadline"
                );
                return;
            }
        }
        drop(count);
        for thread in threads
            .into_iter()
            .filter(|thread| thread.thread().id() != here)
        {
            if thread.join().is_err() {
                tracing::error!("an event loop panicked");
            }
        }
    }
}

impl fmt::Debug for TcpBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpBackend")
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
