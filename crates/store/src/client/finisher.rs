//! Ends what owners let go of: put sessions that were dropped, or whose end got no answer.
//!
//! A dropped session waits here, sealed and idle, until the master has answered: it is revoked, or, if
//! its header was written and the commit may have been applied, its end is repeated. One call
//! covers all that wait. A start of a key finishes first what is left of an earlier session on it
//! (requirement R5): what waits here, and what is sealed and may be ended again. What the
//! master did not answer for within [`GIVE_UP_AFTER`] is left to its time-outs.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::Core;
use super::now;
use crate::session::put_state::Phase;
use crate::session::{Intent, PutShared};

/// How long a session waits for the master.
const GIVE_UP_AFTER: Duration = Duration::from_mins(10);

/// Pause before the master is asked again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Sessions that wait for their end.
#[derive(Debug, Default)]
pub(crate) struct Finisher {
    queue: Mutex<Vec<Waiting>>,
    /// Sealed sessions that don't wait yet.
    sealed: Mutex<Vec<Weak<PutShared>>>,
    wake: Notify,
    /// One flush at a time, so that none asks for what another is asking for.
    flushing: tokio::sync::Mutex<()>,
}

#[derive(Clone, Debug)]
struct Waiting {
    put: Arc<PutShared>,
    since: Instant,
}

impl Finisher {
    /// Takes over a session that is sealed and idle.
    pub(crate) fn settle_later(&self, put: Arc<PutShared>) {
        self.queue.lock().push(Waiting { put, since: now() });
        self.wake.notify_one();
    }

    /// Remembers a session that is sealed, but that nobody has settled yet: its owner may try again, or its
    /// last transfer is still to end.
    pub(crate) fn left_sealed(&self, put: &Arc<PutShared>) {
        if put.phase() != Phase::Sealed {
            return;
        }
        let mut sealed = self.sealed.lock();
        if sealed.len() == sealed.capacity() {
            sealed.retain(|put| {
                put.upgrade()
                    .is_some_and(|put| put.phase() == Phase::Sealed)
            });
        }
        sealed.push(Arc::downgrade(put));
    }

    /// Finishes what is left of earlier sessions on `keys`. Those that are still held by their owner are
    /// taken from it; what moves is waited for as long as an end would.
    pub(crate) async fn make_way<'a>(
        &self,
        core: &Core,
        keys: impl Iterator<Item = &'a ObjectKey>,
    ) {
        if self.queue.lock().is_empty() && self.sealed.lock().is_empty() {
            return;
        }
        let keys: HashSet<&ObjectKey> = keys.collect();
        let in_the_way = |put: &PutShared| keys.contains(&put.object.key);
        let sealed: Vec<Arc<PutShared>> = {
            let sealed = self.sealed.lock();
            let sealed = sealed.iter().filter_map(Weak::upgrade);
            sealed
                .filter(|put| put.phase() == Phase::Sealed && in_the_way(put))
                .collect()
        };
        for put in &sealed {
            put.abandon();
        }
        let drain = core.config.drain;
        let deadline = tokio::time::Instant::now() + drain;
        for put in sealed {
            if put.idle_until(deadline, drain).await.is_ok() {
                self.settle_later(put);
            }
        }
        let waits = self.queue.lock().iter().any(|w| in_the_way(&w.put));
        if waits {
            self.flush(core).await;
        }
    }

    /// Asks the master about everything that waits. `true` if nothing is left.
    pub(crate) async fn flush(&self, core: &Core) -> bool {
        let _one = self.flushing.lock().await;
        let waiting = self.queue.lock().clone();
        let (ends, revokes): (Vec<_>, Vec<_>) = waiting
            .into_iter()
            .partition(|waiting| waiting.put.intent() == Intent::End);
        tokio::join!(
            self.settle(core, Intent::End, ends),
            self.settle(core, Intent::Revoke, revokes),
        );
        self.queue.lock().is_empty()
    }

    async fn settle(&self, core: &Core, intent: Intent, batch: Vec<Waiting>) {
        if batch.is_empty() {
            return;
        }
        let objects: Vec<ObjectRef> = batch.iter().map(|w| w.put.object.clone()).collect();
        let answer = match intent {
            Intent::End => core.link.put_end(&objects).await,
            Intent::Revoke => core.link.put_revoke(&objects).await,
        };
        let phases: Vec<Option<Phase>> = match answer {
            Ok(results) => results
                .iter()
                .map(|result| phase_after(intent, result))
                .collect(),
            Err(error) => {
                tracing::debug!(%error, count = batch.len(), "sessions wait for the master");
                vec![None; batch.len()]
            }
        };
        let now = now();
        let mut done = HashSet::with_capacity(batch.len());
        for (waiting, phase) in batch.into_iter().zip(phases) {
            let too_old = now.saturating_duration_since(waiting.since) >= GIVE_UP_AFTER;
            if let Some(phase) = phase.or(too_old.then_some(Phase::Revoked)) {
                core.settled(&waiting.put, phase);
                done.insert(waiting.put.object.generation);
            }
        }
        self.queue
            .lock()
            .retain(|waiting| !done.contains(&waiting.put.object.generation));
    }
}

/// What the master's answer makes of a session; `None`: ask again.
pub(super) fn phase_after(intent: Intent, result: &Result<(), Refusal>) -> Option<Phase> {
    match (result, intent) {
        (Ok(()), Intent::End) => Some(Phase::Committed),
        (Err(Refusal::Superseded), _) => Some(Phase::Superseded),
        (Err(Refusal::ShuttingDown | Refusal::WrongTerm), _) => None,
        // Given back, or unknown to the master by now.
        (Ok(()) | Err(_), _) => Some(Phase::Revoked),
    }
}

/// The task that flushes. Runs until it is dropped.
pub(super) async fn finish_task(core: Arc<Core>) {
    loop {
        core.finisher.wake.notified().await;
        while !core.finisher.flush(&core).await {
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }
}
