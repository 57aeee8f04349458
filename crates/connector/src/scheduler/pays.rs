//! Whether a load is faster than computing (C6). Pure.
//!
//! Two rates are smoothed from what workers report: bytes loaded per second, and tokens computed per
//! second. Until both are known every load is taken. One in sixteen that would be declined is taken
//! all the same, so that a store that has become fast is noticed.

use crate::contract::StepPlan;
use crate::rate::Rate;

/// Reports of each kind before anything is declined.
const WARM_UP: u32 = 8;
const EXPLORE_EVERY: u32 = 16;

/// The two rates.
#[derive(Clone, Debug, Default)]
pub struct Payoff {
    bytes_per_second: Rate,
    tokens_per_second: Rate,
    declined: u32,
}

impl Payoff {
    /// One rank's loads of a step.
    pub fn note_load(&mut self, bytes: u64, micros: u64) {
        self.bytes_per_second.note(bytes, micros as f64 / 1e6);
    }

    /// A step's computation.
    pub fn note_compute(&mut self, tokens: u64, micros: u64) {
        self.tokens_per_second.note(tokens, micros as f64 / 1e6);
    }

    /// Whether loading `bytes` per rank is worth saving the computation of `tokens`.
    pub fn pays(&mut self, bytes: u64, tokens: u64) -> bool {
        let (Some(load), Some(compute)) = (
            self.bytes_per_second.after(WARM_UP),
            self.tokens_per_second.after(WARM_UP),
        ) else {
            return true;
        };
        if bytes as f64 / load <= tokens as f64 / compute {
            return true;
        }
        self.declined = self.declined.wrapping_add(1);
        self.declined.is_multiple_of(EXPLORE_EVERY)
    }
}

/// The tokens of a step that tells how fast prompts are computed; 0 if most of them continue an answer
/// one by one, which takes longer a token.
pub(super) fn prompt_tokens(plan: &StepPlan<'_>) -> u64 {
    let of = |most: u64| -> u64 {
        let scheduled = plan.requests.iter().map(|request| request.scheduled);
        scheduled.filter(|tokens| *tokens >= most).sum()
    };
    let all = of(1);
    if of(2) >= all.div_ceil(2) { all } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_store_is_declined_but_tried_again_and_taken_when_it_is_fast() {
        let mut payoff = Payoff::default();
        assert!(payoff.pays(u64::MAX, 1), "nothing is known");
        for _ in 0..WARM_UP {
            payoff.note_load(1_000, 1_000_000);
            payoff.note_compute(100, 1_000_000);
        }
        payoff.note_load(0, 5);
        payoff.note_compute(7, 0);
        assert!(payoff.pays(1_000, 100), "as fast as computing");
        let taken = (0..160).filter(|_| payoff.pays(2_000, 100)).count();
        assert_eq!(taken, 10, "one in sixteen");
        for _ in 0..20 {
            payoff.note_load(1_000_000, 1_000_000);
        }
        assert!((0..100).all(|_| payoff.pays(2_000, 100)));
    }
}
