//! Small gets that are read while the master is asked: in one round trip, and as sure as in two.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{
    ClientConfig, GetOptions, GetRequest, GetSession, PutOutcome, PutRequest, Range, StoreClient,
    StoreError,
};
use layercake_transport::{
    Deadlines, Direction, Engine, EngineConfig, TransportKind, TransportSet,
};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::client_nodes::node_process;
use crate::common;
use crate::common::proxy::{Flow, Proxy};
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, PATIENCE, Spec, Via, buffer, contents, eventually, fresh_key,
    key, one, one_replica, pattern, refusal, replicas, whole,
};

const SIZE: u64 = 4 * KIB;

/// Right and wrong ones.
fn guesses(client: &StoreClient) -> (u64, u64) {
    let stats = client.stats();
    (stats.guesses_right, stats.guesses_wrong)
}

/// Pieces that the first node has served to readers over TCP.
fn served(cluster: &Cluster) -> u64 {
    let stats = cluster.nodes[0].engine.stats();
    let reads = stats.operation(TransportKind::Tcp, Direction::Read);
    reads.map_or(0, |reads| reads.served_pieces)
}

async fn upsert(client: &StoreClient, key: &ObjectKey, bytes: Vec<u8>, config: &ReplicateConfig) {
    let memory = buffer(client.engine(), bytes);
    let request = PutRequest::new(key.clone(), vec![whole(&memory)]);
    let put = one(client.upsert(vec![request], config).await);
    assert_eq!(put.expect("there is room"), PutOutcome::Stored);
}

/// A client whose calls to the master go through a proxy, and end at once if nobody hears them.
async fn behind(proxy: &Proxy) -> StoreClient {
    let engine = Via::Tcp.engine();
    let mut link = common::link_config(proxy.address, "client", &engine);
    link.timeouts.call = Duration::from_secs(2);
    link.timeouts.ping = PATIENCE;
    let client = StoreClient::connect(link, engine, ClientConfig::default()).await;
    client.expect("the master is up")
}

#[tokio::test]
async fn what_was_put_or_read_before_is_read_while_the_master_is_asked() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let (client, other) = (cluster.client().await, cluster.client().await);
        let sizes = [1, 100, SIZE, 4097, 30 * KIB, 60 * KIB, 300 * KIB];
        let keys: Vec<ObjectKey> = sizes.iter().map(|_| fresh_key()).collect();
        for (key, size) in keys.iter().zip(sizes) {
            client.store(key, &pattern(size, size)).await;
        }
        for _ in 0..3 {
            for reader in [&client, &other] {
                let all = reader.get(&keys).await;
                for ((key, size), loaded) in keys.iter().zip(sizes).zip(all) {
                    assert_eq!(loaded.expect("complete"), pattern(size, size));
                    assert_eq!(
                        reader.load(key).await.expect("complete"),
                        pattern(size, size)
                    );
                }
            }
        }
        // The other one's first call finds them.
        for (reader, unknown) in [(&client, 0), (&other, 7)] {
            let (right, wrong) = guesses(reader);
            let stats = reader.stats();
            assert_eq!((wrong, stats.mismatches, stats.bytes_unverified), (0, 0, 0));
            let expected = match via {
                Via::Tcp => 3 * 2 * 7 - unknown,
                // There is no trip to save.
                Via::Local | Via::Shm => 0,
            };
            assert_eq!(right, expected, "{via:?}");
        }
    }
}

#[tokio::test]
async fn the_read_does_not_wait_for_the_master_and_its_bytes_do() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let client = behind(&proxy).await;
    let there = fresh_key();
    client.store(&there, &pattern(1, SIZE)).await;
    assert_eq!(
        client.load(&there).await.expect("complete"),
        pattern(1, SIZE)
    );
    let (before, asked) = (served(&cluster), cluster.master.requests("get_start"));
    proxy.down(Flow::Held);
    let mut loading = Box::pin(client.load(&there));
    let overlap = async {
        eventually("it was read, and the master was asked", || {
            served(&cluster) > before && cluster.master.requests("get_start") > asked
        })
        .await;
    };
    tokio::select! {
        loaded = &mut loading => panic!("nobody has confirmed it: {loaded:?}"),
        () = overlap => {}
    }
    proxy.down(Flow::Open);
    assert_eq!(loading.await.expect("complete"), pattern(1, SIZE));
    assert_eq!(served(&cluster), before + 1, "it was read once");
}

