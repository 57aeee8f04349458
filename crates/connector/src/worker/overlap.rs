//! Whether every layer has memory of its own. Pure.
//!
//! Saves of a layer are read, and loads of later ones written, while others compute: where two layers share bytes, one
//! would be stored as the other, with good checksums. So a registration in which any two blocks share a byte is
//! refused. Entries may well be interleaved: what counts are the blocks, not the span from the first to the last.

use crate::contract::CacheRegistration;
use crate::error::ConnectorError;

/// One entry's blocks: `len` bytes each, `stride` apart.
#[derive(Clone, Copy, Debug)]
struct Blocks<'a> {
    layer: u32,
    entry: &'a str,
    start: i128,
    stride: i128,
    len: i128,
}

/// Refuses caches of which two blocks share memory.
pub(super) fn check(caches: &CacheRegistration) -> Result<(), ConnectorError> {
    let mut all = Vec::new();
    for layer in &caches.layers {
        for entry in &layer.entries {
            all.push(Blocks {
                layer: layer.physical,
                entry: &entry.name,
                start: i128::try_from(entry.memory.addr()).unwrap_or(i128::MAX),
                stride: entry.stride.into(),
                len: entry.len.into(),
            });
        }
    }
    match shared(&mut all, caches.blocks.into()) {
        None => Ok(()),
        Some((one, other)) => Err(ConnectorError::Unsupported {
            setting: "memory of the registered caches",
            value: format!(
                "shared by blocks of entry {:?} of layer {} and of entry {:?} of layer {}",
                one.entry, one.layer, other.entry, other.layer
            ),
            accepted: "every block of every layer needs memory of its own",
        }),
    }
}

/// Two entries of `count` blocks each that share a byte; twice the same one: its own blocks do.
fn shared<'a>(all: &mut [Blocks<'a>], count: i128) -> Option<(Blocks<'a>, Blocks<'a>)> {
    let own = |one: &&Blocks<'_>| count > 1 && one.stride < one.len;
    if let Some(one) = all.iter().find(own) {
        return Some((*one, *one));
    }
    all.sort_unstable_by_key(|one| one.start);
    for (at, other) in all.iter().enumerate() {
        // Only what reaches beyond its start can meet it.
        let mut before = all[..at].iter();
        let meets = |one: &&Blocks<'_>| one.end(count) > other.start && one.meets(other, count);
        if let Some(one) = before.find(meets) {
            return Some((*one, *other));
        }
    }
    None
}

impl Blocks<'_> {
    fn end(&self, count: i128) -> i128 {
        self.start + self.stride * (count - 1) + self.len
    }

    /// Whether any of its blocks shares a byte with one of the other's.
    fn meets(&self, other: &Self, count: i128) -> bool {
        if self.stride == other.stride {
            // Only the distance between two blocks counts: from -(count - 1) up to count - 1 strides.
            return other.has_start_in(self.start - other.start, self.len, 1 - count, count - 1);
        }
        (0..count).any(|at| {
            let from = self.start + at * self.stride - other.start;
            other.has_start_in(from, self.len, 0, count - 1)
        })
    }

    /// Whether one of its blocks from the `first`th to the `last`th, counted from its start on, meets the `len` bytes at
    /// `from`. Of those that begin before these bytes' end, the last reaches furthest.
    fn has_start_in(&self, from: i128, len: i128, first: i128, last: i128) -> bool {
        let at = (from + len - 1).div_euclid(self.stride.max(1)).min(last);
        at >= first && at * self.stride + self.len > from
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks(layer: u32, start: i128, stride: i128, len: i128) -> Blocks<'static> {
        Blocks {
            layer,
            entry: "k",
            start,
            stride,
            len,
        }
    }

    #[test]
    fn interleaved_layers_are_apart_and_shared_ones_are_found() {
        // Two layers, block by block in one buffer.
        let mut apart = [blocks(0, 1000, 64, 32), blocks(1, 1032, 64, 32)];
        assert!(shared(&mut apart, 100).is_none());
        let mut closer = [blocks(0, 1000, 64, 33), blocks(1, 1032, 64, 32)];
        let (one, other) = shared(&mut closer, 100).expect("a byte");
        assert_eq!((one.layer, other.layer), (0, 1));
        let mut same = [blocks(0, 0, 8, 8), blocks(4, 800, 8, 8), blocks(7, 0, 8, 8)];
        let (one, other) = shared(&mut same, 100).expect("one buffer for two");
        assert_eq!((one.layer, other.layer), (0, 7));
        let mut dense = [blocks(0, 0, 7, 8)];
        assert!(shared(&mut dense, 1).is_none());
        assert!(shared(&mut dense, 2).is_some(), "its own blocks");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        #[test]
        fn what_is_found_is_what_counting_bytes_finds(
            entries in proptest::collection::vec((0_i128..60, 1_i128..24, 1_i128..9), 1..4),
            count in 1_i128..6,
        ) {
            let mut all: Vec<_> = entries
                .iter()
                .zip(0..)
                .map(|((start, stride, len), layer)| blocks(layer, *start, *stride, *len))
                .collect();
            let mut bytes = std::collections::HashSet::new();
            let mut twice = false;
            for one in &all {
                for at in 0..count {
                    let start = one.start + at * one.stride;
                    for byte in start..start + one.len {
                        twice |= !bytes.insert(byte);
                    }
                }
            }
            prop_assert_eq!(shared(&mut all, count).is_some(), twice);
        }
    }
}
