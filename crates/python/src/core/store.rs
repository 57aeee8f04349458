//! A member of a cluster: starting and ending it.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_store::link::{LinkState, MasterLink};
use layercake_store::node::{Node, NodeConfig};
use layercake_store::{ClientConfig, StoreClient, StoreError};
use layercake_transport::Access;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::engine::{EngineCore, RegisterRefused};
use super::gets::GetTable;
use super::puts::PutTable;
use super::settings::{MemberName, StoreSettings};
use super::tasks::TaskTable;
use super::turns::Turns;
use crate::runtime::Close;

/// How long a start that failed may take to undo itself.
const UNDO_WITHIN: Duration = Duration::from_secs(2);

/// How long an upsert waits for others of its keys. A transfer has 30 s.
const TURN_WITHIN: Duration = Duration::from_secs(30);

/// Something that goes on for as long as one of these is there.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

/// An engine that is not only this member's, and what keeps it from being closed.
pub(crate) struct SharedEngine {
    pub(crate) engine: Arc<EngineCore>,
    /// What members that share it are called; `None`: as their settings say.
    pub(crate) name: Option<String>,
    pub(crate) keeper: Option<Keeper>,
}

impl From<Arc<EngineCore>> for SharedEngine {
    fn from(engine: Arc<EngineCore>) -> Self {
        Self {
            engine,
            name: None,
            keeper: None,
        }
    }
}

/// A member of a cluster. See the [module above](super).
pub(crate) struct StoreCore {
    handle: Handle,
    engine: Arc<EngineCore>,
    /// Whether the engine ends with this member.
    owns_engine: bool,
    _keeper: Option<Keeper>,
    link: MasterLink,
    client: StoreClient,
    node: Mutex<Option<Node>>,
    /// Where the buffers begin that were registered here.
    registered: Mutex<BTreeSet<u64>>,
    /// Whether it was closed; held while it is being closed.
    closed: tokio::sync::Mutex<bool>,
    pub(super) puts: PutTable,
    pub(super) gets: GetTable,
    pub(super) tasks: TaskTable,
    pub(crate) turns: Turns,
}

/// How a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Serving,
    /// It was closed.
    Closed,
    /// The master can't be reached.
    MasterLost,
}

impl StoreCore {
    /// Joins a cluster, within a runtime. Returns when all memory that is to be lent is in use; dropping the future
    /// leaves the cluster again, in the background.
    pub(crate) async fn open(
        mut settings: StoreSettings,
        shared: Option<SharedEngine>,
    ) -> Result<Arc<Self>, StoreError> {
        let handle = Handle::current();
        let owns_engine = shared.is_none();
        let SharedEngine {
            engine,
            name,
            keeper,
        } = match shared {
            Some(shared) => shared,
            None => EngineCore::start(&settings.engine)?.into(),
        };
        if let Some(name) = name {
            settings.name = MemberName::Given(name);
        }
        let config = settings.link(engine.engine().endpoint());
        let link = match MasterLink::connect(config).await {
            Ok(link) => link,
            Err(error) => {
                if owns_engine {
                    let stop = move || engine.shutdown(UNDO_WITHIN);
                    let stopped = tokio::task::spawn_blocking(stop).await;
                    tracing::debug!(ok = stopped.is_ok(), "the engine was let go of");
                }
                return Err(error);
            }
        };
        let client_config = ClientConfig {
            tenant: settings.tenant.clone(),
            checksums: settings.checksums,
            ..ClientConfig::default()
        };
        let client = StoreClient::new(&link, engine.engine().clone(), client_config)?;
        let core = Arc::new(Self {
            handle,
            engine,
            owns_engine,
            _keeper: keeper,
            link,
            client,
            node: Mutex::new(None),
            registered: Mutex::default(),
            closed: tokio::sync::Mutex::new(false),
            puts: PutTable::default(),
            gets: GetTable::default(),
            tasks: TaskTable::default(),
            turns: Turns::new(TURN_WITHIN),
        });
        let mut undo = Undo(Some(Arc::clone(&core)));
        let lent = core.lend(&settings).await;
        if lent.is_err() {
            core.close(Instant::now() + UNDO_WITHIN).await;
        }
        undo.0 = None;
        lent.map(|()| core)
    }

