use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{
    Checksums, Expected, HEAD_LEN, HeaderError, HeaderSpec, HeaderState, MAX_GROUP_LEN,
    MAX_HEADER_LEN, MAX_ROWS, ObjectHeader, Row, peek, set_state,
};
use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::range::ByteRange;

pub(crate) fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text).expect("valid")
}

pub(crate) fn row(offset: u64, len: u64, crc32c: Option<u32>) -> Row {
    Row {
        range: ByteRange::new(offset, len).expect("no overflow"),
        crc32c,
    }
}

fn header() -> ObjectHeader {
    ObjectHeader {
        state: HeaderState::Sealed,
        generation: Generation(42),
        tenant: Tenant::default(),
        key: key("model@0a0b@0"),
        group: Some("request-7".to_owned()),
        payload_len: 4096,
        fingerprint: Some(Fingerprint([9; 16])),
        layout_id: 77,
        epoch: Epoch(5),
        prefix_index: 3,
        checksums: Checksums::Crc32c,
        rows: vec![
            row(0, 1000, Some(1)),
            row(1000, 24, None),
            row(2048, 2048, Some(0)),
        ],
    }
}

fn expected<'a>(tenant: &'a Tenant, key: &'a ObjectKey) -> Expected<'a> {
    Expected {
        tenant,
        key,
        generation: Generation(42),
        payload_len: 4096,
        fingerprint: Some(Fingerprint([9; 16])),
    }
}

/// Sets the checksums of a header whose bytes were edited, as a faulty writer would.
pub(crate) fn reseal(bytes: &mut [u8], body_end: usize) {
    let body = crc32c::crc32c(&bytes[HEAD_LEN..body_end]);
    bytes[HEAD_LEN - 8..HEAD_LEN - 4].copy_from_slice(&body.to_le_bytes());
    let head = crc32c::crc32c(&bytes[..HEAD_LEN - 4]);
    bytes[HEAD_LEN - 4..HEAD_LEN].copy_from_slice(&head.to_le_bytes());
}

