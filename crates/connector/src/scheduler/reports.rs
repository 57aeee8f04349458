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
    /// What steps load that not all ranks have reported.
    loads: BTreeMap<u64, Vec<BlockId>>,
    /// What failed in such steps.
    failed: BTreeMap<u64, HashSet<BlockId>>,
    /// The last steps of gaps that ranks left in their reports.
    gaps: Vec<u64>,
    /// In which such step a block was last written from its start.
    written: HashMap<BlockId, u64>,
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
            loads: BTreeMap::new(),
            failed: BTreeMap::new(),
            gaps: Vec::new(),
            written: HashMap::new(),
        }
    }

    /// A step is to load some blocks, and computes others from their start.
    pub(super) fn planned(
        &mut self,
        step: u64,
        loads: Vec<BlockId>,
        computed: impl IntoIterator<Item = BlockId>,
    ) {
        let written = loads.iter().copied().chain(computed);
        self.written.extend(written.map(|block| (block, step)));
        if !loads.is_empty() {
            self.loads.insert(step, loads);
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
            for (step, loads) in self.loads.range(gap) {
                self.failed.entry(*step).or_default().extend(loads);
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
            // In their order, so the last step counts.
            settled.void.extend(failed.into_iter().map(|block| {
                let written = self.written.get(&block).is_some_and(|at| *at > step);
                (block, if written { step } else { STILL_VOID })
            }));
        }
        self.gaps.retain(|last| {
            let over = *last <= confirmed;
            if over {
                settled.passed_over = settled.passed_over.max(Some(*last));
            }
            !over
        });
        self.loads.retain(|step, _| *step > confirmed);
        self.written.retain(|_, step| *step > confirmed);
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
        reports.planned(1, vec![10, 11, 12], []);
        reports.planned(2, vec![20], []);
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
            reports.planned(step, vec![step * 10], []);
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
        assert!(reports.loads.keys().eq([&4]), "others need not be known");
        assert!(reports.written.keys().eq([&40]));
    }

    #[test]
    fn a_block_that_was_written_since_is_void_for_who_had_it_before() {
        let mut reports = Reports::new(1);
        reports.planned(1, vec![1, 2, 3], []);
        reports.planned(2, vec![2], [3]);
        reports.note(0, 1, &[1, 2, 3]);
        let then = HashMap::from([(1, STILL_VOID), (2, 1), (3, 1)]);
        assert_eq!(reports.settle().void, then);
        reports.note(0, 2, &[2]);
        assert_eq!(reports.settle(), void(&[2]));
        // One that nobody was to load: taken at its word.
        reports.note(0, 3, &[9]);
        assert_eq!(reports.settle(), void(&[9]));
        assert!(reports.written.is_empty());
    }
}
