//! Clients that close, sessions and futures that are dropped.

use std::time::Duration;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{Range, RangeRead};

use crate::common::{
    KIB, MIB, OneKey as _, PATIENCE, Spec, Via, buffer, contents, eventually, eventually_async,
    fresh_key, one, one_replica, pattern, whole,
};

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

/// Nobody gives leases back in the background any more, so a start does.
#[tokio::test]
async fn a_closed_client_starts_a_key_whose_session_ended_later() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let key = fresh_key();
    client.store(&key, &pattern(0, KIB)).await;
    let first = client.start_get(&key).await.expect("complete");
    let closed = client.close(Duration::from_secs(10)).await;
    closed.expect("get sessions in use are no reason to wait");
    drop(first);
    let again = tokio::time::timeout(PATIENCE, client.start_get(&key)).await;
    let again = again.expect("it does not hang").expect("the link is up");
    let (_, bytes) = client.read(&again, 0, KIB).await.expect("leased");
    assert_eq!(bytes, pattern(0, KIB));
    assert_eq!(client.stats().leases_returned, 1);
}

/// Nobody would come to look for what is handed over, so it is ended at once.
#[tokio::test]
async fn a_closed_client_ends_what_is_released_later() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    let key = fresh_key();
    client.store(&key, &pattern(0, KIB)).await;
    let first = client.start_get(&key).await.expect("complete");
    let closed = client.close(Duration::from_secs(10)).await;
    closed.expect("get sessions in use are no reason to wait");
    client.release_gets(vec![first]);
    one(client.remove(std::slice::from_ref(&key), false).await).expect("nobody reads it");
    assert_eq!(client.stats().leases_returned, 1);
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
