//! An engine that was initialized.
//!
//! Two things keep it. [`Live`] is what Python objects have that move bytes with it, those of stores that share it
//! included: when the last of these has gone, the memory that was registered is the program's alone. [`Running`] is
//! what a store needs beyond that, until it has left its cluster.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_store::StoreError;
use layercake_store::link::block_on;
use layercake_transport::{Access, Direction};
use parking_lot::Mutex;
use thiserror::Error;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::directory::{Directory, DirectoryError};
use super::names::{Named, Names};
use super::notify::Notify;
use super::under_way::UnderWay;
use crate::core::{EngineCore, EngineSettings, Keeper, RegisterRefused};
use crate::dropin::member;
use crate::memory::Use;
use crate::peers::{Move, PeerEngine, PeerError, check_notification};
use crate::runtime;

/// How long closing waits for what is in flight.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// How long an engine that has the name already may take to say that it runs.
const HOLDER_WITHIN: Duration = Duration::from_secs(2);

/// Codes of this interface.
pub(super) mod code {
    pub(in super::super) const FAILED: i64 = -1;
    pub(in super::super) const NOT_REGISTERED: i64 = -3;
    pub(in super::super) const OVERLAPS: i64 = -7;
    pub(in super::super) const BAD_ADDRESS: i64 = -101;
    pub(in super::super) const UNREACHABLE: i64 = -102;
}

/// Why an engine was not started.
#[derive(Debug, Error)]
pub(super) enum StartError {
    #[error(transparent)]
    Engine(#[from] StoreError),
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(
        "the name {name:?} belongs to a running engine at {holder}: choose another name, or close that engine first"
    )]
    NameTaken { name: String, holder: String },
}

/// An engine, its managed buffers, and its transfers under way. Its methods are called without the
/// interpreter lock.
pub(super) struct Live {
    running: Arc<Running>,
    /// `host:port`, where the host is as it was given.
    name: String,
    pub(super) under_way: UnderWay,
    /// First address and length.
    managed: Mutex<HashMap<u64, u64>>,
    /// From the drop on; goes after all of the above.
    behind: Option<TaskTrackerToken>,
}

/// The pieces of a call: local addresses, addresses in the peer, lengths.
pub(super) type Pieces<'a> = (&'a [u64], &'a [u64], &'a [u64]);

impl Live {
    fn new(engine: Arc<PeerEngine>, host: &str, names: Names) -> Self {
        Self {
            name: member::at_port(host, engine.address().port()),
            running: Arc::new(Running(Arc::new(Named { engine, names }))),
            under_way: UnderWay::default(),
            managed: Mutex::default(),
            behind: None,
        }
    }

    /// Starts an engine that is known as `host`, in the place of the one that was listed at the address `before`.
    pub(super) async fn start(
        settings: EngineSettings,
        host: String,
        directory: Option<Directory>,
        before: Option<String>,
    ) -> Result<Self, StartError> {
        let advertise = settings.advertise;
        let engine = PeerEngine::start(settings).await?;
        let Some(directory) = directory else {
            return Ok(Self::new(engine, &host, Names::default()));
        };
        let mut address = engine.address();
        if let Some(advertise) = advertise {
            address.set_ip(advertise.ip());
        }
        let address = address.to_string();
        let listing = async {
            let own = [before.as_deref(), Some(&*address)];
            leaving(&host).await;
            let mut holder = is_taken(&engine, &directory, &host, &own).await?;
            if holder.is_some() {
                // A store that was dropped keeps an engine that it shares until it has left its cluster.
                let left = tokio::time::timeout(CLOSE_WITHIN, runtime::closed_behind()).await;
                tracing::debug!(in_time = left.is_ok(), "dropped stores were waited for");
                leaving(&host).await;
                holder = is_taken(&engine, &directory, &host, &own).await?;
            }
            if let Some(holder) = holder {
                let name = host.clone();
                return Err(StartError::NameTaken { name, holder });
            }
            engine.call_itself(&host);
            Ok(Names::listed(directory, &host, &address).await?)
        };
        match listing.await {
            Ok(names) => Ok(Self::new(engine, &host, names)),
            Err(error) => {
                engine.close(Instant::now() + CLOSE_WITHIN).await;
                Err(error)
            }
        }
    }

    pub(super) fn peers(&self) -> &Arc<PeerEngine> {
        &self.named().engine
    }

    /// The address that the metadata server tells, if there is one.
    pub(super) fn listed_at(&self) -> Option<String> {
        self.named().names.own().map(str::to_owned)
    }

    /// What is closed at the end of the interpreter.
    pub(super) fn named(&self) -> &Arc<Named> {
        &self.running.0
    }

