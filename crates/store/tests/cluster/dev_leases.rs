//! DEV-03 and DEV-04: reads that outlive their lease, and long batches under a short one.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GetStarted, Recency, Segment};
use layercake_store::link::StartOptions;
use layercake_store::{ClientConfig, Range, RangeRead, StoreClient};
use layercake_transport::{Batch, Direction, Engine, Outcome, Piece, RemoteSlice};

use crate::common;
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, Spec, Via, buffer, contents, eventually, eventually_async,
    fresh_key, one, pattern, refusal, whole,
};

const LEASE: Duration = Duration::from_millis(300);
const SIZE: u64 = 64 * KIB;

/// A client whose sessions are never renewed.
fn careless() -> ClientConfig {
    ClientConfig {
        session_idle: Duration::ZERO,
        ..ClientConfig::default()
    }
}

/// What a query told about an object: a descriptor that someone may keep for too long.
struct Descriptor {
    found: GetStarted,
    segment: Arc<Segment>,
}

async fn query(client: &StoreClient, keys: &[ObjectKey]) -> Vec<Descriptor> {
    let answer = client
        .link()
        .get_start(keys, StartOptions::default(), false)
        .await
        .expect("up");
    let found = answer
        .results
        .into_iter()
        .map(|found| found.expect("complete"));
    found
        .map(|found| {
            let replica = found.replicas[0];
            let segment = answer.segments.iter().find(|s| s.id == replica.segment);
            Descriptor {
                segment: Arc::clone(segment.expect("described")),
                found,
            }
        })
        .collect()
}

/// Reads straight through the transport, without any of the client's checks.
async fn read_descriptors(engine: &Engine, descriptors: &[&Descriptor]) -> (Outcome, Vec<Vec<u8>>) {
    let buffers: Vec<_> = descriptors
        .iter()
        .map(|d| buffer(engine, pattern(u64::MAX, d.found.size)))
        .collect();
    let pieces = descriptors
        .iter()
        .zip(&buffers)
        .map(|(descriptor, memory)| {
            let replica = descriptor.found.replicas[0];
            Piece {
                local: whole(memory),
                remote: RemoteSlice {
                    region: descriptor.segment.region,
                    capability: descriptor.segment.capability,
                    offset: replica.payload_offset(),
                    len: descriptor.found.size,
                    generation: Some(replica.generation),
                },
            }
        });
    let transfer = engine.submit(Batch {
        peer: Arc::new(descriptors[0].segment.endpoint.clone()),
        direction: Direction::Read,
        pieces: pieces.collect(),
        checksum: false,
        deadline: None,
    });
    let outcome = transfer.await;
    (outcome, buffers.iter().map(contents).collect())
}

/// Fills the pool with other objects, and more than once, so that freed memory is written anew.
async fn overwrite(client: &StoreClient, seed: u64) {
    let bytes = pattern(seed + 1000, SIZE);
    for at in 0..100 {
        let object = [(common::key(format!("other-{seed}-{at}")), bytes.as_slice())];
        one(client.put_bytes(&object, &common::one_replica()).await)
            .expect("older ones are evicted");
    }
}

/// A pool that holds a few dozen objects.
async fn small_pool(via: Via) -> (Cluster, StoreClient) {
    let cluster = Spec::new(via).nodes(&[4 * MIB]).lease(LEASE).start().await;
    let client = cluster.client().await;
    (cluster, client)
}

