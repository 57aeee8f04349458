//! Segment hosts and a real master: death, restart, drain, late writers, and what segments hold.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::helper::{self, Helper};
use common::{
    MIB, OneKey as _, PATIENCE, RunningMaster, Spec, TestNode, Via, eventually, eventually_async,
    key, pattern, refusal,
};
use layercake_protocol::auth::SharedToken;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Term;
use layercake_store::link::{Exists, MasterLink};
use layercake_store::{ClientConfig, StoreError};

/// Time to live of members in tests that wait for it to pass: so long that the others are heard in time
/// on a busy machine.
const TTL: Duration = Duration::from_secs(3);

/// Ends a node like a process that is killed: nobody says goodbye.
async fn kill(node: TestNode) {
    let TestNode { engine, .. } = node;
    // Beside the runtime, on which the other members' heartbeats go on.
    tokio::task::spawn_blocking(move || engine.shutdown(PATIENCE))
        .await
        .expect("no panic");
}

#[tokio::test]
// contract: lease-12
async fn a_node_that_dies_takes_its_segments_and_objects_away() {
    let mut cluster = Spec::new(Via::Tcp)
        .nodes(&[4 * MIB, 4 * MIB])
        .ttl(TTL)
        .start()
        .await;
    let client = cluster.client().await;
    // Enough objects to be on both.
    let keys: Vec<_> = (0..16).map(|n| key(format!("k{n}"))).collect();
    for (n, key) in keys.iter().enumerate() {
        client.store(key, &pattern(n as u64, 100_000)).await;
    }
    let dead = cluster.nodes.remove(0);
    let gone = dead.node.segments()[0].id;
    kill(dead).await;
    let monitor = cluster.master.monitor.clone();
    eventually("its segment is gone", || monitor.status().segments == 1).await;
    assert_eq!(monitor.status().lost_nodes, 1);
    let mut served = 0;
    for (n, key) in keys.iter().enumerate() {
        match client.load(key).await {
            Ok(bytes) => {
                assert_eq!(bytes, pattern(n as u64, 100_000), "{key}");
                served += 1;
            }
            Err(error) => {
                assert!(!client.has(key).await, "{key}: {error}, but promised");
            }
        }
    }
    let listed = client.link().list("", 0, None).await.expect("up").objects;
    assert_eq!(listed.len(), served, "what is listed is what can be read");
    assert!((1..16).contains(&served), "{served} of 16");
    assert!(
        listed
            .iter()
            .all(|stat| stat.replicas.iter().all(|r| r.segment != gone))
    );
}

#[tokio::test]
async fn after_a_restart_of_the_master_nodes_are_there_again_and_hold_nothing_old() {
    let mut cluster = Spec::new(Via::Shm).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    let (old, new) = (key("old"), key("new"));
    client.store(&old, &pattern(1, 50_000)).await;
    let open = client.start_put(&key("open"), 1000).await.expect("room");
    client
        .write(&open, 0, &pattern(2, 1000))
        .await
        .expect("the node is there");
    // The same address, a later term.
    let mut config = cluster.spec.master.clone();
    config.term = Some(Term(cluster.master.monitor.status().term.0 + 1));
    let placeholder = RunningMaster::start(cluster.spec.master.clone()).await;
    let master = std::mem::replace(&mut cluster.master, placeholder);
    let port = master.stop().await;
    cluster.master = RunningMaster::start_at(port, config).await;
    let monitor = cluster.master.monitor.clone();
    eventually("the node is back", || monitor.status().segments == 1).await;
    // It may still be told that nobody is there: the node was quicker to come back.
    let back = async || matches!(client.look(&old).await, Ok(false));
    eventually_async("the client is back", back).await;
    let ended = client.end(open).await;
    assert!(ended.is_err(), "its reservation is gone: {ended:?}");
    client.store(&new, &pattern(3, 50_000)).await;
    assert_eq!(client.load(&new).await.expect("stored"), pattern(3, 50_000));
    assert_eq!(cluster.nodes[0].node.stats().replaced_segments, 1);
}

