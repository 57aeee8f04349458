//! Whole objects, look-ups, replicas, damage and dead nodes.

use std::time::Duration;

use crate::common;
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, Spec, Via, buffer, contents, eventually, eventually_async,
    fresh_key, key, one, one_replica, pattern, refusal, replicas, whole,
};
use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{
    ClientConfig, GetOptions, GetRequest, PutOutcome, PutRequest, Range, RangeRead, StoreError,
};

// contract: session-2
#[tokio::test]
async fn whole_objects_come_back_as_they_were_put() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let client = cluster.client().await;
        let sizes = [1, 7, 4095, 4096, 4097, 64 * KIB, 3 * MIB + 11];
        let keys: Vec<ObjectKey> = sizes.iter().map(|_| fresh_key()).collect();
        let bytes: Vec<Vec<u8>> = sizes.iter().map(|&size| pattern(size, size)).collect();
        let objects: Vec<_> = keys
            .iter()
            .cloned()
            .zip(bytes.iter().map(Vec::as_slice))
            .collect();
        for put in client.put_bytes(&objects, &one_replica()).await {
            assert_eq!(put.expect("there is room"), PutOutcome::Stored);
        }
        for (loaded, bytes) in client.get(&keys).await.into_iter().zip(&bytes) {
            assert_eq!(loaded.expect("complete"), bytes);
        }
        for (found, size) in client.sizes(&keys).await.into_iter().zip(sizes) {
            assert_eq!(found.expect("complete"), size);
        }
        let stats = client.stats();
        assert_eq!(stats.bytes_unverified, 0, "{via:?}");
        assert_eq!(stats.open_puts + stats.open_gets, 0);
    }
}

#[tokio::test]
async fn one_bad_entry_does_not_fail_its_neighbours() {
    let cluster = Spec::new(Via::Shm).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    let there = fresh_key();
    client.store(&there, &pattern(0, KIB)).await;
    let big = pattern(1, 16 * MIB);
    let small = pattern(2, KIB);
    let objects = [
        (fresh_key(), small.as_slice()),
        (there.clone(), small.as_slice()),
        (fresh_key(), big.as_slice()),
        (fresh_key(), &[]),
        (fresh_key(), small.as_slice()),
    ];
    let mut put = client.put_bytes(&objects, &one_replica()).await;
    assert_eq!(put.len(), 5);
    assert_eq!(put.remove(0).expect("fits"), PutOutcome::Stored);
    assert_eq!(put.remove(0).expect("ordinary"), PutOutcome::Existed);
    assert!(
        matches!(refusal(put.remove(0)), Refusal::NoSpace { largest_free } if largest_free > 0)
    );
    assert!(matches!(
        refusal(put.remove(0)),
        Refusal::InvalidArgument { .. }
    ));
    assert_eq!(put.remove(0).expect("fits"), PutOutcome::Stored);

    let keys: Vec<ObjectKey> = objects.iter().map(|(key, _)| key.clone()).collect();
    let exist = client.exists(&keys, Recency::default()).await;
    let exist: Vec<bool> = exist.into_iter().map(|found| found.expect("up")).collect();
    assert_eq!(exist, [true, true, false, false, true]);
    let loaded = client.get(&keys).await;
    let found: Vec<bool> = loaded.iter().map(Result::is_ok).collect();
    assert_eq!(found, exist);
    assert_eq!(
        loaded[1].as_ref().expect("complete")[..],
        pattern(0, KIB)[..],
        "the first value stays"
    );
    let readable = client.readable(&keys, Recency::default()).await;
    assert!(
        readable
            .into_iter()
            .map(|found| found.expect("up"))
            .eq(exist)
    );
    assert!(client.get(&[]).await.is_empty());
    assert!(client.exists(&[], Recency::default()).await.is_empty());
}