    /// What keeps the engine running, with no memory of the program's once this has gone.
    pub(super) fn keeper(&self) -> Keeper {
        Arc::clone(&self.running) as _
    }

    /// `host:port`, under which peers without a metadata server find it.
    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    pub(super) fn engine(&self) -> &Arc<EngineCore> {
        self.peers().engine()
    }

    pub(super) fn register(&self, addr: u64, len: u64) -> i64 {
        match self.engine().register(addr, len, Access::RemoteReadWrite) {
            Ok(()) => 0,
            Err(RegisterRefused::Overlap(error)) => {
                tracing::debug!(%error, "memory was not registered");
                code::OVERLAPS
            }
            Err(error) => {
                tracing::warn!(%error, "memory was not registered");
                code::FAILED
            }
        }
    }

    pub(super) fn unregister(&self, addr: u64) -> i64 {
        if self.managed.lock().contains_key(&addr) {
            return code::NOT_REGISTERED;
        }
        self.withdraw(addr)
    }

    fn withdraw(&self, addr: u64) -> i64 {
        match self.engine().unregister(addr) {
            Ok(()) => 0,
            Err(RegisterRefused::Unknown { .. }) => code::NOT_REGISTERED,
            Err(error) => {
                tracing::warn!(%error, "memory was not unregistered");
                code::FAILED
            }
        }
    }

    /// All or none.
    pub(super) fn register_all(&self, addrs: &[u64], lens: &[u64]) -> i64 {
        if addrs.len() != lens.len() {
            return code::FAILED;
        }
        for (done, (&addr, &len)) in addrs.iter().zip(lens).enumerate() {
            let code = self.register(addr, len);
            if code != 0 {
                for &addr in &addrs[..done] {
                    self.withdraw(addr);
                }
                return code;
            }
        }
        0
    }

    /// Each that can be; the first code that is not 0.
    pub(super) fn unregister_all(&self, addrs: &[u64]) -> i64 {
        let codes = addrs.iter().map(|&addr| self.unregister(addr));
        codes.fold(0, |first, code| if first == 0 { code } else { first })
    }

    /// The address of memory that peers can touch; 0 if there is none to be had.
    pub(super) fn allocate(&self, len: u64) -> u64 {
        if len > host_memory() {
            // The system would promise it, and break the promise when the pages are touched.
            return 0;
        }
        match self.engine().allocate(len, Access::RemoteReadWrite) {
            Ok(addr) => {
                self.managed.lock().insert(addr, len);
                addr
            }
            Err(error) => {
                tracing::warn!(%error, len, "no memory was allocated");
                0
            }
        }
    }

    pub(super) fn free(&self, addr: u64) -> i64 {
        if self.managed.lock().remove(&addr).is_none() {
            return code::NOT_REGISTERED;
        }
        self.withdraw(addr)
    }

    /// Moves, and returns when all of it is there; then tells the peer, if there is something to tell.
    pub(super) fn transfer(
        &self,
        peer: &str,
        direction: Direction,
        pieces: Pieces<'_>,
        notify: Option<Notify>,
    ) -> i64 {
        let Some(moves) = self.moves(direction, pieces, Locals::Any) else {
            return code::FAILED;
        };
        let moving = async {
            if let Some(Notify { name, msg }) = &notify {
                // Before anything moves.
                check_notification(name, msg.as_bytes())?;
            }
            self.named().transfer(peer, direction, &moves).await?;
            match notify {
                Some(notify) => self.named().notify(peer, notify).await,
                None => Ok(()),
            }
        };
        match block_on(self.peers().handle(), moving) {
            Ok(()) => 0,
            Err(error) => failed(peer, &error),
        }
    }

    /// Starts moving. A number to ask about it, 0 if it can't be started. What is not registered here may go as
    /// soon as this returns, so then it is moved before.
    pub(super) fn submit(
        self: Arc<Self>,
        peer: &str,
        direction: Direction,
        pieces: Pieces<'_>,
    ) -> u64 {
        let registered = self.moves(direction, pieces, Locals::Registered);
        let handle = self.peers().handle().clone();
        let Some(moves) = registered else {
            if self.moves(direction, pieces, Locals::Any).is_none() {
                return 0;
            }
            let done = self.transfer(peer, direction, pieces, None) == 0;
            let (id, report) = self.under_way.begin();
            report.end(done);
            return id;
        };
        if let Err(error) = handle.block_on(self.named().reach(peer)) {
            failed(peer, &error);
            return 0;
        }
        let (id, report) = self.under_way.begin();
        let peers = Arc::clone(self.named());
        let peer = peer.to_owned();
        handle.spawn(async move {
            let result = peers.transfer(&peer, direction, &moves).await;
            if let Err(error) = &result {
                failed(&peer, error);
            }
            report.end(result.is_ok());
        });
        id
    }

