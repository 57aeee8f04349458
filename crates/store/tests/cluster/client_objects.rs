//! Whole objects and look-ups.

use layercake_protocol::error::Refusal;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, Recency};
use layercake_store::{ClientConfig, GetRequest, PutOutcome, PutRequest, Range, StoreError};

use crate::common::{
    KIB, MIB, OneKey as _, Spec, Via, buffer, contents, eventually, fresh_key, key, one,
    one_replica, pattern, refusal, whole,
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
    let big = pattern(1, 5 * MIB);
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
async fn a_removal_of_versions_takes_what_it_names_and_nothing_else() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let keys = [fresh_key(), fresh_key(), fresh_key()];
    let mut versions = Vec::new();
    for key in &keys {
        client.store(key, &pattern(0, KIB)).await;
        versions.push(ObjectRef {
            key: key.clone(),
            generation: client.stat(key).await.expect("stored").object.generation,
        });
    }
    let reader = client.start_get(&keys[0]).await.expect("complete");
    one(client.remove(&keys[1..2], true).await).expect("stored");
    client.store(&keys[1], &pattern(1, KIB)).await;
    let mut removed = client.remove_versions(&versions).await.into_iter();
    let mut next = || removed.next().expect("one for each");
    next().expect("readers don't keep the name");
    assert_eq!(refusal(next()), Refusal::NotFound);
    next().expect("nobody reads it");
    assert_eq!(
        client.load(&keys[1]).await.expect("it stays"),
        pattern(1, KIB)
    );
    assert!(!client.has(&keys[0]).await && !client.has(&keys[2]).await);
    drop(reader);
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