    /// Lends memory, and returns when all of it is mounted.
    async fn lend(&self, settings: &StoreSettings) -> Result<(), StoreError> {
        if settings.capacity == 0 {
            return Ok(());
        }
        let config = NodeConfig::lending(settings.capacity, settings.huge_pages);
        let node = Node::begin(&config, self.engine.engine().clone(), self.link.clone())?;
        let within = settings.ready_within;
        let ready = tokio::time::timeout(within, node.ready()).await;
        // Kept in either case: closing ends it in order.
        *self.node.lock() = Some(node);
        ready.unwrap_or(Err(StoreError::Timeout {
            what: "lending the memory",
            after: within,
        }))
    }

    pub(crate) fn client(&self) -> &StoreClient {
        &self.client
    }

    pub(crate) fn engine(&self) -> &Arc<EngineCore> {
        &self.engine
    }

    /// Registers memory by address, until it is unregistered or this member is closed.
    pub(crate) fn register(&self, addr: u64, len: u64) -> Result<(), RegisterRefused> {
        self.engine.register(addr, len, Access::LocalOnly)?;
        self.registered.lock().insert(addr);
        Ok(())
    }

    /// Unregisters memory by its first address, whoever registered it.
    pub(crate) fn unregister(&self, addr: u64) -> Result<(), RegisterRefused> {
        self.engine.unregister(addr)?;
        self.registered.lock().remove(&addr);
        Ok(())
    }

    /// The name that `preferred_segments` refers to.
    pub(crate) fn name(&self) -> &str {
        self.link.name()
    }

    /// Waits for a future on the calling thread, which must not hold the interpreter lock.
    pub(crate) fn block<T>(&self, future: impl Future<Output = T>) -> T {
        self.link.block_on(&self.handle, future)
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Plain: asks nobody.
    pub(crate) fn health(&self) -> Health {
        match self.link.state() {
            LinkState::Up { .. } => Health::Serving,
            LinkState::Closed => Health::Closed,
            _ => Health::MasterLost,
        }
    }

    /// Leaves the cluster: revokes and ends what is open, withdraws what was lent, and ends what belongs to
    /// this member. What does not end by `until` is left to the master's time-outs. Repeating it waits for the
    /// first call; calls under way elsewhere end with errors.
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
        let left = || until.saturating_duration_since(Instant::now());
        let puts = self.puts.take_all();
        // What these can't do in time, the client and then the master do.
        if !puts.is_empty() {
            let revoked = tokio::time::timeout(left(), self.client.revoke_puts(puts)).await;
            tracing::debug!(in_time = revoked.is_ok(), "open put sessions were revoked");
        }
        self.gets.clear();
        self.tasks.stop();
        if let Err(error) = self.client.close(left()).await {
            tracing::debug!(%error, "closing the client");
        }
        let node = self.node.lock().take();
        if let Some(node) = node
            && let Err(error) = node.shutdown(left()).await
        {
            tracing::debug!(%error, "closing the node");
        }
        if let Err(error) = self.link.close(left()).await {
            tracing::debug!(%error, "closing the link");
        }
        let (engine, owned) = (Arc::clone(&self.engine), self.owns_engine);
        let registered = std::mem::take(&mut *self.registered.lock());
        let stop = move || {
            let left = || until.saturating_duration_since(Instant::now());
            if owned {
                engine.shutdown(left());
            } else {
                for addr in registered {
                    // Somebody else may have unregistered it.
                    let done = engine.unregister_within(addr, left());
                    tracing::debug!(addr, ?done, "a buffer was unregistered");
                }
            }
        };
        let stopped = tokio::task::spawn_blocking(stop).await;
        tracing::debug!(ok = stopped.is_ok(), "the engine was let go of");
    }
}

/// Closes a member whose start was given up half way.
struct Undo(Option<Arc<StoreCore>>);

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(core) = self.0.take() {
            let handle = core.handle.clone();
            handle.spawn(async move { core.close(Instant::now() + UNDO_WITHIN).await });
        }
    }
}

impl Close for StoreCore {
    fn close_by(&self, until: Instant) {
        self.handle.block_on(self.close(until));
    }
}

impl fmt::Debug for StoreCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreCore")
            .field("link", &self.link)
            .field("node", &*self.node.lock())
            .finish_non_exhaustive()
    }
}
