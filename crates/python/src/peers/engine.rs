//! The engine: starting, submitting, notifying.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::auth::SharedToken;
use layercake_protocol::endpoint::Endpoint;
use layercake_store::StoreError;
use layercake_transport::{
    Batch, Direction, Error, LocalSlice, Outcome, Piece, PieceError, Refusal, Transfer,
};
use parking_lot::RwLock;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::link::{Link, View};
use super::server::{self, Door, Notification};
use super::{PeerError, check_notification};
use crate::core::{EngineCore, EngineSettings};
use crate::runtime::Close;

/// A transfer engine that peers find by its address.
pub(crate) struct PeerEngine {
    handle: Handle,
    address: SocketAddr,
    token: Option<SharedToken>,
    door: Arc<Door>,
    peers: RwLock<HashMap<String, Arc<Peer>>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Whether it was closed; held while it is being closed.
    closed: tokio::sync::Mutex<bool>,
}

/// A peer that was reached, and what it showed last.
struct Peer {
    link: Link,
    view: RwLock<Arc<View>>,
}

/// One copy: local memory, and the address in the peer.
pub(crate) struct Move {
    pub(crate) local: LocalSlice,
    pub(crate) remote: u64,
}

/// A batch under way.
pub(crate) struct Submitted {
    pub(crate) transfer: Transfer,
    pub(crate) pieces: usize,
    pub(crate) bytes: u64,
}

impl Submitted {
    fn new(batch: Batch, submit: impl FnOnce(Batch) -> Transfer) -> Self {
        let lens = batch.pieces.iter().map(|piece| piece.remote.len);
        Self {
            pieces: batch.pieces.len(),
            bytes: lens.fold(0, u64::saturating_add),
            transfer: submit(batch),
        }
    }

    /// What an outcome says as a whole.
    pub(crate) fn result(&self, outcome: &Outcome) -> Result<u64, PeerError> {
        let mut errors = outcome
            .pieces
            .iter()
            .filter_map(|piece| piece.as_ref().err());
        match errors.next() {
            None => Ok(self.bytes),
            Some(first) => Err(PeerError::Pieces {
                failed: errors.count() + 1,
                pieces: self.pieces,
                first: *first,
            }),
        }
    }
}

fn batch(
    peer: &Arc<Endpoint>,
    direction: Direction,
    pieces: Vec<Piece>,
    deadline: Option<Duration>,
) -> Batch {
    Batch {
        peer: Arc::clone(peer),
        direction,
        pieces,
        checksum: false,
        deadline,
    }
}

