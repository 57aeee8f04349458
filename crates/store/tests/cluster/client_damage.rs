//! Bytes that are damaged or of another deployment.

use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::replica::{PutStart, Recency, Replica, ReplicateConfig};
use layercake_store::{EarlyRead, GetOptions, PutRequest, Range, StoreError};

use crate::common::{
    Cluster, KIB, OneKey as _, PATIENCE, Spec, TestNode, Via, buffer, fresh_key, one, one_replica,
    pattern, refusal, replicas, whole,
};

// contract: session-12
#[tokio::test]
async fn a_damaged_byte_is_never_served() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let client = cluster.client().await;
        let (damaged, sound) = (fresh_key(), fresh_key());
        let size = 64 * KIB;
        let session = client
            .start_put(&damaged, size)
            .await
            .expect("there is room");
        for row in 0..4 {
            client
                .write(&session, row * 16 * KIB, &pattern(row, 16 * KIB))
                .await
                .expect("up");
        }
        let replica = session.replicas().next().expect("one");
        client.end(session).await.expect("whole");
        client.store(&sound, &pattern(9, size)).await;
        let at = replica.payload_offset() + 20 * KIB;
        let node = &cluster.nodes[0];
        let byte = node.peek(at, 1).await[0];
        node.poke(at, &[byte ^ 0x10]).await;

        let loaded = client.get(&[damaged.clone(), sound]).await;
        let error = loaded[0].as_ref().expect_err("damaged");
        assert!(
            matches!(
                error,
                StoreError::ChecksumMismatch {
                    offset: 16_384,
                    len: 16_384
                }
            ),
            "{error}"
        );
        assert_eq!(
            loaded[1].as_ref().expect("its neighbour is sound")[..],
            pattern(9, size)[..]
        );
        let get = client
            .start_get(&damaged)
            .await
            .expect("the header is sound");
        let error = client
            .read(&get, 16 * KIB, 16 * KIB)
            .await
            .expect_err("the damaged row");
        assert!(
            matches!(error, StoreError::ChecksumMismatch { .. }),
            "{error}"
        );
        for row in [0, 2, 3] {
            let (done, bytes) = client
                .read(&get, row * 16 * KIB, 16 * KIB)
                .await
                .expect("sound");
            assert_eq!(bytes, pattern(row, 16 * KIB));
            assert_eq!(done.verified, 16 * KIB);
        }
        let (done, _) = client
            .read(&get, 100, 100)
            .await
            .expect("a part of a sound row");
        assert_eq!(
            (done.verified, done.unverified),
            (0, 100),
            "and it says that it can't know"
        );
        assert_eq!(client.stats().mismatches, 2);
        drop(get);

        // A damaged header is no header.
        node.poke(replica.offset + 40, &[0xFF; 4]).await;
        let error = client.start_get(&damaged).await.expect_err("damaged");
        assert!(
            matches!(error, StoreError::HeaderMismatch { .. }),
            "{error}"
        );
    }
}

// contract: session-12
#[tokio::test]
async fn another_deployments_object_is_refused_before_a_byte_lands() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let client = cluster.client().await;
    let (theirs, ours) = (Fingerprint([7; 16]), Fingerprint([8; 16]));
    let keys = [fresh_key(), fresh_key(), fresh_key()];
    for (key, fingerprint) in keys.iter().zip([Some(theirs), Some(ours), None]) {
        let memory = buffer(client.engine(), pattern(1, KIB));
        let mut request = PutRequest::new(key.clone(), vec![whole(&memory)]);
        request.fingerprint = fingerprint;
        one(client.put(vec![request], &one_replica()).await).expect("there is room");
    }
    let options = GetOptions {
        fingerprint: Some(ours),
        ..GetOptions::default()
    };
    let before = client.stats().bytes_read;
    let mut sessions = client.start_gets(&keys, options).await;
    for (at, found) in [(2, None), (0, Some(theirs))] {
        let error = sessions.remove(at).expect_err("not ours");
        assert!(
            matches!(error, StoreError::FingerprintMismatch { expected, found: f } if expected == ours && f == found),
            "{error}"
        );
        assert!(error.to_string().contains(&ours.to_string()), "{error}");
    }
    let ours_session = one(sessions).expect("ours");
    assert_eq!(ours_session.fingerprint(), Some(ours));
    assert_eq!(client.stats().bytes_read, before);
    client.end_gets(vec![ours_session]).await;
    assert_eq!(client.stats().open_gets, 0);
    for removed in client.remove(&keys, false).await {
        removed.expect("refused sessions hold no lease");
    }
}

