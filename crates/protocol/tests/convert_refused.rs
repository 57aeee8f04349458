//! What no side would send is refused by the name of its field.

use layercake_protocol::convert::{
    Context, PutStartAnswer, TICKET_METADATA, decode_key_results, decode_presences,
    decode_refusals, decode_status, decode_ticket, encode_key_results, encode_ticket,
};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::replica::{
    GRANULE, ObjectRef, PutStart, Replica, ReplicateConfig, Segment,
};
use layercake_protocol::wire;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

fn some_replica() -> wire::Replica {
    wire::Replica {
        segment_id: 1,
        offset: GRANULE,
        header_len: 64,
        generation: 9,
    }
}

fn some_segment() -> wire::Segment {
    wire::Segment {
        segment_id: 1,
        name: "n".into(),
        endpoint: Some(wire::Endpoint {
            engine: Some(wire::Id128 { high: 1, low: 2 }),
            tcp: "host:1".into(),
            host: vec![0; 16].into(),
            shm: String::new(),
            pid: 1,
        }),
        region_id: 1,
        capability: vec![0; 16].into(),
        len: 1,
        memory_kind: wire::MemoryKind::Host.into(),
        device_id: 0,
    }
}

/// The name of the field that was refused.
fn field<T: std::fmt::Debug>(result: Result<T, WireError>) -> &'static str {
    match result.expect_err("it must be refused") {
        WireError::Missing { field } | WireError::Invalid { field, .. } => field,
        other => panic!("an error without a field: {other}"),
    }
}

#[test]
fn what_a_segment_must_have_is_named() {
    assert!(Segment::try_from(some_segment()).is_ok());
    let mut cases: Vec<(&str, wire::Segment)> = Vec::new();
    let mut case = |name, change: fn(&mut wire::Segment)| {
        let mut segment = some_segment();
        change(&mut segment);
        cases.push((name, segment));
    };
    case("segment.segment_id", |s| s.segment_id = 0);
    case("segment.name", |s| s.name.clear());
    case("segment.len", |s| s.len = 0);
    case("segment.endpoint", |s| s.endpoint = None);
    case("segment.capability", |s| s.capability = vec![0; 15].into());
    case("segment.memory_kind", |s| s.memory_kind = 0);
    case("segment.memory_kind", |s| s.memory_kind = 77);
    case("endpoint.engine", |s| {
        s.endpoint.as_mut().expect("set above").engine = None;
    });
    case("endpoint.host", |s| {
        s.endpoint.as_mut().expect("set above").host = vec![0; 17].into();
    });
    for (name, segment) in cases {
        assert_eq!(field(Segment::try_from(segment)), name);
    }
}

#[test]
fn what_a_request_must_have_is_named() {
    let start = wire::PutStart {
        key: "k".into(),
        size: 1,
        ..Default::default()
    };
    assert!(PutStart::try_from(start.clone()).is_ok());
    let with = |change: fn(&mut wire::PutStart)| {
        let mut start = start.clone();
        change(&mut start);
        field(PutStart::try_from(start))
    };
    assert_eq!(with(|s| s.key.clear()), "key");
    assert_eq!(with(|s| s.key = "x".repeat(65_536)), "key");
    assert_eq!(with(|s| s.size = 0), "size");
    assert_eq!(with(|s| s.fingerprint = vec![1; 3].into()), "fingerprint");
    assert_eq!(with(|s| s.fingerprint = vec![0; 16].into()), "fingerprint");
    assert_eq!(
        field(ReplicateConfig::try_from(wire::ReplicateConfig::default())),
        "config.replicas"
    );
    assert_eq!(
        field(Context::try_from(wire::Context::default())),
        "context.client_id"
    );
    assert_eq!(
        field(ObjectRef::try_from(wire::ObjectRef {
            key: "k".into(),
            generation: 0
        })),
        "generation"
    );
}

#[test]
fn a_replica_starts_on_a_granule_and_ends_within_64_bits() {
    assert!(Replica::try_from(some_replica()).is_ok());
    for offset in [1, GRANULE - 1, GRANULE + 512, u64::MAX - (GRANULE - 1)] {
        let replica = wire::Replica {
            offset,
            header_len: u32::MAX,
            ..some_replica()
        };
        assert_eq!(field(Replica::try_from(replica)), "replica.offset");
    }
}

