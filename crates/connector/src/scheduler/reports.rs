//! Which steps all ranks have reported. Pure.
//!
//! A rank reports its steps in their order. One that it passes over was left in the middle: nobody
//! knows what failed in it.

use std::ops::RangeInclusive;

#[derive(Debug)]
pub(super) struct Reports {
    /// The last step of each rank.
    last: Vec<u64>,
}

impl Reports {
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            last: vec![0; usize::try_from(ranks).unwrap_or(usize::MAX)],
        }
    }

    /// A rank reports a step. The steps that it passed over.
    pub(super) fn note(&mut self, rank: u32, step: u64) -> Option<RangeInclusive<u64>> {
        let last = self.last.get_mut(usize::try_from(rank).ok()?)?;
        if step <= *last {
            return None;
        }
        let missing = *last + 1..=step - 1;
        *last = step;
        (!missing.is_empty()).then_some(missing)
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
        assert_eq!(reports.note(0, 1), None);
        assert_eq!(reports.confirmed(), 0);
        assert_eq!(reports.note(1, 1), None);
        assert_eq!(reports.confirmed(), 1);
        assert_eq!(reports.note(1, 4), Some(2..=3));
        assert_eq!(reports.confirmed(), 1);
        assert_eq!(reports.note(0, 2), None);
        assert_eq!(reports.note(0, 2), None, "told twice");
        assert_eq!(reports.confirmed(), 2);
        assert_eq!(reports.note(7, 9), None, "there is no such rank");
        assert_eq!(reports.confirmed(), 2);
    }
}
