//! Headers of any fields, whole and damaged.

use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{
    Checksums, HEAD_LEN, HeaderError, HeaderSpec, HeaderState, ObjectHeader, Row, peek,
};
use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::Tenant;
use proptest::prelude::*;

use crate::header::{key, reseal, row};

fn names() -> impl Strategy<Value = (String, String, Option<String>)> {
    let name = |len: usize| prop::string::string_regex(&format!(".{{1,{len}}}")).expect("valid");
    (name(20), name(60), prop::option::of(name(20)))
}

fn row_tables() -> impl Strategy<Value = Vec<Row>> {
    // Few lengths, so that there are runs.
    let lens = prop_oneof![
        Just(8),
        8..10_u64,
        1..1000_u64,
        any::<u32>().prop_map(|len| u64::from(len) + 1)
    ];
    let gaps = prop_oneof![8 => Just(0), 1 => 0..1000_u64, 1 => 0..1_u64 << 60];
    let crcs = prop::option::weighted(0.8, any::<u32>());
    prop::collection::vec((gaps, lens, crcs), 0..20).prop_map(|steps| {
        let mut at = 0;
        let rows = steps.into_iter().map(|(gap, len, crc)| {
            let row = row(at + gap, len, crc);
            at = row.range.end();
            row
        });
        rows.collect()
    })
}

fn headers() -> impl Strategy<Value = ObjectHeader> {
    let state = prop::sample::select(vec![
        HeaderState::Writing,
        HeaderState::Sealed,
        HeaderState::Removed,
    ]);
    let checksums = prop::sample::select(vec![Checksums::None, Checksums::Crc32c]);
    let numbers = (
        any::<u64>(),
        any::<u64>(),
        any::<u64>(),
        any::<u32>(),
        1..100_u64,
    );
    let fingerprint =
        prop::option::of(any::<[u8; 16]>().prop_filter("zero is none", |f| *f != [0; 16]));
    (
        names(),
        row_tables(),
        state,
        checksums,
        numbers,
        fingerprint,
    )
        .prop_map(
            |((tenant, name, group), rows, state, checksums, numbers, fingerprint)| {
                let (generation, layout_id, epoch, prefix_index, slack) = numbers;
                ObjectHeader {
                    state,
                    generation: Generation(generation),
                    tenant: Tenant::new(&tenant).expect("short"),
                    key: key(&name),
                    group,
                    payload_len: rows.last().map_or(0, |r| r.range.end()) + slack,
                    fingerprint: fingerprint.map(Fingerprint),
                    layout_id,
                    epoch: Epoch(epoch),
                    prefix_index,
                    checksums,
                    rows,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_header_is_read_as_it_was_written(header in headers(), more in 0..4_usize, noise in any::<u8>()) {
        let len = header.spec().encoded_len().expect("small") as usize + more * 64;
        // What lay here before, and what lies behind, is of no matter.
        let mut place = vec![noise; len + 100];
        header.encode_into(&mut place[..len]).expect("valid");
        prop_assert_eq!(ObjectHeader::decode(&place), Ok(header.clone()));
        prop_assert_eq!(peek(&place).expect("a header").header_len as usize, len);
        let spec = header.spec();
        let capacity = spec.row_capacity(u32::try_from(len).expect("small"));
        prop_assert!(capacity >= header.rows.len());
        let full = HeaderSpec { rows: capacity, ..spec };
        prop_assert_eq!(full.encoded_len().expect("small") as usize, len);
    }

    #[test]
    fn a_part_of_a_header_is_an_error(header in headers(), cut in any::<prop::sample::Index>()) {
        let bytes = header.encode().expect("valid");
        let cut = cut.index(bytes.len());
        match ObjectHeader::decode(&bytes[..cut]) {
            Err(HeaderError::Truncated { len, need }) => {
                prop_assert!(len == cut && cut < need);
                if cut >= HEAD_LEN {
                    prop_assert_eq!(ObjectHeader::decode(&bytes[..need]), Ok(header));
                }
            }
            // Only what nobody looks at is missing.
            found => prop_assert_eq!(found, Ok(header)),
        }
    }

    #[test]
    fn a_torn_header_is_an_error(
        old in headers(),
        new in headers(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut len = old.spec().encoded_len().expect("small");
        len = len.max(new.spec().encoded_len().expect("small"));
        let mut before = vec![0; len as usize];
        let mut after = before.clone();
        old.encode_into(&mut before).expect("valid");
        new.encode_into(&mut after).expect("valid");
        let cut = cut.index(before.len() + 1);
        after[cut..].copy_from_slice(&before[cut..]);
        match ObjectHeader::decode(&after) {
            Ok(found) => prop_assert!(found == old || found == new),
            Err(error) => {
                let torn = matches!(error, HeaderError::Torn { .. });
                prop_assert!(torn, "{}", error);
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_an_error_or_does_not_matter(
        header in headers(),
        byte in any::<prop::sample::Index>(),
        bit in 0..8_u8,
    ) {
        let mut bytes = header.encode().expect("valid");
        let at = byte.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(found) = ObjectHeader::decode(&bytes) {
            prop_assert_eq!(found, header);
        }
    }

    #[test]
    fn any_bytes_are_a_header_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(ObjectHeader::decode(&bytes).is_err());
    }

    /// A writer that is wrong, not torn: the checksums fit, the fields hold anything.
    #[test]
    fn a_sealed_header_of_any_fields_is_valid_or_an_error(
        header in headers(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = header.encode().expect("valid");
        let spec = header.spec();
        let table_len = bytes[80..84].first_chunk().copied().map_or(0, u32::from_le_bytes);
        let body_end = (HEAD_LEN + spec.tenant_len + spec.key_len + spec.group_len)
            .next_multiple_of(8) + table_len as usize;
        for (at, value) in edits {
            let at = 10 + at.index(body_end - 10);
            bytes[at] = value;
        }
        reseal(&mut bytes, body_end);
        if let Ok(found) = ObjectHeader::decode(&bytes) {
            let again = found.encode().expect("what is read can be written");
            prop_assert_eq!(ObjectHeader::decode(&again), Ok(found));
        }
    }
}
