//! A running master as its own process sees it: for health checks, consoles and administration.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, SegmentId};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GetStarted, Recency, Segment};
use layercake_protocol::report::{SegmentStat, Status};

use crate::metrics::Calls;
use crate::service::Core;
use crate::state::{Caller, Counters, Gauges, GetStart, TenantStat};

/// A view of a running master, in its process. Cheap to clone; it does not keep the master running.
#[derive(Clone, Debug)]
pub struct Monitor {
    pub(crate) core: Arc<Core>,
}

/// How a master is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// It takes requests; false once it shuts down.
    pub serving: bool,
    /// Its numbers.
    pub status: Status,
}

impl Monitor {
    /// How the master is. Looks at all of it; [`serving`](Self::serving) alone costs nothing.
    pub fn health(&self) -> Health {
        Health {
            serving: self.serving(),
            status: self.status(),
        }
    }

    /// It takes requests; false once it shuts down.
    pub fn serving(&self) -> bool {
        !self.core.closing.is_cancelled()
    }

    /// Its numbers.
    pub fn status(&self) -> Status {
        self.core.state.status(self.core.now(), self.core.term)
    }

    /// What there is at the moment.
    pub fn gauges(&self) -> Gauges {
        self.core.state.gauges()
    }

    /// What happened since the start.
    pub fn counters(&self) -> Counters {
        self.core.state.counters()
    }

    /// The calls that were answered since the start.
    pub fn calls(&self) -> Calls {
        self.core.metrics.calls.snapshot()
    }

    /// Length of a lease.
    pub fn lease(&self) -> Duration {
        self.core.state.terms().lease
    }

    /// The segments with the payload bytes of the objects and reservations in each, each replica counted. What
    /// readers or late writers hold back without a name doesn't count.
    pub fn payloads(&self) -> Vec<(Arc<Segment>, u64)> {
        self.core.state.payloads()
    }

    /// Whether a member is connected at the moment. One that is not may be about to come back; it is gone
    /// only after its time to live.
    pub fn is_connected(&self, member: ClientId) -> bool {
        self.core.links.is_attached(member)
    }

    /// One segment, as clients address it.
    pub fn segment(&self, id: SegmentId) -> Option<Arc<Segment>> {
        self.core.state.segment(id)
    }

    /// Whether all tenants' keys lie in one key space.
    pub fn shares_tenants(&self) -> bool {
        self.core.state.shares_tenants()
    }

    /// The tenants with a quota, by name; `None`: quotas don't rule.
    pub fn tenants(&self) -> Option<Vec<TenantStat>> {
        self.core.state.tenants()
    }

    /// Gives a tenant a quota in bytes, or another one; see [`State::set_quota`](crate::state::State::set_quota).
    pub fn set_quota(&self, tenant: &Tenant, bytes: u64) -> Result<(), Refusal> {
        self.core.state.set_quota(tenant, bytes)
    }

    /// Takes a tenant's quota; see [`State::remove_quota`](crate::state::State::remove_quota).
    pub fn remove_quota(&self, tenant: &Tenant) -> Result<(), Refusal> {
        self.core.state.remove_quota(tenant)
    }

    /// Its segments and how full they are.
    pub fn segments(&self) -> Vec<SegmentStat> {
        self.core.state.segments(self.core.now())
    }

    /// The keys of all complete objects, of one tenant or of all, in no order. A look at the whole table:
    /// it runs on a thread for blocking work. Empty once the master shuts down.
    pub async fn keys(&self, tenant: Option<&Tenant>) -> Vec<ObjectKey> {
        let core = Arc::clone(&self.core);
        let tenant = tenant.cloned();
        let scan = self
            .core
            .work
            .spawn_blocking(move || core.state.keys(tenant.as_ref()));
        scan.await.unwrap_or_default()
    }

    /// Looks objects up as a reader does: it grants leases and refreshes recency.
    pub fn query(&self, tenant: &Tenant, keys: &[ObjectKey]) -> Vec<Result<GetStarted, Refusal>> {
        let query = GetStart {
            keys,
            recency: Recency::default(),
            session: false,
            unreachable: &[],
        };
        let caller = caller(tenant);
        let (found, _) = self.core.state.get_start(self.core.now(), &caller, &query);
        self.core.dispatch();
        found
    }

    /// Removes a tenant's complete objects, leased ones only with `force`, and returns how many. Runs on a
    /// thread for blocking work; 0 once the master shuts down.
    pub async fn remove_all(&self, tenant: &Tenant, force: bool) -> u64 {
        let core = Arc::clone(&self.core);
        let tenant = tenant.clone();
        let removal = self.core.work.spawn_blocking(move || {
            let removed = core
                .state
                .remove_matching(core.now(), &tenant, &|_| true, force);
            core.dispatch();
            removed
        });
        removal.await.unwrap_or(0)
    }
}

/// Nobody who has joined.
fn caller(tenant: &Tenant) -> Caller {
    Caller {
        client: ClientId(0),
        tenant: tenant.clone(),
        location: None,
    }
}
