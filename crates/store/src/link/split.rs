//! Cutting a batch into messages.
//!
//! A batch of any size is accepted; what exceeds one message goes in several, one after the other, and
//! the answers are joined in order. The limits lie under what the master takes in one message.

use std::ops::Range;

use layercake_protocol::convert::{MAX_KEYS_PER_REQUEST, MAX_MESSAGE_BYTES};

/// The most keys in one message: few enough that a message is worked on in milliseconds, so that the
/// deadline of a call and the fairness between clients don't depend on the size of a batch.
pub(super) const MAX_KEYS: usize = 16_384;

/// The most bytes of entries in one message.
pub(super) const MAX_BYTES: usize = 8 << 20;

const _: () = assert!(MAX_KEYS <= MAX_KEYS_PER_REQUEST && MAX_BYTES * 2 <= MAX_MESSAGE_BYTES);

/// The parts of a batch, as index ranges: in order, without gaps, none empty. `size` is what an entry
/// takes in a message, in bytes; one that exceeds the limit alone stands alone.
pub(super) fn parts<T>(
    entries: &[T],
    size: impl Fn(&T) -> usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let mut bytes = 0_usize;
        let count = entries[start..]
            .iter()
            .take(MAX_KEYS)
            .take_while(|entry| {
                bytes = bytes.saturating_add(size(entry));
                bytes <= MAX_BYTES
            })
            .count();
        let end = entries.len().min(start + count.max(1));
        let part = start..end;
        start = end;
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn parts_cover_the_batch_in_order_and_keep_to_the_limits(
            sizes in proptest::collection::vec(
                prop_oneof![1_usize..200, 60_000_usize..70_000, MAX_BYTES - 2..MAX_BYTES + 2],
                0..300,
            ),
            many in 0_usize..40_000,
        ) {
            let mut sizes = sizes;
            sizes.extend(std::iter::repeat_n(1, many));
            let mut next = 0;
            for part in parts(&sizes, |size| *size) {
                prop_assert_eq!(part.start, next);
                prop_assert!(!part.is_empty() && part.len() <= MAX_KEYS);
                let bytes: usize = sizes[part.clone()].iter().sum();
                prop_assert!(bytes <= MAX_BYTES || part.len() == 1);
                // Greedy: the next entry would not have fitted.
                if let Some(following) = sizes.get(part.end) {
                    prop_assert!(part.len() == MAX_KEYS || bytes + following > MAX_BYTES);
                }
                next = part.end;
            }
            prop_assert_eq!(next, sizes.len());
        }
    }
}