#[tokio::test]
async fn ranges_of_objects_go_into_many_buffers() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let client = cluster.client().await;
    let (a, b) = (fresh_key(), fresh_key());
    let bytes = pattern(1, 300 * KIB);
    let pieces = [100, 100 * KIB, 0, 200 * KIB - 100];
    let memory = buffer(client.engine(), bytes.clone());
    let mut at = 0;
    let pieces = pieces.map(|len| {
        at += len;
        memory.slice(at - len, len).expect("inside")
    });
    let requests = vec![
        PutRequest::new(a.clone(), pieces.to_vec()),
        PutRequest::new(b.clone(), vec![whole(&memory)]),
    ];
    for put in client.put(requests, &one_replica()).await {
        assert_eq!(put.expect("there is room"), PutOutcome::Stored);
    }
    let into = buffer(client.engine(), vec![0; 300 << 10]);
    let range = |offset, at, len| Range {
        offset,
        local: into.slice(at, len).expect("inside"),
    };
    let requests = vec![
        GetRequest {
            key: a.clone(),
            ranges: vec![range(0, 0, 100), range(100, 100, 150 * KIB)],
        },
        GetRequest {
            key: fresh_key(),
            ranges: vec![range(0, 0, 1)],
        },
        GetRequest {
            key: b.clone(),
            ranges: vec![range(150 * KIB + 100, 150 * KIB + 100, 150 * KIB - 100)],
        },
        GetRequest {
            key: a.clone(),
            ranges: vec![range(300 * KIB - 1, 0, 2)],
        },
    ];
    let mut done = client.get_into(requests).await;
    assert!(matches!(
        done.pop(),
        Some(Err(StoreError::OutOfBounds { .. }))
    ));
    assert_eq!(done.remove(0).expect("up").bytes, 150 * KIB + 100);
    assert_eq!(refusal(done.remove(0)), Refusal::NotFound);
    assert_eq!(one(done).expect("up").bytes, 150 * KIB - 100);
    assert_eq!(contents(&into), bytes);
    assert_eq!(client.stats().open_gets, 0);
}

// contract: lease-13
#[tokio::test]
async fn an_upsert_replaces_and_open_readers_keep_their_version() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).start().await;
        let client = cluster.client().await;
        let key = fresh_key();
        client.store(&key, &pattern(1, 64 * KIB)).await;
        let session = client.start_get(&key).await.expect("complete");
        let bytes = pattern(2, 8 * KIB);
        let memory = buffer(client.engine(), bytes.clone());
        let request = PutRequest::new(key.clone(), vec![whole(&memory)]);
        let put = one(client.upsert(vec![request], &one_replica()).await);
        assert_eq!(put.expect("there is room"), PutOutcome::Stored);
        assert_eq!(client.load(&key).await.expect("complete"), bytes);
        let (_, old) = client
            .read(&session, 0, 64 * KIB)
            .await
            .expect("its lease protects it");
        assert_eq!(old, pattern(1, 64 * KIB));
        client.end_gets(vec![session]).await;
        eventually("the old version's memory comes back", || {
            cluster.master.monitor.status().quarantined_bytes == 0
        })
        .await;
    }
}

