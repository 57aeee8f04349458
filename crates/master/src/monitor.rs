//! A running master as its own process sees it: for health checks, consoles and administration.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GetStarted, Recency};
use layercake_protocol::report::{SegmentStat, Status};

use crate::service::Core;
use crate::state::{Caller, Counters, Gauges, GetStart};

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
