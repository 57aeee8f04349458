use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn any_region() -> impl Strategy<Value = WireRegion> {
    (any::<u64>(), any::<[u8; 16]>()).prop_map(|(region, capability)| WireRegion {
        region: RegionId(region),
        capability: Capability(capability),
    })
}

/// A request as an initiator may make it: lengths within the caps.
fn any_request() -> impl Strategy<Value = (Vec<WireRegion>, Vec<WireOp>)> {
    vec(any_region(), 1..5).prop_flat_map(|regions| {
        let count = u16::try_from(regions.len()).expect("a few");
        let op = (0..count, any::<u64>(), 1..2048_u64, any::<Option<u64>>()).prop_map(
            |(region, offset, len, generation)| WireOp {
                region,
                offset,
                len,
                generation: generation.map(Generation),
            },
        );
        let ops = vec(op, usize::from(count)..=MAX_OPS);
        (Just(regions), ops)
    })
}

fn encode(kind: Kind, seq: u64, regions: &[WireRegion], ops: &[WireOp]) -> Vec<u8> {
    let payload: u64 = ops.iter().map(|op| op.len).sum();
    let mut bytes = Vec::new();
    Header {
        kind,
        flags: 0,
        count: u16::try_from(ops.len()).expect("capped"),
        regions: u16::try_from(regions.len()).expect("capped"),
        seq,
        payload: u32::try_from(payload).expect("capped"),
    }
    .encode(&mut bytes);
    for region in regions {
        region.encode(&mut bytes);
    }
    for op in ops {
        op.encode(&mut bytes);
    }
    bytes
}

type Received = (Header, Vec<WireRegion>, Vec<WireOp>);

/// What a receiver does with the bytes it has; `None` means that it waits for more.
fn receive(bytes: &[u8]) -> Option<Result<Received, FrameError>> {
    let header = match Header::decode(bytes.first_chunk()?) {
        Ok(header) => header,
        Err(error) => return Some(Err(error)),
    };
    assert!(header.body_len() <= MAX_BODY);
    let body = bytes.get(HEADER_LEN..HEADER_LEN + header.body_len())?;
    if !matches!(header.kind, Kind::Write | Kind::Read) {
        return Some(Ok((header, Vec::new(), Vec::new())));
    }
    Some(
        Request::decode(&header, body)
            .map(|request| (header, request.regions().collect(), request.ops().collect())),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_arrive_unchanged((regions, ops) in any_request(), seq in any::<u64>(), write: bool) {
        let kind = if write { Kind::Write } else { Kind::Read };
        let bytes = encode(kind, seq, &regions, &ops);
        let (header, got_regions, got_ops) = receive(&bytes).expect("complete").expect("well-formed");
        prop_assert_eq!((header.kind, header.seq), (kind, seq));
        prop_assert_eq!(got_regions, regions);
        prop_assert_eq!(got_ops, ops);
    }

    #[test]
    fn a_truncated_request_waits_for_more((regions, ops) in any_request(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(Kind::Read, 1, &regions, &ops);
        prop_assert!(receive(&bytes[..cut.index(bytes.len())]).is_none());
    }

    #[test]
    fn random_bytes_are_refused_or_within_the_caps(bytes in vec(any::<u8>(), 0..4096)) {
        if let Some(Ok((header, _, ops))) = receive(&bytes) {
            prop_assert!(usize::from(header.count) <= MAX_OPS);
            prop_assert!(header.payload <= MAX_PAYLOAD_ACCEPTED);
            prop_assert!(ops.len() <= MAX_OPS);
        }
    }

    #[test]
    fn flipped_bits_never_reach_past_the_frame((regions, ops) in any_request(), at in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = encode(Kind::Write, 9, &regions, &ops);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Some(Ok((header, regions, ops))) = receive(&bytes) {
            for op in &ops {
                prop_assert!(usize::from(op.region) < regions.len());
            }
            if header.kind == Kind::Write {
                let sum: u64 = ops.iter().map(|op| op.len).sum();
                prop_assert_eq!(sum, u64::from(header.payload));
            }
        }
    }
}

#[test]
fn oversized_counts_and_payloads_are_refused_before_anything_is_read() {
    let good = Header {
        kind: Kind::Write,
        flags: 0,
        count: 1,
        regions: 1,
        seq: 0,
        payload: 1,
    };
    let decoded = |header: Header| {
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        Header::decode(bytes.first_chunk().expect("a header"))
    };
    assert_eq!(decoded(good), Ok(good));
    let too_many = u16::try_from(MAX_OPS + 1).expect("fits");
    for bad in [
        Header {
            count: too_many,
            ..good
        },
        Header {
            count: 0,
            regions: 0,
            ..good
        },
        Header { regions: 2, ..good },
        Header { regions: 0, ..good },
        Header {
            payload: MAX_PAYLOAD_ACCEPTED + 1,
            ..good
        },
        Header {
            flags: FLAG_TRAILER,
            ..good
        },
        Header {
            kind: Kind::Written,
            ..good
        },
        Header {
            kind: Kind::Ping,
            ..good
        },
    ] {
        assert!(decoded(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn a_length_of_2_to_the_63_is_an_operation_to_refuse_not_a_frame_to_wait_for() {
    let region = WireRegion {
        region: RegionId(1),
        capability: Capability([1; 16]),
    };
    let op = WireOp {
        region: 0,
        offset: 0,
        len: 1 << 63,
        generation: None,
    };
    let mut body = Vec::new();
    region.encode(&mut body);
    op.encode(&mut body);
    let header = Header {
        kind: Kind::Read,
        flags: 0,
        count: 1,
        regions: 1,
        seq: 0,
        payload: 0,
    };
    let request = Request::decode(&header, &body).expect("asks for nothing acceptable");
    assert!(request.ops().all(|op| !op.has_acceptable_len()));
    // As a write its payload can't follow, so the connection can't go on.
    let header = Header {
        kind: Kind::Write,
        ..header
    };
    assert!(Request::decode(&header, &body).is_err());
}