#[tokio::test]
async fn objects_are_removed_by_key_by_pattern_and_all_at_once() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    for name in ["a/1", "a/2", "b/1", "b/2", "c"] {
        client.store(&key(name), &pattern(0, KIB)).await;
    }
    let keys = ["a/1", "missing", "a/1"].map(key);
    let removed = client.remove(&keys, false).await;
    let mut removed = removed.into_iter();
    removed.next().expect("three").expect("nobody reads it");
    for missing in removed {
        assert_eq!(refusal(missing), Refusal::NotFound);
    }
    assert_eq!(
        client
            .remove_matching("^b/", false)
            .await
            .expect("a pattern"),
        2
    );
    let leased = client.start_get(&key("c")).await.expect("complete");
    assert_eq!(client.remove_all(false).await.expect("up"), 1);
    assert!(client.has(&key("c")).await);
    assert_eq!(client.remove_all(true).await.expect("up"), 1);
    drop(leased);
    let error = client
        .remove_matching("(", false)
        .await
        .expect_err("no pattern");
    assert!(
        matches!(error, StoreError::Refused(Refusal::InvalidArgument { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn tenants_have_keys_of_their_own() {
    let cluster = Spec::new(Via::Shm).start().await;
    let tenant = |name| ClientConfig {
        tenant: Tenant::new(name).expect("short"),
        ..ClientConfig::default()
    };
    let (one, two) = (
        cluster.client_with(tenant("one")).await,
        cluster.client_with(tenant("two")).await,
    );
    let key = fresh_key();
    one.store(&key, &pattern(1, KIB)).await;
    assert!(!two.has(&key).await);
    two.store(&key, &pattern(2, 2 * KIB)).await;
    assert_eq!(one.load(&key).await.expect("complete"), pattern(1, KIB));
    assert_eq!(two.load(&key).await.expect("complete"), pattern(2, 2 * KIB));
    assert_eq!(one.remove_all(true).await.expect("up"), 1);
    assert!(two.has(&key).await);
}

#[tokio::test]
async fn a_prefix_is_asked_for_in_windows_and_no_further_than_its_first_miss() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let keys: Vec<ObjectKey> = (0..100).map(|_| fresh_key()).collect();
    for key in &keys[..37] {
        client.store(key, &pattern(0, 64)).await;
    }
    client.store(&keys[38], &pattern(0, 64)).await;
    for (window, most) in [(16, 48), (1, 38), (1000, 100), (0, 38)] {
        let before = cluster.master.requests("exists");
        let hit = client.longest_prefix(&keys, window).await.expect("up");
        assert_eq!(hit.blocks, 37);
        assert!(
            hit.keys_queried <= most,
            "{} keys for window {window}",
            hit.keys_queried
        );
        assert!(hit.epoch.0 > 0);
        let asked = cluster.master.requests("exists") - before;
        assert_eq!(asked, 37 / window.max(1) as u64 + 1, "window {window}");
    }
    assert_eq!(client.longest_prefix(&[], 16).await.expect("up").blocks, 0);
}

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

/// Ends a node as a kill would: nothing is said to anyone.
async fn kill(cluster: &mut Cluster, name: &str) {
    let at = cluster
        .nodes
        .iter()
        .position(|node| node.link.name() == name)
        .expect("there");
    let node = cluster.nodes.remove(at);
    let engine = node.engine.clone();
    drop(node);
    tokio::task::spawn_blocking(move || engine.shutdown(Duration::from_secs(5)))
        .await
        .expect("no panic");
}

// contract: session-13
#[tokio::test]
async fn a_second_replica_serves_when_the_first_node_is_killed() {
    for via in [Via::Shm, Via::Tcp] {
        let mut cluster = Spec::new(via).nodes(&[8 * MIB, 8 * MIB]).start().await;
        let client = cluster.client().await;
        let key = fresh_key();
        let bytes = pattern(1, 256 * KIB);
        let put = client
            .put_bytes(&[(key.clone(), &bytes)], &replicas(2))
            .await;
        assert_eq!(one(put).expect("there is room"), PutOutcome::Stored);
        let session = client.start_get(&key).await.expect("complete");
        let (_, read) = client
            .read(&session, 0, 256 * KIB)
            .await
            .expect("both are up");
        assert_eq!(read, bytes);

        // The one that serves: the nearest, which the session tries first.
        let detail = client.stat(&key).await.expect("complete");
        assert_eq!(detail.object.replicas.len(), 2);
        let first = detail.object.replicas[0].segment;
        let name = detail
            .segments
            .iter()
            .find(|s| s.id == first)
            .expect("described")
            .name
            .clone();
        kill(&mut cluster, &name).await;
        for _ in 0..3 {
            let (_, read) = client
                .read(&session, 0, 256 * KIB)
                .await
                .expect("the other one serves");
            assert_eq!(read, bytes);
        }
        assert!(client.has(&key).await);
        assert_eq!(
            client.load(&key).await.expect("the other one serves"),
            bytes
        );
    }
}

/// Damage of one replica is repaired by the reader's turn to the other.
#[tokio::test]
async fn a_damaged_replica_is_passed_over() {
    let cluster = Spec::new(Via::Shm).nodes(&[8 * MIB, 8 * MIB]).start().await;
    let client = cluster.client().await;
    let key = fresh_key();
    let bytes = pattern(1, 64 * KIB);
    one(client
        .put_bytes(&[(key.clone(), &bytes)], &replicas(2))
        .await)
    .expect("there is room");
    let detail = client.stat(&key).await.expect("complete");
    for replica in &detail.object.replicas {
        let segment = detail
            .segments
            .iter()
            .find(|s| s.id == replica.segment)
            .expect("described");
        let node = cluster
            .nodes
            .iter()
            .find(|node| node.link.name() == segment.name);
        let node = node.expect("a node of the cluster");
        let at = replica.payload_offset() + 1000;
        let sound = node.peek(at, 4).await;
        let damaged: Vec<u8> = sound.iter().map(|byte| !byte).collect();
        node.poke(at, &damaged).await;
        assert_eq!(
            client.load(&key).await.expect("the other replica is sound"),
            bytes
        );
        node.poke(at, &sound).await;
    }
    assert!(client.stats().failovers >= 1);
}

// contract: session-16
#[tokio::test]
async fn what_only_a_dead_node_holds_is_absent_at_once() {
    for via in [Via::Shm, Via::Tcp] {
        // The master goes on believing in the node for a long time.
        let mut cluster = Spec::new(via)
            .nodes(&[8 * MIB, 8 * MIB])
            .ttl(Duration::from_hours(1))
            .start()
            .await;
        let client = cluster.client().await;
        let keys: Vec<ObjectKey> = (0..16).map(|_| fresh_key()).collect();
        for key in &keys {
            client.store(key, &pattern(0, 4 * KIB)).await;
        }
        let on = async |name: &str| {
            let mut there = Vec::new();
            for key in &keys {
                let detail = client.stat(key).await.expect("complete");
                if detail.segments[0].name == name {
                    there.push(key.clone());
                }
            }
            there
        };
        let (lost, kept) = (on("node-0").await, on("node-1").await);
        assert!(!lost.is_empty() && !kept.is_empty(), "both nodes hold some");
        kill(&mut cluster, "node-0").await;
        for key in &lost {
            client.load(key).await.expect_err("its node is dead");
        }
        for found in client
            .exists(&keys, Recency::default())
            .await
            .into_iter()
            .zip(&keys)
        {
            assert_eq!(
                found.0.expect("up"),
                kept.contains(found.1),
                "{:?}",
                found.1
            );
        }
        for found in client.get(&keys).await.into_iter().zip(&keys) {
            assert_eq!(found.0.is_ok(), kept.contains(found.1));
        }
        assert_eq!(client.stats().suspect_segments, 1);
        // Nothing new is placed there.
        for _ in 0..16 {
            client.store(&fresh_key(), &pattern(1, 4 * KIB)).await;
        }
    }
}

/// A put whose node is dead, which nobody has noticed yet, goes elsewhere.
#[tokio::test]
async fn puts_go_elsewhere_when_their_node_is_found_dead() {
    let mut cluster = Spec::new(Via::Tcp)
        .nodes(&[8 * MIB, 8 * MIB])
        .ttl(Duration::from_hours(1))
        .start()
        .await;
    let client = cluster.client().await;
    kill(&mut cluster, "node-0").await;
    let keys: Vec<ObjectKey> = (0..32).map(|_| fresh_key()).collect();
    let bytes = pattern(1, 4 * KIB);
    let objects: Vec<_> = keys
        .iter()
        .map(|key| (key.clone(), bytes.as_slice()))
        .collect();
    for put in client.put_bytes(&objects, &one_replica()).await {
        assert_eq!(put.expect("the other node has room"), PutOutcome::Stored);
    }
    for loaded in client.get(&keys).await {
        assert_eq!(loaded.expect("complete"), bytes);
    }
}

#[tokio::test]
async fn a_suspect_that_answers_again_counts_again() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let key = fresh_key();
    client.store(&key, &pattern(0, KIB)).await;
    // A client that can't reach the node at all, since it may only use tcp and the node does not.
    let lonely = common::client(
        cluster.master.address,
        Via::Tcp.engine(),
        ClientConfig::default(),
    )
    .await;
    lonely.load(&key).await.expect_err("no way there");
    assert!(
        !lonely.has(&key).await,
        "what it can't reach is absent for it"
    );
    assert!(client.has(&key).await, "and for it alone");
    assert_eq!(lonely.stats().suspect_segments, 1);
}

// contract: session-10
#[tokio::test]
async fn closing_a_client_revokes_its_puts_and_gives_its_leases_back() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let (written, read) = (fresh_key(), fresh_key());
    client.store(&read, &pattern(0, KIB)).await;
    let put = client
        .start_put(&written, KIB)
        .await
        .expect("there is room");
    let get = client.start_get(&read).await.expect("complete");
    drop(get);
    client
        .close(Duration::from_secs(10))
        .await
        .expect("the master is up");
    assert_eq!(cluster.master.monitor.status().reserved_objects, 0);
    one(other.remove(std::slice::from_ref(&read), false).await).expect("nobody reads it");
    other.store(&written, &pattern(1, KIB)).await;
    drop(put);
}

// contract: session-10
#[tokio::test]
async fn dropped_sessions_are_ended_in_the_background() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let keys: Vec<ObjectKey> = (0..50).map(|_| fresh_key()).collect();
    let entries: Vec<_> = keys
        .iter()
        .map(|key| PutStart::new(key.clone(), KIB))
        .collect();
    let puts = client
        .start_puts(entries, &one_replica(), Recency::default())
        .await;
    assert_eq!(client.stats().open_puts, 50);
    drop(puts);
    eventually("all are revoked", || {
        cluster.master.monitor.status().reserved_objects == 0
    })
    .await;
    assert!(cluster.master.requests("put_revoke") < 50, "in few calls");
    for key in &keys {
        client.store(key, &pattern(0, KIB)).await;
    }
    let gets = client.start_gets(&keys, Recency::default()).await;
    assert_eq!(client.stats().open_gets, 50);
    drop(gets);
    eventually_async("all leases are given back", async || {
        client
            .remove(&keys, false)
            .await
            .into_iter()
            .all(|removed| removed.is_ok())
    })
    .await;
}

/// A future that is dropped loses nothing: what it began is seen through.
#[tokio::test]
async fn a_dropped_call_is_seen_through() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let client = cluster.client().await;
    let key = fresh_key();
    let bytes = pattern(1, MIB);
    let session = client.start_put(&key, MIB).await.expect("there is room");
    let memory = buffer(client.engine(), bytes.clone());
    let ranges = vec![Range {
        offset: 0,
        local: whole(&memory),
    }];
    drop(client.write_ranges(vec![layercake_store::RangeWrite {
        session: &session,
        ranges,
    }]));
    client
        .end(session)
        .await
        .expect("the end waits for what is under way");
    assert_eq!(client.load(&key).await.expect("complete"), bytes);

    let get = client.start_get(&key).await.expect("complete");
    let into = buffer(client.engine(), vec![0; 1 << 20]);
    let ranges = vec![Range {
        offset: 0,
        local: whole(&into),
    }];
    drop(client.read_ranges(vec![RangeRead {
        session: &get,
        ranges,
    }]));
    drop(get);
    eventually("the read comes back and its lease is given back", || {
        client.stats().open_gets == 0
    })
    .await;
    assert_eq!(contents(&into), bytes);
}
