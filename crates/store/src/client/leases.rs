//! The leases of open get sessions: their table's lock, and giving them back in batches.
//!
//! The rules are [`LeaseTable`]'s. One give-back call covers all leases whose last session has ended since the one
//! before; it is not repeated, since a lease runs out by itself. Before a call that such a lease could be in the
//! way of, it is made at once, by that call; else by the keeper ([`keeper`](super::keeper)), which also renews.
//!
//! Sessions that are ended without waiting are handed to the keeper as they are: taking them apart costs more than
//! most callers have to do, and it is due before the next give-back, removal or renewal only. A keeper that is
//! about to look anyway is not woken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::Core;
use super::now;
use crate::error::StoreError;
use crate::session::lease::{Grant, Lease, LeaseTable};
use crate::session::{GetSession, LeaseHold};

/// How long a start waits for earlier leases of its keys to be given back.
const GIVE_BACK_PATIENCE: Duration = Duration::from_secs(30);

/// The leases of one client.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    inner: Mutex<Inner>,
    /// The length of the last lease granted, in milliseconds: how often to look what is due.
    lease_ms: AtomicU64,
    /// Wakes the keeper.
    rouse: Notify,
    /// Wakes starts that wait for a give-back.
    gave: Notify,
    /// One give-back at a time, so that whoever returns from one has also waited for what others give.
    giving: tokio::sync::Mutex<()>,
    handed_over: Mutex<HandedOver>,
}

/// What is left to the keeper, and what it knows.
#[derive(Debug, Default)]
struct HandedOver {
    /// Sessions that were ended and still have their shares in leases.
    sessions: Vec<GetSession>,
    /// The keeper looks again soon by itself.
    awake: bool,
    /// A session was started or ended since it looked.
    stirred: bool,
    /// It has ended: nobody comes to look.
    closed: bool,
}

/// How long the keeper may rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// It must look soon: nobody wakes it.
    Brief,
    /// Until a lease may have to be renewed, or it is woken.
    Long,
    /// Until it is woken.
    Silent,
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
        let ready = {
            let mut inner = leases.inner.lock();
            let mut ready = true;
            for key in keys {
                ready &= inner.table.begin_start(key);
            }
            ready
        };
        if ready {
            return Ok(starting);
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
            self.stir(|_| {});
        }
    }

    /// Ends sessions soon, at the latest before anything is given back.
    pub(crate) fn end_soon(&self, mut sessions: Vec<GetSession>) {
        self.stir(|handed_over| match handed_over {
            HandedOver { closed: true, .. } => {}
            HandedOver {
                sessions: before, ..
            } if before.is_empty() => {
                std::mem::swap(before, &mut sessions);
            }
            HandedOver {
                sessions: before, ..
            } => before.append(&mut sessions),
        });
        GetSession::end_all(sessions);
    }

    /// Notes that something was started or ended, and wakes the keeper if it would not look soon.
    fn stir(&self, note: impl FnOnce(&mut HandedOver)) {
        let wake = {
            let mut handed_over = self.handed_over.lock();
            note(&mut handed_over);
            handed_over.stirred = true;
            !std::mem::replace(&mut handed_over.awake, true)
        };
        if wake {
            self.rouse.notify_one();
        }
    }

    /// How the keeper may rest now. Unless something was started or ended since the last time it keeps awake only
    /// if it `lingers`. Tells also whether that was so.
    pub(super) fn begin_rest(&self, lingers: bool) -> (Rest, bool) {
        let open = !self.inner.lock().table.is_empty();
        let mut handed_over = self.handed_over.lock();
        let stirred = std::mem::take(&mut handed_over.stirred);
        handed_over.awake = stirred || lingers;
        let rest = if handed_over.awake {
            Rest::Brief
        } else if open {
            Rest::Long
        } else {
            Rest::Silent
        };
        (rest, stirred)
    }

    /// Waits until the keeper is needed sooner than it knows.
    pub(super) async fn roused(&self) {
        self.rouse.notified().await;
    }

    /// Nobody comes to look from here on. What is handed over holds the client that would keep it, so nothing
    /// is any more.
    pub(super) fn close(&self) {
        self.handed_over.lock().closed = true;
        self.end_handed_over();
    }

    /// Whether leases of ended sessions are still to be given back.
    pub(super) fn has_ended(&self) -> bool {
        !self.handed_over.lock().sessions.is_empty() || !self.inner.lock().gives.is_empty()
    }

    /// Makes a request that leases of ended sessions could be in the way of: they are given back ahead of it.
    pub(super) async fn ahead_of<T>(&self, core: &Core, request: impl Future<Output = T>) -> T {
        if self.has_ended() {
            // Sent in this order, and nobody waits for two answers one after the other.
            tokio::join!(biased; self.give_back(core), request).1
        } else {
            request.await
        }
    }

    /// The leases that are to be renewed now; each renewal must be ended.
    pub(super) fn due(&self, core: &Core) -> Vec<Arc<Lease>> {
        self.end_handed_over();
        let inner = self.inner.lock();
        inner.table.due(now(), core.config.session_idle)
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
            self.stir(|_| {});
        }
    }

    /// The length of the last lease granted.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.load(Ordering::Relaxed))
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
            leases.stir(|_| {});
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;

    /// Whether the keeper was woken since the last time.
    async fn was_roused(leases: &Leases) -> bool {
        let mut roused = Box::pin(leases.roused());
        poll_fn(|cx| Poll::Ready(roused.as_mut().poll(cx).is_ready())).await
    }

    #[tokio::test]
    async fn a_keeper_that_looks_soon_is_not_woken_and_one_that_rests_is() {
        let leases = Leases::default();
        assert_eq!(leases.begin_rest(false), (Rest::Silent, false));
        leases.end_soon(Vec::new());
        assert!(was_roused(&leases).await, "it rested");
        leases.end_soon(Vec::new());
        assert!(!was_roused(&leases).await, "it looks by itself now");
        assert_eq!(leases.begin_rest(false), (Rest::Brief, true));
        leases.end_soon(Vec::new());
        assert!(!was_roused(&leases).await, "it looks soon");
        assert_eq!(leases.begin_rest(false), (Rest::Brief, true));
        assert_eq!(leases.begin_rest(true), (Rest::Brief, false), "it lingers");
        assert_eq!(leases.begin_rest(false), (Rest::Silent, false));
    }

    #[tokio::test]
    async fn a_keeper_rests_no_longer_than_leases_that_are_held_allow() {
        let leases = Leases::default();
        let key = ObjectKey::new("k").expect("valid");
        leases.inner.lock().table.begin_start(&key);
        assert_eq!(leases.begin_rest(true), (Rest::Brief, false));
        assert_eq!(leases.begin_rest(false), (Rest::Long, false));
        leases.end_soon(Vec::new());
        assert!(was_roused(&leases).await);
    }
}