// contract: lease-1, transport-6
async fn dev_03_old_descriptors_on(via: Via) {
    let (cluster, client) = small_pool(via).await;
    let reader = cluster.client_with(careless()).await;
    let keys = [fresh_key(), fresh_key()];
    for (seed, key) in (0..).zip(&keys) {
        client.store(key, &pattern(seed, SIZE)).await;
    }
    let descriptors = query(&reader, &keys).await;
    let both: Vec<&Descriptor> = descriptors.iter().collect();
    let (outcome, bytes) = read_descriptors(reader.engine(), &both).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(outcome.transport, Some(via.kind()));
    assert_eq!(bytes, [pattern(0, SIZE), pattern(1, SIZE)]);

    let sessions = reader.start_gets(&keys, Recency::default()).await;
    let sessions: Vec<_> = sessions
        .into_iter()
        .map(|get| get.expect("complete"))
        .collect();
    eventually_async("the leases run out", async || {
        one(client.remove(&keys[..1], false).await).is_ok()
    })
    .await;
    one(client.remove(&keys[1..], true).await).expect("forced");
    overwrite(&client, 7).await;
    assert!(!client.has(&keys[0]).await);

    for batch in [&both[..1], &both[1..], &both[..]] {
        let (outcome, bytes) = read_descriptors(reader.engine(), batch).await;
        for ((piece, bytes), descriptor) in outcome.pieces.iter().zip(bytes).zip(batch) {
            let seed = u64::from(!std::ptr::eq(*descriptor, both[0]));
            assert!(
                piece.is_err() || bytes == pattern(seed, SIZE),
                "other bytes were served"
            );
        }
    }
    for session in &sessions {
        assert_eq!(
            refusal(reader.read(session, 0, SIZE).await),
            Refusal::LeaseExpired
        );
    }
}

#[tokio::test]
async fn dev_03_old_descriptors_never_read_other_bytes_locally() {
    dev_03_old_descriptors_on(Via::Local).await;
}

#[tokio::test]
async fn dev_03_old_descriptors_never_read_other_bytes_over_shm() {
    dev_03_old_descriptors_on(Via::Shm).await;
}

#[tokio::test]
async fn dev_03_old_descriptors_never_read_other_bytes_over_tcp() {
    dev_03_old_descriptors_on(Via::Tcp).await;
}

