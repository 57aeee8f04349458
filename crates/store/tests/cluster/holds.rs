//! Small objects in places that a client has in advance: one call to the master for each.

use std::collections::BTreeSet;
use std::time::Duration;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::link::{MasterLink, StartOptions};
use layercake_store::{ClientConfig, PutOutcome, PutRequest, StoreClient};

use crate::common;
use crate::common::helper::{Helper, orders, ready};
use crate::common::proxy::{Flow, Proxy};
use crate::common::{
    Cluster, KIB, MIB, OneKey as _, PATIENCE, Spec, Via, buffer, eventually, eventually_async,
    fresh_key, key, one, one_replica, pattern, replicas, whole,
};

const SIZE: u64 = 4 * KIB;
const TTL: Duration = Duration::from_secs(3);
const HOLDER: &str = "holds::helper_that_has_a_hold_until_it_is_killed";

async fn put(client: &StoreClient, key: &ObjectKey, bytes: &[u8]) -> PutOutcome {
    let object = [(key.clone(), bytes)];
    one(client.put_bytes(&object, &one_replica()).await).expect("the cluster is up")
}

fn starts(cluster: &Cluster) -> [u64; 3] {
    ["put_start", "put_slots", "put_end"].map(|method| cluster.master.requests(method))
}

fn holds(cluster: &Cluster) -> u64 {
    cluster.master.monitor.gauges().holds
}

#[tokio::test]
async fn puts_after_the_first_ask_the_master_once_and_are_like_any_other() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let (client, other) = (cluster.client().await, cluster.client().await);
        let many = 100;
        let keys: Vec<ObjectKey> = (0..many).map(|_| fresh_key()).collect();
        for (seed, key) in keys.iter().enumerate() {
            let bytes = pattern(seed as u64, SIZE + seed as u64);
            assert_eq!(put(&client, key, &bytes).await, PutOutcome::Stored);
        }
        let [started, slots, ended] = starts(&cluster);
        assert_eq!(started, ended, "{via:?}");
        assert_eq!(started + slots, many, "{via:?}");
        // A hold may be used up before the one before it was given back.
        assert!(slots >= many * 9 / 10, "{via:?}: {slots}");
        for (seed, key) in keys.iter().enumerate() {
            let bytes = pattern(seed as u64, SIZE + seed as u64);
            assert_eq!(other.load(key).await.expect("stored"), bytes, "{via:?}");
            assert_eq!(put(&other, key, &pattern(0, 9)).await, PutOutcome::Existed);
        }
        let load = other.load(&keys[0]).await.expect("stored");
        assert_eq!(load, pattern(0, SIZE), "the first value stays");
        assert_eq!(other.stats().bytes_unverified + other.stats().mismatches, 0);
        let stats = client.stats();
        assert_eq!((stats.puts_committed, stats.open_puts), (many, 0));
        // What a node finds in its memory is what the master lists, and what was refused.
        let listed = client.link().list("", 0, None).await.expect("up").objects;
        let listed: BTreeSet<_> = listed.into_iter().map(|o| (o.key, o.generation)).collect();
        assert_eq!(listed.len() as u64, many);
        let inventory = one(cluster.nodes[0].node.inventory().await.expect("readable"));
        let found = inventory.objects.into_iter();
        let found: BTreeSet<_> = found.map(|o| (o.key, o.replica.generation)).collect();
        assert!(found.is_superset(&listed), "{via:?}");
        client.close(PATIENCE).await.expect("nothing is open");
        other.close(PATIENCE).await.expect("nothing is open");
        let gauges = cluster.master.monitor.gauges();
        assert_eq!((gauges.holds, gauges.quarantined_bytes), (0, 0), "{via:?}");
        assert_eq!(
            gauges.used_bytes,
            many * 2 * SIZE,
            "{via:?}: nothing is left over"
        );
    }
}

#[tokio::test]
async fn calls_of_many_small_objects_use_holds_as_well() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    for call in 0..10_u64 {
        let bytes = pattern(call, SIZE);
        let keys: Vec<ObjectKey> = (0..16).map(|_| fresh_key()).collect();
        let objects: Vec<_> = keys.iter().map(|key| (key.clone(), &bytes[..])).collect();
        for put in client.put_bytes(&objects, &one_replica()).await {
            assert_eq!(put.expect("there is room"), PutOutcome::Stored);
        }
        for loaded in client.get(&keys).await {
            assert_eq!(loaded.expect("stored"), bytes);
        }
    }
    let [started, slots, _] = starts(&cluster);
    assert_eq!(started + slots, 10);
    assert!(slots > 5, "{slots}");
}

