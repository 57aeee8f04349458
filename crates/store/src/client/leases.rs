//! Keeps the leases of open get sessions: renews them in time and gives them back in batches.
//!
//! The rules are [`LeaseTable`]'s; here are its lock and the two tasks that talk to the master. One
//! renewal call covers all sessions that are due, and one give-back call all that have ended since
//! the last. A call that hangs holds up its own leases only, and no longer than a third of a lease:
//! others that become due go in calls of their own. A renewal that fails because the master can't be reached is tried again until the lease is
//! over; a give-back is not repeated, since the lease runs out by itself.
//!
//! Sessions that are ended without waiting are handed to the giver as they are: taking them apart costs more than
//! most callers have to do, and it is due before the next give-back, removal or renewal only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::core::Core;
use super::now;
use crate::error::StoreError;
use crate::session::lease::{Grant, Lease, LeaseTable};
use crate::session::{GetSession, LeaseHold};

/// Bounds of the pause between two looks at what is due.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long a start waits for earlier leases of its keys to be given back.
const GIVE_BACK_PATIENCE: Duration = Duration::from_secs(30);

/// The leases of one client.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    inner: Mutex<Inner>,
    /// The length of the last lease granted, in milliseconds: how often to look what is due.
    lease_ms: AtomicU64,
    /// Wakes the renewer: the first session was started.
    started: Notify,
    /// Wakes the giver.
    ended: Notify,
    /// Wakes starts that wait for a give-back.
    gave: Notify,
    /// One give-back at a time, so that whoever returns from one has also waited for what others give.
    giving: tokio::sync::Mutex<()>,
    handed_over: Mutex<HandedOver>,
}

/// Sessions that were ended and still have their shares in leases.
#[derive(Debug, Default)]
struct HandedOver {
    sessions: Vec<GetSession>,
    /// The giver has ended: nobody comes to look.
    closed: bool,
}

#[derive(Debug, Default)]
struct Inner {
    table: LeaseTable,
    gives: Vec<ObjectRef>,
}

/// Announced starts that have no answer yet. Dropping it ends those without a grant.
#[derive(Debug)]
pub(crate) struct Starting<'a> {
    core: &'a Arc<Core>,
    keys: &'a [ObjectKey],
    answered: usize,
}

/// Give-backs under way.
struct Giving<'a> {
    leases: &'a Leases,
    objects: Vec<ObjectRef>,
}

impl Leases {
    /// Announces starts of `keys` and waits until none of them is being given back.
    pub(crate) async fn start<'a>(
        core: &'a Arc<Core>,
        keys: &'a [ObjectKey],
    ) -> Result<Starting<'a>, StoreError> {
        let starting = Starting {
            core,
            keys,
            answered: 0,
        };
        let leases = &core.leases;
        {
            let mut inner = leases.inner.lock();
            for key in keys {
                inner.table.begin_start(key);
            }
        }
        let deadline = tokio::time::Instant::now() + GIVE_BACK_PATIENCE;
        loop {
            let gave = leases.gave.notified();
            tokio::pin!(gave);
            gave.as_mut().enable();
            let ready = {
                let inner = leases.inner.lock();
                keys.iter().all(|key| inner.table.may_start(key))
            };
            if ready {
                return Ok(starting);
            }
            let given = async {
                // The task that does it may have other work, or have ended with the client.
                leases.give_back(core).await;
                gave.await;
            };
            if tokio::time::timeout_at(deadline, given).await.is_err() {
                return Err(StoreError::Timeout {
                    what: "giving an earlier lease back",
                    after: GIVE_BACK_PATIENCE,
                });
            }
        }
    }

    /// Ends sessions' shares in leases. What they held the last share of is given back soon.
    pub(crate) fn end<'a>(&self, leases: impl IntoIterator<Item = &'a Arc<Lease>>) {
        let give = {
            let mut inner = self.inner.lock();
            let Inner { table, gives } = &mut *inner;
            for lease in leases {
                table.end(lease, gives);
            }
            !gives.is_empty()
        };
        if give {
            self.ended.notify_one();
        }
    }

    /// Ends sessions soon, at the latest before anything is given back.
    pub(crate) fn end_soon(&self, mut sessions: Vec<GetSession>) {
        {
            let mut handed_over = self.handed_over.lock();
            if !handed_over.closed {
                if handed_over.sessions.is_empty() {
                    std::mem::swap(&mut handed_over.sessions, &mut sessions);
                } else {
                    handed_over.sessions.append(&mut sessions);
                }
            }
        }
        if sessions.is_empty() {
            self.ended.notify_one();
        } else {
            GetSession::end_all(sessions);
        }
    }

    /// Ends what was handed over.
    fn end_handed_over(&self) {
        let sessions = std::mem::take(&mut self.handed_over.lock().sessions);
        GetSession::end_all(sessions);
    }

    pub(crate) fn sessions(&self) -> u64 {
        self.end_handed_over();
        self.inner.lock().table.sessions()
    }

    /// Gives back what has ended, in one call. What is being given back already is waited for: when this
    /// returns, no lease of a session that has ended stands in the way of another call.
    pub(crate) async fn give_back(&self, core: &Core) {
        let _one = self.giving.lock().await;
        self.end_handed_over();
        let objects = std::mem::take(&mut self.inner.lock().gives);
        if objects.is_empty() {
            return;
        }
        let giving = Giving {
            leases: self,
            objects,
        };
        match core.link.get_end(&giving.objects).await {
            Ok(()) => core
                .counters
                .leases_returned
                .add(giving.objects.len() as u64),
            Err(error) => tracing::debug!(%error, count = giving.objects.len(), "leases run out"),
        }
    }

    /// Ends announced starts, each with the version that was granted, if any.
    fn finish_starts<'a>(
        &self,
        starts: impl Iterator<Item = (&'a ObjectKey, Option<Generation>)>,
        grant: Grant,
        mut each: impl FnMut(Option<Arc<Lease>>),
    ) {
        let now = now();
        let give = {
            let mut inner = self.inner.lock();
            let Inner { table, gives } = &mut *inner;
            for (key, granted) in starts {
                let granted = granted.map(|generation| (generation, grant));
                each(table.finish_start(key, granted, now, gives));
            }
            !gives.is_empty()
        };
        if give {
            self.ended.notify_one();
        }
    }

    fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Ordering::Relaxed))
    }

    fn pause(&self) -> Duration {
        (self.lease() / 12).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }
}

