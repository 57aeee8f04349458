//! The link to the master: one stream that many calls share.
//!
//! A [`MasterLink`] greets the master (versions, mutual proof of the token), opens the stream, joins
//! as a member, sends heartbeats, and does all of it again when the connection is lost. Handles are
//! cheap to clone and made for many tasks at once; any number of calls is in flight together, in a
//! bounded queue that makes callers wait rather than fail.
//!
//! What a caller can rely on:
//! - Every call ends: with an answer, or with an error by its deadline ([`Timeouts::call`] for each
//!   message of a batch).
//! - While the master is known to be unreachable, calls fail at once; see [`LinkState`].
//! - A call that the connection broke under is repeated if it is renewed at once, where that can't do harm:
//!   under the same request id, so that a start is made once. It fails as soon as the master is known to be
//!   unreachable. Removals and (un)mounts are not repeated; they fail with [`StoreError::MasterUnreachable`].
//! - A put start whose caller goes away while it is under way, or that failed so, is taken back in the background; a
//!   lease is left to run out.
//! - A batch of any size goes through, in as many messages as it takes.
//!
//! Who looks after what: `shared` the circuit breaker and the way of a call, `signs` whether the master is alive, `connection` one stream
//! and its calls in flight, `lane` the bytes of a stream that is no gRPC, `greet` the way to an open stream, `supervise` the tasks, `outbox` what is
//! still to be told, `doubts` what this member can't confirm. No lock is held across an await, and no two are held together.

mod codec;
mod config;
mod connection;
mod connector;
mod doubts;
mod drive;
mod greet;
mod joined;
mod keys;
mod lane;
mod members;
mod outbox;
mod parker;
mod proofs;
mod shared;
mod signs;
mod slots;
mod sniff;
mod split;
mod supervise;
mod tools;
mod types;
mod unanswered;

pub use config::{Backoff, LinkConfig, Timeouts};
pub use connector::{Connector, Opened, TcpConnector};
pub use drive::block_on;
pub use types::{
    CommandId, Existence, Exists, GetsStarted, Life, LinkCarrier, LinkState, NodeEvent,
    ObjectDetail, ObjectPage, PutsStarted, Renewed, SessionEvent, StartOptions,
};

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use layercake_protocol::ids::ClientId;
use layercake_protocol::key::Tenant;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::DropGuard;

use self::connection::{Connection, Request, Response};
use self::shared::{Shared, Status};
use crate::error::StoreError;

/// A member's link to its master. See the module's text.
///
/// When the last handle is dropped, the link's tasks end. The master is told nothing then, and waits
/// for the member's time to live: [`Self::close`] is the polite way.
#[derive(Clone)]
pub struct MasterLink {
    inner: Arc<Inner>,
    tenant: Tenant,
}

struct Inner {
    shared: Arc<Shared>,
    _stops_tasks: DropGuard,
}

impl MasterLink {
    /// Connects over TCP and joins. Fails if the master can't be reached or does not fit; there is
    /// one attempt.
    pub async fn connect(config: LinkConfig) -> Result<Self, StoreError> {
        Self::connect_with(config, TcpConnector).await
    }

    /// As [`Self::connect`], over connections from `connector`.
    pub async fn connect_with(
        config: LinkConfig,
        connector: impl Connector,
    ) -> Result<Self, StoreError> {
        config.validate()?;
        let shared = Arc::new(Shared::new(config));
        let guard = shared.cancel.clone().drop_guard();
        let established = greet::establish(&shared, &connector).await?;
        let status = Status::Up(Arc::clone(&established.connection));
        shared.set_status(status);
        shared.tracker.spawn(supervise::supervise(
            Arc::clone(&shared),
            connector,
            established,
        ));
        shared
            .tracker
            .spawn(supervise::empty_outbox(Arc::clone(&shared)));
        let tenant = shared.config.tenant.clone();
        let link = Self {
            inner: Arc::new(Inner {
                shared,
                _stops_tasks: guard,
            }),
            tenant: Tenant::default(),
        };
        Ok(link.with_tenant(tenant))
    }