// Other builds read what this one wrote: a change of these bytes needs a new format version.
#[test]
fn the_format_keeps_its_bytes() {
    let bytes = header().encode().expect("valid");
    assert_eq!(bytes.len(), 256);
    let field = |at: usize, len: usize| &bytes[at..at + len];
    assert_eq!(field(0, 8), b"LCOBJECT");
    assert_eq!(field(8, 8), [2, 0, 2, 1, 0, 1, 0, 0]);
    assert_eq!(field(16, 8), 42_u64.to_le_bytes());
    assert_eq!(field(24, 8), 4096_u64.to_le_bytes());
    assert_eq!(field(32, 8), 77_u64.to_le_bytes());
    assert_eq!(field(40, 16), [9; 16]);
    assert_eq!(field(56, 8), 5_u64.to_le_bytes());
    assert_eq!(field(64, 8), [3, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!(
        field(72, 16),
        [12, 0, 9, 0, 7, 0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(field(96, 28), b"defaultmodel@0a0b@0request-7");
    // 0 + 1000 with a checksum; 0 + 24 without; 1024 + 2048 with one.
    assert_eq!(
        field(128, 12),
        [0, 0xE8, 7, 3, 0, 24, 2, 0x80, 8, 0x80, 16, 3]
    );
    assert_eq!(field(140, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(field(148, 108), [0; 108]);
    assert_eq!(crc32c::crc32c(&bytes), 492_565_577);
}

#[test]
fn a_header_is_as_long_as_its_sizes_say() {
    let spec = header().spec();
    assert_eq!(spec.encoded_len(), Ok(256));
    assert_eq!(spec.row_capacity(256), 5);
    assert_eq!(spec.row_capacity(64), 0);
    let longest = HeaderSpec {
        tenant_len: 255,
        key_len: 65_535,
        group_len: MAX_GROUP_LEN,
        rows: MAX_ROWS,
    };
    let len = longest.encoded_len().expect("within the limits") as usize;
    assert!(len <= MAX_HEADER_LEN && len.is_multiple_of(64));
    for wrong in [
        HeaderSpec {
            tenant_len: 256,
            ..longest
        },
        HeaderSpec {
            key_len: 65_536,
            ..longest
        },
        HeaderSpec {
            group_len: MAX_GROUP_LEN + 1,
            ..longest
        },
        HeaderSpec {
            rows: MAX_ROWS + 1,
            ..longest
        },
        HeaderSpec {
            rows: usize::MAX,
            ..longest
        },
    ] {
        assert!(matches!(
            wrong.encoded_len(),
            Err(HeaderError::TooLong { .. })
        ));
        assert!(wrong.row_capacity(u32::MAX) <= MAX_ROWS);
    }
    for (payload, rows) in [(1, 8), (3 << 20, 48), (u64::MAX, 4096)] {
        assert_eq!(HeaderSpec::default_rows(payload), rows);
    }
}

#[test]
fn the_longest_header_is_written_and_read() {
    let long = ObjectHeader {
        tenant: Tenant::new(&"t".repeat(255)).expect("fits"),
        key: key(&"k".repeat(65_535)),
        group: Some("g".repeat(MAX_GROUP_LEN)),
        payload_len: u64::MAX,
        rows: (0..MAX_ROWS as u64).map(|at| row(at, 1, Some(7))).collect(),
        ..header()
    };
    let bytes = long.encode().expect("fits");
    assert_eq!(ObjectHeader::decode(&bytes), Ok(long));
}

#[test]
fn a_table_of_more_rows_than_any_writer_may_have_is_refused() {
    let mut bytes = vec![0; MAX_HEADER_LEN];
    header().encode_into(&mut bytes).expect("fits");
    let rows = u32::try_from(MAX_ROWS + 1).expect("small");
    bytes[68..72].copy_from_slice(&rows.to_le_bytes());
    reseal(&mut bytes, 128 + (MAX_ROWS + 1) * 24);
    assert_eq!(
        ObjectHeader::decode(&bytes),
        Err(HeaderError::Malformed {
            field: "number of rows",
            value: rows.into(),
        })
    );
}

#[test]
fn what_a_reader_was_promised_is_checked() {
    let (tenant, name) = (Tenant::default(), key("model@0a0b@0"));
    let good = header();
    assert_eq!(good.check(&expected(&tenant, &name)), Ok(()));
    let any = Expected {
        fingerprint: None,
        ..expected(&tenant, &name)
    };
    assert_eq!(good.check(&any), Ok(()));
    let stale = ObjectHeader {
        generation: Generation(41),
        ..good.clone()
    };
    assert_eq!(
        stale.check(&any),
        Err(HeaderError::WrongGeneration {
            expected: Generation(42),
            found: Generation(41)
        })
    );
    for other in [
        ObjectHeader {
            key: key("other"),
            ..good.clone()
        },
        ObjectHeader {
            tenant: Tenant::new("other").expect("fits"),
            ..good.clone()
        },
    ] {
        assert!(matches!(
            other.check(&any),
            Err(HeaderError::WrongObject { .. })
        ));
    }
    let short = ObjectHeader {
        payload_len: 4095,
        ..good.clone()
    };
    assert_eq!(
        short.check(&any),
        Err(HeaderError::WrongSize {
            expected: 4096,
            found: 4095
        })
    );
    let unnamed = ObjectHeader {
        fingerprint: None,
        ..good.clone()
    };
    assert_eq!(unnamed.check(&any), Ok(()));
    let error = unnamed
        .check(&expected(&tenant, &name))
        .expect_err("no fingerprint");
    assert!(error.to_string().contains("missing"), "{error}");
    assert_eq!(good.check_sealed(), Ok(()));
    let open = ObjectHeader {
        state: HeaderState::Writing,
        ..good
    };
    assert_eq!(
        open.check_sealed(),
        Err(HeaderError::NotSealed {
            state: HeaderState::Writing
        })
    );
}

#[test]
fn the_state_changes_by_the_head_alone() {
    let mut bytes = header().encode().expect("valid");
    let body = bytes[HEAD_LEN..].to_vec();
    set_state(&mut bytes[..HEAD_LEN], HeaderState::Removed).expect("a header");
    assert_eq!(bytes[HEAD_LEN..], body);
    let removed = ObjectHeader {
        state: HeaderState::Removed,
        ..header()
    };
    assert_eq!(ObjectHeader::decode(&bytes), Ok(removed));
    bytes[20] ^= 1;
    assert!(matches!(
        set_state(&mut bytes, HeaderState::Sealed),
        Err(HeaderError::Torn { part: "head", .. })
    ));
}

#[test]
fn the_head_alone_tells_how_much_to_fetch() {
    let bytes = header().encode().expect("valid");
    let peeked = peek(&bytes[..HEAD_LEN]).expect("a header");
    assert_eq!(peeked.header_len, 256);
    assert_eq!(peeked.generation, Generation(42));
    assert_eq!(peeked.payload_len, 4096);
    assert_eq!(peeked.state, HeaderState::Sealed);
    assert_eq!(
        ObjectHeader::decode(&bytes[..147]),
        Err(HeaderError::Truncated {
            len: 147,
            need: 148
        })
    );
    assert_eq!(ObjectHeader::decode(&bytes[..148]), Ok(header()));
    assert_eq!(
        peek(&bytes[..95]),
        Err(HeaderError::Truncated { len: 95, need: 96 })
    );
}

#[test]
fn what_no_reader_should_get_is_not_written() {
    let mut place = [0xAA; 1024];
    let mut refuse = |header: ObjectHeader, len: usize| {
        header.encode_into(&mut place[..len]).expect_err("refused")
    };
    assert_eq!(
        refuse(header(), 192),
        HeaderError::NoRoom {
            need: 256,
            has: 192
        }
    );
    assert_eq!(
        refuse(header(), 300),
        HeaderError::Malformed {
            field: "length",
            value: 300
        }
    );
    for wrong in [
        ObjectHeader {
            payload_len: 0,
            rows: vec![],
            ..header()
        },
        ObjectHeader {
            fingerprint: Some(Fingerprint([0; 16])),
            ..header()
        },
        ObjectHeader {
            rows: vec![row(0, 4097, None)],
            ..header()
        },
        ObjectHeader {
            rows: vec![row(8, 0, None)],
            ..header()
        },
        ObjectHeader {
            rows: vec![row(0, 8, None), row(7, 8, None)],
            ..header()
        },
        ObjectHeader {
            rows: vec![row(8, 8, None), row(0, 8, None)],
            ..header()
        },
    ] {
        assert!(matches!(refuse(wrong, 1024), HeaderError::Malformed { .. }));
    }
    assert_eq!(place, [0xAA; 1024]);
    assert_eq!(ObjectHeader::decode(&place), Err(HeaderError::NotAHeader));
}

#[test]
fn another_format_is_refused_by_its_version() {
    let mut bytes = header().encode().expect("valid");
    for found in [1, 3] {
        bytes[8] = found;
        assert_eq!(
            ObjectHeader::decode(&bytes),
            Err(HeaderError::UnknownVersion {
                found: found.into()
            })
        );
    }
}

#[test]
fn rows_of_one_length_take_little() {
    let len = 64 << 10;
    let rows = (0..64).map(|at| row(at * len, len, Some(7)));
    let even = ObjectHeader {
        payload_len: 64 * len,
        group: None,
        rows: rows.collect(),
        ..header()
    };
    let bytes = even.encode().expect("valid");
    let likely = even
        .spec()
        .likely_len(u32::try_from(bytes.len()).expect("small")) as usize;
    assert!(likely < bytes.len() / 3, "{likely} of {}", bytes.len());
    assert_eq!(ObjectHeader::decode(&bytes[..likely]), Ok(even.clone()));
    assert_eq!(bytes[likely..], vec![0; bytes.len() - likely]);
    let uneven = ObjectHeader {
        rows: (0..64).map(|at| row(at * len, len - at, Some(7))).collect(),
        ..even
    };
    let bytes = uneven.encode().expect("valid");
    let Err(HeaderError::Truncated { need, .. }) = ObjectHeader::decode(&bytes[..likely]) else {
        panic!("its rows take more");
    };
    assert_eq!(ObjectHeader::decode(&bytes[..need]), Ok(uneven));
}
