//! Asks the store for a request's prefix, window after window.
//!
//! All calls of a look-up have one deadline. What was answered before a call failed, or was not answered in time, counts;
//! the keys of that call count as asked for.

use std::future::Future;

use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{Presence, Recency};
use layercake_store::link::Existence;
use layercake_store::{Progress, StoreClient, StoreError};
use tokio::time::{Instant, timeout_at};

use crate::lookup::{Found, KeyState, Lookup};
use crate::stats::MissReason;

/// Who is asked.
pub(super) trait Store: Sync {
    /// See [`StoreClient::probe_prefix`].
    fn probe(
        &self,
        keys: &[ObjectKey],
        recency: Recency,
    ) -> impl Future<Output = Result<Existence, StoreError>> + Send;

    /// See [`StoreClient::progress`].
    fn progress(
        &self,
        keys: &[ObjectKey],
    ) -> impl Future<Output = Result<Vec<Progress>, StoreError>> + Send;
}

impl Store for StoreClient {
    async fn probe(&self, keys: &[ObjectKey], recency: Recency) -> Result<Existence, StoreError> {
        self.probe_prefix(keys, recency).await
    }

    async fn progress(&self, keys: &[ObjectKey]) -> Result<Vec<Progress>, StoreError> {
        StoreClient::progress(self, keys).await
    }
}

/// Asks to the end or until `deadline`. With `early`, what is being written by a writer that publishes it counts as
/// readable.
pub(super) async fn ask<S: Store>(
    store: &S,
    keys: &[ObjectKey],
    mut lookup: Lookup,
    early: bool,
    deadline: Instant,
) -> Found {
    while let Some(window) = lookup.next() {
        let mut asking = Window {
            store,
            deadline,
            first: window.start,
            keys: &keys[window],
            states: Vec::new(),
            epoch: lookup.epoch(),
            queried: 0,
        };
        let asked = asking.ask(early).await;
        lookup.answer(&asking.states, asking.epoch, asking.queried);
        if let Err(reason) = asked {
            lookup.fail(reason);
        }
    }
    lookup.found()
}

/// A window that is being asked for.
struct Window<'a, S> {
    store: &'a S,
    deadline: Instant,
    /// Place of the first key in the request's.
    first: usize,
    keys: &'a [ObjectKey],
    /// Of the keys so far.
    states: Vec<KeyState>,
    epoch: Epoch,
    queried: u64,
}

impl<S: Store> Window<'_, S> {
    /// Each key is asked for once; with `early` up to three times: those from the first that is being written on once
    /// more, and those among them that are complete once again, as what is loaded must be touched.
    async fn ask(&mut self, early: bool) -> Result<(), MissReason> {
        self.probe(self.keys.len()).await?;
        if !early || self.states.last() != Some(&KeyState::Reserved) {
            return Ok(());
        }
        self.states.pop();
        let rest = &self.keys[self.states.len()..];
        self.queried += rest.len() as u64;
        let progress = in_time(self.deadline, self.store.progress(rest)).await?;
        for run in progress.chunk_by(|a, b| a == b) {
            let end = self.states.len() + run.len();
            match run[0] {
                Progress::Publishing => self.states.resize(end, KeyState::Readable),
                Progress::Complete => self.probe(run.len()).await?,
                Progress::Unreadable => self.states.push(KeyState::Reserved),
                Progress::Absent => self.states.push(KeyState::Absent),
            }
            if self.states.len() < end || self.states.last() != Some(&KeyState::Readable) {
                break;
            }
        }
        Ok(())
    }

    /// Looks the next keys up. Their states end with the first that is not readable.
    async fn probe(&mut self, keys: usize) -> Result<(), MissReason> {
        let from = self.states.len();
        let recency = Recency {
            epoch: self.epoch,
            first_index: u32::try_from(self.first + from).unwrap_or(u32::MAX),
        };
        let asked = &self.keys[from..from + keys];
        let answer = in_time(self.deadline, self.store.probe(asked, recency)).await;
        let answer = answer.inspect_err(|_| self.queried += keys as u64)?;
        self.epoch = answer.epoch;
        self.queried += answer.keys_queried;
        let states = answer.states.iter().map(|state| state_of(*state));
        let first_miss = states.clone().position(|it| it != KeyState::Readable);
        let known = first_miss.map_or(keys, |at| at + 1);
        self.states.extend(states.take(known));
        Ok(())
    }
}

async fn in_time<T>(
    deadline: Instant,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, MissReason> {
    match timeout_at(deadline, call).await {
        Ok(answer) => answer.map_err(|error| {
            tracing::debug!(%error, "the rest of a look-up counts as missed");
            MissReason::Master
        }),
        Err(_) => Err(MissReason::TimeOut),
    }
}

fn state_of(presence: Presence) -> KeyState {
    match presence {
        Presence::Complete => KeyState::Readable,
        Presence::Reserved => KeyState::Reserved,
        Presence::Absent => KeyState::Absent,
    }
}

#[cfg(test)]
mod tests;
