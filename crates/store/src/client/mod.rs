//! The store's client library.
//!
//! A [`StoreClient`] reads and writes objects: whole ones ([`StoreClient::put`], [`StoreClient::get`]) or
//! by ranges in sessions ([`StoreClient::start_puts`], [`StoreClient::start_gets`]). Metadata goes over a
//! [`MasterLink`], bytes through a transfer [`Engine`]; both are given, and may serve others too.
//!
//! | module | what it does |
//! |---|---|
//! | `lookup` | existence, prefixes, waiting, removal |
//! | `put`, `get` | whole objects, made of sessions |
//! | `slots`, `holds` | small objects, put into places that the client has in advance |
//! | `put_start`, `write`, `put_end` | put sessions |
//! | `get_start`, `read` | get sessions |
//! | `hints`, `guess` | reading where objects lay, while the master is asked where they lie |
//! | `early` | reading what is written of objects that are not complete |
//! | `relocate` | replicas in other segments |
//! | `headers`, `records`, `refresh` | the record in front of each object |
//! | `fanout`, `places`, `scratch`, `spares` | one batch per peer out of many ranges |
//! | `leases`, `finisher`, `events`, `suspects` | what goes on in the background |
//!
//! Batches are answered entry by entry, in order, and one bad entry never fails its neighbours. Calls
//! that change something are seen through even if their future is dropped. Six tasks belong to a
//! client; they end when its last handle is dropped or [`StoreClient::close`] is called.

mod core;
mod early;
mod events;
mod fanout;
mod finisher;
mod get;
mod get_start;
mod guess;
mod headers;
mod hints;
mod holds;
mod keeper;
mod leases;
mod lookup;
mod places;
mod put;
mod put_end;
mod put_start;
mod read;
mod records;
mod refresh;
mod relocate;
mod scratch;
mod slots;
mod spares;
mod stats;
mod suspects;
mod write;

pub(crate) use self::core::Core;
use self::core::now;
pub use self::early::{EarlyRead, EarlyReading, EarlySession, Progress};
pub use self::get::GetRequest;
pub use self::get_start::GetOptions;
pub use self::lookup::{Located, PrefixHit};
pub(crate) use self::places::Places;
pub use self::put::{PutOutcome, PutRequest};
pub use self::put_end::EndError;
pub use self::read::{RangeRead, ReadDone, Reading};
pub use self::stats::ClientStats;
pub(crate) use self::write::Round;
pub use self::write::{Range, RangeWrite, Writing};

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::key::Tenant;
use layercake_transport::Engine;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::error::StoreError;
use crate::link::{LinkConfig, MasterLink};
use crate::node::check_generations;
use crate::session::PutShared;
use crate::session::put_state::Phase;

/// How a client works. Plain data.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Namespace of all keys. Default: `default`.
    pub tenant: Tenant,
    /// Keep a checksum of every range that is written, and compare those of ranges that are read.
    /// Default: on.
    pub checksums: bool,
    /// Leases of sessions that were not used for this long are not renewed any more. Default 60 s.
    pub session_idle: Duration,
    /// How long an end or a revoke waits for the session's transfers. Default 60 s.
    pub drain: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            tenant: Tenant::default(),
            checksums: true,
            session_idle: Duration::from_mins(1),
            drain: Duration::from_mins(1),
        }
    }
}

/// A client of the store. Cheap to clone. See the module's text.
#[derive(Clone)]
pub struct StoreClient {
    core: Arc<Core>,
    tasks: Arc<Tasks>,
}

/// The client's background tasks. They end with the last handle.
struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
    _guard: DropGuard,
}

impl StoreClient {
    /// Connects to a master with a link of its own, and makes a client on it. The link is given the
    /// engine's endpoint; [`MasterLink::close`] on [`Self::link`] leaves the master.
    pub async fn connect(
        mut link: LinkConfig,
        engine: Engine,
        config: ClientConfig,
    ) -> Result<Self, StoreError> {
        link.endpoint = Some(engine.endpoint().clone());
        let link = MasterLink::connect(link).await?;
        Self::new(&link, engine, config)
    }