    /// This link for the keys of another tenant: the default one, at a master that
    /// [shares one key space among all](Self::shares_tenants).
    #[must_use]
    pub fn with_tenant(&self, tenant: Tenant) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            tenant: if self.shares_tenants() {
                Tenant::default()
            } else {
                tenant
            },
        }
    }

    /// Whether the master puts all tenants' keys into one key space, as it said when this member joined.
    pub fn shares_tenants(&self) -> bool {
        self.shared().shares_tenants.load(Ordering::Relaxed)
    }

    /// How long a look-up or a read protects what it found, as the master said when this member joined last; `None`: it
    /// did not say.
    pub fn lease(&self) -> Option<Duration> {
        let ms = self.shared().lease_ms.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms))
    }

    /// Whether the link is up, and over a framed lane; else it is down, or over gRPC.
    pub fn uses_lane(&self) -> bool {
        matches!(
            self.carrier(),
            Some(LinkCarrier::TcpLane | LinkCarrier::UnixLane)
        )
    }

    /// What carries the link, while it is up.
    pub fn carrier(&self) -> Option<LinkCarrier> {
        let Status::Up(connection) = self.shared().status() else {
            return None;
        };
        Some(connection.carrier())
    }

    /// The namespace of the keys in this handle's calls.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The member that this link joined as.
    pub fn client_id(&self) -> ClientId {
        self.shared().client
    }

    /// The member's name.
    pub fn name(&self) -> &str {
        &self.shared().config.name
    }

    /// The master's address, as configured.
    pub fn master(&self) -> &str {
        &self.shared().master
    }

    /// How the link stands.
    pub fn state(&self) -> LinkState {
        self.shared().watch().borrow().clone()
    }

    /// Tells of every change of [`Self::state`]; changes in quick succession may be seen as one.
    pub fn watch(&self) -> watch::Receiver<LinkState> {
        self.shared().watch()
    }

    /// Leaves the master and stops the link's tasks; other handles answer [`StoreError::Closed`] from
    /// the first moment on. Leaving tells the master that no transfer of this member's open puts is in
    /// flight any more: end, revoke or drain them before. What this member can't know that of is named
    /// first; if that fails, the master is left to find out that the member is gone.
    pub async fn close(&self, deadline: Duration) -> Result<(), StoreError> {
        let shared = self.shared();
        let until = Instant::now() + deadline;
        let last = shared.status();
        shared.set_status(Status::Closed);
        if let Status::Up(connection) = last {
            let leaving = async {
                if !self.tell_doubts(&connection, until).await {
                    return;
                }
                let request = self.once(Body::Leave(wire::LeaveRequest {}));
                // Best effort: without it the member's time to live ends it.
                let answer = connection.ask(shared.next_request(), &request, until).await;
                if !matches!(answer, Ok(Response::Done(_))) {
                    tracing::debug!(?answer, "left without the master's answer");
                }
            };
            // Nobody leads on a link that is closed, and who led would have looked at the deadline.
            if timeout_at(until, leaving).await.is_err() {
                tracing::debug!("left without the master's answer in time");
            }
        }
        shared.cancel.cancel();
        shared.tracker.close();
        timeout_at(until, shared.tracker.wait())
            .await
            .map_err(|_| StoreError::Timeout {
                what: "the link to the master",
                after: deadline,
            })
    }

    /// Revokes what is in doubt and was not given up yet. `false`: the master did not answer for all.
    async fn tell_doubts(&self, connection: &Connection, until: Instant) -> bool {
        let shared = self.shared();
        for (tenant, objects) in shared.doubts.untold() {
            let link = self.with_tenant(tenant);
            for (objects, request) in link.revokes(&objects) {
                let answer = connection.ask(shared.next_request(), &request, until).await;
                if !matches!(answer, Ok(Response::Results(_))) {
                    tracing::debug!(?answer, "left without a word about writes in doubt");
                    return false;
                }
                for object in objects {
                    shared.doubts.told(object.generation);
                }
            }
        }
        true
    }

    /// Has the link's own tasks look after calls that were made by a thread which led, and wait elsewhere from now on.
    pub(crate) fn mind_calls(&self) {
        if let Status::Up(connection) = self.shared().status() {
            connection.be_swept();
            if let Some(lane) = connection.lane() {
                lane.reader.call_back();
            }
        }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    async fn call(&self, request: &Request) -> Result<(Response, Arc<Connection>), StoreError> {
        let within = self.shared().config.timeouts.call;
        self.shared().call(request, within).await
    }
}

impl fmt::Debug for MasterLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MasterLink")
            .field("master", &self.shared().master)
            .field("client", &self.shared().client)
            .field("tenant", &self.tenant)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
