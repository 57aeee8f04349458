use layercake_protocol::header::{ReadPlan, Row, Verified, VerifyError};
use layercake_protocol::range::{ByteRange, RangeSet};
use proptest::prelude::*;

const LEN: u64 = 100;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::from_bounds(start, end).expect("ordered")
}

fn slice(bytes: &[u8], range: ByteRange) -> &[u8] {
    let at = |offset| usize::try_from(offset).expect("small");
    &bytes[at(range.start())..at(range.end())]
}

fn crc(bytes: &[u8], range: ByteRange) -> u32 {
    crc32c::crc32c(slice(bytes, range))
}

/// Reads every piece and gives its checksum, as a transport does.
fn crcs(plan: &ReadPlan, bytes: &[u8]) -> Vec<Option<u32>> {
    let pieces = plan.pieces().iter();
    pieces.map(|piece| Some(crc(bytes, piece.range))).collect()
}

fn payload() -> Vec<u8> {
    (0..100_u8).map(|at| at.wrapping_mul(37)).collect()
}

fn table(bytes: &[u8], cuts: &[(u64, u64)]) -> Vec<Row> {
    let rows = cuts.iter().map(|&(start, end)| Row {
        range: range(start, end),
        crc32c: Some(crc(bytes, range(start, end))),
    });
    rows.collect()
}

#[test]
fn a_range_that_is_one_row_is_one_piece() {
    let bytes = payload();
    let rows = table(&bytes, &[(0, 40), (40, 100)]);
    let plan = ReadPlan::new(&rows[..], &[range(40, 100)]);
    assert_eq!(plan.pieces().len(), 1);
    assert_eq!(
        plan.verify(&crcs(&plan, &bytes)),
        Ok(Verified {
            verified_bytes: 60,
            unverified_bytes: 0
        })
    );
}

#[test]
fn a_wrong_byte_is_found_and_its_row_named() {
    let bytes = payload();
    let rows = table(&bytes, &[(0, 40), (40, 100)]);
    let plan = ReadPlan::new(&rows[..], &[range(0, 100)]);
    let mut wrong = bytes.clone();
    wrong[99] ^= 1;
    let error = plan.verify(&crcs(&plan, &wrong)).expect_err("flipped");
    assert_eq!(
        error,
        VerifyError::Mismatch {
            range: range(40, 100),
            expected: crc(&bytes, range(40, 100)),
            found: crc(&wrong, range(40, 100)),
        }
    );
}

#[test]
fn a_row_that_several_ranges_cover_together_is_verified() {
    let bytes = payload();
    let rows = table(&bytes, &[(0, 100)]);
    let plan = ReadPlan::new(&rows[..], &[range(60, 100), range(0, 30), range(20, 60)]);
    let done = plan.verify(&crcs(&plan, &bytes)).expect("right bytes");
    assert_eq!(done.verified_bytes, 100);
    assert_eq!(done.unverified_bytes, 10);
}

#[test]
fn rows_read_in_part_and_pieces_without_checksum_count_as_unverified() {
    let bytes = payload();
    let rows = table(&bytes, &[(0, 40), (40, 100)]);
    let plan = ReadPlan::new(&rows[..], &[range(10, 100)]);
    let done = plan.verify(&crcs(&plan, &bytes)).expect("right bytes");
    assert_eq!((done.verified_bytes, done.unverified_bytes), (60, 30));
    let none = vec![None; plan.pieces().len()];
    let done = plan.verify(&none).expect("nothing to compare");
    assert_eq!((done.verified_bytes, done.unverified_bytes), (0, 90));
    assert_eq!(
        plan.verify(&[]),
        Err(VerifyError::PieceCount {
            expected: plan.pieces().len(),
            found: 0
        })
    );
}

#[test]
fn without_rows_a_range_is_one_piece_and_wants_no_checksum() {
    let plan = ReadPlan::new(&[][..], &[range(5, 50), range(7, 7)]);
    assert_eq!(plan.pieces().len(), 1);
    assert!(!plan.wants_checksums());
}

fn tables() -> impl Strategy<Value = Vec<Row>> {
    let one = (0..4_u64, 1..30_u64, prop::bool::weighted(0.85));
    prop::collection::vec(one, 0..12).prop_map(|steps| {
        let bytes = payload();
        let mut at = 0;
        let mut rows = Vec::new();
        for (gap, len, known) in steps {
            // Most rows touch.
            let start = at + gap.saturating_sub(2);
            if start + len > LEN {
                break;
            }
            let range = range(start, start + len);
            rows.push(Row {
                range,
                crc32c: known.then(|| crc(&bytes, range)),
            });
            at = range.end();
        }
        rows
    })
}

fn wanted() -> impl Strategy<Value = Vec<ByteRange>> {
    let one = (0..=LEN, 0..=LEN).prop_map(|(a, b)| range(a.min(b), a.max(b)));
    prop::collection::vec(one, 0..6)
}

/// Whether the row's bytes are compared, and how often: once for every wanted range that holds all of
/// it, or once if only several together do.
fn copies(row: &Row, wanted: &[ByteRange]) -> u64 {
    if row.crc32c.is_none() {
        return 0;
    }
    let alone = wanted
        .iter()
        .filter(|want| want.contains(row.range))
        .count();
    let together: RangeSet = wanted.iter().copied().collect();
    (alone as u64).max(u64::from(together.contains(row.range)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn pieces_are_the_wanted_ranges_and_every_whole_row_is_verified(
        rows in tables(),
        wanted in wanted(),
        flip in 0..100_usize,
    ) {
        let bytes = payload();
        let plan = ReadPlan::new(&rows[..], &wanted);

        // In order, without gap or overlap, each where it says it is.
        for (index, want) in wanted.iter().enumerate() {
            let mut at = want.start();
            for piece in plan.pieces().iter().filter(|p| p.wanted == index) {
                prop_assert_eq!(piece.range.start(), at);
                prop_assert_eq!(piece.within, at - want.start());
                prop_assert!(!piece.range.is_empty());
                at = piece.range.end();
            }
            prop_assert_eq!(at, want.end());
        }
        prop_assert!(plan.pieces().is_sorted_by_key(|p| (p.wanted, p.range)));

        let verified: u64 = rows.iter().map(|r| copies(r, &wanted) * r.range.len()).sum();
        let total: u64 = wanted.iter().map(|w| w.len()).sum();
        prop_assert_eq!(plan.wants_checksums(), verified > 0);
        prop_assert_eq!(
            plan.verify(&crcs(&plan, &bytes)),
            Ok(Verified { verified_bytes: verified, unverified_bytes: total - verified })
        );

        let mut wrong = bytes.clone();
        wrong[flip] ^= 0x10;
        let hit = rows
            .iter()
            .find(|r| r.range.contains_offset(flip as u64) && copies(r, &wanted) > 0);
        match (plan.verify(&crcs(&plan, &wrong)), hit) {
            (Err(VerifyError::Mismatch { range, .. }), Some(row)) => {
                prop_assert_eq!(range, row.range);
            }
            (Ok(_), None) => {}
            (result, hit) => prop_assert!(false, "{:?} with {:?}", result, hit),
        }
    }
}