#[test]
fn an_answer_that_does_not_fit_its_keys_is_refused() {
    let put = wire::PutStartResponse {
        results: vec![wire::PutStarted {
            refusal: wire::Refusal::None.into(),
            generation: 9,
            replicas: [some_replica()].into(),
        }],
        ..Default::default()
    };
    assert!(PutStartAnswer::decode(put.clone(), 1).is_ok());
    assert_eq!(field(PutStartAnswer::decode(put.clone(), 2)), "results");
    let mut other_generation = put.clone();
    other_generation.results[0].generation = 8;
    assert_eq!(
        field(PutStartAnswer::decode(other_generation, 1)),
        "results.generation"
    );
    let mut nowhere = put;
    nowhere.results[0].replicas.clear();
    assert_eq!(field(PutStartAnswer::decode(nowhere, 1)), "replicas");
    assert_eq!(field(decode_presences(&[1, 1], 1)), "states");
    assert_eq!(field(decode_presences(&[3], 1)), "states");
    assert_eq!(field(decode_refusals(vec![0], 1)), "refusals");
    assert_eq!(field(decode_refusals(vec![1, 1], 1)), "refusals");
}

#[test]
fn a_code_of_a_later_version_refuses_its_key_alone() {
    let unknown = Refusal::Unknown { code: 99 };
    let text = unknown.to_string();
    assert!(text.contains("99") && text.contains("upgrade"), "{text}");
    assert!(!unknown.is_retryable());

    let none = i32::from(wire::Refusal::None);
    let results = vec![
        Ok(()),
        Err(unknown.clone()),
        Err(Refusal::NoSpace { largest_free: 7 }),
        Ok(()),
    ];
    let mut sent = encode_key_results(&results);
    assert_eq!(sent.refusals[1], 99);
    assert_eq!(decode_key_results(sent.clone(), 4), Ok(results.clone()));
    // It may say more than this version can tell.
    let detail = wire::KeyDetail {
        index: 1,
        error: Some(wire::Error {
            refusal: 99,
            detail: "of a later version".into(),
            largest_free: 3,
        }),
    };
    sent.details.insert(0, detail);
    assert_eq!(decode_key_results(sent, 4), Ok(results));
    assert_eq!(
        decode_refusals(vec![none, 99, none], 3),
        Ok(vec![Ok(()), Err(unknown.clone()), Ok(())])
    );

    let put = |refusal, replicas| wire::PutStarted {
        refusal,
        generation: 9,
        replicas,
    };
    let started = wire::PutStartResponse {
        results: vec![
            put(none, [some_replica()].into()),
            put(99, wire::Replicas::new()),
            put(none, [some_replica()].into()),
        ],
        ..Default::default()
    };
    let started = PutStartAnswer::decode(started, 3).expect("one key is refused, not the list");
    assert!(started.results[0].is_ok() && started.results[2].is_ok());
    assert_eq!(started.results[1], Err(unknown));
}

#[test]
fn details_must_belong_to_the_keys_they_name() {
    let results = encode_key_results(&[Ok(()), Err(Refusal::NoSpace { largest_free: 7 })]);
    let mut stray = results.clone();
    stray.details[0].index = 2;
    assert_eq!(field(decode_key_results(stray, 2)), "details");
    let mut contrary = results;
    contrary.details[0].index = 0;
    assert_eq!(field(decode_key_results(contrary, 2)), "details");
}

#[test]
fn a_ticket_is_32_hexadecimal_digits_and_never_shown() {
    let ticket = [0xAB; 16];
    let mut metadata = MetadataMap::new();
    assert_eq!(decode_ticket(&metadata), Ok(None));
    metadata.insert(TICKET_METADATA, encode_ticket(&ticket));
    assert_eq!(decode_ticket(&metadata), Ok(Some(ticket)));
    assert!(!format!("{metadata:?}").contains("abab"), "{metadata:?}");
    for wrong in [
        "",
        "abc",
        "+bababababababababababababababab",
        &"g".repeat(32),
    ] {
        metadata.insert(TICKET_METADATA, wrong.parse().expect("ASCII"));
        assert_eq!(field(decode_ticket(&metadata)), TICKET_METADATA);
    }
}

#[test]
fn a_status_carries_the_refusal_and_others_carry_none() {
    let refusal = Refusal::NoSpace { largest_free: 42 };
    let status = Status::from(&refusal);
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(decode_status(&status), Some(refusal));
    assert_eq!(decode_status(&Status::unavailable("gone")), None);
    let garbage = Status::with_details(Code::Internal, "x", vec![0xFF; 9].into());
    assert_eq!(decode_status(&garbage), None);
}
