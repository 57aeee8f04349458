//! One question about a request's prefix, asked in windows (W9, C4). Pure.
//!
//! A block counts only if every storing rank's object of it is readable, and only as part of the
//! prefix that begins with the first block. Keys are asked for a window of blocks at a time, all ranks
//! of a block together; behind the first block that is not whole nothing is asked any more, so the
//! number of keys is bounded by the hit and one window. A question that fails ends the look-up, and what was answered
//! before it counts.

use std::num::NonZeroUsize;
use std::ops::Range;

use layercake_protocol::ids::Epoch;

use crate::stats::MissReason;

/// What the store says of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// Complete, with a live replica.
    Readable,
    /// Reserved by a writer that has not finished.
    Reserved,
    /// Not there, or out of reach.
    Absent,
}

/// What a look-up came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Blocks from the first on that are whole on every storing rank.
    pub blocks: usize,
    /// What the first key that is not readable is; `None` if all are.
    pub missing: Option<KeyState>,
    /// Why nothing is known of what follows, if the look-up did not come to its end.
    pub failure: Option<MissReason>,
    /// The epoch under which the keys were touched.
    pub epoch: Epoch,
    /// Keys asked for.
    pub keys_queried: u64,
}

impl Found {
    /// Nothing was found out.
    pub fn failed(reason: MissReason) -> Self {
        Self {
            blocks: 0,
            missing: None,
            failure: Some(reason),
            epoch: Epoch::UNSET,
            keys_queried: 0,
        }
    }
}

/// A look-up that is under way.
#[derive(Clone, Debug)]
pub struct Lookup {
    blocks: usize,
    ranks: usize,
    window: NonZeroUsize,
    found: Found,
}

impl Lookup {
    /// A question about `blocks` blocks of `ranks` storing ranks, `window` blocks at a time.
    pub fn new(blocks: usize, ranks: usize, window: NonZeroUsize) -> Self {
        Self {
            blocks,
            ranks,
            window,
            found: Found {
                blocks: 0,
                missing: None,
                failure: None,
                epoch: Epoch::UNSET,
                keys_queried: 0,
            },
        }
    }

    /// The keys to ask for next, as indices into the block-major list of keys; `None`: it is over.
    pub fn next(&self) -> Option<Range<usize>> {
        let start = self.found.blocks;
        let end = self.blocks.min(start.saturating_add(self.window.get()));
        let over = self.found.missing.is_some() || self.found.failure.is_some();
        let open = !over && start < end && self.ranks > 0;
        open.then(|| start * self.ranks..end * self.ranks)
    }

    /// Epoch of the keys asked so far, for the next window.
    pub fn epoch(&self) -> Epoch {
        self.found.epoch
    }

    /// The answer to [`next`](Self::next). An answer that is too short counts as absent from there on;
    /// `queried` keys were looked at.
    pub fn answer(&mut self, states: &[KeyState], epoch: Epoch, queried: u64) {
        let Some(asked) = self.next() else {
            return;
        };
        self.found.keys_queried += queried;
        self.found.epoch = epoch;
        let missing = states
            .iter()
            .take(asked.len())
            .position(|state| *state != KeyState::Readable);
        let readable = missing.unwrap_or(states.len().min(asked.len()));
        self.found.blocks += readable / self.ranks;
        if readable < asked.len() {
            let state = states.get(readable).copied();
            self.found.missing = Some(state.unwrap_or(KeyState::Absent));
        }
    }

    /// The question was not answered, or not to its end: what was answered before counts, the rest is missed.
    pub fn fail(&mut self, reason: MissReason) {
        self.found.failure = Some(reason);
    }

    /// What it has come to.
    pub fn found(&self) -> Found {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state() -> impl Strategy<Value = KeyState> {
        prop_oneof![
            12 => Just(KeyState::Readable),
            1 => Just(KeyState::Reserved),
            1 => Just(KeyState::Absent),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        // contract: connector-6
        #[test]
        fn the_prefix_that_every_rank_has_for_a_bounded_number_of_keys(
            ranks in 1_usize..4,
            window in 1_usize..9,
            states in proptest::collection::vec(state(), 0..120),
            stops in any::<bool>(),
        ) {
            let blocks = states.len() / ranks;
            let states = &states[..blocks * ranks];
            let whole = |block: usize| {
                states[block * ranks..][..ranks].iter().all(|s| *s == KeyState::Readable)
            };
            let expected = (0..blocks).take_while(|block| whole(*block)).count();

            let window_size = NonZeroUsize::new(window).expect("above 0");
            let mut lookup = Lookup::new(blocks, ranks, window_size);
            let mut calls = 0;
            while let Some(keys) = lookup.next() {
                calls += 1;
                prop_assert!(calls <= blocks + 1, "it ends");
                let states = &states[keys.clone()];
                let first = states.iter().position(|s| *s != KeyState::Readable);
                // A master that stops at the first miss has looked at no more keys than that.
                let seen = first.map_or(states.len(), |at| at + 1);
                let answered = if stops { seen } else { states.len() };
                lookup.answer(&states[..answered], Epoch(7), answered as u64);
            }
            let found = lookup.found();
            prop_assert_eq!(found.blocks, expected);
            prop_assert_eq!(found.missing.is_none(), expected == blocks);
            let bound = (expected + window) * ranks;
            prop_assert!(found.keys_queried <= bound as u64, "{found:?}");
        }
    }

    #[test]
    fn a_short_answer_is_a_miss_and_nothing_shifts() {
        let mut lookup = Lookup::new(4, 2, NonZeroUsize::MIN.saturating_add(3));
        lookup.answer(&[KeyState::Readable; 3], Epoch(1), 8);
        assert_eq!(lookup.found().blocks, 1);
        assert_eq!(lookup.found().missing, Some(KeyState::Absent));
        assert_eq!(lookup.next(), None);
        lookup.answer(&[KeyState::Readable; 8], Epoch(2), 8);
        assert_eq!(
            lookup.found().blocks,
            1,
            "an answer to no question is dropped"
        );
    }
}
