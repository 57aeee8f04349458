use layercake_protocol::header::{Crcs, Row, WrittenRanges};
use layercake_protocol::range::{ByteRange, RangeSet};
use proptest::prelude::*;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::from_bounds(start, end).expect("ordered")
}

fn rows(written: &WrittenRanges) -> Vec<(u64, u64, Option<u32>)> {
    let rows = written.rows();
    assert_eq!(rows.len(), written.len());
    assert_eq!(rows_of_runs(written), rows.clone().collect::<Vec<_>>());
    rows.map(|r| (r.range.start(), r.range.end(), r.crc32c))
        .collect()
}

/// What the header will hold.
fn rows_of_runs(written: &WrittenRanges) -> Vec<Row> {
    let mut rows = Vec::new();
    for run in written.runs() {
        let crcs = match run.crcs {
            Crcs::Known(crcs) => crcs.iter().copied().map(Some).collect(),
            Crcs::Unknown(count) => vec![None; count],
        };
        for (index, crc32c) in crcs.into_iter().enumerate() {
            let start = run.start + index as u64 * run.row_len;
            rows.push(Row {
                range: range(start, start + run.row_len),
                crc32c,
            });
        }
    }
    rows
}

#[test]
fn what_is_written_upwards_in_units_is_one_run_until_it_is_not() {
    for (then, runs) in [
        (None, 1),
        (Some((range(10, 20), Some(9))), 1),
        (Some((range(30, 35), Some(9))), 4),
        (Some((range(40, 50), Some(9))), 4),
        (Some((range(10, 20), None)), 3),
        (Some((range(15, 25), Some(9))), 4),
    ] {
        let mut written = WrittenRanges::new(8);
        for (start, crc) in [(0, 1), (10, 2), (20, 3)] {
            written.record(range(start, start + 10), Some(crc));
        }
        if let Some((range, crc)) = then {
            written.record(range, crc);
        }
        assert_eq!(written.runs().count(), runs, "{then:?}");
        let last = rows(&written).pop().expect("there are rows");
        assert!(last.1 >= 30, "{last:?}");
    }
}

#[test]
fn rows_follow_the_writes_and_stay_apart() {
    let mut written = WrittenRanges::new(8);
    written.record(range(10, 20), Some(2));
    written.record(range(0, 10), Some(1));
    written.record(range(20, 20), Some(9));
    assert_eq!(rows(&written), [(0, 10, Some(1)), (10, 20, Some(2))]);
    assert_eq!(written.missing(25).collect::<Vec<_>>(), [range(20, 25)]);
    assert!(written.is_complete(20) && !written.is_complete(21));
}

#[test]
fn writing_the_same_range_again_replaces_its_checksum() {
    let mut written = WrittenRanges::new(8);
    written.record(range(0, 10), Some(1));
    written.record(range(10, 20), Some(2));
    written.record(range(0, 10), Some(3));
    assert_eq!(rows(&written), [(0, 10, Some(3)), (10, 20, Some(2))]);
    assert_eq!(written.stale().count(), 0);
}

#[test]
fn a_rewrite_that_cuts_a_row_leaves_its_remains_stale() {
    let mut written = WrittenRanges::new(8);
    written.record(range(0, 30), Some(1));
    written.record(range(10, 20), Some(2));
    assert_eq!(
        rows(&written),
        [(0, 10, None), (10, 20, Some(2)), (20, 30, None)]
    );
    let stale: Vec<_> = written.stale().collect();
    assert_eq!(stale, [range(0, 10), range(20, 30)]);
    assert!(written.set_crc(stale[0], 7));
    written.record(range(20, 25), Some(8));
    assert!(
        !written.set_crc(stale[1], 9),
        "it was written anew meanwhile"
    );
    assert_eq!(written.stale().collect::<Vec<_>>(), [range(25, 30)]);
    assert!(!written.set_crc(range(10, 20), 9), "it is not stale");
}

#[test]
fn bytes_without_a_checksum_stay_unverified() {
    let mut written = WrittenRanges::new(8);
    written.record(range(0, 30), None);
    written.record(range(10, 20), Some(2));
    assert_eq!(written.stale().count(), 0);
    assert_eq!(rows(&written)[0], (0, 10, None));
}

#[test]
fn a_failed_write_makes_its_bytes_missing() {
    let mut written = WrittenRanges::new(8);
    written.record(range(0, 30), Some(1));
    written.forget(range(10, 20));
    assert_eq!(written.missing(30).collect::<Vec<_>>(), [range(10, 20)]);
    assert_eq!(written.covered(), 20);
    written.record(range(10, 20), Some(1));
    assert!(written.is_complete(30));
}

#[test]
fn too_many_rows_are_joined_where_no_checksum_is_lost() {
    let bytes: Vec<u8> = (0..100).collect();
    let crc = |r: ByteRange| {
        let at = |o| usize::try_from(o).expect("small");
        crc32c::crc32c(&bytes[at(r.start())..at(r.end())])
    };
    let mut written = WrittenRanges::new(3);
    written.record(range(0, 10), None);
    for start in (10..100).step_by(10) {
        let r = range(start, start + 10);
        written.record(r, Some(crc(r)));
    }
    assert!(written.fits());
    assert_eq!(rows(&written)[0], (0, 10, None));
    for row in written.rows().skip(1) {
        assert_eq!(row.crc32c, Some(crc(row.range)));
    }
    assert!(written.is_complete(100));
}

