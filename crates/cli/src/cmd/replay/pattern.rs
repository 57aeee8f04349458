//! The bytes that a cache entry must hold.
//!
//! The content of (hash, layer, entry) is a pseudo-random stream that anyone can make again from those
//! three numbers, at several gigabytes a second, from any word on. Two entries never share a stream,
//! so a block in the wrong place, an entry of another layer or a byte of an earlier tenant of the same
//! memory shows up as a difference, whatever it was.

/// Spreads neighbouring numbers over all 64 bits (the finaliser of `SplitMix64`).
const fn spread(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const WORD: usize = size_of::<u64>();

/// The content of one cache entry of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    base: u64,
}

impl Pattern {
    /// The content of entry `entry` of layer `layer` in the block named `hash`.
    pub(crate) fn new(hash: u64, layer: u32, entry: u32) -> Self {
        let place = u64::from(layer) << 32 | u64::from(entry);
        let base = spread(spread(hash.wrapping_add(GOLDEN)) ^ spread(place.wrapping_mul(GOLDEN)));
        Self { base }
    }

    /// The word with this index: bytes `8 × index` to `8 × index + 8`, little-endian.
    fn word(self, index: u64) -> u64 {
        // One multiplication a word: enough to make every byte depend on the index, and fast.
        let x = self.base.wrapping_add(index.wrapping_mul(GOLDEN));
        (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }

    /// Writes the bytes from `8 × first_word` on.
    pub(crate) fn fill(self, first_word: u64, out: &mut [u8]) {
        let (words, tail) = out.as_chunks_mut::<WORD>();
        let mut index = first_word;
        for word in words {
            *word = self.word(index).to_le_bytes();
            index += 1;
        }
        let last = self.word(index).to_le_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }

    /// Whether `bytes` are those from `8 × first_word` on: every byte is compared.
    pub(crate) fn matches(self, first_word: u64, bytes: &[u8]) -> bool {
        let (words, tail) = bytes.as_chunks::<WORD>();
        let mut index = first_word;
        let mut difference = 0;
        for word in words {
            difference |= u64::from_le_bytes(*word) ^ self.word(index);
            index += 1;
        }
        let last = self.word(index).to_le_bytes();
        difference == 0 && tail == &last[..tail.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(pattern: Pattern, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        pattern.fill(0, &mut out);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_was_filled_matches_and_any_changed_byte_does_not(
            hash: u64, layer in 0u32..100, entry in 0u32..8,
            len in 1usize..600, at: prop::sample::Index, flip in 1u8..,
        ) {
            let pattern = Pattern::new(hash, layer, entry);
            let mut content = bytes(pattern, len);
            prop_assert!(pattern.matches(0, &content));
            content[at.index(len)] ^= flip;
            prop_assert!(!pattern.matches(0, &content));
        }

        #[test]
        fn pieces_add_up_to_the_whole(hash: u64, words in 1usize..64, cut in 0usize..64, tail in 0usize..8) {
            let pattern = Pattern::new(hash, 3, 1);
            let len = words * WORD + tail;
            let cut = cut.min(words);
            let mut pieces = vec![0; len];
            let (head, rest) = pieces.split_at_mut(cut * WORD);
            pattern.fill(0, head);
            pattern.fill(cut as u64, rest);
            prop_assert_eq!(&pieces, &bytes(pattern, len));
            prop_assert!(pattern.matches(cut as u64, &pieces[cut * WORD..]));
        }

        #[test]
        fn no_two_places_hold_the_same(hash in 0u64..1000, layer in 0u32..64, entry in 0u32..4) {
            let here = bytes(Pattern::new(hash, layer, entry), 64);
            for other in [
                Pattern::new(hash + 1, layer, entry),
                Pattern::new(hash, layer + 1, entry),
                Pattern::new(hash, layer, entry + 1),
                Pattern::new(u64::from(layer), u32::try_from(hash).unwrap(), entry),
            ] {
                if other != Pattern::new(hash, layer, entry) {
                    prop_assert_ne!(&here, &bytes(other, 64));
                }
            }
        }
    }

    #[test]
    fn the_content_is_the_same_in_every_process() {
        // Workers of different builds check each other's bytes: these values never change.
        assert_eq!(Pattern::new(7, 3, 1).word(5), 0x8c1b_ffba_81f0_257c);
        assert_eq!(
            bytes(Pattern::new(0, 0, 0), 8),
            [0xdb, 0xee, 0x9e, 0x35, 0xdf, 0x64, 0xf3, 0x4e]
        );
    }
}