#[tokio::test]
async fn without_the_master_nothing_is_answered_from_a_hint() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let client = behind(&proxy).await;
    let there = fresh_key();
    client.store(&there, &pattern(1, SIZE)).await;
    client.load(&there).await.expect("complete");
    let before = served(&cluster);
    proxy.down(Flow::Held);
    let memory = buffer(client.engine(), pattern(2, SIZE));
    let request = GetRequest {
        key: there.clone(),
        ranges: vec![Range {
            offset: 0,
            local: whole(&memory),
        }],
    };
    let got = one(client.get_into(vec![request]).await);
    let error = got.expect_err("the master does not answer");
    assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
    assert!(served(&cluster) > before, "the node has answered");
    assert_eq!(contents(&memory), pattern(2, SIZE), "nobody has seen it");
}

/// What others did to objects since this client saw them.
#[tokio::test]
async fn a_wrong_guess_is_thrown_away() {
    let cluster = Spec::new(Via::Tcp).nodes(&[MIB]).start().await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let keys: Vec<ObjectKey> = (0..8).map(|_| fresh_key()).collect();
    for (seed, key) in (0..).zip(&keys) {
        client.store(key, &pattern(seed, SIZE)).await;
    }
    for loaded in client.get(&keys).await {
        loaded.expect("complete");
    }
    let (right, wrong) = guesses(&client);
    assert_eq!(wrong, 0);
    // Replaced by as many bytes, by fewer, and by more; removed; removed and put again; overwritten many times.
    upsert(&other, &keys[0], pattern(100, SIZE), &one_replica()).await;
    upsert(&other, &keys[1], pattern(101, 10), &one_replica()).await;
    upsert(&other, &keys[2], pattern(102, 20 * KIB), &one_replica()).await;
    one(other.remove(&keys[3..4], true).await).expect("there");
    one(other.remove(&keys[4..5], true).await).expect("there");
    other.store(&keys[4], &pattern(104, SIZE)).await;
    one(other.remove(&keys[5..6], true).await).expect("there");
    // Its place has had others in it meanwhile.
    for seed in 0..300 {
        upsert(
            &other,
            &key("churn"),
            pattern(seed, 8 * KIB),
            &one_replica(),
        )
        .await;
    }
    let expected = [
        Some(pattern(100, SIZE)),
        Some(pattern(101, 10)),
        Some(pattern(102, 20 * KIB)),
        None,
        Some(pattern(104, SIZE)),
        None,
        Some(pattern(6, SIZE)),
        Some(pattern(7, SIZE)),
    ];
    let memories: Vec<_> = expected
        .iter()
        .map(|bytes| {
            let len = bytes.as_ref().map_or(SIZE, |bytes| bytes.len() as u64);
            buffer(client.engine(), pattern(200, len))
        })
        .collect();
    let requests = keys.iter().zip(&memories).map(|(key, memory)| GetRequest {
        key: key.clone(),
        ranges: vec![Range {
            offset: 0,
            local: whole(memory),
        }],
    });
    let got = client.get_into(requests.collect()).await;
    for ((got, memory), expected) in got.into_iter().zip(&memories).zip(&expected) {
        if let Some(bytes) = expected {
            let done = got.expect("complete");
            assert_eq!(done.bytes, bytes.len() as u64);
            assert_eq!(done.unverified, 0);
            assert_eq!(contents(memory), *bytes);
        } else {
            assert_eq!(refusal(got), Refusal::NotFound);
            assert_eq!(contents(memory), pattern(200, SIZE), "left alone");
        }
    }
    assert_eq!(guesses(&client), (right + 2, wrong + 6));
    // What the master said then is the next hint, and of what is gone there is none.
    for (loaded, expected) in client.get(&keys).await.into_iter().zip(expected) {
        assert_eq!(loaded.ok().map(|bytes| bytes.to_vec()), expected);
    }
    assert_eq!(guesses(&client), (right + 8, wrong + 6));
    assert_eq!(client.stats().mismatches, 0);
    assert_eq!(client.stats().suspect_segments, 0);
}

