//! What one side sends is what the other side gets.

use std::time::Duration;

use layercake_protocol::command::{DropSessions, Fence, FencedPlace};
use layercake_protocol::convert::{
    Context, GetStartAnswer, PutStartAnswer, decode_key_results, decode_presences, decode_refusals,
    encode_key_results, encode_presences, encode_refusals,
};
use layercake_protocol::early::{EarlyTable, EarlyToken};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Epoch, Generation, MemoryKind, RegionId, RequestId, SegmentId,
    Term,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{
    GRANULE, GetStarted, Hold, ObjectRef, ObjectState, Presence, PutStart, PutStarted, Recency,
    Replica, ReplicateConfig, Segment,
};
use layercake_protocol::report::{ObjectStat, SegmentStat, SegmentState, Status};
use layercake_protocol::version::Version;
use layercake_protocol::wire;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use prost::Message;

/// Through the bytes, as a message travels.
fn travel<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).expect("what was encoded decodes")
}

fn keys() -> impl Strategy<Value = ObjectKey> {
    "\\PC{1,40}".prop_map(|text| ObjectKey::new(&text).expect("at least one character"))
}

fn tenants() -> impl Strategy<Value = Tenant> {
    prop_oneof![
        Just(Tenant::default()),
        "[a-z]{1,12}".prop_map(|name| Tenant::new(&name).expect("short enough")),
    ]
}

fn millis() -> impl Strategy<Value = Duration> {
    any::<u32>().prop_map(|ms| Duration::from_millis(ms.into()))
}

fn endpoints() -> impl Strategy<Value = Endpoint> {
    (
        any::<u128>(),
        "[a-z0-9.]{1,20}:[0-9]{1,5}",
        any::<[u8; 16]>(),
        option::of("[a-z/]{1,20}"),
        any::<u32>(),
    )
        .prop_map(|(engine, tcp, host, shm, pid)| Endpoint {
            engine: EngineId(engine),
            tcp,
            host: HostId(host),
            shm,
            pid,
        })
}

fn kinds() -> impl Strategy<Value = MemoryKind> {
    (0..5, any::<u32>()).prop_map(|(kind, device)| match kind {
        0 => MemoryKind::Host,
        1 => MemoryKind::PinnedHost,
        2 => MemoryKind::Cuda { device },
        3 => MemoryKind::Rocm { device },
        _ => MemoryKind::Npu { device },
    })
}

fn segments() -> impl Strategy<Value = Segment> {
    (
        1..u64::MAX,
        "[a-z0-9-]{1,16}",
        endpoints(),
        any::<u64>(),
        any::<[u8; 16]>(),
        1..u64::MAX,
        kinds(),
    )
        .prop_map(
            |(id, name, endpoint, region, capability, len, kind)| Segment {
                id: SegmentId(id),
                name,
                endpoint,
                region: RegionId(region),
                capability: Capability(capability),
                len,
                kind,
            },
        )
}

/// Replicas of one version: one generation.
fn replicas() -> impl Strategy<Value = Vec<Replica>> {
    (
        1..u64::MAX,
        vec((1..u64::MAX, 0..1_u64 << 40, any::<u32>()), 1..4),
    )
        .prop_map(|(generation, places)| {
            places
                .into_iter()
                .map(|(segment, granule, header_len)| Replica {
                    segment: SegmentId(segment),
                    offset: granule * GRANULE,
                    header_len,
                    generation: Generation(generation),
                })
                .collect()
        })
}

