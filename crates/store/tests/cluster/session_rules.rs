//! Rules of range sessions, R1 to R8, over a whole cluster.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{
    GetSession, PutSession, Range, RangeRead, RangeWrite, StoreClient, StoreError,
};

use crate::common;
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, Spec, Via, buffer, contents, fresh_key, one, one_replica,
    pattern, refusal, whole,
};

async fn cluster(via: Via) -> (Cluster, StoreClient) {
    let cluster = Spec::new(via).start().await;
    let client = cluster.client().await;
    (cluster, client)
}

async fn start_all(client: &StoreClient, keys: &[ObjectKey], size: u64) -> Vec<PutSession> {
    let entries = keys
        .iter()
        .map(|key| PutStart::new(key.clone(), size))
        .collect();
    let started = client
        .start_puts(entries, &one_replica(), Recency::default())
        .await;
    started
        .into_iter()
        .map(|session| session.expect("there is room"))
        .collect()
}

/// Writes layer `layer` of `len` bytes of every session, in one call.
async fn write_layer(client: &StoreClient, sessions: &[PutSession], layer: u64, len: u64) {
    let buffers: Vec<_> = (0..sessions.len() as u64)
        .map(|seed| buffer(client.engine(), pattern(seed * 100 + layer, len)))
        .collect();
    let writes = sessions
        .iter()
        .zip(&buffers)
        .map(|(session, memory)| RangeWrite {
            session,
            ranges: vec![Range {
                offset: layer * len,
                local: whole(memory),
            }],
        });
    for written in client.write_ranges(writes).await {
        assert_eq!(written.expect("the node is up"), len);
    }
}

async fn read_layer(client: &StoreClient, sessions: &[GetSession], layer: u64, len: u64) {
    let buffers: Vec<_> = sessions
        .iter()
        .map(|_| buffer(client.engine(), pattern(u64::MAX, len)))
        .collect();
    let reads = sessions
        .iter()
        .zip(&buffers)
        .map(|(session, memory)| RangeRead {
            session,
            ranges: vec![Range {
                offset: layer * len,
                local: whole(memory),
            }],
        });
    for done in client.read_ranges(reads).await {
        let done = done.expect("the node is up");
        assert_eq!(
            (done.bytes, done.verified),
            (len, len),
            "whole rows are verified"
        );
    }
    for (seed, memory) in (0..).zip(&buffers) {
        assert_eq!(contents(memory), pattern(seed * 100 + layer, len));
    }
}

async fn r1_on(via: Via) {
    let (cluster, client) = cluster(via).await;
    let (keys, layers, len) = (20, 8, 3 * KIB);
    let keys: Vec<ObjectKey> = (0..keys).map(|_| fresh_key()).collect();
    let requests = || cluster.master.object_requests();
    let before = requests();
    let puts = start_all(&client, &keys, layers * len).await;
    assert_eq!(requests() - before, 1, "start is one call");
    for layer in 0..layers {
        write_layer(&client, &puts, layer, len).await;
    }
    assert_eq!(requests() - before, 1, "ranges make no call");
    for ended in client.end_puts(puts).await {
        ended.expect("all is written");
    }
    assert_eq!(requests() - before, 2, "end is one call");
    let gets = client.start_gets(&keys, Recency::default()).await;
    let gets: Vec<GetSession> = gets.into_iter().map(|get| get.expect("complete")).collect();
    for layer in (0..layers).rev() {
        read_layer(&client, &gets, layer, len).await;
    }
    assert_eq!(requests() - before, 3);
    client.end_gets(gets).await;
    assert_eq!(requests() - before, 4, "ending all of them is one call");
    assert_eq!(
        client
            .engine()
            .transport_to(cluster.nodes[0].engine.endpoint()),
        Some(via.kind())
    );
}

// contract: session-1
#[tokio::test]
async fn r1_only_start_and_end_talk_to_the_master_locally() {
    r1_on(Via::Local).await;
}

#[tokio::test]
async fn r1_only_start_and_end_talk_to_the_master_over_shm() {
    r1_on(Via::Shm).await;
}

