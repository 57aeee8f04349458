//! What is void by the workers' reports, told once all ranks have reported a step. Pure.
//!
//! Ranks may report apart, and steps may be planned before earlier ones are reported. What fails in a step on any rank is
//! void for all, so nothing is made of a step before its last rank has spoken. A rank reports its steps in their order. One
//! that it passes over was left in the middle: nobody knows what failed in it, so all that it was to load counts as failed.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::contract::BlockId;

#[derive(Debug)]
pub(super) struct Reports {
    /// The last step of each rank.
    last: Vec<u64>,
    /// Steps that not all ranks have reported, but for those that write nothing.
    open: BTreeMap<u64, Writes>,
    /// What failed in such steps.
    failed: BTreeMap<u64, HashSet<BlockId>>,
    /// The last steps of gaps that ranks left in their reports.
    gaps: Vec<u64>,
}

/// Blocks that a step writes from their start.
#[derive(Debug)]
struct Writes {
    loads: Vec<BlockId>,
    computed: Vec<BlockId>,
}

/// Undefined bytes of a block, for whoever has it since this step or an earlier one.
pub(super) type Void = HashMap<BlockId, u64>;

/// Nobody has written to it since.
const STILL_VOID: u64 = u64::MAX;

/// What is known for good.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Settled {
    /// Blocks that were void, or still are.
    pub(super) void: Void,
    /// A rank passed over steps, this one the last of them.
    pub(super) passed_over: Option<u64>,
}

impl Reports {
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            last: vec![0; usize::try_from(ranks).unwrap_or(usize::MAX)],
            open: BTreeMap::new(),
            failed: BTreeMap::new(),
            gaps: Vec::new(),
        }
    }

    /// A step is to load some blocks, and computes others from their start.
    pub(super) fn planned(&mut self, step: u64, loads: Vec<BlockId>, computed: Vec<BlockId>) {
        if !(loads.is_empty() && computed.is_empty()) {
            self.open.insert(step, Writes { loads, computed });
        }
    }

    /// A rank reports a step. `false`: it had before, or there is no such rank; nothing comes of that.
    pub(super) fn note(&mut self, rank: u32, step: u64, failed: &[BlockId]) -> bool {
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        let Some(last) = self.last.get_mut(rank).filter(|last| **last < step) else {
            return false;
        };
        let gap = *last + 1..step;
        *last = step;
        if !gap.is_empty() {
            self.gaps.push(step - 1);
            for (step, writes) in self.open.range(gap) {
                let failed = self.failed.entry(*step).or_default();
                failed.extend(&writes.loads);
            }
        }
        if !failed.is_empty() {
            self.failed.entry(step).or_default().extend(failed);
        }
        true
    }

    /// What all ranks are through with by now, once.
    pub(super) fn settle(&mut self) -> Settled {
        let confirmed = self.confirmed();
        let mut settled = Settled::default();
        while let Some(open) = self.failed.first_entry()
            && *open.key() <= confirmed
        {
            let (step, failed) = open.remove_entry();
            let later = self.open.range(step + 1..).map(|(_, writes)| writes);
            let written = later.flat_map(|writes| writes.loads.iter().chain(&writes.computed));
            let written: HashSet<_> = written.copied().collect();
            // In their order, so the last step counts.
            settled.void.extend(failed.into_iter().map(|block| {
                let void_until = if written.contains(&block) {
                    step
                } else {
                    STILL_VOID
                };
                (block, void_until)
            }));
        }
        self.gaps.retain(|last| {
            let over = *last <= confirmed;
            if over {
                settled.passed_over = settled.passed_over.max(Some(*last));
            }
            !over
        });
        self.open.retain(|step, _| *step > confirmed);
        settled
    }

    /// Every rank is through with every step up to this one.
    pub(super) fn confirmed(&self) -> u64 {
        self.last.iter().copied().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn void(blocks: &[BlockId]) -> Settled {
        Settled {
            void: blocks.iter().map(|block| (*block, STILL_VOID)).collect(),
            passed_over: None,
        }
    }

    #[test]
    fn what_any_rank_says_of_a_step_counts_when_the_last_has_spoken() {
        let mut reports = Reports::new(2);
        reports.planned(1, vec![10, 11, 12], vec![]);
        reports.planned(2, vec![20], vec![]);
        assert!(reports.note(0, 1, &[11]));
        assert!(reports.note(0, 2, &[20]));
        assert_eq!(reports.settle(), void(&[]));
        assert!(reports.note(1, 1, &[10]));
        assert!(!reports.note(1, 1, &[12]), "told twice");
        assert!(!reports.note(7, 9, &[12]), "there is no such rank");
        assert_eq!(reports.settle(), void(&[10, 11]));
        assert_eq!(reports.confirmed(), 1);
        assert!(reports.note(1, 2, &[]));
        assert_eq!(reports.settle(), void(&[20]));
        assert_eq!(reports.settle(), void(&[]), "told once");
    }

    #[test]
    fn what_a_rank_passes_over_has_failed() {
        let mut reports = Reports::new(2);
        for step in [1, 2, 4] {
            reports.planned(step, vec![step * 10], vec![]);
        }
        reports.note(0, 1, &[]);
        reports.note(1, 1, &[]);
        reports.note(1, 4, &[]);
        assert_eq!(reports.settle(), void(&[]));
        reports.note(0, 2, &[]);
        // The gap is of steps 2 and 3: not all of it is over.
        assert_eq!(reports.settle(), void(&[20]));
        reports.note(0, 3, &[]);
        let gap = Settled {
            passed_over: Some(3),
            ..Settled::default()
        };
        assert_eq!(reports.settle(), gap);
        assert_eq!(reports.confirmed(), 3);
        assert!(reports.open.keys().eq([&4]), "others need not be known");
    }

    #[test]
    fn a_block_that_was_written_since_is_void_for_who_had_it_before() {
        let mut reports = Reports::new(1);
        reports.planned(1, vec![1, 2, 3], vec![]);
        reports.planned(2, vec![2], vec![3]);
        reports.note(0, 1, &[1, 2, 3]);
        let then = HashMap::from([(1, STILL_VOID), (2, 1), (3, 1)]);
        assert_eq!(reports.settle().void, then);
        reports.note(0, 2, &[2]);
        assert_eq!(reports.settle(), void(&[2]));
        // One that nobody was to load: taken at its word.
        reports.note(0, 3, &[9]);
        assert_eq!(reports.settle(), void(&[9]));
        assert!(reports.open.is_empty() && reports.failed.is_empty());
    }
}
