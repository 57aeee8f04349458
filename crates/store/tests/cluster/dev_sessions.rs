//! DEV-05 and DEV-06: sessions that share a key, layers of unequal size.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{Range, RangeRead, RangeWrite, StoreError};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::common;
use crate::common::{
    KIB, MIB, OneKey as _, Spec, Via, buffer, contents, key, one, one_replica, pattern, refusal,
    whole,
};

/// So long that a busy machine renews it in time.
const LEASE: Duration = Duration::from_secs(3);

// contract: lease-2, lease-3
async fn dev_05_on(via: Via) {
    let cluster = Spec::new(via).lease(LEASE).start().await;
    let client = cluster.client().await;
    let keys = ["a", "b", "c"].map(key);
    for (seed, key) in (0..).zip(&keys) {
        client.store(key, &pattern(seed, 16 * KIB)).await;
    }
    let mut first = client.start_gets(&keys[..2], Recency::default()).await;
    let mut second = client.start_gets(&keys[1..], Recency::default()).await;
    let first: Vec<_> = first.drain(..).map(|get| get.expect("complete")).collect();
    let second: Vec<_> = second.drain(..).map(|get| get.expect("complete")).collect();
    client.end_gets(first).await;
    one(client.remove(&keys[..1], false).await).expect("a's last session is over");

    // Each of the two is renewed until it would have run out.
    while client.stats().leases_renewed < 8 {
        for (seed, session) in (1..).zip(&second) {
            let (_, bytes) = client
                .read(session, 0, 16 * KIB)
                .await
                .expect("its lease is renewed");
            assert_eq!(bytes, pattern(seed, 16 * KIB));
        }
        assert_eq!(
            refusal(one(client.remove(&keys[1..2], false).await)),
            Refusal::Leased
        );
        tokio::time::sleep(LEASE / 20).await;
    }

    // A third user goes away in the middle of a read: only its own share goes.
    let third = client.start_get(&keys[1]).await.expect("complete");
    let memory = buffer(client.engine(), vec![0; 16 << 10]);
    let ranges = vec![Range {
        offset: 0,
        local: whole(&memory),
    }];
    drop(client.read_ranges(vec![RangeRead {
        session: &third,
        ranges,
    }]));
    drop(third);
    common::eventually("the aborted read comes back", || {
        client.stats().open_gets == 2
    })
    .await;
    let (_, bytes) = client
        .read(&second[0], 0, 16 * KIB)
        .await
        .expect("still leased");
    assert_eq!(bytes, pattern(1, 16 * KIB));
    assert_eq!(
        refusal(one(client.remove(&keys[1..2], false).await)),
        Refusal::Leased
    );

    client.end_gets(second).await;
    client.end_gets(Vec::new()).await;
    for removed in client.remove(&keys[1..], false).await {
        removed.expect("nobody reads it any more");
    }
    let stats = client.stats();
    assert_eq!(stats.leases_lost, 0);
    assert_eq!(
        stats.leases_returned, 3,
        "one for each key, however many sessions it had"
    );
}

// contract: lease-3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_finds_no_lease_of_a_session_that_was_released_before() {
    let cluster = Spec::new(Via::Local).lease(LEASE).start().await;
    let client = cluster.client().await;
    for round in 0..32 {
        let keys: Vec<_> = (0..4).map(|n| key(format!("{round}/{n}"))).collect();
        for key in &keys {
            client.store(key, &pattern(round, KIB)).await;
        }
        let gets = client.start_gets(&keys, Recency::default()).await;
        let gets: Vec<_> = gets.into_iter().map(|get| get.expect("complete")).collect();
        client.release_gets(gets);
        for removed in client.remove(&keys, false).await {
            removed.expect("nobody reads it any more");
        }
    }
    assert_eq!(client.stats().open_gets, 0);
}

// contract: lease-3
#[tokio::test]
async fn leases_of_released_sessions_are_given_back_without_another_call() {
    let cluster = Spec::new(Via::Local).start().await;
    let client = cluster.client().await;
    for round in 1..=3 {
        let key = key(format!("{round}"));
        client.store(&key, &pattern(round, KIB)).await;
        let session = client.start_get(&key).await.expect("complete");
        client.release_gets(vec![session]);
        common::eventually("its lease is given back", || {
            client.stats().leases_returned == round
        })
        .await;
    }
}

// contract: lease-3
#[tokio::test]
async fn a_put_finds_the_room_of_what_was_read_until_just_before() {
    let cluster = Spec::new(Via::Local).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    client.store(&key("k"), &pattern(1, 3 * MIB)).await;
    let session = client.start_get(&key("k")).await.expect("complete");
    client.release_gets(vec![session]);
    let put = client.start_put(&key("other"), 3 * MIB).await;
    drop(put.expect("nobody reads what was there"));
}