fn refusals() -> impl Strategy<Value = Refusal> {
    (0..19, "\\PC{0,20}", any::<u64>()).prop_map(|(which, detail, largest_free)| match which {
        0 => Refusal::InvalidArgument { detail },
        1 => Refusal::NotFound,
        2 => Refusal::NotReady,
        3 => Refusal::AlreadyExists,
        4 => Refusal::InProgress,
        5 => Refusal::Leased,
        6 => Refusal::LeaseExpired,
        7 => Refusal::NoSpace { largest_free },
        8 => Refusal::Superseded,
        9 => Refusal::Unreachable,
        10 => Refusal::UnknownMember,
        11 => Refusal::WrongTerm,
        12 => Refusal::Unauthenticated,
        13 => Refusal::Version { detail },
        14 => Refusal::ShuttingDown,
        15 => Refusal::TooLarge { detail },
        16 => Refusal::QuotaExceeded,
        17 => Refusal::UnknownTenant,
        // Far from the codes that are, or may soon be, known.
        _ => Refusal::Unknown { code: 1 << 20 },
    })
}

/// The refusal without its values, as an answer without details carries it.
fn bare(refusal: Refusal) -> Refusal {
    match refusal {
        Refusal::InvalidArgument { .. } => Refusal::invalid(""),
        Refusal::NoSpace { .. } => Refusal::NoSpace { largest_free: 0 },
        Refusal::Version { .. } => Refusal::Version {
            detail: String::new(),
        },
        Refusal::TooLarge { .. } => Refusal::TooLarge {
            detail: String::new(),
        },
        other => other,
    }
}

fn early_tables() -> impl Strategy<Value = Option<EarlyTable>> {
    option::of(
        (1..u64::MAX, 1..u32::MAX).prop_map(|(token, slots)| EarlyTable {
            token: EarlyToken::new(token).expect("not zero"),
            slots,
        }),
    )
}

fn fingerprints() -> impl Strategy<Value = Option<Fingerprint>> {
    option::of(
        any::<[u8; 16]>()
            .prop_filter("zero is none", |print| *print != [0; 16])
            .prop_map(Fingerprint),
    )
}

