//! Which steps all ranks have reported. Pure.
//!
//! A rank reports its steps in their order. One that it passes over was left in the middle: nobody
//! knows what failed in it, so all that it was to load counts as failed.

use std::collections::{BTreeMap, HashSet};

use crate::contract::BlockId;

#[derive(Debug)]
pub(super) struct Reports {
    /// The last step of each rank.
    last: Vec<u64>,
    /// What steps load that not all ranks have reported.
    loads: BTreeMap<u64, Vec<BlockId>>,
}

/// Steps that a rank passed over.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missing {
    /// The last of them.
    pub(super) last: u64,
    /// Those that were to load something, and what.
    pub(super) loads: Vec<(u64, HashSet<BlockId>)>,
}

impl Reports {
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            last: vec![0; usize::try_from(ranks).unwrap_or(usize::MAX)],
            loads: BTreeMap::new(),
        }
    }

    /// A step is to load these blocks.
    pub(super) fn planned(&mut self, step: u64, loads: Vec<BlockId>) {
        if !loads.is_empty() {
            self.loads.insert(step, loads);
        }
    }

    /// A rank reports a step. The steps that it passed over.
    pub(super) fn note(&mut self, rank: u32, step: u64) -> Option<Missing> {
        let last = self.last.get_mut(usize::try_from(rank).ok()?)?;
        if step <= *last {
            return None;
        }
        let missing = *last + 1..step;
        *last = step;
        let missing = (!missing.is_empty()).then(|| Missing {
            last: step - 1,
            loads: self
                .loads
                .range(missing)
                .map(|(step, loads)| (*step, loads.iter().copied().collect()))
                .collect(),
        });
        let confirmed = self.confirmed();
        self.loads.retain(|step, _| *step > confirmed);
        missing
    }

    /// Every rank is through with every step up to this one.
    pub(super) fn confirmed(&self) -> u64 {
        self.last.iter().copied().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_confirmed_by_its_last_rank_and_gaps_are_told() {
        let mut reports = Reports::new(2);
        for step in [1, 2, 4] {
            reports.planned(step, vec![step * 10]);
        }
        assert_eq!(reports.note(0, 1), None);
        assert_eq!(reports.confirmed(), 0);
        assert_eq!(reports.note(1, 1), None);
        assert_eq!(reports.confirmed(), 1);
        let missing = Missing {
            last: 3,
            loads: vec![(2, HashSet::from([20]))],
        };
        assert_eq!(reports.note(1, 4), Some(missing));
        assert_eq!(reports.confirmed(), 1);
        assert_eq!(reports.note(0, 2), None);
        assert_eq!(reports.note(0, 2), None, "told twice");
        assert_eq!(reports.confirmed(), 2);
        assert_eq!(reports.note(7, 9), None, "there is no such rank");
        assert_eq!(reports.confirmed(), 2);
        assert!(reports.loads.keys().eq([&4]), "others need not be known");
    }
}