    /// A client over `link`, for the keys of `config.tenant`, and `engine`, whose endpoint the link should
    /// have been given. A link serves one client: it is this one that answers when the master takes
    /// sessions away, so a second one is refused.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn new(
        link: &MasterLink,
        engine: Engine,
        mut config: ClientConfig,
    ) -> Result<Self, StoreError> {
        check_generations(&engine)?;
        let runtime = Handle::current();
        let link = link.with_tenant(config.tenant);
        // The records in front of objects name the key space, not what the caller called it.
        config.tenant = link.tenant().clone();
        let events = link
            .session_events()
            .ok_or_else(|| StoreError::InvalidConfig {
                setting: "link",
                detail: "it serves another client, each needs a link of its own".to_owned(),
            })?;
        let core = Arc::new(Core::new(link, engine, config, runtime));
        let stop = CancellationToken::new();
        let tracker = TaskTracker::new();
        let tasks = Tasks {
            tracker,
            _guard: stop.clone().drop_guard(),
            stop,
        };
        tasks.spawn(keeper::keep_task(Arc::clone(&core)));
        tasks.spawn(finisher::finish_task(Arc::clone(&core)));
        tasks.spawn(suspects::probe_task(Arc::clone(&core)));
        tasks.spawn(holds::tend_task(Arc::clone(&core)));
        tasks.spawn(events::drop_task(Arc::clone(&core), events));
        Ok(Self {
            core,
            tasks: Arc::new(tasks),
        })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// How it was configured.
    pub fn config(&self) -> &ClientConfig {
        &self.core.config
    }

    /// The engine that moves the bytes.
    pub fn engine(&self) -> &Engine {
        &self.core.engine
    }

    /// The link to the master, for this client's tenant.
    pub fn link(&self) -> &MasterLink {
        &self.core.link
    }

    /// The counters.
    pub fn stats(&self) -> ClientStats {
        let counted = self.core.counters.snapshot();
        let settled = counted.puts_committed + counted.puts_revoked + counted.puts_superseded;
        ClientStats {
            open_gets: self.core.leases.sessions(),
            open_puts: counted.puts_started.saturating_sub(settled),
            suspect_segments: self.core.suspects.len() as u64,
            ..counted
        }
    }

    /// Ends what is open: waits for calls under way, revokes put sessions that were dropped, gives leases
    /// back, and stops the background tasks. Link and engine stay as they are. An error says that
    /// something was left to the master's time-outs; the tasks are stopped all the same.
    ///
    /// Put sessions that the caller still holds are sealed and revoked as well.
    pub async fn close(&self, deadline: Duration) -> Result<(), StoreError> {
        let core = &self.core;
        let work = async {
            core.orphans().close();
            core.orphans().wait().await;
            let until = tokio::time::Instant::now() + deadline;
            let puts = core.puts.all();
            for put in &puts {
                put.abandon();
            }
            let open = |put: &Arc<PutShared>| put.phase() == Phase::Sealed;
            for put in puts.into_iter().filter(open) {
                if put.idle_until(until, deadline).await.is_ok() {
                    core.finisher.settle_later(put);
                }
            }
            core.leases.give_back(core).await;
            core.holds.give_back(core).await;
            core.finisher.flush(core).await
        };
        let settled = tokio::time::timeout(deadline, work).await;
        self.tasks.stop.cancel();
        self.tasks.tracker.close();
        self.tasks.tracker.wait().await;
        match settled {
            Ok(true) => Ok(()),
            _ => Err(StoreError::Timeout {
                what: "the client's open sessions",
                after: deadline,
            }),
        }
    }
}

impl Tasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stop.clone().cancelled_owned();
        self.tracker.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopped => {}
            }
        });
    }
}

impl fmt::Debug for StoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreClient")
            .field("link", &self.core.link)
            .field("config", &self.core.config)
            .finish_non_exhaustive()
    }
}