/// An engine that waits for a peer that stands still for longer than any test.
fn patient_engine() -> Engine {
    let forever = Duration::from_hours(1);
    let config = EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
        deadlines: Deadlines {
            progress: forever,
            transfer: forever,
            connect: forever,
        },
        ..EngineConfig::default()
    };
    Engine::start(config).expect("an engine starts on loopback")
}

#[tokio::test]
async fn a_guess_at_a_node_that_stands_still_costs_nobody_its_time() {
    let cluster = Spec::new(Via::Tcp)
        .ttl(Duration::from_hours(1))
        .start()
        .await;
    let node = node_process(&cluster, "still", 8 * MIB).await;
    let on = |name: &str| ReplicateConfig {
        preferred_segments: vec![name.to_owned()],
        ..ReplicateConfig::default()
    };
    let engine = patient_engine();
    let client = common::client(cluster.master.address, engine, ClientConfig::default()).await;
    let other = cluster.client().await;
    let [moved, gone] = [fresh_key(), fresh_key()];
    for key in [&moved, &gone] {
        upsert(&other, key, pattern(1, SIZE), &on("still")).await;
        assert_eq!(client.load(key).await.expect("complete"), pattern(1, SIZE));
    }
    upsert(&other, &moved, pattern(2, SIZE), &on("node-0")).await;
    one(other.remove(std::slice::from_ref(&gone), true).await).expect("there");
    node.stop().await;
    let both = [moved, gone];
    let loaded = tokio::time::timeout(PATIENCE, client.get(&both)).await;
    let [moved, gone]: [_; 2] = loaded
        .expect("the node that stands still is not waited for")
        .try_into()
        .expect("two answers");
    assert_eq!(moved.expect("on the other node"), pattern(2, SIZE));
    assert_eq!(refusal(gone), Refusal::NotFound);
    assert_eq!(guesses(&client), (0, 2));
    assert_eq!(client.stats().suspect_segments, 0, "nobody has said so");
    node.kill().await;
}

#[tokio::test]
async fn a_guess_at_a_dead_node_is_its_first_read_and_the_next_replica_serves() {
    let cluster = Spec::new(Via::Tcp)
        .ttl(Duration::from_hours(1))
        .start()
        .await;
    let node = node_process(&cluster, "dead", 8 * MIB).await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let both = ReplicateConfig {
        preferred_segments: vec!["dead".to_owned(), "node-0".to_owned()],
        ..replicas(2)
    };
    let keys: Vec<ObjectKey> = (0..4).map(|_| fresh_key()).collect();
    for key in &keys {
        upsert(&other, key, pattern(3, SIZE), &both).await;
        assert_eq!(client.load(key).await.expect("complete"), pattern(3, SIZE));
    }
    node.kill().await;
    for loaded in client.get(&keys).await {
        assert_eq!(loaded.expect("node-0 has it"), pattern(3, SIZE));
    }
    for key in &keys {
        assert_eq!(
            client.load(key).await.expect("node-0 has it"),
            pattern(3, SIZE)
        );
    }
}

/// Keys that are replaced and removed all the time, each by one writer. Each version says which it is.
struct Churn {
    keys: Vec<ObjectKey>,
    /// The last version of each key that is committed.
    committed: Vec<AtomicU64>,
    /// What each generation was seen to be.
    seen: Mutex<HashMap<(usize, Generation), u64>>,
}

/// Versions of each key.
const WRITES: u64 = 120;

impl Churn {
    fn new(keys: usize) -> Self {
        Self {
            keys: (0..keys).map(|_| fresh_key()).collect(),
            committed: (0..keys).map(|_| AtomicU64::new(0)).collect(),
            seen: Mutex::default(),
        }
    }

    fn value(at: usize, version: u64) -> Vec<u8> {
        let mut bytes = version.to_le_bytes().to_vec();
        let at = at as u64;
        let len = 100 + (at * 977 + version * 131) % (9 * KIB);
        bytes.extend(pattern(at << 32 | version, len));
        bytes
    }

