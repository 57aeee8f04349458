use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

fn version() -> impl Strategy<Value = Version> {
    (any::<u32>(), any::<u32>()).prop_map(|(protocol, semantics)| Version {
        protocol,
        semantics,
    })
}

fn region() -> impl Strategy<Value = (RegionId, Capability)> {
    (any::<u64>(), any::<[u8; 16]>()).prop_map(|(id, key)| (RegionId(id), Capability(key)))
}

fn not_opened() -> impl Strategy<Value = NotOpenedReason> {
    prop_oneof![
        Just(NotOpenedReason::NotShared),
        select(Refusal::ALL.to_vec()).prop_map(NotOpenedReason::Refused),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let engines = (any::<u128>(), any::<u128>());
    prop_oneof![
        (version(), engines, any::<Nonce>()).prop_map(|(version, (from, to), nonce)| {
            Message::Hello {
                version,
                from: EngineId(from),
                to: EngineId(to),
                nonce,
            }
        }),
        (
            version(),
            any::<u128>(),
            any::<Nonce>(),
            option::of(any::<Proof>())
        )
            .prop_map(|(version, from, nonce, proof)| {
                Message::Welcome {
                    version,
                    from: EngineId(from),
                    nonce,
                    proof,
                }
            }),
        option::of(any::<Proof>()).prop_map(|proof| Message::Prove { proof }),
        (any::<u64>(), any::<u128>())
            .prop_map(|(probe_addr, probe)| Message::Attached { probe_addr, probe }),
        (select(RefusedReason::ALL.to_vec()), version())
            .prop_map(|(reason, version)| Message::Refused { reason, version }),
        region().prop_map(|(region, capability)| Message::Open { region, capability }),
        (region(), any::<u32>(), any::<bool>(), any::<bool>()).prop_map(
            |((region, capability), index, mapped, tags)| {
                Message::Opened {
                    region,
                    capability,
                    index,
                    mapped,
                    tags,
                }
            }
        ),
        (region(), not_opened()).prop_map(|((region, capability), reason)| {
            Message::NotOpened {
                region,
                capability,
                reason,
            }
        }),
        any::<u64>().prop_map(|region| Message::Withdrawn {
            region: RegionId(region)
        }),
        any::<u32>().prop_map(|pieces| Message::Violations { pieces }),
    ]
}

proptest! {
    #[test]
    fn what_is_sent_is_what_arrives(message in message(), later in vec(any::<u8>(), 0..8)) {
        let mut bytes = message.encode();
        prop_assert!(bytes.len() <= MAX_LEN);
        // A later version's additional fields do no harm.
        bytes.extend(later);
        prop_assert_eq!(Message::decode(&bytes), Ok(message));
    }

    #[test]
    fn a_cut_message_is_refused(message in message(), cut: prop::sample::Index) {
        let bytes = message.encode();
        prop_assert!(Message::decode(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(mut bytes in vec(any::<u8>(), 0..300), kind in 0..16_u8) {
        // Mostly known kinds, or the fields would never be reached.
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }
}

#[test]
fn another_protocol_is_named_as_such() {
    let mut bytes = Message::Hello {
        version: layercake_protocol::version::CURRENT,
        from: EngineId(1),
        to: EngineId(2),
        nonce: [0; 32],
    }
    .encode();
    bytes[3] ^= 1;
    assert_eq!(Message::decode(&bytes), Err(WireError::Magic));
}
