//! Nodes that die, stand still and come back; replicas.

use std::time::Duration;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Recency;
use layercake_store::link::MasterLink;
use layercake_store::{Node, NodeConfig, PutOutcome, PutSession, StoreClient, StoreError};
use tokio::sync::oneshot;

use crate::common;
use crate::common::helper::{Helper, orders, ready};
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, PATIENCE, Spec, Via, eventually, fresh_key, one, one_replica,
    pattern, replicas,
};

const NODE: &str = "client_nodes::helper_that_lends_memory";

/// Of an object that is read while its node is killed.
const SIZE: u64 = 64 * KIB;

/// Lends memory until it is killed.
#[tokio::test]
#[ignore = "a process of its own for the tests here"]
async fn helper_that_lends_memory() {
    let orders = orders();
    let [master, via, name, bytes] = orders.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{orders:?} is no order");
    };
    let engine = Via::named(via).engine();
    let master = master.parse().expect("an address");
    let link = MasterLink::connect(common::link_config(master, name, &engine)).await;
    let config = NodeConfig::lending(bytes.parse().expect("a number"), false);
    let node = Node::start(config, engine, link.expect("the master is up")).await;
    let _node = node.expect("there is memory");
    ready("").await;
}

/// A node in a process of its own.
pub(crate) async fn node_process(cluster: &Cluster, name: &str, bytes: u64) -> Helper {
    let (master, via) = (cluster.master.address, cluster.spec.via.kind());
    Helper::start(NODE, &format!("{master} {via} {name} {bytes}"))
        .await
        .0
}

/// A client that reads all the time while a node is killed gets every byte right, or an error, and all
/// objects again from the other node.
// contract: session-13
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_a_node_process_costs_no_object_that_has_another_replica() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).nodes(&[16 * MIB]).start().await;
        let node = node_process(&cluster, "victim", 16 * MIB).await;
        let client = cluster.client().await;
        let keys: Vec<ObjectKey> = (0..24).map(|_| fresh_key()).collect();
        let bytes: Vec<Vec<u8>> = (0..24).map(|seed| pattern(seed, SIZE)).collect();
        let objects: Vec<_> = keys
            .iter()
            .cloned()
            .zip(bytes.iter().map(Vec::as_slice))
            .collect();
        for put in client.put_bytes(&objects, &replicas(2)).await {
            assert_eq!(put.expect("there is room"), PutOutcome::Stored);
        }
        let sessions = client.start_gets(&keys, Recency::default()).await;
        let sessions: Vec<_> = sessions
            .into_iter()
            .map(|get| get.expect("complete"))
            .collect();
        let (read_so_many, reads) = oneshot::channel();
        let kill = async {
            reads.await.expect("there are as many reads");
            node.kill().await;
        };
        let read_all = async {
            let mut kill_now = Some(read_so_many);
            for round in 0..10 {
                for (at, (session, bytes)) in sessions.iter().zip(&bytes).enumerate() {
                    // In the middle of a round, while this read and later ones are under way.
                    if (round, at) == (1, 7) {
                        let kill_now = kill_now.take().expect("there is one such read");
                        kill_now.send(()).expect("somebody waits for it");
                    }
                    let (_, read) = client.read(session, 0, SIZE).await.expect("one is alive");
                    assert_eq!(&read, bytes);
                }
            }
        };
        tokio::join!(kill, read_all);
        for (loaded, bytes) in client.get(&keys).await.into_iter().zip(&bytes) {
            assert_eq!(loaded.expect("one is alive"), bytes);
        }
    }
}