#[tokio::test]
async fn a_draining_segment_takes_nothing_new_and_goes_with_its_last_lease() {
    let cluster = Spec::new(Via::Tcp).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    let name = key("k");
    client.store(&name, &pattern(1, 50_000)).await;
    let session = client.start_get(&name).await.expect("stored");
    let node = &cluster.nodes[0].node;
    let id = node.segments()[0].id;
    let unmounting = node.unmount(id, Some(PATIENCE));
    tokio::pin!(unmounting);
    let reading = async {
        let master = &cluster.master.monitor;
        let draining = || {
            let segments = master.segments();
            segments
                .iter()
                .any(|s| s.state == layercake_protocol::report::SegmentState::Draining)
        };
        eventually("it drains", draining).await;
        // The session reads on, and no new object finds room.
        let (done, bytes) = client.read(&session, 0, 50_000).await.expect("leased");
        assert_eq!((done.bytes, bytes), (50_000, pattern(1, 50_000)));
        let put = client.start_put(&key("new"), 1000).await;
        assert!(matches!(refusal(put), Refusal::NoSpace { .. }));
    };
    tokio::select! {
        ended = &mut unmounting => panic!("under a lease: {ended:?}"),
        () = reading => {}
    }
    client.end_gets(vec![session]).await;
    unmounting.await.expect("drained");
    assert_eq!(cluster.master.monitor.status().segments, 0);
    assert_eq!(cluster.nodes[0].engine.stats().regions, 0);
    assert!(!client.has(&name).await);
}

#[tokio::test]
async fn a_drain_whose_time_is_over_goes_on_and_can_be_cut_short() {
    let cluster = Spec::new(Via::Tcp).nodes(&[4 * MIB]).start().await;
    let client = cluster.client().await;
    let name = key("k");
    client.store(&name, &pattern(1, 50_000)).await;
    let session = client.start_get(&name).await.expect("stored");
    let node = &cluster.nodes[0].node;
    let id = node.segments()[0].id;
    let drained = node.unmount(id, Some(Duration::from_millis(200))).await;
    assert_eq!(refusal(drained), Refusal::Leased);
    let (done, _) = client
        .read(&session, 0, 50_000)
        .await
        .expect("the lease holds");
    assert_eq!(done.bytes, 50_000);
    node.unmount(id, None).await.expect("at once");
    assert_eq!(cluster.master.monitor.status().segments, 0);
    let read = client.read(&session, 0, 50_000).await;
    assert!(
        read.is_err(),
        "nothing is served from memory that was taken back"
    );
}

#[tokio::test]
#[ignore = "run as a process of its own by the test below"]
async fn helper_writer() {
    let orders = helper::orders();
    let (via, address) = orders.split_once(' ').expect("two words");
    let via = Via::ALL
        .into_iter()
        .find(|known| known.kind().name() == via)
        .expect("known");
    let address = address.parse().expect("an address");
    let client = common::client(address, via.engine(), ClientConfig::default()).await;
    let open = client.start_put(&key("k"), OPEN_SIZE).await.expect("room");
    client
        .write(&open, 0, &pattern(1, 1000))
        .await
        .expect("the node is there");
    helper::ready("").await;
}

/// More than half of a small segment.
const OPEN_SIZE: u64 = 600_000;

#[tokio::test]
// contract: lease-7
async fn memory_of_a_writer_that_died_is_used_again_after_the_fence() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).nodes(&[MIB]).ttl(TTL).start().await;
        let survivor = cluster.client().await;
        let orders = format!("{} {}", via.kind(), cluster.master.address);
        let (writer, _) = Helper::start("helper_writer", &orders).await;
        let second = survivor.start_put(&key("other"), OPEN_SIZE).await;
        assert!(matches!(refusal(second), Refusal::NoSpace { .. }));
        writer.kill().await;
        let bytes = pattern(2, OPEN_SIZE);
        // The name and the room are free when its time to live and the fence are over.
        eventually_async("its place is used again", async || {
            let Ok(session) = survivor.start_put(&key("k"), OPEN_SIZE).await else {
                return false;
            };
            survivor
                .write(&session, 0, &bytes)
                .await
                .expect("the node is there");
            survivor.end(session).await.expect("whole");
            true
        })
        .await;
        let loaded = survivor.load(&key("k")).await.expect("stored");
        assert_eq!(loaded, bytes, "{via:?}");
        let stats = cluster.nodes[0].node.stats();
        assert_eq!((stats.fences_done, stats.fences_waiting), (1, 0), "{via:?}");
        assert_eq!(cluster.master.monitor.status().quarantined_bytes, 0);
    }
}

