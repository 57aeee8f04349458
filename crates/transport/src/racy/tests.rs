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
        len in lengths(), from in 0..70_usize, to in 0..70_usize, seed: u8, way in 0..3_u8, past: bool,
        next in proptest::option::of(0..700_usize),
    ) {
        let source = pattern(from + len + 70, seed);
        let before = pattern(to + len + 70, !seed);
        let mut target = before.clone();
        let ends = (
            Target::from_slice(&mut target).part(to, len).expect("inside"),
            Source::from_slice(&source).part(from, len).expect("inside"),
        );
        // What comes next may lie anywhere, also behind the end of this one or in the middle of it.
        let next = next.map(|from| Source::from_slice(&source[from.min(source.len())..]));
        let copies = Copies { past_cache: past };
        match way {
            0 => copy(ends.0, ends.1),
            1 => copies.copy(ends.0, ends.1, next),
            _ => {
                let crc = copies.copy_crc(ends.0, ends.1, next);
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
        let (mut summed, mut start) = (0, 0);
        for end in ends {
            summed = crc(Source::from_slice(&bytes[start..end]), summed);
            start = end;
        }
        prop_assert_eq!(summed, crc32c::crc32c(&bytes));
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
        for len in [
            0,
            1,
            511,
            512,
            513,
            1024,
            4096,
            4700,
            9000,
            32 << 10,
            50_001,
        ] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (33, 64), (5, 6)] {
                let expected = &source[from..from + len];
                // SAFETY: the range has `len` bytes, and the loops are supported.
                let summed = unsafe { loops.sum(expected.as_ptr(), len, 7) };
                assert_eq!(
                    summed,
                    crc32c::crc32c_append(7, expected),
                    "{len} bytes from {from}"
                );
                let next = Some(Source::from_slice(&source));
                for way in 0..5 {
                    target.fill(0);
                    let (start, end) = (target[to..].as_mut_ptr(), expected.as_ptr());
                    let crc = match way {
                        // SAFETY: both ranges have `len` bytes, and the loops are supported.
                        0 => Some(unsafe { loops.copy(start, end, len) }),
                        // SAFETY: as above.
                        1 => Some(unsafe { loops.copy_past(start, end, len, None) }),
                        // SAFETY: as above.
                        2 => Some(unsafe { loops.copy_past(start, end, len, next) }),
                        _ => {
                            let next = next.filter(|_| way == 4);
                            // SAFETY: as above.
                            unsafe { loops.stream(start, end, len, next) };
                            None
                        }
                    };
                    let case = format!("{len} bytes from {from} to {to}, by way {way}");
                    assert!(
                        crc.is_none_or(|crc| crc == crc32c::crc32c(expected)),
                        "{case}"
                    );
                    assert_eq!(&target[to..to + len], expected, "{case}");
                    let mut outside = target[..to].iter().chain(&target[to + len..]);
                    assert!(outside.all(|byte| *byte == 0), "{case}");
                }
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
            let end = Target::from_slice(&mut target[..part]);
            let crc = Copies::of(part as u64).copy_crc(end, source, None);
            assert_eq!(crc, crc32c::crc32c(&target[..part]));
        }
        stop.store(true, Ordering::Relaxed);
    });
}