#[test]
fn rows_that_do_not_touch_are_kept_until_the_gaps_are_filled() {
    let mut written = WrittenRanges::new(2);
    for start in [0, 20, 40] {
        written.record(range(start, start + 10), Some(0));
    }
    assert!(!written.fits());
    assert_eq!(written.len(), 3);
    written.record(range(10, 20), Some(0));
    assert!(written.fits());
}

#[derive(Clone, Debug)]
enum Step {
    Write(ByteRange, u8, bool),
    Fail(ByteRange, u8),
    Race(ByteRange, u8),
    Recompute,
}

const LEN: u64 = 60;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ranges = (0..=LEN, 0..=LEN).prop_map(|(a, b)| range(a.min(b), a.max(b)));
    // Fixed units, as writers cut them, so that exact rewrites happen.
    let units = (0..LEN / 10).prop_map(|unit| range(unit * 10, unit * 10 + 10));
    let place = prop_oneof![ranges, units];
    let race = place.clone();
    let step = prop_oneof![
        8 => (place.clone(), any::<u8>(), prop::bool::weighted(0.9))
            .prop_map(|(r, seed, known)| Step::Write(r, seed, known)),
        1 => (place, any::<u8>()).prop_map(|(r, seed)| Step::Fail(r, seed)),
        1 => (race, any::<u8>()).prop_map(|(r, seed)| Step::Race(r, seed)),
        2 => Just(Step::Recompute),
    ];
    // First as most writers do: upwards, in units.
    let first = (0..=6_u64, any::<u8>()).prop_map(|(units, seed)| {
        let unit = |unit| Step::Write(range(unit * 10, unit * 10 + 10), seed, true);
        (0..units).map(unit).collect::<Vec<_>>()
    });
    (first, prop::collection::vec(step, 0..40)).prop_map(|(first, then)| [first, then].concat())
}

fn slice(bytes: &[u8], range: ByteRange) -> &[u8] {
    let at = |offset| usize::try_from(offset).expect("small");
    &bytes[at(range.start())..at(range.end())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is written, rewritten or lost: rows are the bytes written, and a checksum is that of
    /// the stored bytes.
    #[test]
    fn known_checksums_are_those_of_the_stored_bytes(steps in steps(), capacity in 1..12_usize) {
        let mut written = WrittenRanges::new(capacity);
        let mut stored = vec![0_u8; 60];
        let mut covered = RangeSet::new();
        let mut ever_unknown = false;
        for step in steps {
            match step {
                Step::Write(range, seed, known) => {
                    for at in range.start()..range.end() {
                        let place = usize::try_from(at).expect("small");
                        stored[place] = seed.wrapping_add(u8::try_from(at).expect("small"));
                    }
                    let crc = crc32c::crc32c(slice(&stored, range));
                    ever_unknown |= !known;
                    written.record(range, known.then_some(crc));
                    covered.insert(range);
                }
                Step::Fail(range, seed) => {
                    if !range.is_empty() {
                        // A part of the bytes arrived.
                        stored[usize::try_from(range.start()).expect("small")] ^= seed;
                    }
                    written.forget(range);
                    covered.remove(range);
                }
                Step::Race(range, seed) => {
                    for at in range.start()..range.end() {
                        stored[usize::try_from(at).expect("small")] ^= seed;
                    }
                    written.mark_stale(range);
                }
                Step::Recompute => {
                    for range in written.stale().collect::<Vec<_>>() {
                        prop_assert!(written.set_crc(range, crc32c::crc32c(slice(&stored, range))));
                    }
                    prop_assert_eq!(written.stale().count(), 0);
                    if !ever_unknown {
                        prop_assert!(written.rows().all(|row| row.crc32c.is_some()));
                    }
                }
            }
            let rows: Vec<_> = written.rows().collect();
            prop_assert_eq!(&rows_of_runs(&written), &rows);
            prop_assert!(rows.iter().all(|row| !row.range.is_empty()));
            prop_assert!(rows.windows(2).all(|p| p[0].range.end() <= p[1].range.start()));
            prop_assert_eq!(&rows.iter().map(|r| r.range).collect::<RangeSet>(), &covered);
            for row in &rows {
                if let Some(crc) = row.crc32c {
                    prop_assert_eq!(crc, crc32c::crc32c(slice(&stored, row.range)));
                }
            }
            let gaps: Vec<_> = covered.missing(ByteRange::to(LEN)).collect();
            prop_assert_eq!(written.missing(LEN).collect::<Vec<_>>(), gaps);
            prop_assert_eq!(written.covered(), covered.covered());
            // More rows than the header has only where there is nothing to join.
            prop_assert!(written.fits() || written.len() == covered.iter().len());
        }
    }

    /// Without pressure on the table every write stays a row of its own.
    #[test]
    fn writes_of_fixed_units_stay_rows(order in Just((0..20_u64).collect::<Vec<_>>()).prop_shuffle()) {
        let mut written = WrittenRanges::new(20);
        for unit in order {
            let crc = u32::try_from(unit).expect("small");
            written.record(range(unit * 8, unit * 8 + 8), Some(crc));
        }
        let expected: Vec<_> = (0..20_u64)
            .map(|u| (u * 8, u * 8 + 8, u32::try_from(u).ok()))
            .collect();
        prop_assert_eq!(rows(&written), expected);
    }
}