impl PeerEngine {
    /// Starts an engine, and a listener for peers on the same address, on the port that the settings name.
    /// The transports have a port of their own.
    pub(crate) async fn start(mut settings: EngineSettings) -> Result<Arc<Self>, StoreError> {
        let listen = settings.listen;
        settings.listen.set_port(0);
        let engine = EngineCore::start(&settings)?;
        let failed = |source| {
            StoreError::from(Error::Listen {
                listen: listen.to_string(),
                source,
            })
        };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let token = settings.trust.token.clone();
        let tasks = TaskTracker::new();
        let door = Arc::new(Door::new(engine, token.clone(), tasks.clone()));
        let stop = CancellationToken::new();
        tasks.spawn(server::serve(Arc::clone(&door), listener, stop.clone()));
        Ok(Arc::new(Self {
            handle: Handle::current(),
            address,
            token,
            door,
            peers: RwLock::default(),
            stop,
            tasks,
            closed: tokio::sync::Mutex::new(false),
        }))
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Where peers find this engine.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn engine(&self) -> &Arc<EngineCore> {
        &self.door.engine
    }

    pub(crate) fn take_notifications(&self) -> Vec<Notification> {
        self.door.take_notifications()
    }

    /// The peer, from before or reached now.
    async fn peer(&self, name: &str) -> Result<Arc<Peer>, PeerError> {
        if self.stop.is_cancelled() {
            return Err(PeerError::Closed);
        }
        let known = self.peers.read().get(name).cloned();
        if let Some(peer) = known.filter(|peer| !peer.link.is_over()) {
            return Ok(peer);
        }
        if !name
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        {
            return Err(PeerError::Address {
                peer: name.to_owned(),
            });
        }
        let link = Link::open(name, self.token.as_ref(), &self.tasks).await?;
        let view = RwLock::new(Arc::new(link.describe().await?));
        let peer = Arc::new(Peer { link, view });
        self.peers
            .write()
            .insert(name.to_owned(), Arc::clone(&peer));
        Ok(peer)
    }

    /// Returns when the peer has been reached, now or before.
    pub(crate) async fn reach(&self, name: &str) -> Result<(), PeerError> {
        self.peer(name).await.map(drop)
    }

    /// Forgets a peer that failed: the next call reaches for it anew.
    fn forget(&self, name: &str, peer: &Arc<Peer>) {
        let mut peers = self.peers.write();
        if peers
            .get(name)
            .is_some_and(|known| Arc::ptr_eq(known, peer))
        {
            peers.remove(name);
        }
    }

    /// Starts moving, and returns without waiting for the bytes; only a peer that is new, or an address
    /// that it did not show before, is asked for first.
    pub(crate) async fn submit(
        &self,
        name: &str,
        direction: Direction,
        moves: &[Move],
        deadline: Option<Duration>,
    ) -> Result<Submitted, PeerError> {
        let batch = self.batch(name, direction, moves, deadline).await?;
        Ok(Submitted::new(batch, |batch| {
            self.engine().engine().submit(batch)
        }))
    }

    /// What to move, with a peer that was asked for it if need be.
    async fn batch(
        &self,
        name: &str,
        direction: Direction,
        moves: &[Move],
        deadline: Option<Duration>,
    ) -> Result<Batch, PeerError> {
        let peer = self.peer(name).await?;
        let view = Arc::clone(&peer.view.read());
        let known = pieces(name, &view, moves).map(|pieces| (view, pieces));
        let (view, pieces) = if let Ok(known) = known {
            known
        } else {
            let view = self.refresh(name, &peer).await?;
            let pieces = pieces(name, &view, moves)?;
            (view, pieces)
        };
        Ok(batch(&view.endpoint, direction, pieces, deadline))
    }

    /// Moves, and returns when every byte has arrived or failed. Memory that was registered anew since
    /// the peer was last asked is found.
    pub(crate) async fn transfer(
        &self,
        name: &str,
        direction: Direction,
        moves: &[Move],
        deadline: Option<Duration>,
    ) -> Result<u64, PeerError> {
        let start = Instant::now();
        let submit = |batch| {
            let engine = self.engine().engine();
            // Only a thread that blocks on this waits for nothing else: that of a task has other tasks.
            match tokio::task::try_id() {
                None => engine.submit_awaited(batch),
                Some(_) => engine.submit(batch),
            }
        };
        let batch_of_all = self.batch(name, direction, moves, deadline).await?;
        let submitted = Submitted::new(batch_of_all, submit);
        let outcome = submitted.transfer.clone().await;
        let result = submitted.result(&outcome);
        let Err(PeerError::Pieces { first, .. }) = result else {
            return result;
        };
        let Ok(peer) = self.peer(name).await else {
            return result;
        };
        if !is_outdated(first) {
            if matches!(
                first,
                PieceError::PeerGone | PieceError::Unreachable | PieceError::Stalled
            ) {
                self.forget(name, &peer);
            }
            return result;
        }
        // What the table said is not so any more: ask, and try the failed ones once more.
        let view = self.refresh(name, &peer).await?;
        let failed = moves
            .iter()
            .zip(&outcome.pieces)
            .filter(|(_, piece)| piece.is_err());
        let failed: Vec<Piece> = failed
            .map(|(one, _)| piece(name, &view, one))
            .collect::<Result<_, _>>()?;
        let left = deadline.map(|deadline| deadline.saturating_sub(start.elapsed()));
        let again = Submitted::new(batch(&view.endpoint, direction, failed, left), submit);
        let outcome = again.transfer.clone().await;
        again.result(&outcome)?;
        Ok(submitted.bytes)
    }

    async fn refresh(&self, name: &str, peer: &Arc<Peer>) -> Result<Arc<View>, PeerError> {
        match peer.link.describe().await {
            Ok(view) => {
                let view = Arc::new(view);
                *peer.view.write() = Arc::clone(&view);
                Ok(view)
            }
            Err(error) => {
                self.forget(name, peer);
                Err(error)
            }
        }
    }

    /// Returns when the peer has the message.
    pub(crate) async fn notify(
        &self,
        name: &str,
        title: String,
        message: Vec<u8>,
    ) -> Result<(), PeerError> {
        check_notification(&title, &message)?;
        self.peer(name).await?.link.notify(title, message).await
    }

    /// Whether the peer answers now: asks it. Gives the address that it registered first.
    pub(crate) async fn probe(&self, name: &str) -> Result<Option<u64>, PeerError> {
        let peer = self.peer(name).await?;
        Ok(self.refresh(name, &peer).await?.table.first())
    }

    /// Sets what peers are told that this engine calls itself. Once.
    pub(crate) fn call_itself(&self, name: &str) {
        let _ = self.door.name.set(name.to_owned());
    }

    /// What the peer at an address calls itself: asks it. Empty where it has no name.
    pub(crate) async fn name_of(&self, address: &str) -> Result<String, PeerError> {
        let peer = self.peer(address).await?;
        Ok(self.refresh(address, &peer).await?.name.clone())
    }

    /// Ends the listener, the streams and the engine; transfers in flight end with errors. Repeating it
    /// waits for the first call.
    pub(crate) async fn close(&self, until: Instant) {
        let closing = tokio::time::timeout_at(until.into(), self.closed.lock()).await;
        match closing {
            Ok(mut closed) if !*closed => {
                self.end(until).await;
                *closed = true;
            }
            _ => {}
        }
    }

    async fn end(&self, until: Instant) {
        self.stop.cancel();
        self.peers.write().clear();
        let left = until.saturating_duration_since(Instant::now());
        let engine = Arc::clone(self.engine());
        let stopped = tokio::task::spawn_blocking(move || engine.shutdown(left)).await;
        self.tasks.close();
        let left = until.saturating_duration_since(Instant::now());
        let ended = tokio::time::timeout(left, self.tasks.wait()).await;
        tracing::debug!(
            engine = stopped.is_ok(),
            tasks = ended.is_ok(),
            "the transfer engine was closed"
        );
    }
}

/// Whether a refusal means that the table is out of date.
fn is_outdated(error: PieceError) -> bool {
    matches!(
        error,
        PieceError::Refused(Refusal::UnknownRegion | Refusal::BadCapability | Refusal::OutOfBounds)
    )
}

fn pieces(name: &str, view: &View, moves: &[Move]) -> Result<Vec<Piece>, PeerError> {
    moves.iter().map(|one| piece(name, view, one)).collect()
}

fn piece(name: &str, view: &View, one: &Move) -> Result<Piece, PeerError> {
    let (address, len) = (one.remote, one.local.len());
    let remote = view
        .table
        .find(address, len)
        .ok_or_else(|| PeerError::UnknownMemory {
            peer: name.to_owned(),
            address,
            len,
        })?;
    Ok(Piece {
        local: one.local.clone(),
        remote,
    })
}

impl Close for PeerEngine {
    fn close_by(&self, until: Instant) {
        self.handle.block_on(self.close(until));
    }

    fn is_needed_by_others(&self) -> bool {
        // A store may move its bytes with this engine.
        true
    }
}
