//! The allocator against a naive model, and how well it uses a segment.

use proptest::prelude::*;

use super::*;

/// One flag per granule: slow and obviously right.
struct Model {
    taken: Vec<bool>,
    pieces: Vec<(u64, u64)>,
}

impl Model {
    fn new(len: u64) -> Self {
        Self {
            taken: vec![false; usize::try_from(len / GRANULE).unwrap()],
            pieces: Vec::new(),
        }
    }

    fn span(offset: u64, len: u64) -> std::ops::Range<usize> {
        let first = usize::try_from(offset / GRANULE).unwrap();
        first..first + usize::try_from(len.div_ceil(GRANULE)).unwrap()
    }

    fn is_free(&self, offset: u64, len: u64) -> bool {
        self.taken[Self::span(offset, len)].iter().all(|t| !t)
    }

    fn take(&mut self, offset: u64, len: u64) {
        assert!(offset.is_multiple_of(GRANULE));
        assert!(self.is_free(offset, len), "overlap at {offset}");
        self.taken[Self::span(offset, len)].fill(true);
        self.pieces.push((offset, len));
    }

    fn give(&mut self, index: usize) -> (u64, u64) {
        let (offset, len) = self.pieces.swap_remove(index);
        self.taken[Self::span(offset, len)].fill(false);
        (offset, len)
    }

    fn largest_free(&self) -> u64 {
        let holes = self.taken.split(|taken| *taken);
        holes.map(<[bool]>::len).max().unwrap_or(0) as u64 * GRANULE
    }