#[tokio::test]
async fn what_needs_the_masters_choice_takes_two_round_trips() {
    let cluster = Spec::new(Via::Shm)
        .nodes(&[32 * MIB, 32 * MIB])
        .start()
        .await;
    let client = cluster.client().await;
    client.store(&fresh_key(), &pattern(0, SIZE)).await;
    client.store(&fresh_key(), &pattern(1, SIZE)).await;
    let [_, before, _] = starts(&cluster);
    assert_eq!(before, 1);
    let memory = buffer(client.engine(), pattern(2, SIZE));
    let request = || PutRequest::new(fresh_key(), vec![whole(&memory)]);
    let configs = [
        replicas(2),
        ReplicateConfig {
            preferred_segments: vec!["node-1".to_owned()],
            ..ReplicateConfig::default()
        },
        ReplicateConfig {
            prefer_same_node: true,
            ..ReplicateConfig::default()
        },
        ReplicateConfig {
            soft_pin: true,
            ..ReplicateConfig::default()
        },
        ReplicateConfig {
            hard_pin: true,
            ..ReplicateConfig::default()
        },
    ];
    for config in configs {
        let put = one(client.put(vec![request()], &config).await);
        assert_eq!(
            put.expect("there is room"),
            PutOutcome::Stored,
            "{config:?}"
        );
    }
    let mut grouped = request();
    grouped.group = Some("g".to_owned());
    let put = one(client.put(vec![grouped], &one_replica()).await);
    assert_eq!(put.expect("there is room"), PutOutcome::Stored);
    let upsert = one(client.upsert(vec![request()], &one_replica()).await);
    assert_eq!(upsert.expect("there is room"), PutOutcome::Stored);
    client.store(&fresh_key(), &pattern(3, MIB)).await;
    assert_eq!(starts(&cluster)[1], before);
    let keeping = ReplicateConfig {
        keep_soft_pin: true,
        ..ReplicateConfig::default()
    };
    let put = one(client.put(vec![request()], &keeping).await);
    assert_eq!(put.expect("there is room"), PutOutcome::Stored);
    assert_eq!(
        starts(&cluster)[1],
        before + 1,
        "it says nothing of new keys"
    );
}

#[tokio::test]
async fn a_start_does_not_fail_for_room_that_somebody_holds() {
    for via in Via::ALL {
        let cluster = Spec::new(via).nodes(&[16 * MIB]).start().await;
        let (client, other) = (cluster.client().await, cluster.client().await);
        client.store(&fresh_key(), &pattern(0, SIZE)).await;
        assert_eq!(holds(&cluster), 1, "{via:?}");
        let all = 16 * MIB - 64 * KIB;
        let session = other.start_put(&key("big"), all).await;
        let session = session.unwrap_or_else(|error| panic!("{via:?}: {error}"));
        assert_eq!(holds(&cluster), 0);
        drop(session);
        // The client goes on, and has another hold when there is room again.
        eventually_async("a hold is granted again", async || {
            put(&client, &fresh_key(), &pattern(1, SIZE)).await;
            holds(&cluster) == 1
        })
        .await;
    }
}

#[tokio::test]
async fn an_idle_client_holds_nothing() {
    let cluster = Spec::new(Via::Shm).start().await;
    let client = cluster.client().await;
    client.store(&fresh_key(), &pattern(0, SIZE)).await;
    assert_eq!(holds(&cluster), 1);
    eventually("it is given back", || holds(&cluster) == 0).await;
    let gauges = cluster.master.monitor.gauges();
    assert_eq!((gauges.used_bytes, gauges.quarantined_bytes), (2 * SIZE, 0));
    assert_eq!(cluster.master.requests("put_revoke"), 1);
}

#[tokio::test]
async fn a_drain_calls_holds_back() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).start().await;
        let client = cluster.client().await;
        client.store(&fresh_key(), &pattern(0, SIZE)).await;
        assert_eq!(holds(&cluster), 1);
        let node = &cluster.nodes[0].node;
        let id = node.segments()[0].id;
        let drained = node.unmount(id, Some(PATIENCE)).await;
        drained.unwrap_or_else(|error| panic!("{via:?}: {error}"));
        let object = [(fresh_key(), &[1; 9][..])];
        let refused = one(client.put_bytes(&object, &one_replica()).await);
        assert!(refused.is_err(), "there is no segment");
    }
}

