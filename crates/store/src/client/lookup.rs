//! Questions about keys, and their removal.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GetStarted, ObjectRef, Presence, Recency, Replica, Segment};

use super::StoreClient;
use crate::error::StoreError;
use crate::link::{Existence, Exists, ObjectDetail, StartOptions};

/// The longest stored prefix of a list of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Blocks from the start that can all be read.
    pub blocks: usize,
    /// The request's epoch: pass it on to the starts that follow.
    pub epoch: Epoch,
    /// Keys that the master was asked for; at most `blocks` plus one window.
    pub keys_queried: u64,
}

/// Where an object lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its size in bytes.
    pub size: u64,
    /// Its replicas that are in reach, as far as is known, and the segment of each.
    pub replicas: Vec<(Replica, Arc<Segment>)>,
}

impl StoreClient {
    /// Which objects are there. Grants each a probe's lease. Segments that this client found out of reach
    /// don't count.
    pub async fn exists(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
    ) -> Vec<Result<bool, StoreError>> {
        let readable = !self.core().suspects.is_empty();
        self.probe(keys, recency, readable).await
    }

    /// Which objects are there and have a replica on a live segment. Grants each a probe's lease.
    pub async fn readable(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
    ) -> Vec<Result<bool, StoreError>> {
        self.probe(keys, recency, true).await
    }

    async fn probe(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
        readable: bool,
    ) -> Vec<Result<bool, StoreError>> {
        if keys.is_empty() {
            return Vec::new();
        }
        match self.presence(keys, recency, readable, false).await {
            Ok(found) => {
                let hits = found
                    .states
                    .iter()
                    .map(|state| *state == Presence::Complete);
                hits.map(Ok).collect()
            }
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn presence(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
        readable: bool,
        stop_at_first_miss: bool,
    ) -> Result<Existence, StoreError> {
        let core = self.core();
        let unreachable = core.unreachable();
        let query = Exists {
            readable,
            recency,
            stop_at_first_miss,
            unreachable: &unreachable,
            ..Exists::readable(keys)
        };
        let found = core.link.exists(&query).await?;
        let hits = found
            .states
            .iter()
            .filter(|state| **state == Presence::Complete)
            .count() as u64;
        core.counters.hits.add(hits);
        core.counters
            .misses
            .add(found.keys_queried.saturating_sub(hits));
        Ok(found)
    }

    /// How many of `keys`, from the first on, can all be read. Asks window by window, `window` keys at a
    /// time (0 counts as 1), and stops behind the first miss. One epoch covers all windows.
    pub async fn longest_prefix(
        &self,
        keys: &[ObjectKey],
        window: usize,
    ) -> Result<PrefixHit, StoreError> {
        let mut hit = PrefixHit::default();
        for keys in keys.chunks(window.max(1)) {
            let recency = Recency {
                epoch: hit.epoch,
                first_index: u32::try_from(hit.blocks).unwrap_or(u32::MAX),
            };
            let found = self.presence(keys, recency, true, true).await?;
            let run = found
                .states
                .iter()
                .take_while(|state| **state == Presence::Complete)
                .count();
            hit.blocks += run;
            hit.epoch = found.epoch;
            hit.keys_queried += found.keys_queried;
            if run < keys.len() {
                break;
            }
        }
        Ok(hit)
    }

    /// One window of a longer prefix, for callers who ask step by step: as
    /// [`longest_prefix`](Self::longest_prefix), but with what the first key that can't be read is, under
    /// the epoch of the windows before. States behind that key mean nothing.
    pub async fn probe_prefix(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
    ) -> Result<Existence, StoreError> {
        self.presence(keys, recency, true, true).await
    }

    /// Sizes of objects in bytes. Grants each a lease, which runs out by itself.
    pub async fn sizes(&self, keys: &[ObjectKey]) -> Vec<Result<u64, StoreError>> {
        self.find(keys, |found, _| found.size).await
    }

    /// Where the replicas of objects lie, the nearest first. Grants each a lease, which runs out by itself.
    pub async fn locate(&self, keys: &[ObjectKey]) -> Vec<Result<Located, StoreError>> {
        self.find(keys, |found, segments| {
            let replicas = found.replicas.iter().filter_map(|replica| {
                let segment = segments.iter().find(|at| at.id == replica.segment)?;
                Some((*replica, Arc::clone(segment)))
            });
            Located {
                size: found.size,
                replicas: replicas.collect(),
            }
        })
        .await
    }

    /// Asks for objects outside of sessions.
    async fn find<T>(
        &self,
        keys: &[ObjectKey],
        answer: impl Fn(&GetStarted, &[Arc<Segment>]) -> T,
    ) -> Vec<Result<T, StoreError>> {
        if keys.is_empty() {
            return Vec::new();
        }
        let core = self.core();
        let unreachable = core.unreachable();
        let options = StartOptions {
            unreachable: &unreachable,
            ..StartOptions::default()
        };
        match core.link.get_start(keys, options, false).await {
            Ok(found) => found
                .results
                .into_iter()
                .map(|result| Ok(answer(&result?, &found.segments)))
                .collect(),
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// What the master knows about an object.
    pub async fn stat(&self, key: &ObjectKey) -> Result<ObjectDetail, StoreError> {
        self.core().link.stat(key).await
    }

    /// Waits until each object is complete, or its writer has failed, or the time is over
    /// ([`Refusal::NotReady`]). Nothing is polled.
    pub async fn wait_complete(
        &self,
        keys: &[ObjectKey],
        timeout: Duration,
    ) -> Vec<Result<(), StoreError>> {
        if keys.is_empty() {
            return Vec::new();
        }
        each_key(keys, self.core().link.wait_complete(keys, timeout).await)
    }

    /// Removes objects. One that is leased is refused ([`Refusal::Leased`]) without `force`; with it, its
    /// name is gone at once, and open sessions read on or fail, but never see other bytes.
    pub async fn remove(&self, keys: &[ObjectKey], force: bool) -> Vec<Result<(), StoreError>> {
        if keys.is_empty() {
            return Vec::new();
        }
        let (core, owned) = (Arc::clone(self.core()), keys.to_vec());
        let work = async move {
            core.leases.give_back(&core).await;
            core.link.remove(&owned, force).await
        };
        each_key(keys, self.core().see_through(work).await)
    }

    /// Removes objects of exactly these generations, whoever reads them: for those that are damaged. What
    /// replaced one of them meanwhile stays ([`Refusal::NotFound`]). Open sessions read on or fail, as with
    /// [`remove`](Self::remove) by force.
    pub async fn remove_versions(&self, objects: &[ObjectRef]) -> Vec<Result<(), StoreError>> {
        if objects.is_empty() {
            return Vec::new();
        }
        each_key(objects, self.core().link.remove_versions(objects).await)
    }

    /// Removes the objects whose keys the regular expression matches anywhere; leased ones only with
    /// `force`. Gives the number that were removed.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64, StoreError> {
        let core = self.core();
        core.leases.give_back(core).await;
        core.link.remove_matching(pattern, force).await
    }

    /// Removes all objects of the tenant; leased ones only with `force`. Gives their number.
    pub async fn remove_all(&self, force: bool) -> Result<u64, StoreError> {
        self.remove_matching("", force).await
    }
}

fn each_key<K>(
    keys: &[K],
    answer: Result<Vec<Result<(), Refusal>>, StoreError>,
) -> Vec<Result<(), StoreError>> {
    match answer {
        Ok(results) => results.into_iter().map(|result| Ok(result?)).collect(),
        Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
    }
}
