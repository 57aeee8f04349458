//! What the planner makes of the workers' results: who computed from void blocks, which steps are confirmed,
//! whose blocks are free.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::{MOST_ATTEMPTS, Planner, to_usize};
use crate::contract::{Absorbed, BlockId, WorkerResults};
use crate::options::FailurePolicy;
use crate::request::{End, Verdict};

impl Planner {
    /// What the workers said, and whose patience is over.
    pub fn absorb(&mut self, results: &[WorkerResults], now: Duration) -> Absorbed {
        let mut absorbed = Absorbed::default();
        let mut invalid: HashMap<u64, HashSet<BlockId>> = HashMap::new();
        for result in results {
            self.payoff
                .note_load(result.loaded_bytes, result.load_micros);
            if !result.invalid_blocks.is_empty() {
                let blocks = invalid.entry(result.step).or_default();
                blocks.extend(&result.invalid_blocks);
            }
            for request in &result.finished {
                let entry = self.requests.get_mut(request);
                if entry.is_some_and(|entry| entry.machine.drained(result.rank).is_some()) {
                    absorbed.free.push(request.clone());
                }
            }
        }
        let mut void: Vec<_> = invalid.into_iter().collect();
        self.note_reports(results, &mut void);
        self.cut_back(&void, &mut absorbed);
        self.note_compute(results);
        self.expire(now, &mut absorbed);
        for request in &absorbed.free {
            self.requests.remove(request);
        }
        absorbed
    }

    /// Cuts back whoever uses a block that is void since one of these steps, the owner of the load or not.
    fn cut_back(&mut self, void: &[(u64, HashSet<BlockId>)], absorbed: &mut Absorbed) {
        if void.is_empty() {
            return;
        }
        let size = self.config.block_size.get();
        for (request, entry) in &mut self.requests {
            if entry.told != Some(entry.machine.attempt()) {
                continue;
            }
            let since = entry.since_step;
            let void = || void.iter().filter(|(step, _)| *step >= since);
            let used = to_usize(entry.end.div_ceil(size)).min(entry.table.len());
            let first = entry.table[..used]
                .iter()
                .position(|id| void().any(|(_, blocks)| blocks.contains(id)));
            let Some(first) = first else {
                continue;
            };
            self.void.insert(request.clone());
            let again = !self.config.restore || entry.machine.attempt() < MOST_ATTEMPTS;
            let policy = if again {
                self.config.policy
            } else {
                FailurePolicy::Fail
            };
            let good = (request.clone(), first as u64 * size);
            match entry.machine.load_failed(policy) {
                Verdict::Recompute => {
                    entry.start_over(first);
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

    /// Steps are confirmed once what is void by them is known. Adds what was to be loaded in steps that a rank never
    /// reports.
    fn note_reports(&mut self, results: &[WorkerResults], void: &mut Vec<(u64, HashSet<BlockId>)>) {
        for result in results.iter().filter(|result| result.step <= self.step) {
            let Some(missing) = self.reports.note(result.rank, result.step) else {
                continue;
            };
            // Whoever may have computed then may have computed from anything.
            let entries = self.requests.iter();
            let then = entries.filter(|(_, entry)| entry.since_step <= missing.last);
            self.void.extend(then.map(|(request, _)| request.clone()));
            void.extend(missing.loads);
        }
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
