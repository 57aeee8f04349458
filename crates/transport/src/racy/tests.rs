use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Bytes that differ at every place, so that a shifted or repeated copy shows.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    })
    .take(len)
    .collect()
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..700_usize,
        4000..4200_usize,
        32_000..34_000_usize,
        Just(100_000)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn a_copy_moves_its_bytes_and_no_others(
        len in lengths(), from in 0..70_usize, to in 0..70_usize, seed: u8, way in 0..3_u8,
    ) {
        let source = pattern(from + len + 70, seed);
        let before = pattern(to + len + 70, !seed);
        let mut target = before.clone();
        let ends = (
            Target::from_slice(&mut target).part(to, len).expect("inside"),
            Source::from_slice(&source).part(from, len).expect("inside"),
        );
        match way {
            0 => copy(ends.0, ends.1),
            1 => copy_past(ends.0, ends.1),
            _ => {
                let crc = copy_crc(ends.0, ends.1, 0);
                prop_assert_eq!(crc, crc32c::crc32c(&source[from..from + len]));
            }
        }
        prop_assert_eq!(&target[to..to + len], &source[from..from + len]);
        prop_assert_eq!(&target[..to], &before[..to]);
        prop_assert_eq!(&target[to + len..], &before[to + len..]);
    }

    #[test]
    fn a_checksum_can_be_taken_in_parts(cuts in vec(0..70_000_usize, 0..4), seed: u8) {
        let bytes = pattern(70_000, seed);
        let mut ends = cuts;
        ends.push(bytes.len());
        ends.sort_unstable();
        let (mut summed, mut copied, mut start) = (0, 0, 0);
        let mut target = vec![0; bytes.len()];
        for end in ends {
            let part = Source::from_slice(&bytes[start..end]);
            summed = crc(part, summed);
            copied = copy_crc(Target::from_slice(&mut target[start..end]), part, copied);
            start = end;
        }
        let whole = crc32c::crc32c(&bytes);
        prop_assert_eq!((summed, copied), (whole, whole));
        prop_assert!(target == bytes);
    }

    #[test]
    fn the_portable_routines_agree(len in lengths(), from in 0..9_usize, to in 0..9_usize, seed: u8) {
        let source = pattern(from + len, seed);
        let part = &source[from..];
        let mut target = vec![0; to + len];
        // SAFETY: both ranges have `len` bytes.
        unsafe { copy_volatile(target[to..].as_mut_ptr(), part.as_ptr(), len) };
        prop_assert_eq!(&target[to..], part);
        target.fill(0);
        // SAFETY: both ranges have `len` bytes.
        let crc = unsafe { bounce::<CHUNK>(Some(target[to..].as_mut_ptr()), part.as_ptr(), len, 0) };
        prop_assert_eq!(crc, crc32c::crc32c(part));
        prop_assert_eq!(&target[to..], part);
    }
}

/// Only the widest loops are used otherwise, so all that the processor has are tried here.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[test]
fn loops_of_every_width_agree() {
    let source = pattern(70_000, 3);
    let mut target = vec![0; source.len()];
    for loops in fold::all_supported() {
        for len in [0, 1, 511, 512, 513, 1024, 9000, 32 << 10, 50_001] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (33, 64), (5, 6)] {
                let expected = &source[from..from + len];
                target.fill(0);
                // SAFETY: both ranges have `len` bytes, and the loops are supported.
                let copied = unsafe {
                    loops.copy(target[to..to + len].as_mut_ptr(), expected.as_ptr(), len, 7)
                };
                // SAFETY: as above.
                let summed = unsafe { loops.sum(expected.as_ptr(), len, 7) };
                let crc = crc32c::crc32c_append(7, expected);
                assert_eq!(
                    (copied, summed),
                    (crc, crc),
                    "{len} bytes from {from} to {to}"
                );
                assert_eq!(&target[to..to + len], expected);
                assert!(
                    target[..to]
                        .iter()
                        .chain(&target[to + len..])
                        .all(|byte| *byte == 0)
                );
                target.fill(0);
                // SAFETY: as above.
                unsafe { loops.stream(target[to..].as_mut_ptr(), expected.as_ptr(), len) };
                assert_eq!(&target[to..to + len], expected);
                assert!(target[to + len..].iter().all(|byte| *byte == 0));
            }
        }
    }
}

#[test]
fn parts_outside_are_none() {
    let bytes = [0; 8];
    let source = Source::from_slice(&bytes);
    assert!(source.part(8, 0).is_some());
    assert!(source.part(8, 1).is_none());
    assert!(source.part(usize::MAX, 2).is_none());
}

/// The checksum describes the bytes that arrived, even while somebody rewrites the source.
#[test]
fn a_racing_writer_makes_mixtures_but_never_a_wrong_checksum() {
    let words: Vec<AtomicU64> = (0..16 << 10).map(|_| AtomicU64::new(0)).collect();
    let len = words.len() * 8;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                value = value.wrapping_add(0x0101_0101_0101_0101);
                for word in &words {
                    word.store(value, Ordering::Relaxed);
                }
            }
        });
        let mut target = vec![0_u8; len];
        for round in 0..400 {
            // SAFETY: the words live to the end of the test and are never borrowed mutably.
            let source = unsafe { Source::new(words.as_ptr().cast(), len) };
            // Below and above the size from which stores go past the cache.
            let part = if round % 2 == 0 { len } else { 20_000 };
            let source = source.part(0, part).expect("inside");
            let crc = copy_crc(Target::from_slice(&mut target[..part]), source, 0);
            assert_eq!(crc, crc32c::crc32c(&target[..part]));
        }
        stop.store(true, Ordering::Relaxed);
    });
}