impl Starting<'_> {
    /// The keys' answers, in order: of each the version that was granted. Gives the sessions' shares in the
    /// leases.
    pub(crate) fn answer(
        mut self,
        grant: Grant,
        granted: impl Iterator<Item = Option<Generation>>,
    ) -> Vec<Option<LeaseHold>> {
        let leases = &self.core.leases;
        let mut holds = Vec::with_capacity(self.keys.len());
        let starts = self.keys.iter().zip(granted);
        leases.finish_starts(starts, grant, |lease| {
            holds.push(lease.map(|lease| LeaseHold::new(lease, Arc::clone(self.core))));
        });
        self.answered = holds.len();
        if holds.iter().any(Option::is_some) {
            let ms = u64::try_from(grant.lease.as_millis()).unwrap_or(u64::MAX);
            leases.lease_ms.store(ms, Ordering::Relaxed);
            leases.started.notify_one();
        }
        holds
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let left = self.keys[self.answered..].iter().map(|key| (key, None));
        let none = Grant {
            sent: now(),
            lease: Duration::ZERO,
        };
        self.core.leases.finish_starts(left, none, drop);
    }
}

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        {
            let mut inner = self.leases.inner.lock();
            self.objects
                .iter()
                .for_each(|object| inner.table.gave(object));
        }
        self.leases.gave.notify_waiters();
    }
}

/// The task that renews. Runs until it is dropped.
pub(super) async fn renew_task(core: Arc<Core>) {
    let mut calls = JoinSet::new();
    loop {
        if core.leases.sessions() == 0 {
            core.leases.started.notified().await;
        }
        tokio::time::sleep(core.leases.pause()).await;
        while calls.try_join_next().is_some() {}
        let due = {
            let inner = core.leases.inner.lock();
            inner.table.due(now(), core.config.session_idle)
        };
        if !due.is_empty() {
            calls.spawn(renew(Arc::clone(&core), due));
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

/// The task that gives back. Runs until it is dropped.
pub(super) fn give_task(core: Arc<Core>) -> impl Future<Output = ()> {
    // From here on, since a task may be dropped before it has begun.
    let giver = Giver(core);
    async move {
        let core = &giver.0;
        loop {
            core.leases.ended.notified().await;
            core.leases.give_back(core).await;
        }
    }
}

/// The giver while it is there. What is handed over holds the client that would keep it: without a giver nothing
/// is.
struct Giver(Arc<Core>);

impl Drop for Giver {
    fn drop(&mut self) {
        self.0.leases.handed_over.lock().closed = true;
        self.0.leases.end_handed_over();
    }
}