/// Puts a small object, and then says so and does nothing more.
#[tokio::test]
#[ignore = "a process of its own for the test below"]
async fn helper_that_has_a_hold_until_it_is_killed() {
    let orders = orders();
    let (master, via) = orders.split_once(' ').expect("two words");
    let master = master.parse().expect("an address");
    let engine = Via::named(via).engine();
    let client = common::client(master, engine, ClientConfig::default()).await;
    client.store(&key("of the dead"), &pattern(7, SIZE)).await;
    ready("").await;
}

#[tokio::test]
async fn the_hold_of_a_client_that_is_killed_comes_back() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = Spec::new(via).ttl(TTL).start().await;
        let orders = format!("{} {}", cluster.master.address, via.kind().name());
        let (helper, _) = Helper::start(HOLDER, &orders).await;
        assert_eq!(holds(&cluster), 1);
        helper.kill().await;
        eventually("its hold is free", || {
            let gauges = cluster.master.monitor.gauges();
            gauges.holds == 0 && gauges.used_bytes == 2 * SIZE
        })
        .await;
        let client = cluster.client().await;
        let loaded = client.load(&key("of the dead")).await;
        assert_eq!(loaded.expect("it was stored"), pattern(7, SIZE), "{via:?}");
    }
}

/// A client whose connection to the master can be held up.
async fn behind_a_proxy(cluster: &Cluster, call: Duration) -> (Proxy, StoreClient) {
    let proxy = Proxy::start(cluster.master.address).await;
    let engine = Via::Shm.engine();
    let mut config = common::link_config(proxy.address, "behind the proxy", &engine);
    config.timeouts.call = call;
    config.timeouts.ping = PATIENCE;
    let link = MasterLink::connect(config).await.expect("it is open");
    let client = StoreClient::new(&link, engine, ClientConfig::default());
    (proxy, client.expect("a link of its own"))
}

#[tokio::test]
async fn a_commit_that_is_repeated_is_made_once() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (proxy, client) = behind_a_proxy(&cluster, PATIENCE).await;
    let observer = cluster.client().await;
    client.store(&fresh_key(), &pattern(0, SIZE)).await;
    let name = fresh_key();
    proxy.down(Flow::Held);
    let bytes = pattern(1, SIZE);
    let (stored, ()) = tokio::join!(put(&client, &name, &bytes), async {
        eventually_async("it is committed", async || observer.has(&name).await).await;
        proxy.cut();
    });
    assert_eq!(stored, PutOutcome::Stored);
    assert_eq!(starts(&cluster)[1], 2, "the call came twice");
    assert_eq!(cluster.master.monitor.status().objects, 2);
    assert_eq!(cluster.master.monitor.counters().puts_committed, 2);
    assert_eq!(observer.load(&name).await.expect("stored"), bytes);
}

#[tokio::test]
async fn a_slot_without_an_answer_is_not_used_again() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (proxy, client) = behind_a_proxy(&cluster, Duration::from_secs(3)).await;
    let observer = cluster.client().await;
    client.store(&fresh_key(), &pattern(0, SIZE)).await;
    let (lost, next) = (fresh_key(), fresh_key());
    proxy.up(Flow::Held);
    let bytes = pattern(1, SIZE);
    let object = [(lost.clone(), &bytes[..])];
    let answer = one(client.put_bytes(&object, &one_replica()).await);
    assert!(answer.is_err(), "{answer:?}");
    proxy.cut();
    eventually_async("the link is up", async || client.look(&lost).await.is_ok()).await;
    client.store(&next, &pattern(2, SIZE)).await;
    assert!(!observer.has(&lost).await);
    let found = observer
        .link()
        .get_start(std::slice::from_ref(&next), StartOptions::default(), false)
        .await
        .expect("up");
    let place = one(found.results).expect("stored").replicas[0];
    let inventory = one(cluster.nodes[0].node.inventory().await.expect("readable"));
    let written = inventory.objects.iter().find(|object| object.key == lost);
    let written = written.expect("its bytes were written").replica;
    assert!(written.generation != place.generation && written.offset != place.offset);
    client.close(PATIENCE).await.expect("nothing is open");
    let gauges = cluster.master.monitor.gauges();
    assert_eq!(gauges.used_bytes, 2 * 2 * SIZE, "its room is free again");
}