    fn usage(&self) -> Usage {
        Usage {
            capacity: self.taken.len() as u64 * GRANULE,
            used: self.taken.iter().filter(|taken| **taken).count() as u64 * GRANULE,
            requested: self.pieces.iter().map(|(_, len)| len).sum(),
            pieces: self.pieces.len() as u64,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(prop::sample::Index),
    Claim(prop::sample::Index, u64),
    FreeWrongly(prop::sample::Index, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![
        4 => 1_u64..20 * GRANULE,
        2 => prop_oneof![Just(161 * GRANULE), Just(799 * GRANULE)],
        1 => 4000 * GRANULE..9000 * GRANULE,
    ];
    prop_oneof![
        5 => len.clone().prop_map(Step::Allocate),
        4 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => (any::<prop::sample::Index>(), len.clone()).prop_map(|(i, l)| Step::Claim(i, l)),
        1 => (any::<prop::sample::Index>(), len).prop_map(|(i, l)| Step::FreeWrongly(i, l)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn agrees_with_a_model_of_single_granules(
        granules in 1_u64..20_000,
        tail in 0..GRANULE,
        steps in prop::collection::vec(step(), 1..160),
    ) {
        let len = granules * GRANULE + tail;
        let mut allocator = BinAllocator::new(len).unwrap();
        let mut model = Model::new(len);
        for step in steps {
            match step {
                Step::Allocate(len) => match allocator.allocate(len) {
                    Some(offset) => model.take(offset, len),
                    None => prop_assert!(model.largest_free() < len, "refused what fits"),
                },
                Step::Free(index) if !model.pieces.is_empty() => {
                    let (offset, len) = model.give(index.index(model.pieces.len()));
                    prop_assert_eq!(allocator.free(offset, len), Ok(()));
                }
                Step::Free(_) => {}
                Step::Claim(index, len) => {
                    let offset = index.index(model.taken.len()) as u64 * GRANULE;
                    let fits = offset + len <= granules * GRANULE;
                    let free = fits && model.is_free(offset, len);
                    prop_assert_eq!(allocator.claim(offset, len).is_ok(), free);
                    if free {
                        model.take(offset, len);
                    }
                }
                // A piece that is free in part, or reaches out of the segment, is not accepted.
                Step::FreeWrongly(index, len) => {
                    let offset = index.index(model.taken.len()) as u64 * GRANULE;
                    let inside = offset + len <= granules * GRANULE;
                    if !inside || model.taken[Model::span(offset, len)].iter().any(|t| !t) {
                        prop_assert!(allocator.free(offset, len).is_err());
                    }
                }
            }
            prop_assert_eq!(allocator.largest_free(), model.largest_free());
            prop_assert_eq!(allocator.usage(), model.usage());
        }
        // All holes join up again.
        while !model.pieces.is_empty() {
            let (offset, len) = model.give(model.pieces.len() / 2);
            prop_assert_eq!(allocator.free(offset, len), Ok(()));
        }
        prop_assert_eq!(allocator.largest_free(), granules * GRANULE);
        prop_assert_eq!(allocator.usage().used, 0);
    }

    #[test]
    fn what_was_handed_out_can_be_claimed_by_a_successor(
        lens in prop::collection::vec(1_u64..40 * GRANULE, 1..60),
    ) {
        let len = 1024 * GRANULE;
        let mut first = BinAllocator::new(len).unwrap();
        let pieces: Vec<_> = lens
            .into_iter()
            .filter_map(|len| Some((first.allocate(len)?, len)))
            .collect();
        let mut second = BinAllocator::new(len).unwrap();
        for (offset, len) in pieces.iter().rev() {
            prop_assert_eq!(second.claim(*offset, *len), Ok(()));
        }
        prop_assert_eq!(second.usage(), first.usage());
        prop_assert_eq!(second.largest_free(), first.largest_free());
    }
}

#[test]
fn a_segment_without_a_whole_granule_or_beyond_the_limit_is_refused() {
    assert!(BinAllocator::new(0).is_none());
    assert!(BinAllocator::new(GRANULE - 1).is_none());
    assert!(BinAllocator::new(BinAllocator::MAX_LEN + 1).is_none());
    assert_eq!(BinAllocator::new(GRANULE).unwrap().largest_free(), GRANULE);
}

#[test]
fn impossible_lengths_are_no_piece() {
    let mut allocator = BinAllocator::new(8 * GRANULE).unwrap();
    assert_eq!(allocator.allocate(0), None);
    assert_eq!(allocator.allocate(u64::MAX), None);
    assert!(allocator.claim(GRANULE, u64::MAX).is_err());
    assert!(allocator.claim(1, 1).is_err());
    assert!(allocator.free(0, 0).is_err());
    assert_eq!(allocator.usage().used, 0);
}

const LARGE: u64 = 3_271_557; // 3.12 MiB
const SMALL: u64 = 643 << 10;

/// Alternates both sizes until one does not fit, and returns the pieces of each.
fn fill(allocator: &mut BinAllocator) -> [Vec<u64>; 2] {
    let mut pieces = [Vec::new(), Vec::new()];
    for turn in 0.. {
        let (kind, len) = [(0, LARGE), (1, SMALL)][turn % 2];
        match allocator.allocate(len) {
            Some(offset) => pieces[kind].push(offset),
            None => break,
        }
    }
    pieces
}

#[test]
fn freed_small_pieces_join_to_room_for_large_ones() {
    let mut allocator = BinAllocator::new(152 << 20).unwrap();
    let [_, small] = fill(&mut allocator);
    for offset in small {
        allocator.free(offset, SMALL).unwrap();
    }
    while allocator.allocate(LARGE).is_some() {}
    let usage = allocator.usage();
    let share = usage.requested as f64 / usage.capacity as f64;
    assert!(share >= 0.95, "only {share:.3} in use at the first refusal");
    assert!(allocator.largest_free() < LARGE);
}

#[test]
fn freed_large_pieces_are_refilled_by_either_size() {
    for refill in [LARGE, SMALL] {
        let mut allocator = BinAllocator::new(152 << 20).unwrap();
        let [large, _] = fill(&mut allocator);
        for offset in large {
            allocator.free(offset, LARGE).unwrap();
        }
        while allocator.allocate(refill).is_some() {}
        let usage = allocator.usage();
        let share = usage.requested as f64 / usage.capacity as f64;
        assert!(
            share >= 0.95,
            "only {share:.3} in use when refilled by {refill}"
        );
    }
}