// contract: lease-3
#[tokio::test]
async fn a_session_ends_with_the_last_handle_on_it() {
    let cluster = Spec::new(Via::Local).lease(LEASE).start().await;
    let client = cluster.client().await;
    client.store(&key("k"), &pattern(1, KIB)).await;
    let session = client.start_get(&key("k")).await.expect("complete");
    let other = session.clone();
    assert!(other.is_same(&session));
    client.end_gets(vec![session]).await;
    let refused = one(client.remove(&[key("k")], false).await);
    assert_eq!(refusal(refused), Refusal::Leased);
    let (_, bytes) = client.read(&other, 0, KIB).await.expect("still leased");
    assert_eq!(bytes, pattern(1, KIB));
    client.release_gets(vec![other]);
    one(client.remove(&[key("k")], false).await).expect("its last handle is gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_05_sessions_that_share_a_key_end_alone_locally() {
    dev_05_on(Via::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_05_sessions_that_share_a_key_end_alone_over_shm() {
    dev_05_on(Via::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_05_sessions_that_share_a_key_end_alone_over_tcp() {
    dev_05_on(Via::Tcp).await;
}

/// Lengths of the entries of five layers, and which layer each belongs to.
const ENTRIES: [(usize, u64); 6] = [
    (0, 64 * KIB),
    (1, 64 * KIB),
    (2, 24 * KIB),
    (3, 96 * KIB),
    (3, 8 * KIB),
    (4, 64 * KIB),
];

/// Offset and length of each entry: the sum of the lengths before it.
fn placed() -> Vec<(usize, u64, u64)> {
    let mut at = 0;
    ENTRIES
        .map(|(layer, len)| {
            at += len;
            (layer, at - len, len)
        })
        .into()
}

async fn dev_06_on(via: Via) {
    let cluster = Spec::new(via).start().await;
    let client = cluster.client().await;
    let size: u64 = ENTRIES.iter().map(|(_, len)| len).sum();
    assert_eq!(size, 320 * KIB);
    let key = common::fresh_key();
    let entry = PutStart {
        header_rows: 6,
        ..PutStart::new(key.clone(), size)
    };
    let session = one(client
        .start_puts(vec![entry], &one_replica(), Recency::default())
        .await)
    .expect("room");
    assert_eq!(session.size(), size);

    let past_the_end = client
        .write(&session, size - 8, &[0; 16])
        .await
        .expect_err("past the end");
    assert!(
        matches!(past_the_end, StoreError::OutOfBounds { .. }),
        "{past_the_end}"
    );
    let mut session = session;
    for layer in 0..5 {
        let refused = one(client.end_puts(vec![session]).await).expect_err("layers are missing");
        let first = placed()
            .into_iter()
            .find(|entry| entry.0 == layer)
            .expect("a layer")
            .1;
        assert!(
            matches!(refused.error, StoreError::Incomplete { first_missing } if first_missing == first),
            "{}",
            refused.error
        );
        session = refused.session.expect("it goes on");
        let ranges = placed().into_iter().filter(|entry| entry.0 == layer);
        let ranges = ranges.map(|(_, offset, len)| Range {
            offset,
            local: whole(&buffer(client.engine(), pattern(offset, len))),
        });
        let write = RangeWrite {
            session: &session,
            ranges,
        };
        one(client.write_ranges(vec![write]).await).expect("up");
    }
    client.end(session).await.expect("whole");

    let get = client.start_get(&key).await.expect("complete");
    assert_eq!(get.size(), size);
    assert_eq!(get.written_ranges().len(), ENTRIES.len());
    let mut order = placed();
    let mut rng = StdRng::seed_from_u64(6);
    for _ in 0..3 {
        order.shuffle(&mut rng);
        for &(_, offset, len) in &order {
            let (done, bytes) = client.read(&get, offset, len).await.expect("up");
            assert_eq!(bytes, pattern(offset, len), "entry at {offset}");
            assert_eq!(done.verified, len);
        }
    }
    let all = order.iter().map(|&(_, offset, len)| {
        (
            offset,
            buffer(
                client.engine(),
                vec![0; usize::try_from(len).expect("small")],
            ),
        )
    });
    let all: Vec<_> = all.collect();
    let ranges = all.iter().map(|(offset, memory)| Range {
        offset: *offset,
        local: whole(memory),
    });
    let read = RangeRead {
        session: &get,
        ranges,
    };
    assert_eq!(
        one(client.read_ranges(vec![read]).await)
            .expect("up")
            .verified,
        size
    );
    for (offset, memory) in all {
        assert_eq!(contents(&memory), pattern(offset, memory.len()));
    }
    let beyond = client
        .read(&get, size - 1, 2)
        .await
        .expect_err("past the end");
    assert!(matches!(beyond, StoreError::OutOfBounds { .. }), "{beyond}");
}

#[tokio::test]
async fn dev_06_uneven_layers_are_exact_locally() {
    dev_06_on(Via::Local).await;
}

#[tokio::test]
async fn dev_06_uneven_layers_are_exact_over_shm() {
    dev_06_on(Via::Shm).await;
}

#[tokio::test]
async fn dev_06_uneven_layers_are_exact_over_tcp() {
    dev_06_on(Via::Tcp).await;
}
