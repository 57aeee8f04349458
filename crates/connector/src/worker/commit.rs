//! The end of saves: what is committed, what waits for other ranks, what is revoked.
//!
//! A row that was computed beside a load is not committed before the results of all ranks are known: its
//! session stays open, or in whole-object mode its block unread, until the next step has told.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use layercake_store::{PutRequest, PutSession, StoreError};

use super::sender::{OpenStep, SaveStep, Sender};
use super::shared::reached;
use crate::audit::Operation;
use crate::contract::Event;
use crate::tracker::PutOutcome;

/// Rows of a step in whole-object mode that nothing was read of yet.
pub(super) struct Unread {
    step: Arc<SaveStep>,
    rows: Vec<usize>,
}

impl Sender {
    pub(super) async fn end(&mut self, step: &Arc<SaveStep>, ready: &Event) {
        let Some(mut open) = self.take(step) else {
            return;
        };
        if !reached(ready, self.shared.options.layer_timeout).await {
            step.given_up.store(true, Ordering::Release);
        }
        self.decide(&mut open).await;
        if open.rows().next().is_some() {
            self.held.push(open);
        }
    }

    /// Something was cancelled or confirmed: goes on with what waited for that.
    pub(super) async fn told(&mut self) {
        if self.is_given_up() {
            // Its end may never be told.
            self.leave().await;
        }
        for mut open in std::mem::take(&mut self.held) {
            self.decide(&mut open).await;
            if open.rows().next().is_some() {
                self.held.push(open);
            }
        }
        for unread in std::mem::take(&mut self.unread) {
            self.put_unread(unread).await;
        }
    }

    /// Commits or revokes every row that need not wait.
    async fn decide(&self, open: &mut OpenStep) {
        self.drop_cancelled(open).await;
        let step = Arc::clone(&open.step);
        let ready: Vec<usize> = self.shared.tracker(|tracker| {
            let ready = |row: &usize| !tracker.must_wait(&step.rows[*row].key);
            open.rows().filter(ready).collect()
        });
        for rows in ready.chunks(self.shared.options.max_transfer_blocks.get()) {
            self.commit(open, rows).await;
        }
        // What was cancelled between the two looks.
        let left = ready
            .into_iter()
            .filter(|row| open.sessions[*row].is_some());
        let left: Vec<usize> = left.collect();
        self.shared.counters.dropped_saves.add(left.len() as u64);
        self.revoke(open, &left).await;
    }

    async fn commit(&self, open: &mut OpenStep, rows: &[usize]) {
        let step = Arc::clone(&open.step);
        let allowed = self.shared.tracker(|tracker| {
            let may = |row: &&usize| tracker.may_commit(&step.rows[**row].key);
            rows.iter().filter(may).copied().collect::<Vec<_>>()
        });
        let taken = allowed
            .iter()
            .filter_map(|&row| Some((row, open.sessions[row].take()?)));
        let (mut rows, mut sessions): (Vec<usize>, Vec<PutSession>) = taken.unzip();
        // A second time for what failed for a passing reason.
        for last in [false, true] {
            let ended = self
                .shared
                .store
                .end_puts(std::mem::take(&mut sessions))
                .await;
            let mut ended = ended.into_iter();
            let mut again = Vec::new();
            for row in std::mem::take(&mut rows) {
                let key = &step.rows[row].key;
                match ended.next() {
                    Some(Ok(())) => {
                        self.shared.audit.note(Operation::PutEnd, key, None, None);
                        self.shared.counters.saved_blocks.add(1);
                        self.shared.settle(key, PutOutcome::Committed);
                    }
                    Some(Err(failed))
                        if !last && failed.error.is_retryable() && failed.session.is_some() =>
                    {
                        sessions.extend(failed.session);
                        again.push(row);
                    }
                    failed => {
                        let error = failed.and_then(Result::err);
                        let error = error.map_or(StoreError::UnknownSession, |failed| failed.error);
                        let audit = &self.shared.audit;
                        audit.note(Operation::PutEnd, key, None, Some(&error));
                        tracing::debug!(%key, %error, "a block's commit failed");
                        self.shared.counters.failed_saves.add(1);
                        self.shared.settle(key, PutOutcome::Lost);
                    }
                }
            }
            rows = again;
            if rows.is_empty() {
                return;
            }
        }
    }