/// A node that stands still for longer than the progress deadline counts as out of reach, and counts
/// again when it goes on.
// contract: session-16
#[tokio::test]
async fn a_node_that_stands_still_is_absent_until_it_goes_on() {
    let cluster = Spec::new(Via::Tcp)
        .nodes(&[])
        .ttl(Duration::from_hours(1))
        .start()
        .await;
    let node = node_process(&cluster, "sleeper", 8 * MIB).await;
    let client = cluster.client().await;
    let key = fresh_key();
    client.store(&key, &pattern(1, 4 * KIB)).await;
    node.stop().await;
    let error = client.load(&key).await.expect_err("it does not answer");
    assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
    assert!(
        !client.has(&key).await,
        "what can't be served is not promised"
    );
    assert_eq!(client.stats().suspect_segments, 1);
    let other = cluster.client().await;
    assert!(other.has(&key).await, "it is this client that found out");
    node.resume().await;
    eventually("the node is in reach again", || {
        client.stats().suspect_segments == 0
    })
    .await;
    assert!(client.has(&key).await);
    assert_eq!(
        client.load(&key).await.expect("complete"),
        pattern(1, 4 * KIB)
    );
}

/// Writes that a node did not answer may still be carried out when it goes on: nothing heals them, and their
/// memory waits for the node, whichever way the writer gives up.
// contract: session-3, session-14
#[tokio::test]
async fn a_write_that_nobody_answered_for_is_not_confirmed() {
    let cluster = Spec::new(Via::Tcp)
        .nodes(&[])
        .ttl(Duration::from_hours(1))
        .start()
        .await;
    let node = node_process(&cluster, "sleeper", 8 * MIB).await;
    let bytes = pattern(1, 64 * KIB);
    let mut scenes = Vec::new();
    for _ in 0..3 {
        let client = cluster.client().await;
        let session = client.start_put(&fresh_key(), 64 * KIB).await;
        let session = session.expect("there is room");
        let written = client.write(&session, 0, &bytes).await;
        written.expect("the node is awake");
        scenes.push((client, session));
    }
    let status = || cluster.master.monitor.status();
    node.stop().await;
    let [first, second, third] = &scenes[..] else {
        panic!("three of them");
    };
    let write = async |(client, session): &(StoreClient, PutSession)| {
        let error = client.write(session, 0, &bytes).await;
        let error = error.expect_err("nobody answers");
        assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
        let error = client.write(session, 0, &bytes).await;
        let error = error.expect_err("it would not heal");
        assert!(matches!(error, StoreError::Unconfirmed), "{error}");
    };
    tokio::join!(write(first), write(second), write(third));
    assert_eq!(
        (status().reserved_objects, status().quarantined_bytes),
        (3, 0)
    );

    let mut scenes = scenes.into_iter();
    let mut next = || scenes.next().expect("three of them");
    // An end is refused, a revoke is not.
    let (client, session) = next();
    let failed = one(client.end_puts(vec![session]).await).expect_err("in doubt");
    assert!(matches!(failed.error, StoreError::Unconfirmed), "{failed}");
    let session = failed.session.expect("it can be revoked");
    let key = session.key().clone();
    one(client.revoke_puts(vec![session]).await).expect("the master is up");
    let held = status().quarantined_bytes;
    assert!(held >= 64 * KIB, "{held} bytes are held back");
    let again = client.start_put(&key, 64 * KIB).await;
    let again = again.expect_err("this client can't reach any memory");
    assert!(
        matches!(again, StoreError::Refused(_)),
        "the key itself is free: {again}"
    );
    // A client that is closed with its session open, and one that just leaves.
    let (client, session) = next();
    client.close(PATIENCE).await.expect("the master is up");
    assert_eq!(status().quarantined_bytes, 2 * held);
    drop(session);
    let (client, session) = next();
    client
        .link()
        .close(PATIENCE)
        .await
        .expect("the master is up");
    assert_eq!(status().quarantined_bytes, 3 * held);
    assert_eq!(status().reserved_objects, 0);
    drop(session);

    node.resume().await;
    eventually("the node has fenced all of it", || {
        status().quarantined_bytes == 0
    })
    .await;
    let client = cluster.client().await;
    client.store(&key, &bytes).await;
    assert_eq!(client.load(&key).await.expect("complete"), bytes);
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
