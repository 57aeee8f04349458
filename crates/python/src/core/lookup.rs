//! Questions about keys, and their removal: coded.

use layercake_protocol::code::ResultCode;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Recency;
use layercake_store::StoreError;
use tokio::task::JoinSet;

use super::StoreCore;
use super::code::{self, ABSENT, Call, INVALID};
use crate::args::Keys;

/// Replicas that one call drops at a time. Where others stay, their bytes are written anew, so memory bounds it.
const DROPS_AT_A_TIME: usize = 8;

/// One replica, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    /// Of the object, in bytes.
    pub(crate) size: u64,
    /// Where its bytes begin in the segment.
    pub(crate) offset: u64,
    /// `host:port` of the engine that owns the segment.
    pub(crate) address: String,
}

impl StoreCore {
    /// 1: there, and nothing says that it can't be read; 0: not, or not finished; negative: not known.
    /// What is there is protected for as long as a lease lasts, though not for ever by probes alone.
    pub(crate) fn exists(&self, keys: &Keys) -> Vec<i64> {
        let found = self.client().exists(keys.good(), Recency::default());
        keys.align(presence(self.block(found)), |_| 0)
    }

    /// As [`exists`](Self::exists), for objects with a replica on a live segment.
    pub(crate) fn readable(&self, keys: &Keys) -> Vec<i64> {
        let found = self.client().readable(keys.good(), Recency::default());
        keys.align(presence(self.block(found)), |_| 0)
    }

    /// Sizes in bytes.
    pub(crate) fn sizes(&self, keys: &Keys) -> Vec<i64> {
        let found = self.block(self.client().sizes(keys.good()));
        let sizes = found.into_iter().map(|size| match size {
            Ok(size) => code::count(size),
            Err(error) => code::of(&error, Call::Question),
        });
        keys.align(sizes.collect(), |_| ABSENT)
    }

    /// Where the replicas of objects lie; an entry that can't be told is left out as `None`.
    pub(crate) fn describe(&self, keys: &Keys) -> Vec<Option<Vec<Description>>> {
        let found = self.block(self.client().locate(keys.good()));
        let found = found.into_iter().map(|located| {
            let located = located.ok()?;
            let replicas = located
                .replicas
                .iter()
                .map(|(replica, segment)| Description {
                    size: located.size,
                    offset: replica.payload_offset(),
                    address: segment.endpoint.tcp.clone(),
                });
            Some(replicas.collect())
        });
        keys.align(found.collect(), |_| None)
    }

    /// Removes objects, in order: a key that is named again is not there any more.
    pub(crate) fn remove(&self, keys: &Keys, force: bool) -> Vec<i64> {
        let done = self.block(self.client().remove(keys.good(), force));
        keys.align(done.into_iter().map(outcome).collect(), |_| ABSENT)
    }

    /// Takes the replicas in the segment of this name away, and objects that have no other: 0 or a code for each.
    pub(crate) fn drop_replicas(&self, keys: &Keys, segment: &str) -> Vec<i64> {
        let dropped = self.block(self.drop_together(keys.good(), segment));
        keys.align(dropped, |_| ABSENT)
    }

    async fn drop_together(&self, keys: &[ObjectKey], segment: &str) -> Vec<i64> {
        let mut codes = vec![INVALID; keys.len()];
        let mut waiting = keys.iter().cloned().enumerate();
        let mut under_way = JoinSet::new();
        loop {
            let free = DROPS_AT_A_TIME.saturating_sub(under_way.len());
            for (index, key) in waiting.by_ref().take(free) {
                let (client, segment) = (self.client().clone(), segment.to_owned());
                under_way.spawn(async move { (index, client.drop_replica(&key, &segment).await) });
            }
            match under_way.join_next().await {
                Some(Ok((index, done))) => codes[index] = outcome(done),
                Some(Err(error)) => tracing::error!(%error, "dropping a replica"),
                None => return codes,
            }
        }
    }

    /// Removes objects whose key the regular expression matches anywhere; gives their number.
    pub(crate) fn remove_matching(&self, pattern: &str, force: bool) -> i64 {
        removed(self.block(self.client().remove_matching(pattern, force)))
    }

    /// Removes all objects of the tenant; gives their number.
    pub(crate) fn remove_all(&self, force: bool) -> i64 {
        removed(self.block(self.client().remove_all(force)))
    }
}

fn removed(count: Result<u64, StoreError>) -> i64 {
    match count {
        Ok(count) => code::count(count),
        Err(error) => code::of(&error, Call::Question),
    }
}

fn presence(found: Vec<Result<bool, StoreError>>) -> Vec<i64> {
    found
        .into_iter()
        .map(|found| match found {
            Ok(found) => i64::from(found),
            Err(error) => code::of(&error, Call::Question),
        })
        .collect()
}

/// An answer without a value.
pub(super) fn outcome(done: Result<(), StoreError>) -> i64 {
    match done {
        Ok(()) => ResultCode::OK.as_result(),
        Err(error) => code::of(&error, Call::Question),
    }
}
