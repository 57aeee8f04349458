//! The leases of one client's get sessions, and when they are renewed and given back.
//!
//! Pure: time is passed in. A [`Lease`] stands for one version of one object and is shared by all
//! sessions on it; the master knows one reader per client and version, however many sessions that
//! client has. So the table counts: a lease is given back when its last session ends (contract
//! lease-3). Two things could take it away under a session's feet, and are excluded here:
//! - a start that is under way when the last session ends counts as a session: nothing is given back;
//! - a start waits while a give-back of its key is under way, so that the master sees them in order.
//!
//! Expiry is counted from the moment at which the request was sent, so a lease ends here no later
//! than at the master. A lease that was found to be over stays over, for its sessions.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;
use smallvec::SmallVec;

/// The lease on one version of an object.
#[derive(Debug)]
pub(crate) struct Lease {
    object: ObjectRef,
    term: Mutex<Term>,
    /// It runs out by itself when its last session has ended.
    kept: AtomicBool,
}

/// The lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over;

#[derive(Debug)]
struct Term {
    until: Instant,
    renew_at: Instant,
    used: Instant,
    reading: u32,
    over: bool,
    /// A renewal is under way.
    renewing: bool,
}

impl Lease {
    fn new(object: ObjectRef, grant: Grant, now: Instant) -> Self {
        let term = Term {
            until: grant.until(),
            renew_at: grant.renew_at(),
            used: now,
            reading: 0,
            over: false,
            renewing: false,
        };
        Self {
            object,
            term: Mutex::new(term),
            kept: AtomicBool::new(false),
        }
    }

    pub(crate) fn object(&self) -> &ObjectRef {
        &self.object
    }

    /// Leaves the lease to run out instead of giving it back.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Starts a read under the lease.
    pub(crate) fn begin_read(&self, now: Instant) -> Result<(), Over> {
        let mut term = self.term.lock();
        term.check(now)?;
        term.reading += 1;
        term.used = now;
        Ok(())
    }

    /// Ends a read. An error if the lease ended before it did: what was read is not to be used.
    pub(crate) fn end_read(&self, now: Instant) -> Result<(), Over> {
        let mut term = self.term.lock();
        term.reading = term.reading.saturating_sub(1);
        term.used = now;
        term.check(now)
    }

    /// Begins a renewal if it is time to: none is under way, the lease is not over, and its sessions used
    /// it less than `idle` ago.
    fn begin_renewal(&self, now: Instant, idle: Duration) -> bool {
        let mut term = self.term.lock();
        let in_use = term.reading > 0 || now.saturating_duration_since(term.used) < idle;
        let due = !term.over && !term.renewing && in_use && now >= term.renew_at;
        term.renewing |= due;
        due
    }

    /// A renewal is over, however it went.
    pub(crate) fn end_renewal(&self) {
        self.term.lock().renewing = false;
    }

    /// The master granted or renewed it.
    pub(crate) fn renewed(&self, grant: Grant) {
        let mut term = self.term.lock();
        term.until = term.until.max(grant.until());
        term.renew_at = term.renew_at.max(grant.renew_at());
    }

    /// The master says that it is over.
    pub(crate) fn lapse(&self) {
        self.term.lock().over = true;
    }

    fn is_over(&self, now: Instant) -> bool {
        self.term.lock().check(now).is_err()
    }
}

impl Term {
    fn check(&mut self, now: Instant) -> Result<(), Over> {
        self.over |= now >= self.until;
        if self.over { Err(Over) } else { Ok(()) }
    }
}

/// What the master granted, and when it was asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) sent: Instant,
    pub(crate) lease: Duration,
}

impl Grant {
    fn until(self) -> Instant {
        self.sent + self.lease
    }

    /// Early enough for two more tries.
    fn renew_at(self) -> Instant {
        self.sent + self.lease / 3
    }
}

#[derive(Debug, Default)]
struct Entry {
    /// Starts under way.
    starting: u32,
    /// Give-backs under way.
    giving: u32,
    /// Versions that are held: seldom more than one.
    held: SmallVec<[Held; 1]>,
}

#[derive(Debug)]
struct Held {
    lease: Arc<Lease>,
    sessions: u32,
}

/// All leases of a client. Methods that end something add what is to be given back to `gives`; each
/// such object must come back through [`LeaseTable::gave`], whatever the master answered.
#[derive(Debug, Default)]
pub(crate) struct LeaseTable {
    keys: HashMap<ObjectKey, Entry>,
}

