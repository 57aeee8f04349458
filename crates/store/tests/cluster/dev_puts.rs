//! DEV-01 and DEV-02: a writer that dies half-way, and two writers of one key.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_store::{ClientConfig, PutOutcome, Range, RangeWrite, StoreClient};

use crate::common;
use crate::common::helper::{Helper, orders, ready};
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, Spec, Via, buffer, eventually, eventually_async, fresh_key,
    key, one, one_replica, pattern, refusal, whole,
};

const SIZE: u64 = MIB;
/// Time to live of members: so long that those that live are heard in time on a busy machine.
const TTL: Duration = Duration::from_secs(3);
const WRITER: &str = "dev_puts::helper_that_writes_until_it_is_killed";

/// Starts a put, writes all but the last byte over and over, and never ends it.
#[tokio::test]
#[ignore = "a process of its own for the tests here"]
async fn helper_that_writes_until_it_is_killed() {
    let orders = orders();
    let [master, via, name] = orders.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{orders:?} is no order");
    };
    let via = Via::named(via);
    let master = master.parse().expect("an address");
    let client = common::client(master, via.engine(), ClientConfig::default()).await;
    let session = client
        .start_put(&key(name), SIZE)
        .await
        .expect("the key is free");
    let memory = buffer(client.engine(), pattern(666, SIZE - 1));
    let write = async || {
        let ranges = vec![Range {
            offset: 0,
            local: whole(&memory),
        }];
        one(client
            .write_ranges(vec![RangeWrite {
                session: &session,
                ranges,
            }])
            .await)
    };
    write().await.expect("the node is up");
    let writes = async {
        while write().await.is_ok() {}
        println!(
            "taken away: {:?}",
            write().await.expect_err("it stays away")
        );
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = ready("") => {}
        () = writes => {}
    }
}

async fn writer(cluster: &Cluster, key: &ObjectKey) -> Helper {
    let orders = format!(
        "{} {} {key}",
        cluster.master.address,
        cluster.spec.via.kind()
    );
    Helper::start(WRITER, &orders).await.0
}

/// Looks at a key until told to stop: never sees anything but an error or all of `bytes`.
async fn watch(client: &StoreClient, key: &ObjectKey, bytes: &[u8]) -> bool {
    match client.load(key).await {
        Ok(loaded) => {
            assert_eq!(loaded, bytes, "partial or other data was served");
            true
        }
        Err(error) => {
            let refusal = refusal::<()>(Err(error));
            assert!(
                matches!(refusal, Refusal::NotReady | Refusal::NotFound),
                "{refusal}"
            );
            false
        }
    }
}

// contract: session-11, lease-7
async fn dev_01_killed_on(via: Via) {
    let cluster = Spec::new(via).nodes(&[4 * MIB]).ttl(TTL).start().await;
    let other = cluster.client().await;
    let key = fresh_key();
    let helper = writer(&cluster, &key).await;
    let bytes = pattern(1, SIZE);
    assert!(!other.has(&key).await);
    assert!(!watch(&other, &key, &bytes).await);
    let object = [(key.clone(), bytes.as_slice())];
    let put = one(other.put_bytes(&object, &one_replica()).await).expect("an ordinary outcome");
    assert_eq!(put, PutOutcome::InProgress);
    helper.kill().await;
    eventually_async("the key can be written again", async || {
        watch(&other, &key, &bytes).await;
        let put = one(other.put_bytes(&object, &one_replica()).await).expect("there is room");
        put == PutOutcome::Stored
    })
    .await;
    assert!(watch(&other, &key, &bytes).await);
    eventually("the dead writer's memory comes back", || {
        let status = cluster.master.monitor.status();
        status.quarantined_bytes == 0 && status.reserved_objects == 0
    })
    .await;
    for seed in 2..6 {
        other.store(&fresh_key(), &pattern(seed, MIB / 2)).await;
    }
    assert!(watch(&other, &key, &bytes).await);
}

#[tokio::test]
async fn dev_01_a_writer_killed_half_way_leaves_its_key_writable_over_shm() {
    dev_01_killed_on(Via::Shm).await;
}

#[tokio::test]
async fn dev_01_a_writer_killed_half_way_leaves_its_key_writable_over_tcp() {
    dev_01_killed_on(Via::Tcp).await;
}

/// A writer that stands still, perhaps in the middle of a copy, writes on when it may: never into memory
/// that is somebody else's by then.
// contract: session-14, lease-7
#[tokio::test]
async fn dev_01_a_stopped_writer_that_goes_on_damages_nobody() {
    for via in [Via::Shm, Via::Tcp] {
        for round in 0..2 {
            dev_01_stopped(via, round).await;
        }
    }
}