#[tokio::test]
async fn what_segments_hold_is_what_the_master_lists() {
    let cluster = Spec::new(Via::Tcp).nodes(&[4 * MIB, 4 * MIB]).start().await;
    let client = cluster.client().await;
    for n in 0..40_u64 {
        client
            .store(&key(format!("k{n}")), &pattern(n, 1 + n * 4001))
            .await;
    }
    // One that is open, and one that was given up.
    let open = client.start_put(&key("open"), 5000).await.expect("room");
    client
        .write(&open, 0, &pattern(1, 5000))
        .await
        .expect("the node is there");
    let revoked = client.start_put(&key("revoked"), 5000).await.expect("room");
    client
        .write(&revoked, 0, &pattern(1, 5000))
        .await
        .expect("the node is there");
    for ended in client.revoke_puts(vec![revoked]).await {
        ended.expect("its own");
    }
    let mut held = BTreeMap::new();
    for node in &cluster.nodes {
        for inventory in node.node.inventory().await.expect("it can be read") {
            for object in inventory.objects {
                assert!(object.replica.generation <= inventory.max_generation);
                let place = (object.size, vec![object.replica]);
                assert!(held.insert(object.key.as_str().to_owned(), place).is_none());
            }
        }
    }
    let listed = client.link().list("k", 0, None).await.expect("up").objects;
    let listed: BTreeMap<_, _> = listed
        .into_iter()
        .map(|stat| (stat.key.as_str().to_owned(), (stat.size, stat.replicas)))
        .collect();
    assert_eq!(listed.len(), 40);
    assert_eq!(held, listed);
}

#[tokio::test]
async fn a_master_with_a_token_lets_in_who_knows_it_and_is_let_in_by_them_only() {
    let token = |text: &str| Some(SharedToken::new(text).expect("long enough"));
    let mut spec = Spec::new(Via::Tcp);
    spec.master.token = token("the secret of this cluster");
    let master = RunningMaster::start(spec.master.clone()).await;
    let connect = async |secret: Option<SharedToken>| {
        let engine = Via::Tcp.engine();
        let mut config = common::link_config(master.address, "n", &engine);
        config.token = secret;
        MasterLink::connect(config).await
    };
    let link = connect(token("the secret of this cluster"))
        .await
        .expect("it is right");
    assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
    assert!(
        link.status().await.is_ok(),
        "unary calls show the ticket too"
    );
    let wrong = connect(token("the secret of another one"))
        .await
        .expect_err("wrong");
    assert!(
        matches!(wrong, StoreError::MasterUnproven { .. }),
        "{wrong}"
    );
    let none = connect(None).await.expect_err("none");
    assert!(matches!(none, StoreError::TokenRequired { .. }), "{none}");
}

#[tokio::test]
async fn large_batches_go_through_a_real_master() {
    let cluster = Spec::new(Via::Local).start().await;
    let client = cluster.client().await;
    client.store(&key("17"), &pattern(1, 10)).await;
    let keys: Vec<_> = (0..50_000).map(|n| key(n.to_string())).collect();
    let existence = client
        .link()
        .exists(&Exists::readable(&keys))
        .await
        .expect("any size");
    let found: Vec<_> = (0..keys.len())
        .filter(|n| existence.states[*n] == layercake_protocol::replica::Presence::Complete)
        .collect();
    assert_eq!(found, [17]);
    let waited = client
        .link()
        .wait_complete(&keys[..20_000], Duration::from_millis(1))
        .await;
    let waited = waited.expect("any size");
    assert_eq!(waited.iter().filter(|result| result.is_ok()).count(), 1);
}
