//! Requests about many keys are the messages that they stand for.

use layercake_protocol::convert::{encode_batch, encode_upserts};
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
    #![proptest_config(ProptestConfig::with_cases(64))]

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
        remove.keys = texts;
        same(&bytes, Request::Remove(remove));

        let bytes = encode_batch(&wire::RenewRequest::default(), &objects);
        same(&bytes, Request::Renew(wire::RenewRequest { objects: refs.clone() }));
        let bytes = encode_batch(&wire::GetEndRequest::default(), &objects);
        same(&bytes, Request::GetEnd(wire::GetEndRequest { objects: refs.clone() }));
        let bytes = encode_batch(&wire::PutEndRequest::default(), &objects);
        same(&bytes, Request::PutEnd(wire::PutEndRequest { objects: refs.clone() }));
        let unconfirmed = vec![flag; objects.len()];
        let mut revoke = wire::PutRevokeRequest { unconfirmed, ..Default::default() };
        let bytes = encode_batch(&revoke, &objects);
        revoke.objects = refs;
        same(&bytes, Request::PutRevoke(revoke));
    }
}
