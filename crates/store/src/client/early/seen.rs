//! What a reader has seen of a table. Pure.
//!
//! Records come in the order of their slots, but for those under way side by side, so a look takes in the slots that were
//! not seen yet and a few more. A slot may stay empty for ever, where a record could not be published. Records that overlap
//! earlier ones are no writer's and count for nothing.

use std::collections::BTreeSet;
use std::ops::Range;

use layercake_protocol::early::EarlyRecord;
use layercake_protocol::header::Row;
use layercake_protocol::range::{ByteRange, RangeSet};

/// Slots that a look takes in behind the last that was seen.
const AHEAD: u32 = 16;

#[derive(Debug)]
pub(super) struct Seen {
    slots: u32,
    /// All slots before this one were seen.
    first_missing: u32,
    /// And these behind it.
    beyond: BTreeSet<u32>,
    /// Ascending, disjoint, each with its checksum.
    rows: Vec<Row>,
}

impl Seen {
    pub(super) fn new(slots: u32) -> Self {
        Self {
            slots,
            first_missing: 0,
            beyond: BTreeSet::new(),
            rows: Vec::new(),
        }
    }

    /// The slots to look at next; empty when all were seen.
    pub(super) fn window(&self) -> Range<u32> {
        let next = self
            .beyond
            .last()
            .map_or(self.first_missing, |last| last + 1);
        self.first_missing..next.saturating_add(AHEAD).min(self.slots)
    }

    /// Takes the record of a slot in. `true`: it is news.
    pub(super) fn take(&mut self, slot: u32, record: EarlyRecord) -> bool {
        if slot < self.first_missing || !self.beyond.insert(slot) {
            return false;
        }
        while self.beyond.remove(&self.first_missing) {
            self.first_missing += 1;
        }
        let at = self
            .rows
            .partition_point(|row| row.range.end() <= record.range.start());
        let free = self
            .rows
            .get(at)
            .is_none_or(|row| record.range.end() <= row.range.start());
        if free {
            self.rows.insert(at, record.into());
        }
        free
    }

    /// Whether any record was seen.
    pub(super) fn any(&self) -> bool {
        !self.rows.is_empty()
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Whether these ranges together are whole rows, so that every byte of them can be checked.
    pub(super) fn covers(&self, wanted: &[ByteRange]) -> bool {
        let mut all = RangeSet::new();
        for range in wanted {
            all.insert(*range);
        }
        all.iter().all(|range| self.tiled(range))
    }

    fn tiled(&self, range: ByteRange) -> bool {
        let first = self
            .rows
            .partition_point(|row| row.range.end() <= range.start());
        let mut at = range.start();
        for row in &self.rows[first..] {
            if row.range.start() != at || at == range.end() {
                break;
            }
            at = row.range.end();
        }
        at == range.end()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn record(start: u64, len: u64) -> EarlyRecord {
        EarlyRecord {
            range: ByteRange::new(start, len).expect("small"),
            crc32c: 0,
        }
    }

    proptest! {
        /// A reader that looks at each window, in whatever order records land, sees all that there are.
        #[test]
        fn windows_miss_nothing(
            slots in 1_u32..80,
            landing in prop::collection::vec((0_u32..80, any::<bool>()), 0..120),
        ) {
            let mut seen = Seen::new(slots);
            let mut landed = BTreeMap::new();
            for (slot, look) in landing {
                if slot < slots {
                    landed.insert(slot, record(u64::from(slot) * 10, 10));
                }
                if look {
                    for slot in seen.window() {
                        let Some(record) = landed.get(&slot) else { continue };
                        seen.take(slot, *record);
                    }
                }
            }
            // However far apart they are: each look that brings something leads further.
            loop {
                let window = seen.window();
                prop_assert!(window.end <= slots);
                let news = window.clone().filter(|slot| {
                    landed.get(slot).is_some_and(|record| seen.take(*slot, *record))
                });
                if news.count() == 0 {
                    break;
                }
            }
            let end = seen.window().end;
            let expected: Vec<Row> =
                landed.range(..end).map(|(_, record)| (*record).into()).collect();
            prop_assert_eq!(seen.rows(), expected);
            let gap = landed.range(end..).next();
            prop_assert!(gap.is_none_or(|(slot, _)| *slot >= end), "only behind a long gap");
        }

        /// What is covered is what whole rows tile, against a naive look at every byte.
        #[test]
        fn covered_is_what_whole_rows_make_up(
            rows in prop::collection::vec((0_u64..60, 1_u64..12), 0..12),
            wanted in prop::collection::vec((0_u64..60, 1_u64..20), 1..4),
        ) {
            let mut seen = Seen::new(64);
            let mut owner = [None; 80];
            for (slot, (start, len)) in rows.into_iter().enumerate() {
                let bytes = usize::try_from(start).expect("small")
                    ..usize::try_from(start + len).expect("small");
                let free = owner[bytes.clone()].iter().all(Option::is_none);
                let number = u32::try_from(slot).expect("few");
                prop_assert_eq!(seen.take(number, record(start, len)), free);
                if free {
                    owner[bytes].fill(Some(slot));
                }
            }
            let wanted: Vec<ByteRange> =
                wanted.iter().map(|(start, len)| record(*start, *len).range).collect();
            let inside = |at: usize| {
                let at = u64::try_from(at).expect("small");
                wanted.iter().any(|range| range.contains_offset(at))
            };
            let whole = |slot| (0..80).filter(|at| owner[*at] == Some(slot)).all(inside);
            let expected = (0..80).filter(|at| inside(*at)).all(|at| owner[at].is_some_and(whole));
            prop_assert_eq!(seen.covers(&wanted), expected);
        }
    }

    #[test]
    fn a_slot_counts_once_and_a_record_over_another_never() {
        let mut seen = Seen::new(20);
        assert_eq!(seen.window(), 0..16);
        assert!(!seen.any());
        assert!(seen.take(3, record(30, 10)));
        assert!(!seen.take(3, record(50, 10)));
        assert_eq!(seen.window(), 0..20, "up to the table's end");
        assert!(!seen.take(0, record(35, 10)), "no writer publishes that");
        assert_eq!(seen.rows(), [record(30, 10).into()]);
        assert_eq!(seen.window().start, 1);
        (1..20).filter(|slot| *slot != 3).for_each(|slot| {
            seen.take(slot, record(u64::from(slot) * 10, 10));
        });
        assert!(seen.window().is_empty());
    }
}
