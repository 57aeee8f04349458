//! The messages that are written by hand have the bytes that generated ones would have.

use std::fmt::Debug;

use bytes::Bytes;
use layercake_protocol::wire::{self, Replica};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};

#[derive(Clone, PartialEq, Message)]
struct PutStarted {
    #[prost(enumeration = "wire::Refusal", tag = "1")]
    refusal: i32,
    #[prost(uint64, tag = "2")]
    generation: u64,
    #[prost(message, repeated, tag = "3")]
    replicas: Vec<Replica>,
}

#[derive(Clone, PartialEq, Message)]
struct GetStarted {
    #[prost(enumeration = "wire::Refusal", tag = "1")]
    refusal: i32,
    #[prost(uint64, tag = "2")]
    size: u64,
    #[prost(message, repeated, tag = "3")]
    replicas: Vec<Replica>,
    #[prost(bytes = "bytes", tag = "4")]
    fingerprint: Bytes,
    #[prost(fixed64, tag = "5")]
    layout_id: u64,
    #[prost(fixed64, tag = "6")]
    early_token: u64,
    #[prost(uint32, tag = "7")]
    early_slots: u32,
    #[prost(uint32, tag = "8")]
    left_out: u32,
}

impl From<PutStarted> for wire::PutStarted {
    fn from(put: PutStarted) -> Self {
        Self {
            refusal: put.refusal,
            generation: put.generation,
            replicas: put.replicas.into(),
        }
    }
}

impl From<GetStarted> for wire::GetStarted {
    fn from(got: GetStarted) -> Self {
        Self {
            refusal: got.refusal,
            size: got.size,
            replicas: got.replicas.into(),
            fingerprint: got.fingerprint,
            layout_id: got.layout_id,
            early_token: got.early_token,
            early_slots: got.early_slots,
            left_out: got.left_out,
        }
    }
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 1..300_u64, any::<u64>()]
}

fn replicas() -> impl Strategy<Value = Vec<Replica>> {
    let replica = (number(), number(), any::<u32>(), number());
    let replica = replica.prop_map(|(segment_id, offset, header_len, generation)| Replica {
        segment_id,
        offset,
        header_len,
        generation,
    });
    vec(replica, 0..4)
}

fn puts() -> impl Strategy<Value = PutStarted> {
    let fields = (-2..100_i32, number(), replicas());
    fields.prop_map(|(refusal, generation, replicas)| PutStarted {
        refusal,
        generation,
        replicas,
    })
}

fn gets() -> impl Strategy<Value = GetStarted> {
    let origin = (vec(any::<u8>(), 0..20), number(), number());
    let fields = (
        -2..100_i32,
        number(),
        replicas(),
        origin,
        0..3_u32,
        0..3_u32,
    );
    fields.prop_map(
        |(refusal, size, replicas, origin, early_slots, left_out)| GetStarted {
            refusal,
            size,
            replicas,
            fingerprint: origin.0.into(),
            layout_id: origin.1,
            early_token: origin.2,
            early_slots,
            left_out,
        },
    )
}

/// A field of a later version, of any kind.
fn unknown() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop_oneof![
        any::<u64>().prop_map(|value| {
            let mut bytes = Vec::new();
            encode_varint(value, &mut bytes);
            (WireType::Varint, bytes)
        }),
        any::<[u8; 8]>().prop_map(|bytes| (WireType::SixtyFourBit, bytes.to_vec())),
        any::<[u8; 4]>().prop_map(|bytes| (WireType::ThirtyTwoBit, bytes.to_vec())),
        vec(any::<u8>(), 0..20).prop_map(|content| {
            let mut bytes = Vec::new();
            encode_varint(content.len() as u64, &mut bytes);
            bytes.extend(content);
            (WireType::LengthDelimited, bytes)
        }),
        gets().prop_map(|inside| (WireType::StartGroup, inside.encode_to_vec())),
    ];
    (9..40_u32, payload).prop_map(|(field, (kind, payload))| {
        let mut bytes = Vec::new();
        encode_key(field, kind, &mut bytes);
        bytes.extend(payload);
        if kind == WireType::StartGroup {
            encode_key(field, WireType::EndGroup, &mut bytes);
        }
        bytes
    })
}

/// What a peer of any version may send: fields given once or several times, known or not, in any order.
fn parts() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        2 => puts().prop_map(|put| put.encode_to_vec()),
        2 => gets().prop_map(|got| got.encode_to_vec()),
        3 => unknown(),
    ];
    vec(part, 0..5).prop_map(|parts| parts.concat())
}

/// Bytes that are fields of a message, and not always of the right type, or whole.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let field = (0..10_u8, 0..6_u8, vec(0..12_u8, 0..9));
    let field = field.prop_map(|(field, wire_type, rest)| {
        let mut bytes = vec![field << 3 | wire_type];
        bytes.extend(rest);
        bytes
    });
    vec(field, 0..5).prop_map(|fields| fields.concat())
}

/// Both have the same bytes, and take the other's for the same, also in two parts.
fn check<G, H>(generated: &G, more: &G) -> Result<(), TestCaseError>
where
    G: Message + Default + Clone + Into<H>,
    H: Message + Default + PartialEq + Debug,
{
    let ours: H = generated.clone().into();
    let bytes = generated.encode_to_vec();
    prop_assert_eq!(ours.encoded_len(), bytes.len());
    prop_assert_eq!(&ours.encode_to_vec(), &bytes);
    prop_assert_eq!(H::decode(bytes.as_slice()), Ok(ours));
    let twice = [bytes, more.encode_to_vec()].concat();
    let sum = G::decode(twice.as_slice()).map(Into::into);
    let mut ours = H::decode(twice.as_slice());
    prop_assert_eq!(&ours, &sum);
    if let Ok(ours) = &mut ours {
        ours.clear();
        prop_assert_eq!(&*ours, &H::default());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_sent_is_what_generated_code_would_send(
        puts in (puts(), puts()), gets in (gets(), gets()),
    ) {
        check::<_, wire::PutStarted>(&puts.0, &puts.1)?;
        check::<_, wire::GetStarted>(&gets.0, &gets.1)?;
    }

    #[test]
    fn what_a_later_version_sends_means_what_generated_code_would_make_of_it(bytes in parts()) {
        let put = PutStarted::decode(bytes.as_slice()).map(wire::PutStarted::from);
        prop_assert!(put.is_ok());
        prop_assert_eq!(wire::PutStarted::decode(bytes.as_slice()), put);
        let got = GetStarted::decode(bytes.as_slice()).map(wire::GetStarted::from);
        prop_assert!(got.is_ok());
        prop_assert_eq!(wire::GetStarted::decode(bytes.as_slice()), got);
    }

    #[test]
    fn garbage_is_refused_where_generated_code_would(
        before in parts(), garbage in garbage(), cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = [before, garbage].concat();
        bytes.truncate(cut.index(bytes.len() + 1));
        let put = PutStarted::decode(bytes.as_slice()).map(wire::PutStarted::from);
        prop_assert_eq!(wire::PutStarted::decode(bytes.as_slice()).ok(), put.ok());
        let got = GetStarted::decode(bytes.as_slice()).map(wire::GetStarted::from);
        prop_assert_eq!(wire::GetStarted::decode(bytes.as_slice()).ok(), got.ok());
    }
}
