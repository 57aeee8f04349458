//! The table for early readers: what is taken for a record, and where it lies.

use layercake_protocol::early::{EarlyRecord, EarlyTable, EarlyToken, SLOT_LEN, SlotPlace};
use layercake_protocol::header::{HEADER_ALIGN, HeaderSpec};
use layercake_protocol::ids::Generation;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::PutStart;
use proptest::prelude::*;

const PAYLOAD: u64 = 1 << 20;

fn table(token: u64) -> EarlyTable {
    EarlyTable {
        token: EarlyToken::new(token).expect("not zero"),
        slots: 8,
    }
}

fn place(generation: u64, slot: u32) -> SlotPlace {
    SlotPlace {
        generation: Generation(generation),
        slot,
    }
}

fn record(offset: u64, len: u64, crc32c: u32) -> EarlyRecord {
    EarlyRecord {
        range: ByteRange::new(offset, len).expect("no overflow"),
        crc32c,
    }
}

#[test]
fn a_record_counts_in_its_own_slot_of_its_own_session_only() {
    let written = record(4096, 512, 7);
    let bytes = table(5).encode(&written, place(9, 3));
    let read = |table: EarlyTable, place| table.decode(&bytes, place, PAYLOAD);
    assert_eq!(read(table(5), place(9, 3)), Some(written));
    assert_eq!(read(table(6), place(9, 3)), None, "another session");
    assert_eq!(read(table(5), place(10, 3)), None, "another generation");
    assert_eq!(read(table(5), place(9, 4)), None, "another slot");
    assert_eq!(table(5).decode(&bytes, place(9, 3), 4607), None, "outside");
    assert_eq!(table(5).decode(&bytes[1..], place(9, 3), PAYLOAD), None);
    let empty = table(5).encode(&record(4096, 0, 7), place(9, 3));
    assert_eq!(table(5).decode(&empty, place(9, 3), PAYLOAD), None);
    assert_eq!(table(5).decode(&[0; SLOT_LEN], place(9, 3), PAYLOAD), None);
    // Two headers with one token in a row: a token that was used again is not enough.
    let again = table(5).encode(&written, place(8, 3));
    assert_eq!(table(5).decode(&again, place(9, 3), PAYLOAD), None);
}

proptest! {
    /// Whatever lay in the slot before, and whichever bytes of a record have landed: it is read as it was
    /// written, or not at all.
    #[test]
    fn a_torn_record_is_none(
        before in prop_oneof![
            any::<[u8; SLOT_LEN]>(),
            // The same range of an earlier session, as the objects of one model are.
            (any::<u32>(), 1_u64..9).prop_map(|(crc, generation)| {
                table(4).encode(&record(4096, 512, crc), place(generation, 3))
            }),
            // A session that was told the same token, which none is.
            any::<u32>().prop_map(|crc| table(5).encode(&record(4096, 512, crc), place(8, 3))),
        ],
        crc32c in any::<u32>(),
        landed in any::<[bool; SLOT_LEN]>(),
    ) {
        let written = record(4096, 512, crc32c);
        let bytes = table(5).encode(&written, place(9, 3));
        let mut seen = before;
        for (at, landed) in landed.into_iter().enumerate() {
            if landed {
                seen[at] = bytes[at];
            }
        }
        let read = table(5).decode(&seen, place(9, 3), PAYLOAD);
        prop_assert_eq!(read, (seen == bytes).then_some(written));
    }

    /// The table takes nothing from the header, and its slots don't overlap each other or the payload.
    #[test]
    fn the_table_lies_between_header_and_payload(
        rows in 1_u32..12_000,
        key_len in 1_usize..64,
    ) {
        let key = ObjectKey::new(&"k".repeat(key_len)).expect("short");
        let tenant = Tenant::default();
        let plain = PutStart { header_rows: rows, ..PutStart::new(key, PAYLOAD) };
        let early = plain.clone().early_reads();
        let without = plain.header_len(&tenant).expect("fits");
        let header_len = early.header_len(&tenant).expect("fits");
        let table = early.early_table().expect("asked for");
        prop_assert!(plain.early_table().is_none());
        prop_assert_eq!(table.slots, rows);
        prop_assert_eq!(header_len as usize % HEADER_ALIGN, 0);
        prop_assert_eq!(table.leaves(header_len), Some(without));
        let spec = HeaderSpec {
            tenant_len: tenant.as_str().len(),
            key_len,
            group_len: 0,
            rows: 0,
        };
        prop_assert!(spec.row_capacity(without) >= rows as usize);
        let mut end = u64::from(without);
        for slot in 0..rows {
            let at = table.slot_at(header_len, slot).expect("a slot of the table");
            prop_assert_eq!(at, end);
            end = at + SLOT_LEN as u64;
        }
        prop_assert!(end <= u64::from(header_len));
        prop_assert_eq!(table.slot_at(header_len, rows), None);
        prop_assert_eq!(table.leaves(0), None);
    }
}

#[test]
fn a_header_that_gets_too_long_by_the_table_is_refused() {
    let rows = |rows| PutStart {
        header_rows: rows,
        ..PutStart::new(ObjectKey::new("k").expect("short"), PAYLOAD)
    };
    let tenant = Tenant::default();
    assert!(rows(20_000).header_len(&tenant).is_ok());
    let error = rows(20_000).early_reads().header_len(&tenant);
    let error = error.expect_err("more than a header may have").to_string();
    assert!(
        error.contains("early") && error.contains("1048576"),
        "{error}"
    );
}
