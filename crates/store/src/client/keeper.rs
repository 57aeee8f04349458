//! The task that keeps leases: renews them in time, and gives back those of sessions that have ended.
//!
//! While sessions come and go it looks every [`SOON`]: then neither the start nor the end of a session has to
//! wake a thread, which would cost its caller more than the rest of an end. When nothing of that kind has happened
//! for a while ([`LINGERS`]) it looks for renewals only, and without open sessions not at all, until it is woken.
//!
//! One renewal call covers all leases that are due. A call that hangs holds up its own leases only, and no longer
//! than a third of a lease: others that become due go in calls of their own. A renewal that fails because the
//! master can't be reached is tried again until the lease is over.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::replica::ObjectRef;
use tokio::task::JoinSet;

use super::core::{Core, now};
use super::leases::Rest;
use crate::error::StoreError;
use crate::session::lease::{Grant, Lease};

/// Leases are given back no later than this after their last session has ended.
const SOON: Duration = Duration::from_millis(20);

/// How long the keeper goes on looking that often.
const LINGERS: Duration = Duration::from_secs(1);

/// Bounds of the pause between two looks at what is to be renewed.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The task. Runs until it is dropped.
pub(super) fn keep_task(core: Arc<Core>) -> impl Future<Output = ()> {
    // From here on, since a task may be dropped before it has begun.
    let keeper = Keeper(core);
    async move { keeper.run().await }
}

/// The keeper while it is there.
struct Keeper(Arc<Core>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.leases.close();
    }
}

impl Keeper {
    async fn run(&self) {
        let leases = &self.0.leases;
        let (mut gives, mut renewals) = (JoinSet::new(), JoinSet::new());
        let mut stirred_at = now();
        let mut look_at = now();
        loop {
            while gives.try_join_next().is_some() {}
            while renewals.try_join_next().is_some() {}
            let ended = leases.has_ended();
            if ended && gives.is_empty() {
                let core = Arc::clone(&self.0);
                gives.spawn(async move { core.leases.give_back(&core).await });
            }
            let lingers = ended || now() < stirred_at + LINGERS;
            let (rest, stirred) = leases.begin_rest(lingers);
            if stirred {
                stirred_at = now();
            }
            self.rest(rest).await;
            if now() >= look_at {
                self.renew(&mut renewals);
                look_at = now() + self.pause();
            }
        }
    }

    async fn rest(&self, rest: Rest) {
        let woken = self.0.leases.roused();
        match rest {
            Rest::Brief => tokio::time::sleep(SOON.min(self.pause())).await,
            // The time is over, or it was woken: both are reasons to look.
            Rest::Long => drop(tokio::time::timeout(self.pause(), woken).await),
            Rest::Silent => woken.await,
        }
    }

    /// The pause between two looks at what is to be renewed.
    fn pause(&self) -> Duration {
        (self.0.leases.lease() / 12).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }

    fn renew(&self, renewals: &mut JoinSet<()>) {
        let due = self.0.leases.due(&self.0);
        if !due.is_empty() {
            renewals.spawn(renew(Arc::clone(&self.0), due));
        }
    }
}

/// Renews leases in one call.
async fn renew(core: Arc<Core>, due: Vec<Arc<Lease>>) {
    let sent = now();
    let objects: Vec<ObjectRef> = due.iter().map(|lease| lease.object().clone()).collect();
    let within = (core.leases.lease() / 3).max(SHORTEST_PAUSE);
    let answer = tokio::time::timeout(within, core.link.renew(&objects)).await;
    let answer = answer.unwrap_or(Err(StoreError::Timeout {
        what: "a renewal",
        after: within,
    }));
    match answer {
        Ok(renewed) => {
            let grant = Grant {
                sent,
                lease: renewed.lease,
            };
            for (lease, result) in due.iter().zip(renewed.results) {
                settle(&core, lease, grant, result.map_err(StoreError::from));
            }
        }
        Err(error) => tracing::debug!(%error, count = due.len(), "leases could not be renewed"),
    }
    for lease in &due {
        lease.end_renewal();
    }
}

fn settle(core: &Core, lease: &Lease, grant: Grant, result: Result<(), StoreError>) {
    match result {
        Ok(()) => {
            core.counters.leases_renewed.one();
            lease.renewed(grant);
        }
        Err(error) if error.is_retryable() => {}
        Err(_) => {
            core.counters.leases_lost.one();
            lease.lapse();
        }
    }
}