    /// Whole-object mode (W14): everything at the step's end.
    pub(super) async fn put_whole(&mut self, step: Arc<SaveStep>, ready: &Event) {
        if !reached(ready, self.shared.options.layer_timeout).await {
            step.given_up.store(true, Ordering::Release);
        }
        let rows = (0..step.rows.len()).collect();
        self.put_unread(Unread { step, rows }).await;
    }

    async fn put_unread(&mut self, unread: Unread) {
        let Unread { step, rows } = unread;
        let given_up = step.given_up.load(Ordering::Acquire);
        let (wait, rows): (Vec<usize>, Vec<usize>) = self.shared.tracker(|tracker| {
            let wait = |row: &usize| !given_up && tracker.must_wait(&step.rows[*row].key);
            rows.into_iter().partition(wait)
        });
        self.put_rows(&step, &rows, given_up).await;
        if !wait.is_empty() {
            self.unread.push(Unread { step, rows: wait });
        }
    }

    /// Gives up what still waits.
    pub(super) async fn leave_waiting(&mut self) {
        for open in std::mem::take(&mut self.held) {
            self.give_up(open).await;
        }
        for Unread { step, rows } in std::mem::take(&mut self.unread) {
            self.put_rows(&step, &rows, true).await;
        }
    }

    async fn put_rows(&mut self, step: &SaveStep, rows: &[usize], given_up: bool) {
        for rows in rows.chunks(self.shared.options.max_transfer_blocks.get()) {
            let mut puts = Vec::with_capacity(rows.len());
            let mut put = Vec::with_capacity(rows.len());
            for row in rows.iter().map(|row| &step.rows[*row]) {
                let allowed =
                    !given_up && self.shared.tracker(|tracker| tracker.may_commit(&row.key));
                let ranges = step.caches.whole(row.block, &mut self.scratch);
                let Some(ranges) = ranges.filter(|_| allowed) else {
                    self.shared.counters.dropped_saves.add(1);
                    self.shared.settle(&row.key, PutOutcome::Lost);
                    continue;
                };
                let pieces = ranges.into_iter().map(|range| range.local).collect();
                puts.push(PutRequest {
                    fingerprint: self.shared.fingerprint,
                    ..PutRequest::new(row.key.clone(), pieces)
                });
                put.push(row);
            }
            let config = self.shared.options.replicate();
            let mut done = self.shared.store.put(puts, &config).await.into_iter();
            for row in put {
                let done = done.next();
                let error = match &done {
                    Some(Err(error)) => Some(error as &dyn std::fmt::Display),
                    _ => None,
                };
                self.shared
                    .audit
                    .note(Operation::Put, &row.key, None, error);
                match done {
                    Some(Ok(layercake_store::PutOutcome::Stored)) => {
                        self.shared.counters.saved_blocks.add(1);
                        self.shared.settle(&row.key, PutOutcome::Committed);
                    }
                    Some(Ok(layercake_store::PutOutcome::Existed)) => {
                        self.shared.counters.saved_elsewhere.add(1);
                        self.shared.settle(&row.key, PutOutcome::Elsewhere);
                    }
                    Some(Ok(_)) => {
                        self.shared.counters.saved_elsewhere.add(1);
                        self.shared.settle(&row.key, PutOutcome::Lost);
                    }
                    failed => {
                        tracing::debug!(key = %row.key, ?failed, "a block is not saved");
                        self.shared.counters.failed_saves.add(1);
                        self.shared.settle(&row.key, PutOutcome::Lost);
                    }
                }
            }
        }
    }
}