fn groups() -> impl Strategy<Value = Option<String>> {
    option::of("[a-z]{1,8}".prop_map(String::from))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn members_travel_unchanged(
        segment in segments(),
        client in any::<u128>(),
        term in option::of(1..u64::MAX),
        request in any::<u64>(),
        tenant in tenants(),
        version in any::<(u32, u32)>(),
    ) {
        prop_assert_eq!(Segment::try_from(travel(&wire::Segment::from(&segment))), Ok(segment));
        let context = Context {
            term: term.map(Term),
            client: ClientId(client),
            request: RequestId(request),
            tenant,
        };
        prop_assert_eq!(Context::try_from(travel(&wire::Context::from(&context))), Ok(context));
        let version = Version { protocol: version.0, semantics: version.1 };
        prop_assert_eq!(Version::from(travel(&wire::Version::from(version))), version);
    }

    #[test]
    fn requests_travel_unchanged(
        key in keys(),
        size in 1..u64::MAX,
        header_rows in any::<u32>(),
        group in groups(),
        fingerprint in fingerprints(),
        numbers in any::<(u64, Option<u32>, u32)>(),
        generation in 1..u64::MAX,
        flags in any::<(bool, bool, bool)>(),
        ttl in option::of((1..u32::MAX).prop_map(|ms| Duration::from_millis(ms.into()))),
        names in vec("[a-z]{1,8}", 0..4),
        count in 1..u32::MAX,
    ) {
        let start = PutStart {
            key: key.clone(),
            size,
            header_rows,
            group,
            fingerprint,
            layout_id: numbers.0,
            prefix_index: numbers.1,
            copy_of: flags.0.then_some(Generation(generation)),
            early: EarlyToken::new(numbers.0),
        };
        prop_assert_eq!(PutStart::try_from(travel(&wire::PutStart::from(start.clone()))), Ok(start));
        let object = ObjectRef { key, generation: Generation(generation) };
        prop_assert_eq!(ObjectRef::try_from(travel(&wire::ObjectRef::from(&object))), Ok(object));
        let recency = Recency { epoch: Epoch(numbers.0), first_index: numbers.2 };
        prop_assert_eq!(Recency::from(travel(&wire::Recency::from(recency))), recency);
        let config = ReplicateConfig {
            replicas: count,
            preferred_segments: names,
            prefer_same_node: flags.0,
            soft_pin: flags.1,
            soft_pin_ttl: ttl,
            keep_soft_pin: flags.2,
            hard_pin: flags.2,
        };
        prop_assert_eq!(
            ReplicateConfig::try_from(travel(&wire::ReplicateConfig::from(&config))),
            Ok(config)
        );
    }

    #[test]
    fn refusals_travel_with_their_values(results in vec(prop_oneof![Just(None), option::of(refusals())], 0..40)) {
        for refusal in results.iter().flatten() {
            prop_assert_eq!(Refusal::try_from(travel(&wire::Error::from(refusal))), Ok(refusal.clone()));
        }
        let results: Vec<Result<(), Refusal>> =
            results.into_iter().map(|refusal| refusal.map_or(Ok(()), Err)).collect();
        prop_assert_eq!(
            decode_key_results(travel(&encode_key_results(&results)), results.len()),
            Ok(results.clone())
        );
        let codes = encode_refusals(&results);
        let bare: Vec<_> = results.into_iter().map(|result| result.map_err(bare)).collect();
        prop_assert_eq!(decode_refusals(codes, bare.len()), Ok(bare));
    }

    #[test]
    fn answers_travel_unchanged(
        got in vec(
            prop_oneof![
                (1..u64::MAX, replicas(), any::<u32>(), fingerprints(), any::<u64>(), early_tables()).prop_map(
                    |(size, replicas, left_out, fingerprint, layout_id, early)| Ok(GetStarted {
                        size, replicas: replicas.into(), left_out, fingerprint, layout_id, early
                    })
                ),
                refusals().prop_map(|refusal| Err(bare(refusal))),
            ],
            0..12,
        ),
        put in vec(
            prop_oneof![
                replicas().prop_map(|replicas| Ok(PutStarted {
                    generation: replicas[0].generation,
                    replicas: replicas.into(),
                })),
                refusals().prop_map(Err),
            ],
            0..12,
        ),
        segments in vec(segments(), 0..3),
        epoch in any::<u64>(),
        time in millis(),
    ) {
        let answer = GetStartAnswer {
            results: got,
            segments: segments.clone(),
            lease: time,
            epoch: Epoch(epoch),
        };
        let keys = answer.results.len();
        prop_assert_eq!(
            GetStartAnswer::decode(travel(&wire::GetStartResponse::from(answer.clone())), keys),
            Ok(answer)
        );
        let hold = segments.first().map(|segment| Hold {
            generation: Generation(epoch | 1),
            segment: segment.id,
            offset: 3 * GRANULE,
            len: 64 * GRANULE,
            epoch: Epoch(epoch),
        });
        let hold = hold.filter(|hold| hold.generation.0 < u64::MAX - 64);
        let answer = PutStartAnswer {
            results: put,
            segments,
            epoch: Epoch(epoch),
            discard_after: time,
            hold,
        };
        let keys = answer.results.len();
        prop_assert_eq!(
            PutStartAnswer::decode(travel(&wire::PutStartResponse::from(&answer)), keys),
            Ok(answer)
        );
    }

    #[test]
    fn presences_travel_and_a_short_list_means_absent(
        states in vec((0..3).prop_map(|state| match state {
            0 => Presence::Absent,
            1 => Presence::Complete,
            _ => Presence::Reserved,
        }), 0..50),
        unasked in 0_usize..20,
    ) {
        let keys = states.len() + unasked;
        let mut expected = states.clone();
        expected.resize(keys, Presence::Absent);
        prop_assert_eq!(decode_presences(&encode_presences(&states), keys), Ok(expected));
    }

    #[test]
    fn commands_travel_unchanged(
        id in any::<u64>(),
        segment in any::<u64>(),
        places in vec((any::<u32>(), any::<u32>(), 1..u64::MAX), 0..5),
        writer in any::<u128>(),
        engine in option::of(any::<u128>()),
        tenant in tenants(),
        objects in vec((keys(), 1..u64::MAX), 0..5),
    ) {
        let fence = Fence {
            id,
            segment: SegmentId(segment),
            places: places
                .into_iter()
                .map(|(offset, len, generation)| FencedPlace {
                    offset: offset.into(),
                    len: len.into(),
                    generation: Generation(generation),
                })
                .collect(),
            writer: ClientId(writer),
            engine: engine.map(EngineId),
        };
        prop_assert_eq!(Fence::try_from(travel(&wire::FenceCommand::from(fence.clone()))), Ok(fence));
        let drop = DropSessions {
            id,
            tenant,
            objects: objects
                .into_iter()
                .map(|(key, generation)| ObjectRef { key, generation: Generation(generation) })
                .collect(),
        };
        prop_assert_eq!(
            DropSessions::try_from(travel(&wire::DropSessionsCommand::from(&drop))),
            Ok(drop)
        );
    }

    #[test]
    fn reports_travel_unchanged(
        key in keys(),
        replicas in replicas(),
        state in 0..5,
        numbers in any::<(u64, u64, u64, u64, u32, u32)>(),
        flags in any::<(bool, bool)>(),
        group in groups(),
        time in millis(),
        segment in segments(),
        client in any::<u128>(),
    ) {
        let object = ObjectStat {
            key,
            size: numbers.0,
            state: match state {
                0 => ObjectState::Initialized,
                1 => ObjectState::Processing,
                2 => ObjectState::Complete,
                3 => ObjectState::Failed,
                _ => ObjectState::Removed,
            },
            generation: replicas[0].generation,
            replicas,
            lease_remaining: time,
            soft_pinned: flags.0,
            hard_pinned: flags.1,
            group,
            epoch: Epoch(numbers.1),
            prefix_index: numbers.4,
            open_readers: numbers.5,
        };
        prop_assert_eq!(ObjectStat::try_from(travel(&wire::ObjectStat::from(object.clone()))), Ok(object));
        let stat = SegmentStat {
            segment,
            state: if flags.0 { SegmentState::Mounted } else { SegmentState::Draining },
            used_bytes: numbers.0,
            largest_free: numbers.1,
            objects: numbers.2,
            quarantined_bytes: numbers.3,
            heartbeat_age: time,
            client: ClientId(client),
        };
        prop_assert_eq!(SegmentStat::try_from(travel(&wire::SegmentStat::from(stat.clone()))), Ok(stat));
        let status = Status {
            term: Term(numbers.0),
            uptime: time,
            objects: numbers.1,
            reserved_objects: numbers.2,
            capacity_bytes: numbers.3,
            used_bytes: numbers.0 ^ 1,
            quarantined_bytes: numbers.1 ^ 2,
            segments: numbers.2 ^ 3,
            members: numbers.3 ^ 4,
            evicted_objects: numbers.0 ^ 5,
            evicted_bytes: numbers.1 ^ 6,
            refused_puts: numbers.2 ^ 7,
            lost_nodes: numbers.3 ^ 8,
            discarded_puts: numbers.0 ^ 9,
            client_ttl: time,
            version: Version { protocol: numbers.4, semantics: numbers.5 },
        };
        prop_assert_eq!(Status::try_from(travel(&wire::StatusResponse::from(status))), Ok(status));
    }

    /// Any message at all is converted or refused, never a panic.
    #[test]
    fn no_bytes_make_a_conversion_panic(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(message) = wire::Segment::decode(bytes.as_slice()) {
            let _ = Segment::try_from(message);
        }
        if let Ok(message) = wire::PutStart::decode(bytes.as_slice()) {
            let _ = PutStart::try_from(message);
        }
        if let Ok(message) = wire::PutStartResponse::decode(bytes.as_slice()) {
            let _ = PutStartAnswer::decode(message, 1);
        }
        if let Ok(message) = wire::KeyResults::decode(bytes.as_slice()) {
            let _ = decode_key_results(message, 3);
        }
        if let Ok(message) = wire::FenceCommand::decode(bytes.as_slice()) {
            let _ = Fence::try_from(message);
        }
    }
}
