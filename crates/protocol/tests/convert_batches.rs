//! Requests about many keys are the messages that they stand for, encoded and decoded.

use layercake_protocol::convert::{ListedFrame, encode_batch, encode_upserts};
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, PutStart};
use layercake_protocol::wire;
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;

fn keys() -> impl Strategy<Value = ObjectKey> {
    "\\PC{1,40}".prop_map(|text| ObjectKey::new(&text).expect("at least one character"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_batch_is_encoded_as_its_message_is(
        objects in vec((keys(), 1_u64..), 0..20),
        flag in any::<bool>(),
        segments in vec(any::<u64>(), 0..3),
    ) {
        use wire::client_frame::Request;
        let objects = objects.into_iter().map(|(key, generation)| ObjectRef {
            key,
            generation: Generation(generation),
        });
        let objects: Vec<ObjectRef> = objects.collect();
        let keys: Vec<ObjectKey> = objects.iter().map(|object| object.key.clone()).collect();
        let texts: Vec<String> = keys.iter().map(ToString::to_string).collect();
        let refs: Vec<wire::ObjectRef> = objects.iter().map(Into::into).collect();
        let same = |bytes: &[u8], request: Request| {
            let frame = wire::ClientFrame::decode(bytes).expect("a frame");
            assert_eq!(frame.context, None);
            assert_eq!(frame.request, Some(request));
            let listed = ListedFrame::decode(bytes).expect("a frame");
            assert_eq!(listed, ListedFrame::from(frame));
            if let Some(Request::PutStart(_) | Request::UpsertStart(_)) = listed.frame.request {
                assert!(listed.list.is_empty(), "their entries are no keys");
                return;
            }
            let listed_keys = listed.list.keys().map(|key| key.expect("a good key"));
            assert_eq!(listed_keys.collect::<Vec<_>>(), texts);
            for (object, listed) in refs.iter().zip(listed.list.versions()) {
                if let Ok(listed) = listed {
                    assert_eq!((listed.key, listed.generation.0), (object.key.as_str(), object.generation));
                }
            }
        };

        let mut exists = wire::ExistsRequest {
            stop_at_first_miss: flag,
            peek: !flag,
            unreachable_segments: segments.clone(),
            recency: Some(wire::Recency { epoch: 3, first_index: 5 }),
            ..Default::default()
        };
        let bytes = encode_batch(&exists, &keys);
        exists.keys.clone_from(&texts);
        same(&bytes, Request::Exists(exists));

        let mut get_start = wire::GetStartRequest {
            session: flag,
            unreachable_segments: segments,
            ..Default::default()
        };
        let bytes = encode_batch(&get_start, &keys);
        get_start.keys.clone_from(&texts);
        same(&bytes, Request::GetStart(get_start));

        let entries = objects.iter().map(|object| PutStart {
            group: flag.then(|| "g".to_owned()),
            fingerprint: flag.then_some(Fingerprint([7; 16])),
            copy_of: (!flag).then_some(object.generation),
            prefix_index: flag.then_some(0),
            ..PutStart::new(object.key.clone(), object.generation.0)
        });
        let entries: Vec<PutStart> = entries.collect();
        let mut put_start = wire::PutStartRequest {
            recency: Some(wire::Recency { epoch: 3, first_index: 5 }),
            ..Default::default()
        };
        let bytes = encode_batch(&put_start, &entries);
        let upserts = encode_upserts(&put_start, &entries);
        put_start.entries = entries.into_iter().map(Into::into).collect();
        same(&bytes, Request::PutStart(put_start.clone()));
        same(&upserts, Request::UpsertStart(wire::UpsertStartRequest { start: Some(put_start) }));

        let mut wait = wire::WaitCompleteRequest { timeout_ms: 7, ..Default::default() };
        let bytes = encode_batch(&wait, &keys);
        wait.keys.clone_from(&texts);
        same(&bytes, Request::WaitComplete(wait));

        let mut remove = wire::RemoveRequest { force: flag, ..Default::default() };
        let bytes = encode_batch(&remove, &keys);
        remove.keys.clone_from(&texts);
        same(&bytes, Request::Remove(remove));

        let bytes = encode_batch(&wire::RenewRequest::default(), &objects);
        same(&bytes, Request::Renew(wire::RenewRequest { objects: refs.clone() }));
        let bytes = encode_batch(&wire::GetEndRequest::default(), &objects);
        same(&bytes, Request::GetEnd(wire::GetEndRequest { objects: refs.clone() }));
        let bytes = encode_batch(&wire::PutEndRequest::default(), &objects);
        same(&bytes, Request::PutEnd(wire::PutEndRequest { objects: refs.clone() }));
        let bytes = encode_batch(&wire::RemoveVersionsRequest::default(), &objects);
        same(&bytes, Request::RemoveVersions(wire::RemoveVersionsRequest { objects: refs.clone() }));
        let unconfirmed = vec![flag; objects.len()];
        let mut revoke = wire::PutRevokeRequest { unconfirmed, ..Default::default() };
        let bytes = encode_batch(&revoke, &objects);
        revoke.objects.clone_from(&refs);
        same(&bytes, Request::PutRevoke(revoke));
    }

    /// Whatever arrives is refused by both ways to decode it, or means the same to both.
    #[test]
    fn what_arrives_is_decoded_as_its_message_is(
        objects in vec((".{0,6}", any::<u64>()), 0..4),
        context in prop::option::of(any::<u64>()),
        kinds in vec(0_usize..6, 1..3),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        use wire::client_frame::Request;
        let keys: Vec<String> = objects.iter().map(|(key, _)| key.clone()).collect();
        let objects: Vec<_> = objects
            .into_iter()
            .map(|(key, generation)| wire::ObjectRef { key, generation })
            .collect();
        let context = context.map(|request_id| wire::Context { request_id, ..Default::default() });
        let mut bytes = Vec::new();
        // One frame behind the other is the sum of both.
        for kind in kinds {
            let request = match kind {
                0 => Request::Exists(wire::ExistsRequest {
                    keys: keys.clone(),
                    unreachable_segments: vec![5],
                    ..Default::default()
                }),
                1 => Request::GetStart(wire::GetStartRequest { keys: keys.clone(), ..Default::default() }),
                2 => Request::PutEnd(wire::PutEndRequest { objects: objects.clone() }),
                3 => Request::PutRevoke(wire::PutRevokeRequest {
                    objects: objects.clone(),
                    unconfirmed: vec![true; objects.len()],
                }),
                4 => Request::Heartbeat(wire::HeartbeatRequest { segment_ids: vec![1] }),
                _ => Request::WaitComplete(wire::WaitCompleteRequest { keys: keys.clone(), timeout_ms: 3 }),
            };
            let frame = wire::ClientFrame { context: context.clone(), request: Some(request) };
            bytes.extend(frame.encode_to_vec());
        }
        for (place, by) in changes {
            if !bytes.is_empty() {
                let at = place.index(bytes.len());
                bytes[at] = by;
            }
        }
        let listed = ListedFrame::decode(&bytes).ok();
        let frame = wire::ClientFrame::decode(bytes.as_slice()).ok().map(ListedFrame::from);
        prop_assert_eq!(listed, frame);
    }

    #[test]
    fn a_bad_entry_of_a_list_is_refused_alone(long in 0_usize..3) {
        let objects = ["k", "", "l"].map(|key| wire::ObjectRef { key: key.to_owned(), generation: 7 });
        let mut request = wire::GetEndRequest { objects: objects.to_vec() };
        request.objects[2].generation = 0;
        request.objects[long].key = "x".repeat(65_536);
        let request = Some(wire::client_frame::Request::GetEnd(request));
        let listed = ListedFrame::from(wire::ClientFrame { context: None, request });
        let keys = listed.list.keys().map(|key| key.is_ok());
        prop_assert_eq!(keys.collect::<Vec<_>>(), [0, 1, 2].map(|at| at != long && at != 1));
        let versions = listed.list.versions().map(|version| version.is_ok());
        prop_assert_eq!(versions.collect::<Vec<_>>(), [long != 0, false, false]);
        prop_assert_eq!((listed.list.len(), listed.list.is_empty()), (3, false));
    }
}