impl LeaseTable {
    /// Announces a start, and tells whether it [may be sent](Self::may_start). The caller sends it when it may, and
    /// then calls [`finish_start`](Self::finish_start), once for each announcement.
    pub(crate) fn begin_start(&mut self, key: &ObjectKey) -> bool {
        let entry = self.keys.entry(key.clone()).or_default();
        entry.starting += 1;
        entry.giving == 0
    }

    /// Whether no give-back of the key is under way.
    pub(crate) fn may_start(&self, key: &ObjectKey) -> bool {
        self.keys.get(key).is_none_or(|entry| entry.giving == 0)
    }

    /// Ends a start; with a grant, a session begins.
    pub(crate) fn finish_start(
        &mut self,
        key: &ObjectKey,
        granted: Option<(Generation, Grant)>,
        now: Instant,
        gives: &mut Vec<ObjectRef>,
    ) -> Option<Arc<Lease>> {
        let entry = self.keys.get_mut(key)?;
        entry.starting = entry.starting.saturating_sub(1);
        let lease = granted.map(|(generation, grant)| entry.hold(key, generation, grant, now));
        if entry.tidy(gives) {
            self.keys.remove(key);
        }
        lease
    }

    /// Ends one session on the lease.
    pub(crate) fn end(&mut self, lease: &Arc<Lease>, gives: &mut Vec<ObjectRef>) {
        let key = &lease.object.key;
        let Some(entry) = self.keys.get_mut(key) else {
            return;
        };
        // A lease that was over may have been replaced by a newer one, which others hold.
        if let Some(held) = entry
            .held
            .iter_mut()
            .find(|held| Arc::ptr_eq(&held.lease, lease))
        {
            held.sessions = held.sessions.saturating_sub(1);
        }
        if entry.tidy(gives) {
            self.keys.remove(key);
        }
    }

    /// A give-back is done, or failed for good: then the lease runs out at the master.
    pub(crate) fn gave(&mut self, object: &ObjectRef) {
        if let Some(entry) = self.keys.get_mut(&object.key) {
            entry.giving = entry.giving.saturating_sub(1);
            if entry.tidy(&mut Vec::new()) {
                self.keys.remove(&object.key);
            }
        }
    }

    /// The leases that are to be renewed now: for each a renewal begins, which the caller must end.
    pub(crate) fn due(&self, now: Instant, idle: Duration) -> Vec<Arc<Lease>> {
        let held = self.keys.values().flat_map(|entry| &entry.held);
        held.filter(|held| held.lease.begin_renewal(now, idle))
            .map(|held| Arc::clone(&held.lease))
            .collect()
    }

    /// Whether nothing is started, held or given back.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The number of sessions.
    pub(crate) fn sessions(&self) -> u64 {
        let held = self.keys.values().flat_map(|entry| &entry.held);
        held.map(|held| u64::from(held.sessions)).sum()
    }
}

impl Entry {
    /// Gives back what no session holds. `true`: nothing is left of the entry.
    fn tidy(&mut self, gives: &mut Vec<ObjectRef>) -> bool {
        if self.starting > 0 {
            return false;
        }
        let giving = &mut self.giving;
        self.held.retain(|held| {
            if held.sessions == 0 && !held.lease.kept.load(Ordering::Relaxed) {
                gives.push(held.lease.object.clone());
                *giving += 1;
            }
            held.sessions > 0
        });
        self.held.is_empty() && self.giving == 0
    }

    fn hold(
        &mut self,
        key: &ObjectKey,
        generation: Generation,
        grant: Grant,
        now: Instant,
    ) -> Arc<Lease> {
        let known = self
            .held
            .iter_mut()
            .find(|held| held.lease.object.generation == generation);
        match known {
            Some(held) if !held.lease.is_over(now) => {
                held.lease.renewed(grant);
                held.sessions += 1;
                Arc::clone(&held.lease)
            }
            known => {
                let object = ObjectRef {
                    key: key.clone(),
                    generation,
                };
                let lease = Arc::new(Lease::new(object, grant, now));
                let held = Held {
                    lease: Arc::clone(&lease),
                    sessions: 1,
                };
                match known {
                    Some(over) => *over = held,
                    None => self.held.push(held),
                }
                lease
            }
        }
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
