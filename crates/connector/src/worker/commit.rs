//! The end of saves: what is committed, what waits for other ranks, what is revoked.
//!
//! A row that was computed beside a load is not committed before the results of all ranks are known: its
//! session stays open until the next step has told.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use layercake_store::{PutSession, StoreError};

use super::sender::{OpenStep, SaveStep, Sender};
use super::shared::reached;
use crate::audit::Operation;
use crate::contract::Event;
use crate::tracker::PutOutcome;

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
    }

    /// Commits or revokes every row that need not wait.
    async fn decide(&self, open: &mut OpenStep) {
        let rows: Vec<usize> = open.rows().collect();
        self.drop_cancelled(open, &rows).await;
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

    /// Gives up what still waits.
    pub(super) async fn leave_waiting(&mut self) {
        for open in std::mem::take(&mut self.held) {
            self.give_up(open).await;
        }
    }
}
