//! What the planner makes of the workers' results: who computed from void blocks, which steps are confirmed,
//! whose blocks are free.

use std::time::Duration;

use super::super::entry::Entry;
use super::super::reports::Void;
use super::{MOST_ATTEMPTS, Planner};
use crate::contract::{Absorbed, WorkerResults};
use crate::options::FailurePolicy;
use crate::request::{End, Verdict};

impl Planner {
    /// What the workers said, and whose patience is over.
    pub fn absorb(&mut self, results: &[WorkerResults], now: Duration) -> Absorbed {
        let mut absorbed = Absorbed::default();
        for result in results {
            self.payoff
                .note_load(result.loaded_bytes, result.load_micros);
            for request in &result.finished {
                // A report from before its end is of an earlier request of this name.
                let ended = |entry: &&mut Entry| entry.end_told.is_some_and(|at| at <= result.step);
                let entry = self.requests.get_mut(request).filter(ended);
                if entry.is_some_and(|entry| entry.machine.drained(result.rank).is_some()) {
                    absorbed.free.push(request.clone());
                }
            }
        }
        self.note_reports(results);
        let settled = self.reports.settle();
        absorbed.confirmed = self.reports.confirmed();
        if let Some(last) = settled.passed_over {
            // Whoever may have computed then may have computed from anything.
            let entries = self.requests.iter();
            let then = entries.filter(|(_, entry)| entry.began_by(last));
            self.void.extend(then.map(|(request, _)| request.clone()));
        }
        self.cut_back(&settled.void, &mut absorbed);
        self.note_compute(results);
        self.expire(now, &mut absorbed);
        for request in &absorbed.free {
            self.requests.remove(request);
        }
        absorbed
    }

    /// Takes in what the ranks say of their steps, each in its order.
    fn note_reports(&mut self, results: &[WorkerResults]) {
        let mut results: Vec<_> = results.iter().collect();
        results.sort_by_key(|result| result.step);
        for result in results {
            let (rank, step) = (result.rank, result.step);
            if step > self.step || rank >= self.config.ranks {
                tracing::warn!(
                    rank,
                    step,
                    ranks = self.config.ranks,
                    last_step = self.step,
                    "results of a rank or a step that there is not are ignored"
                );
                continue;
            }
            self.reports.note(rank, step, &result.invalid_blocks);
        }
    }

    /// Cuts back whoever uses a void block, the owner of the load or not; one that waits for its next attempt is cut
    /// back further.
    fn cut_back(&mut self, void: &Void, absorbed: &mut Absorbed) {
        if void.is_empty() {
            return;
        }
        let size = self.config.block_size.get();
        for (request, entry) in &mut self.requests {
            let Some(first) = entry.first_void(void, size) else {
                continue;
            };
            self.void.insert(request.clone());
            let again = !self.config.restore || entry.cuts + 1 < MOST_ATTEMPTS;
            let policy = if again {
                self.config.policy
            } else {
                FailurePolicy::Fail
            };
            let good = (request.clone(), first as u64 * size);
            match entry.machine.load_failed(policy) {
                Verdict::Recompute => {
                    entry.start_over(first, size);
                    entry.cuts += 1;
                    self.counters.recomputed_requests.add(1);
                    absorbed.recompute.push(good);
                }
                Verdict::Fail => {
                    self.counters.failed_requests.add(1);
                    absorbed.failed.push(good);
                }
                Verdict::Nothing => {}
            }
        }
        absorbed.recompute.sort_unstable();
        absorbed.failed.sort_unstable();
    }

    fn note_compute(&mut self, results: &[WorkerResults]) {
        let Some(slowest) = results.iter().max_by_key(|result| result.compute_micros) else {
            return;
        };
        if let Some(&(_, tokens)) = self.steps.iter().find(|(step, _)| *step == slowest.step) {
            self.payoff.note_compute(tokens, slowest.compute_micros);
        }
    }

    /// Saves that take too long are given up like those of a preempted request: its blocks can be given to
    /// others, since the next step begins with nothing that reads from them.
    fn expire(&mut self, now: Duration, absorbed: &mut Absorbed) {
        for (request, entry) in &mut self.requests {
            if entry.machine.expire(now) == Some(End::Overdue) {
                self.counters.overdue_requests.add(1);
                tracing::warn!(%request, "not every worker has reported the end of its saves");
                self.preempted.insert(request.clone());
                absorbed.free.push(request.clone());
            }
        }
    }
}