/// Of two replicas one is damaged and one out of reach, whichever is tried first: nobody knows that the object is damaged, and
/// who removes what is would remove a good one.
// contract: session-12
#[tokio::test]
async fn an_object_is_damaged_only_if_all_its_replicas_are() {
    let holder = |cluster: &Cluster, replica: &Replica| -> usize {
        let holds = |node: &TestNode| node.node.segments()[0].id == replica.segment;
        let found = cluster.nodes.iter().position(holds);
        found.expect("it is on one of the nodes")
    };
    for damaged in [0, 1] {
        for header in [false, true] {
            let spec = Spec::new(Via::Tcp).nodes(&[1024 * KIB; 2]);
            let cluster = spec.start().await;
            let (writer, reader) = (cluster.client().await, cluster.client().await);
            let (key, size) = (fresh_key(), 64 * KIB);
            let memory = buffer(writer.engine(), pattern(1, size));
            let put = PutRequest::new(key.clone(), vec![whole(&memory)]);
            one(writer.put(vec![put], &replicas(2)).await).expect("there is room");
            let get = reader.start_get(&key).await.expect("sound");
            let places: Vec<Replica> = writer
                .stat(&key)
                .await
                .expect("it is there")
                .object
                .replicas;
            let place = &places[damaged];
            let at = if header {
                place.offset + 40
            } else {
                place.payload_offset()
            };
            let node = &cluster.nodes[holder(&cluster, place)];
            let byte = node.peek(at, 1).await[0];
            node.poke(at, &[byte ^ 0x10]).await;
            let other = &cluster.nodes[holder(&cluster, &places[1 - damaged])];
            other.engine.shutdown(PATIENCE);
            let error = if header {
                let again = cluster.client().await;
                again
                    .start_get(&key)
                    .await
                    .map(drop)
                    .expect_err("damaged, or not there")
            } else {
                let read = reader.read(&get, 0, size).await;
                read.map(drop).expect_err("damaged, or not there")
            };
            assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
        }
    }
}

/// A client that knows a replica's node to be out of reach is not told of the replica. It may be a good one all the same, so
/// an object is not called damaged for the others; one without such a replica is.
// contract: session-13
#[tokio::test]
async fn a_replica_that_is_not_tried_may_be_a_good_one() {
    let cluster = Spec::new(Via::Tcp).nodes(&[1024 * KIB; 2]).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let size = 64 * KIB;
    let memory = buffer(writer.engine(), pattern(1, size));
    let on = |node: &str| ReplicateConfig {
        preferred_segments: vec![node.to_owned()],
        ..one_replica()
    };
    let (both, here, there) = (
        [fresh_key(), fresh_key()],
        [fresh_key(), fresh_key()],
        fresh_key(),
    );
    let mut wanted = vec![(there.clone(), on("node-1"))];
    wanted.extend(both.iter().map(|key| (key.clone(), replicas(2))));
    wanted.extend(here.iter().map(|key| (key.clone(), on("node-0"))));
    for (key, config) in wanted {
        let put = PutRequest::new(key, vec![whole(&memory)]);
        one(writer.put(vec![put], &config).await).expect("there is room");
    }
    let unfinished = PutStart::new(fresh_key(), size).early_reads();
    let early = unfinished.key.clone();
    let two = replicas(2);
    let started = writer.start_puts(vec![unfinished], &two, Recency::default());
    let put = one(started.await).expect("there is room");
    writer.write(&put, 0, &pattern(1, size)).await.expect("up");

    let node = &cluster.nodes[0];
    let damage = async |replica: &Replica, header: bool| {
        assert_eq!(replica.segment, node.node.segments()[0].id);
        let at = if header {
            replica.offset + 40
        } else {
            replica.payload_offset()
        };
        let byte = node.peek(at, 1).await[0];
        node.poke(at, &[byte ^ 0x10]).await;
    };
    let own = |replica: &Replica| replica.segment == node.node.segments()[0].id;
    for keys in [&both, &here] {
        for (key, header) in keys.iter().zip([false, true]) {
            let found = writer.stat(key).await.expect("it is there").object;
            let replica = found.replicas.iter().find(|replica| own(replica));
            damage(replica.expect("one is on this node"), header).await;
        }
    }
    let replica = put.replicas().find(|replica| own(replica));
    damage(&replica.expect("one is on this node"), false).await;
    cluster.nodes[1].engine.shutdown(PATIENCE);
    let gone = reader.start_get(&there).await.map(drop);
    assert!(matches!(gone, Err(StoreError::Transfer { .. })), "{gone:?}");

    for (keys, damaged) in [(&both, false), (&here, true)] {
        let get = reader.start_get(&keys[0]).await.expect("a sound header");
        let payload = reader.read(&get, 0, size).await.map(drop);
        let header = reader.start_get(&keys[1]).await.map(drop);
        for failed in [payload, header] {
            let error = failed.expect_err("damaged");
            let told = matches!(
                error,
                StoreError::ChecksumMismatch { .. } | StoreError::HeaderMismatch { .. }
            );
            let passed_over = matches!(error, StoreError::Refused(Refusal::Unreachable));
            assert_eq!((told, passed_over), (damaged, !damaged), "{error}");
        }
    }
    let sessions = reader.start_early_gets(std::slice::from_ref(&early), Recency::default());
    let session = one(sessions.await).expect("it is being written");
    let target = buffer(
        reader.engine(),
        vec![0; usize::try_from(size).expect("small")],
    );
    let reads = vec![EarlyRead {
        session: &session,
        ranges: vec![Range {
            offset: 0,
            local: whole(&target),
        }],
    }];
    let read = one(reader.read_early(reads, PATIENCE).await).map(drop);
    assert_eq!(refusal(read), Refusal::Unreachable);
}