    async fn write(&self, at: usize, client: &StoreClient) {
        let mut rng = StdRng::seed_from_u64(at as u64);
        let key = std::slice::from_ref(&self.keys[at]);
        for version in 1..=WRITES {
            if rng.random_bool(0.2) {
                let removed = one(client.remove(key, true).await);
                assert!(matches!(
                    removed,
                    Ok(()) | Err(StoreError::Refused(Refusal::NotFound))
                ));
            }
            let memory = buffer(client.engine(), Self::value(at, version));
            let put = loop {
                let request = PutRequest::new(key[0].clone(), vec![whole(&memory)]);
                match one(client.upsert(vec![request], &one_replica()).await) {
                    Err(StoreError::Refused(Refusal::NoSpace { .. })) => {
                        tokio::task::yield_now().await;
                    }
                    put => break put,
                }
            };
            assert_eq!(put.expect("nobody else writes it"), PutOutcome::Stored);
            self.committed[at].store(version, Ordering::SeqCst);
            // It reads its own, too: hints of what it replaces next.
            if let Ok(read) = one(client.get(key).await) {
                assert_eq!(read, Self::value(at, version));
            }
        }
    }

    fn is_over(&self) -> bool {
        let mut committed = self.committed.iter();
        committed.all(|version| version.load(Ordering::SeqCst) == WRITES)
    }

    /// Reads some of the keys, in one call, until nobody writes any more.
    async fn read(&self, seed: u64, client: &StoreClient) {
        let mut rng = StdRng::seed_from_u64(seed);
        while !self.is_over() {
            let mut wanted: Vec<usize> = (0..self.keys.len()).collect();
            wanted.retain(|_| rng.random_bool(0.4));
            let before = wanted
                .iter()
                .map(|at| self.committed[*at].load(Ordering::SeqCst));
            let before: Vec<u64> = before.collect();
            let keys: Vec<ObjectKey> = wanted.iter().map(|at| self.keys[*at].clone()).collect();
            let options = GetOptions {
                fetch: if rng.random_bool(0.3) { 0 } else { 64 * KIB },
                ..GetOptions::default()
            };
            let sessions = client.start_gets(&keys, options).await;
            for ((at, before), session) in wanted.into_iter().zip(before).zip(sessions) {
                match session {
                    Ok(session) => self.check(at, before, client, &session).await,
                    Err(error) => assert!(is_a_miss(&error), "{error}"),
                }
            }
        }
    }

    /// Reads an object that is no older than a version.
    async fn check(&self, at: usize, before: u64, client: &StoreClient, session: &GetSession) {
        let (done, bytes) = match client.read(session, 0, session.size()).await {
            Ok(read) => read,
            Err(error) => {
                assert!(is_a_miss(&error), "{error}");
                return;
            }
        };
        assert_eq!(done.unverified, 0);
        let version = bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let version = version.expect("each has one");
        assert_eq!(bytes, Self::value(at, version), "torn");
        assert!(version >= before, "{version} is older than {before}");
        let known = *self
            .seen
            .lock()
            .entry((at, session.generation()))
            .or_insert(version);
        assert_eq!(known, version, "two versions under one generation");
    }
}

/// Gone, or replaced while it was read.
fn is_a_miss(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Refused(Refusal::NotFound | Refusal::NotReady | Refusal::LeaseExpired)
            | StoreError::HeaderMismatch { .. }
    )
}

/// There is so little memory that each place is used again at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_get_brings_the_version_that_the_master_named_whatever_others_do() {
    let spec = Spec::new(Via::Tcp).nodes(&[256 * KIB, 256 * KIB]);
    let cluster = spec.start().await;
    let churn = Arc::new(Churn::new(6));
    let mut tasks = Vec::new();
    for at in 0..churn.keys.len() {
        let (churn, client) = (Arc::clone(&churn), cluster.client().await);
        tasks.push(tokio::spawn(async move {
            churn.write(at, &client).await;
            guesses(&client)
        }));
    }
    for reader in 0..3 {
        let (churn, client) = (Arc::clone(&churn), cluster.client().await);
        tasks.push(tokio::spawn(async move {
            churn.read(1000 + reader, &client).await;
            guesses(&client)
        }));
    }
    let mut all = (0, 0);
    for task in tasks {
        let (right, wrong) = task.await.expect("no panic");
        all = (all.0 + right, all.1 + wrong);
    }
    assert!(all.0 > 0 && all.1 > 0, "it was put to the test: {all:?}");
}
