//! Cuts a batch into units of bounded size. Pure.

/// The most bytes of one unit. Small enough for others not to wait long (to share the threads, or for
/// a region to be withdrawn), large enough for its bookkeeping not to count.
pub(crate) const UNIT_BYTES: u64 = 256 << 10;

/// The most parts of one unit; a vectored system call takes them all.
pub(crate) const UNIT_PARTS: usize = 512;

/// A contiguous part of one piece: all of it, unless the piece is larger than a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The piece's index in its batch.
    pub(crate) piece: usize,
    /// First byte, counted from the piece's start.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

/// How far a list of pieces was cut.
#[derive(Debug, Default)]
pub(super) struct Cutter {
    position: usize,
    offset: u64,
}

impl Cutter {
    /// Fills `unit` with the next unit; leaves it empty when all is cut. The list has `count`
    /// positions; `piece_at` tells the piece there and its length, or none to skip it.
    pub(super) fn next_unit(
        &mut self,
        count: usize,
        piece_at: impl Fn(usize) -> Option<(usize, u64)>,
        unit: &mut Vec<Part>,
    ) {
        unit.clear();
        let mut room = UNIT_BYTES;
        while room > 0 && unit.len() < UNIT_PARTS && self.position < count {
            let left = piece_at(self.position).map(|(piece, len)| (piece, len - self.offset));
            let Some((piece, left)) = left.filter(|(_, left)| *left > 0) else {
                self.position += 1;
                self.offset = 0;
                continue;
            };
            if left > room && !unit.is_empty() {
                break;
            }
            let len = left.min(room);
            unit.push(Part {
                piece,
                offset: self.offset,
                len,
            });
            room -= len;
            self.offset += len;
            if len == left {
                self.position += 1;
                self.offset = 0;
            }
        }
    }

    /// The position of the first piece that is not wholly in a unit yet; no units are cut any more.
    pub(super) fn stop(&mut self, count: usize) -> usize {
        std::mem::replace(&mut self.position, count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn units_cover_every_byte_once_and_in_order(
            pieces in vec(
                (prop_oneof![1..5000_u64, 1..4 * UNIT_BYTES, Just(UNIT_BYTES), Just(1)], any::<bool>()),
                0..700,
            ),
        ) {
            let mut covered = vec![0; pieces.len()];
            let mut cutter = Cutter::default();
            let mut unit = Vec::new();
            loop {
                let piece_at = |at: usize| pieces[at].1.then_some((at, pieces[at].0));
                cutter.next_unit(pieces.len(), piece_at, &mut unit);
                if unit.is_empty() {
                    break;
                }
                prop_assert!(unit.len() <= UNIT_PARTS);
                prop_assert!(unit.iter().map(|part| part.len).sum::<u64>() <= UNIT_BYTES);
                for part in &unit {
                    prop_assert!(part.len > 0);
                    prop_assert_eq!(covered[part.piece], part.offset);
                    covered[part.piece] += part.len;
                    // Only what does not fit into one unit is split.
                    let len = pieces[part.piece].0;
                    prop_assert!(len > UNIT_BYTES || part.len == len);
                }
            }
            let wanted: Vec<_> = pieces.iter().map(|(len, take)| if *take { *len } else { 0 }).collect();
            prop_assert_eq!(covered, wanted);
            prop_assert_eq!(cutter.stop(pieces.len()), pieces.len());
        }
    }
}