    /// Waits for all of them: 0 if each ended well.
    pub(super) fn wait(&self, ids: &[u64]) -> i64 {
        let Some(waiters) = self.under_way.waiters(ids) else {
            return code::FAILED;
        };
        let all = async {
            let mut well = true;
            for waiter in waiters {
                well &= waiter.ended_well().await;
            }
            well
        };
        if self.peers().handle().block_on(all) {
            0
        } else {
            code::FAILED
        }
    }

    pub(super) fn probe(&self, peer: &str) -> Result<Option<u64>, i64> {
        let asked = self.peers().handle().block_on(self.named().probe(peer));
        asked.map_err(|error| {
            failed(peer, &error);
            match error {
                PeerError::Address { .. } => code::BAD_ADDRESS,
                _ => code::UNREACHABLE,
            }
        })
    }

    /// The copies of a call, without those of no bytes; `None` if the lists or the memory are wrong.
    fn moves(
        &self,
        direction: Direction,
        (local, remote, lens): Pieces<'_>,
        locals: Locals,
    ) -> Option<Vec<Move>> {
        if local.len() != remote.len() || remote.len() != lens.len() {
            return None;
        }
        let of = match direction {
            Direction::Read => Use::Write,
            Direction::Write => Use::Read,
        };
        let mut resolver = self.engine().resolver();
        let pieces = local.iter().zip(remote).zip(lens);
        pieces
            .filter(|(_, len)| **len > 0)
            .map(|((&addr, &remote), &len)| {
                let local = match locals {
                    Locals::Any => resolver.any(addr, len, of),
                    Locals::Registered => resolver.registered(addr, len),
                };
                Some(Move {
                    local: local.ok()?,
                    remote,
                })
            })
            .collect()
    }
}

impl Drop for Live {
    /// A program that drops it may do with the memory what it likes when this returns.
    fn drop(&mut self) {
        // Who wants the name waits for this, and finds the engine among those that leave then.
        let behind = runtime::behind();
        self.behind = Some(behind.clone());
        let running = Arc::clone(&self.running);
        runtime::apart(move || {
            if !running.0.engine.engine().unregister_all(CLOSE_WITHIN) {
                tracing::error!(
                    "memory of an engine that ends is still in use after {CLOSE_WITHIN:?}"
                );
            }
            drop(running);
            drop(behind);
        });
    }
}

/// An engine that runs, until the last of those who need it has gone. Its end needs nobody to wait.
struct Running(Arc<Named>);

impl Drop for Running {
    fn drop(&mut self) {
        let peers = Arc::clone(&self.0);
        // First of all: whoever wants the name finds it here.
        LEAVING.lock().push(Arc::clone(&peers));
        let handle = peers.engine.handle().clone();
        handle.spawn(async move {
            peers.close(Instant::now() + CLOSE_WITHIN).await;
            LEAVING.lock().retain(|other| !Arc::ptr_eq(other, &peers));
        });
    }
}

/// Engines of this process that are being closed.
static LEAVING: Mutex<Vec<Arc<Named>>> = Mutex::new(Vec::new());

/// Waits until the engines of this process that had this name, and are being closed, have left it.
async fn leaving(name: &str) {
    let all = LEAVING.lock().clone();
    for one in all.iter().filter(|one| one.names.own_name() == Some(name)) {
        one.close(Instant::now() + CLOSE_WITHIN).await;
    }
}

/// The address of the engine that a name belongs to: at none of the `own` addresses, it answers, and to the name. One that
/// crashed left its entry behind, and another may have its address by now. Of two that start at the same moment the
/// later one has the name.
async fn is_taken(
    engine: &PeerEngine,
    directory: &Directory,
    name: &str,
    own: &[Option<&str>],
) -> Result<Option<String>, DirectoryError> {
    let Some(holder) = directory.get(name).await? else {
        return Ok(None);
    };
    if own.contains(&Some(&*holder)) {
        return Ok(None);
    }
    match tokio::time::timeout(HOLDER_WITHIN, engine.name_of(&holder)).await {
        Ok(Ok(theirs)) if theirs == name => Ok(Some(holder)),
        _ => Ok(None),
    }
}

/// Bytes of memory that this host has in all.
fn host_memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into())
}

/// Which local memory will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locals {
    Any,
    Registered,
}

fn failed(peer: &str, error: &PeerError) -> i64 {
    tracing::debug!(peer, %error, "a transfer failed");
    code::FAILED
}