/// Reads go on while the object is removed and its memory is reused, at any moment.
// contract: session-11
async fn dev_03_expiry_in_the_middle_on(via: Via) {
    let (cluster, client) = small_pool(via).await;
    let reader = cluster.client_with(careless()).await;
    let size = MIB;
    for round in 0..3 {
        let key = fresh_key();
        client.store(&key, &pattern(round, size)).await;
        let session = reader.start_get(&key).await.expect("complete");
        let descriptor = query(&reader, std::slice::from_ref(&key)).await.remove(0);
        one(client.remove(std::slice::from_ref(&key), true).await).expect("forced");
        let (engine, writer) = (reader.engine().clone(), client.clone());
        let overwriting = tokio::spawn(async move {
            for wave in 0..3 {
                overwrite(&writer, round * 10 + wave).await;
            }
        });
        let (mut last, mut over) = (false, false);
        while !(last && over) {
            // Once more after the last overwrite, and until the lease has run out.
            last = overwriting.is_finished();
            let (outcome, bytes) = read_descriptors(&engine, &[&descriptor]).await;
            assert!(
                outcome.pieces[0].is_err() || bytes[0] == pattern(round, size),
                "a read that straddles the reuse served other bytes"
            );
            match reader.read(&session, 0, size).await {
                Ok((_, bytes)) => {
                    assert!(!over, "what was over stays over");
                    assert_eq!(bytes, pattern(round, size));
                }
                Err(error) => {
                    assert_eq!(refusal::<()>(Err(error)), Refusal::LeaseExpired);
                    over = true;
                }
            }
        }
        overwriting.await.expect("no panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_03_expiry_in_the_middle_of_a_read_over_shm() {
    dev_03_expiry_in_the_middle_on(Via::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_03_expiry_in_the_middle_of_a_read_over_tcp() {
    dev_03_expiry_in_the_middle_on(Via::Tcp).await;
}

/// A forced removal under a session that is renewed: the session reads its version to the end, or
/// fails, and the memory comes back when it has ended.
// contract: lease-5, session-11
#[tokio::test]
async fn dev_03_a_forced_removal_leaves_open_sessions_their_bytes() {
    for via in [Via::Shm, Via::Tcp] {
        let (cluster, client) = small_pool(via).await;
        let reader = cluster.client().await;
        let key = fresh_key();
        client.store(&key, &pattern(1, SIZE)).await;
        let session = reader.start_get(&key).await.expect("complete");
        one(client.remove(std::slice::from_ref(&key), true).await).expect("forced");
        assert!(!client.has(&key).await, "the name is gone at once");
        client.store(&key, &pattern(2, SIZE)).await;
        for wave in 0..3 {
            overwrite(&client, wave).await;
            match reader.read(&session, 0, SIZE).await {
                Ok((_, bytes)) => assert_eq!(bytes, pattern(1, SIZE)),
                Err(error) => {
                    assert_eq!(refusal::<()>(Err(error)), Refusal::LeaseExpired);
                }
            }
        }
        reader.end_gets(vec![session]).await;
        eventually("nothing is held back any more", || {
            cluster.master.monitor.status().quarantined_bytes == 0
        })
        .await;
    }
}

// contract: lease-2
async fn dev_04_on(via: Via) {
    // So long that a busy machine renews it in time.
    let lease = Duration::from_secs(3);
    let cluster = Spec::new(via).nodes(&[24 * MIB]).lease(lease).start().await;
    let client = cluster.client().await;
    let (count, size) = (2_000_u64, 4 * KIB);
    let keys: Vec<ObjectKey> = (0..count).map(|_| fresh_key()).collect();
    let bytes: Vec<Vec<u8>> = (0..count).map(|seed| pattern(seed, size)).collect();
    let objects: Vec<_> = keys
        .iter()
        .cloned()
        .zip(bytes.iter().map(Vec::as_slice))
        .collect();
    for put in client.put_bytes(&objects, &common::one_replica()).await {
        put.expect("there is room");
    }

    // One query for all of them, and a fetch that goes on until the leases would have run out.
    let sessions = client.start_gets(&keys, Recency::default()).await;
    let sessions: Vec<_> = sessions
        .into_iter()
        .map(|get| get.expect("complete"))
        .collect();
    let mut pace = tokio::time::interval(lease / 20);
    let outlived = count * 4;
    let mut parts = sessions.chunks(100).zip(bytes.chunks(100)).cycle();
    let mut fetched = 0;
    while fetched < count || client.stats().leases_renewed < outlived {
        let (part, expected) = parts.next().expect("a cycle");
        fetched += part.len() as u64;
        pace.tick().await;
        let buffers: Vec<_> = part
            .iter()
            .map(|session| buffer(client.engine(), pattern(u64::MAX, session.size())))
            .collect();
        let reads = part
            .iter()
            .zip(&buffers)
            .map(|(session, memory)| RangeRead {
                session,
                ranges: vec![Range {
                    offset: 0,
                    local: whole(memory),
                }],
            });
        for done in client.read_ranges(reads).await {
            assert_eq!(done.expect("its lease is renewed").verified, size);
        }
        for (memory, expected) in buffers.iter().zip(expected) {
            assert_eq!(&contents(memory), expected);
        }
    }
    let renewals = cluster.master.requests("renew");
    assert!(
        renewals < 200,
        "one call renews all sessions: {renewals} calls"
    );
    client.end_gets(sessions).await;
    assert_eq!(client.stats().leases_lost, 0);
    assert_eq!(client.stats().leases_returned, count);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_04_a_long_batch_is_renewed_while_it_works_over_shm() {
    dev_04_on(Via::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_04_a_long_batch_is_renewed_while_it_works_over_tcp() {
    dev_04_on(Via::Tcp).await;
}

/// What is not used is not kept, and says so.
// contract: lease-2
#[tokio::test]
async fn dev_04_an_idle_session_lets_its_lease_go() {
    let lease = Duration::from_secs(2);
    let cluster = Spec::new(Via::Shm).lease(lease).start().await;
    let idle = ClientConfig {
        session_idle: lease / 2,
        ..ClientConfig::default()
    };
    let client = cluster.client_with(idle).await;
    let key = fresh_key();
    client.store(&key, &pattern(0, KIB)).await;
    let session = client.start_get(&key).await.expect("complete");
    client.read(&session, 0, KIB).await.expect("fresh");
    eventually_async("the lease is given up", async || {
        one(client.remove(std::slice::from_ref(&key), false).await).is_ok()
    })
    .await;
    assert_eq!(
        refusal(client.read(&session, 0, KIB).await),
        Refusal::LeaseExpired
    );
    assert_eq!(
        refusal(client.read(&session, 0, KIB).await),
        Refusal::LeaseExpired
    );
}