async fn dev_01_stopped(via: Via, round: u64) {
    let cluster = Spec::new(via)
        .nodes(&[4 * MIB])
        .discard_after(Duration::from_millis(200))
        .start()
        .await;
    let other = cluster.client().await;
    let taken = fresh_key();
    let mut helper = writer(&cluster, &taken).await;
    helper.stop().await;
    let bytes = pattern(1, SIZE);
    let object = [(taken.clone(), bytes.as_slice())];
    eventually_async("the key is taken over", async || {
        let put = one(other.put_bytes(&object, &one_replica()).await).expect("there is room");
        put == PutOutcome::Stored
    })
    .await;
    // The pool is filled more than once: whatever may be reused is.
    let others: Vec<(ObjectKey, u64)> = (0..24)
        .map(|seed| (fresh_key(), round * 100 + seed))
        .collect();
    for (key, seed) in &others {
        other.store(key, &pattern(*seed, MIB / 4)).await;
    }
    helper.resume().await;
    let said = helper.wait_for("taken away:").await;
    assert!(said.contains("Superseded"), "{said}");
    let mut left = 0;
    for (key, seed) in &others {
        match other.load(key).await {
            Ok(loaded) => {
                assert_eq!(loaded, pattern(*seed, MIB / 4));
                left += 1;
            }
            Err(error) => assert_eq!(refusal::<()>(Err(error)), Refusal::NotFound, "evicted"),
        }
    }
    assert!(left >= 8, "most of the pool holds objects: {left}");
    eventually(
        "the memory comes back when the writer has confirmed",
        || cluster.master.monitor.status().quarantined_bytes == 0,
    )
    .await;
    helper.kill().await;
}

#[tokio::test]
async fn dev_01_a_late_commit_of_a_superseded_writer_is_refused() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via)
            .discard_after(Duration::from_millis(100))
            .start()
            .await;
        let (late, quick) = (cluster.client().await, cluster.client().await);
        let key = fresh_key();
        let session = late.start_put(&key, 4 * KIB).await.expect("there is room");
        late.write(&session, 0, &pattern(1, 4 * KIB))
            .await
            .expect("up");
        let bytes = pattern(2, 4 * KIB);
        let object = [(key.clone(), bytes.as_slice())];
        eventually_async("the key is taken over", async || {
            let put = one(quick.put_bytes(&object, &one_replica()).await).expect("there is room");
            put == PutOutcome::Stored
        })
        .await;
        assert_eq!(refusal(late.end(session).await), Refusal::Superseded);
        assert_eq!(quick.load(&key).await.expect("complete"), bytes);
        eventually("both sides have confirmed", || {
            cluster.master.monitor.status().quarantined_bytes == 0
        })
        .await;
        assert_eq!(
            refusal(late.start_put(&key, KIB).await),
            Refusal::AlreadyExists
        );
    }
}

/// The same while the old writer is in the middle of its writes.
#[tokio::test]
async fn dev_01_a_session_taken_over_by_an_upsert_stops_writing_and_can_be_started_again() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).start().await;
        let (late, quick) = (cluster.client().await, cluster.client().await);
        let key = fresh_key();
        let session = late.start_put(&key, MIB).await.expect("there is room");
        late.write(&session, 0, &pattern(1, MIB)).await.expect("up");
        let bytes = pattern(2, MIB);
        let request = layercake_store::PutRequest::new(
            key.clone(),
            vec![whole(&buffer(quick.engine(), bytes.clone()))],
        );
        let put = one(quick.upsert(vec![request], &one_replica()).await).expect("it takes over");
        assert_eq!(put, PutOutcome::Stored);
        eventually_async("the old session learns of it", async || {
            match late.write(&session, 0, &pattern(3, MIB)).await {
                Ok(_) => false,
                Err(error) => refusal::<()>(Err(error)) == Refusal::Superseded,
            }
        })
        .await;
        assert_eq!(quick.load(&key).await.expect("complete"), bytes);
        drop(session);
        eventually("its memory comes back", || {
            cluster.master.monitor.status().quarantined_bytes == 0
        })
        .await;
        one(late.remove(std::slice::from_ref(&key), true).await).expect("forced");
        late.start_put(&key, KIB)
            .await
            .expect("the same client may start it again");
    }
}

// contract: session-8, session-11
async fn dev_02_on(via: Via, rounds: u64) {
    let cluster = Spec::new(via).nodes(&[64 * MIB]).start().await;
    let (first, second, third) = (
        cluster.client().await,
        cluster.client().await,
        cluster.client().await,
    );
    for round in 0..rounds {
        let key = fresh_key();
        let payloads = [pattern(2 * round, 4 * KIB), pattern(2 * round + 1, 4 * KIB)];
        let put = async |client: &StoreClient, bytes: &[u8]| {
            let put = client
                .put_bytes(&[(key.clone(), bytes)], &one_replica())
                .await;
            one(put).expect("losing is an ordinary outcome")
        };
        let both = async { tokio::join!(put(&first, &payloads[0]), put(&second, &payloads[1])) };
        tokio::pin!(both);
        let outcomes = loop {
            let poll = async {
                if third.has(&key).await {
                    let bytes = third.load(&key).await.expect("it exists");
                    assert!(payloads.contains(&bytes), "a value that nobody wrote");
                }
            };
            tokio::select! {
                biased;
                outcomes = &mut both => break outcomes,
                () = poll => {}
            }
        };
        let winner = match outcomes {
            (PutOutcome::Stored, PutOutcome::Existed | PutOutcome::InProgress) => 0,
            (PutOutcome::Existed | PutOutcome::InProgress, PutOutcome::Stored) => 1,
            other => panic!("exactly one wins, not {other:?}"),
        };
        assert!(third.has(&key).await);
        assert_eq!(third.load(&key).await.expect("complete"), payloads[winner]);
        let removed = one(first.remove(std::slice::from_ref(&key), true).await);
        removed.expect("forced");
    }
    let status = cluster.master.monitor.status();
    assert_eq!((status.objects, status.reserved_objects), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_02_of_two_writers_exactly_one_wins_over_shm() {
    dev_02_on(Via::Shm, 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_02_of_two_writers_exactly_one_wins_over_tcp() {
    dev_02_on(Via::Tcp, 200).await;
}