#[tokio::test]
async fn r1_only_start_and_end_talk_to_the_master_over_tcp() {
    r1_on(Via::Tcp).await;
}

#[tokio::test]
async fn r2_a_call_with_thousands_of_ranges_is_taken() {
    for via in [Via::Shm, Via::Tcp] {
        let (_cluster, client) = cluster(via).await;
        let (count, len) = (8_192, 256);
        let key = fresh_key();
        let session = client
            .start_put(&key, count * len)
            .await
            .expect("there is room");
        let source = buffer(client.engine(), pattern(5, count * len));
        let ranges = (0..count).map(|at| Range {
            offset: at * len,
            local: source.slice(at * len, len).expect("inside"),
        });
        let write = RangeWrite {
            session: &session,
            ranges,
        };
        assert_eq!(
            one(client.write_ranges(vec![write]).await).expect("taken"),
            count * len
        );
        client.end(session).await.expect("all is written");
        assert_eq!(
            client.load(&key).await.expect("complete"),
            pattern(5, count * len)
        );
    }
}

// contract: session-2, session-3
#[tokio::test]
async fn r3_a_failed_range_fails_its_key_alone_and_is_healed_by_writing_it_again() {
    let (_cluster, client) = cluster(Via::Tcp).await;
    let keys: Vec<ObjectKey> = (0..10).map(|_| fresh_key()).collect();
    let mut sessions = start_all(&client, &keys, 2 * KIB).await;
    write_layer(&client, &sessions, 0, KIB).await;
    let good = buffer(client.engine(), pattern(1, KIB));
    let gone = buffer(client.engine(), pattern(2, KIB));
    let unusable = whole(&gone);
    gone.unregister(Duration::from_secs(5))
        .expect("nothing in flight");
    let writes = sessions.iter().enumerate().map(|(at, session)| {
        let local = if at == 3 {
            unusable.clone()
        } else {
            whole(&good)
        };
        RangeWrite {
            session,
            ranges: vec![Range { offset: KIB, local }],
        }
    });
    for (at, written) in client.write_ranges(writes).await.into_iter().enumerate() {
        assert_eq!(written.is_ok(), at != 3, "{written:?}");
    }
    let failed = sessions.remove(3);
    for ended in client.end_puts(sessions).await {
        ended.expect("its neighbours are whole");
    }
    let refused = one(client.end_puts(vec![failed]).await).expect_err("a range is missing");
    assert!(
        matches!(
            refused.error,
            StoreError::Incomplete {
                first_missing: 1024
            }
        ),
        "{}",
        refused.error
    );
    let session = refused.session.expect("it can be healed");
    assert!(
        !client.has(session.key()).await,
        "not readable before it is whole"
    );
    client
        .write(&session, KIB, &pattern(1, KIB))
        .await
        .expect("open again");
    client.end(session).await.expect("whole now");
    let expected = [pattern(300, KIB), pattern(1, KIB)].concat();
    assert_eq!(client.load(&keys[3]).await.expect("complete"), expected);
}

// contract: session-4
#[tokio::test]
async fn r4_an_object_with_a_gap_is_not_committed() {
    let (_cluster, client) = cluster(Via::Shm).await;
    let key = fresh_key();
    let session = client
        .start_put(&key, 8 * KIB)
        .await
        .expect("there is room");
    for layer in [0, 1, 2, 3, 4, 6, 7] {
        client
            .write(&session, layer * KIB, &pattern(layer, KIB))
            .await
            .expect("up");
        assert!(!client.has(&key).await);
    }
    let refused = one(client.end_puts(vec![session]).await).expect_err("layer 5 is missing");
    assert!(matches!(
        refused.error,
        StoreError::Incomplete {
            first_missing: 5120
        }
    ));
    assert_eq!(refusal(client.load(&key).await), Refusal::NotReady);
}

/// Nobody has to look at a call for its session to get on.
// contract: session-5
#[tokio::test]
async fn r5_an_end_does_not_wait_for_futures_that_nobody_polls() {
    for via in [Via::Shm, Via::Tcp] {
        let (_cluster, client) = cluster(via).await;
        let key = fresh_key();
        let session = client.start_put(&key, MIB).await.expect("there is room");
        let write = |seed, offset, len| {
            let local = whole(&buffer(client.engine(), pattern(seed, len)));
            let ranges = vec![Range { offset, local }];
            client.write_ranges(vec![RangeWrite {
                session: &session,
                ranges,
            }])
        };
        let first = write(1, 0, MIB);
        let second = write(2, 100, KIB);
        assert_eq!(one(second.await).expect("up"), KIB);
        let third = write(3, 2 * KIB, KIB);
        let late = write(4, 2 * KIB, KIB);
        let started = tokio::time::Instant::now();
        client.end(session).await.expect("all has arrived");
        assert!(started.elapsed() < common::PATIENCE);
        assert_eq!(one(first.await).expect("up"), MIB);
        assert_eq!(one(third.await).expect("up"), KIB);
        let late = one(late.await).expect_err("it had to wait, and the session ended first");
        assert!(matches!(late, StoreError::SessionEnded), "{late}");
        let mut expected = pattern(1, MIB);
        expected[100..100 + 1024].copy_from_slice(&pattern(2, KIB));
        expected[2048..2048 + 1024].copy_from_slice(&pattern(3, KIB));
        assert_eq!(client.load(&key).await.expect("complete"), expected);
    }
}

// contract: session-8
#[tokio::test]
async fn r8_of_two_clients_one_writes_and_the_other_can_follow() {
    let (cluster, writer) = cluster(Via::Shm).await;
    let follower = cluster.client().await;
    let key = fresh_key();
    let session = writer.start_put(&key, KIB).await.expect("there is room");
    assert_eq!(
        refusal(follower.start_put(&key, KIB).await),
        Refusal::InProgress
    );
    let waits = follower.clone();
    let waited = key.clone();
    let wait =
        tokio::spawn(async move { one(waits.wait_complete(&[waited], common::PATIENCE).await) });
    writer
        .write(&session, 0, &pattern(3, KIB))
        .await
        .expect("up");
    assert!(!wait.is_finished(), "nothing is complete before the end");
    writer.end(session).await.expect("whole");
    wait.await.expect("no panic").expect("the writer committed");
    assert_eq!(
        follower.load(&key).await.expect("complete"),
        pattern(3, KIB)
    );
    assert_eq!(
        refusal(follower.start_put(&key, KIB).await),
        Refusal::AlreadyExists
    );
    one(follower
        .wait_complete(std::slice::from_ref(&key), Duration::ZERO)
        .await)
    .expect("complete already");
}

#[tokio::test]
async fn r8_a_follower_learns_that_the_writer_gave_up_or_took_too_long() {
    let (cluster, writer) = cluster(Via::Shm).await;
    let follower = cluster.client().await;
    let key = fresh_key();
    let session = writer.start_put(&key, KIB).await.expect("there is room");
    let keys = std::slice::from_ref(&key);
    let too_soon = one(follower
        .wait_complete(keys, Duration::from_millis(20))
        .await);
    assert_eq!(refusal(too_soon), Refusal::NotReady);
    let (waited, revoked) = tokio::join!(
        follower.wait_complete(keys, common::PATIENCE),
        writer.revoke_puts(vec![session]),
    );
    one(revoked).expect("the master is up");
    let gave_up = refusal(one(waited));
    assert_ne!(
        gave_up,
        Refusal::NotReady,
        "the writer's end was noticed, not the time-out"
    );
    follower
        .start_put(&key, KIB)
        .await
        .expect("the key is free");
}

// contract: lease-6
#[tokio::test]
async fn the_room_of_a_revoked_session_is_free_at_once() {
    let cluster = Spec::new(Via::Shm).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    for _ in 0..8 {
        let session = client
            .start_put(&fresh_key(), 3 * MIB)
            .await
            .expect("free again");
        client
            .write(&session, 0, &pattern(0, MIB))
            .await
            .expect("up");
        one(client.revoke_puts(vec![session]).await).expect("the master is up");
        let status = cluster.master.monitor.status();
        assert_eq!((status.used_bytes, status.quarantined_bytes), (0, 0));
    }
    assert_eq!(client.stats().open_puts, 0);
}
