//! Whole-object mode is as strict and as orderly as layers are.

use std::num::NonZeroUsize;

use layercake_connector::checks::Deployment;
use layercake_connector::contract::{
    BlockHash, BlockId, CacheLayout, HostEvent, SchedulerSide as _, WorkerSide as _,
};
use layercake_connector::stats::MissReason;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::LayerSpec;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{PutRequest, StoreClient};
use layercake_transport::Access;
use serde_json::{Value, json};

use crate::cluster::{Cluster, deployment, eventually, hashes};
use crate::rig::{Rig, options, pending};

fn whole() -> Value {
    json!({"use_layerwise": false, "layerwise_max_transfer_blocks": 2})
}

/// What an engine stores of a prompt in one step.
async fn stored(store: &StoreClient, deployment: &Deployment, with: &Value) -> Vec<Vec<u8>> {
    let hashes = hashes(1, 5);
    let mut rig = Rig::new(deployment, store, with);
    rig.step(&[(("p", &[5, 0, 3, 1, 2], 20, 0, 20), &hashes)]);
    rig.finish("p").await;
    let keys: Vec<ObjectKey> = hashes.iter().map(|hash| rig.key(0, hash)).collect();
    rig.close().await;
    let objects = store.get(&keys).await.into_iter();
    objects
        .map(|object| object.expect("stored").to_vec())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn both_modes_store_the_same_bytes() {
    let (one, other) = (Cluster::start().await, Cluster::start().await);
    let deployment = deployment(1);
    let layers = stored(&one.client().await, &deployment, &json!({})).await;
    let objects = stored(&other.client().await, &deployment, &whole()).await;
    assert_eq!(layers, objects);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn long_loads_have_few_sessions_open_and_short_calls() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 11);
    let mut rig = Rig::new(&deployment, &store, &whole());
    let table: Vec<BlockId> = (0..11).collect();
    rig.step(&[(("p", &table, 44, 0, 44), &hashes)]);
    rig.finish("p").await;
    rig.close().await;
    let mut options = options(&whole());
    for window in [1, 3, 4] {
        options.session_window_blocks = NonZeroUsize::new(window).expect("above 0");
        let mut rig = Rig::with(&deployment, &store, &options);
        assert_eq!(rig.admit("d", &hashes).await, 44);
        let table: Vec<BlockId> = (12..24).rev().collect();
        let absorbed = rig.step(&[(("d", &table, 45, 44, 1), &hashes)]);
        assert!(absorbed.is_empty(), "{absorbed:?}");
        assert_eq!(rig.right(&table, &hashes), [true; 11]);
        rig.close().await;
    }
}

/// Loads 4 blocks in whole-object mode of which none is this engine's, whatever is there: nothing reaches the cache.
async fn refuses(store: &StoreClient, deployment: &Deployment, hashes: &[BlockHash]) {
    let mut rig = Rig::new(deployment, store, &whole());
    assert_eq!(rig.admit("d", hashes).await, 16);
    let table: Vec<BlockId> = (10..15).collect();
    let before = BlockHash::new(b"before");
    for (layer, block) in (0..3).flat_map(|layer| table.iter().map(move |block| (layer, block))) {
        rig.ranks[0].fill(layer, *block, &before);
    }
    let absorbed = rig.step(&[(("d", &table, 17, 16, 1), hashes)]);
    assert_eq!(absorbed.recompute.len(), 1);
    assert_eq!(rig.right(&table[..4], &vec![before; 4]), [true; 4]);
    let stats = rig.ranks[0].worker.stats();
    assert_eq!(stats.missed(MissReason::OtherFingerprint), 4);
    rig.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn objects_of_another_layout_are_refused() {
    let cluster = Cluster::start().await;
    let store = cluster.client().await;
    let mut ours = deployment(1);
    ours.compatible_keys = true;
    let mut other = ours.clone();
    // All that we would read is there, and more.
    other.groups = vec![CacheLayout {
        layers: (0..3)
            .map(|layer| LayerSpec::new(layer, [("kv", 2048)]))
            .collect(),
    }];
    let hashes = hashes(1, 4);
    let mut rig = Rig::new(&other, &store, &whole());
    rig.step(&[(("p", &[0, 1, 2, 3], 16, 0, 16), &hashes)]);
    rig.finish("p").await;
    rig.close().await;
    refuses(&store, &ours, &hashes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn objects_of_another_fingerprint_are_refused() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 4);
    let rig = Rig::new(&deployment, &store, &whole());
    // As long as ours.
    let len = 1024 + 24 + 200;
    let memory = store
        .engine()
        .register(vec![7; len].into(), Access::LocalOnly)
        .expect("memory of its own");
    let puts = hashes.iter().map(|hash| {
        let piece = memory.slice(0, memory.len()).expect("whole");
        PutRequest {
            fingerprint: Some(Fingerprint([9; 16])),
            ..PutRequest::new(rig.key(0, hash), vec![piece])
        }
    });
    let put = store.put(puts.collect(), &ReplicateConfig::default()).await;
    assert!(put.iter().all(Result::is_ok));
    rig.close().await;
    refuses(&store, &deployment, &hashes).await;
}

/// Blocks of a prompt, in however many calls, go from the tail on when the room is needed.
// contract: connector-21
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pressure_shortens_a_prefix_from_its_tail() {
    let cluster = Cluster::with(256 << 10).await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 16);
    let table: Vec<BlockId> = (0..17).collect();
    for load in [false, true] {
        let mut rig = Rig::new(&deployment, &store, &whole());
        if load {
            assert_eq!(rig.admit("d", &hashes).await, 64);
            rig.step(&[(("d", &table, 65, 64, 1), &hashes)]);
            rig.finish("d").await;
        } else {
            rig.step(&[(("p", &table, 64, 0, 64), &hashes)]);
            rig.finish("p").await;
        }
        let (mut epochs, mut indices) = (Vec::new(), Vec::new());
        for hash in &hashes {
            let object = store.stat(&rig.key(0, hash)).await.expect("stored").object;
            epochs.push(object.epoch);
            indices.push(object.prefix_index);
        }
        epochs.dedup();
        assert_eq!(epochs.len(), 1, "{epochs:?}");
        assert_eq!(indices, (0..16).collect::<Vec<u32>>());
        rig.close().await;
    }
    let keys = {
        let rig = Rig::new(&deployment, &store, &whole());
        let keys: Vec<ObjectKey> = hashes.iter().map(|hash| rig.key(0, hash)).collect();
        rig.close().await;
        keys
    };
    // One after the other, until some of the prefix had to go.
    for number in 0..64 {
        let key = ObjectKey::new(&format!("other-{number}")).expect("valid");
        let put = store
            .put_bytes(&[(key, &[1; 4096])], &ReplicateConfig::default())
            .await;
        drop(put);
        let there = there(&store, &keys).await;
        assert!(there.is_sorted_by(|a, b| a >= b), "{there:?}");
        if there.contains(&false) {
            assert!(there[0], "not all at once: {there:?}");
            return;
        }
    }
    panic!("64 other objects fit beside the prefix");
}

async fn there(store: &StoreClient, keys: &[ObjectKey]) -> Vec<bool> {
    let mut there = Vec::new();
    for key in keys {
        there.push(store.stat(key).await.is_ok());
    }
    there
}

/// A request that loses its blocks before they are read: nothing of what comes into them is stored under its keys.
// contract: connector-18
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_read_of_blocks_that_their_request_lost() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let (victim, thief) = (hashes(1, 3), hashes(2, 3));
    let mut rig = Rig::new(&deployment, &store, &whole());
    let table: Vec<BlockId> = vec![1, 2, 3];
    let part = ("v", table.as_slice(), 12, 0, 12);
    let metadata = rig.plan(&[(part, &victim)], &[]);
    let (event, end) = pending();
    tokio::task::block_in_place(|| {
        let rank = &mut rig.ranks[0];
        let begun = rank.worker.start_load(&metadata, HostEvent::done());
        begun.expect("begins");
        for layer in 0..3 {
            rank.compute(layer, &[(part, &victim)]);
        }
        rank.worker.wait_for_save(end).expect("ends");
        rank.worker.clear_metadata();
    });
    let part = ("t", table.as_slice(), 12, 0, 12);
    let metadata = rig.plan(&[(part, &thief)], &["v"]);
    let setter = std::thread::spawn(move || event.set());
    let results = tokio::task::block_in_place(|| rig.ranks[0].step(&metadata, &[(part, &thief)]));
    setter.join().expect("no panic");
    rig.scheduler.absorb(&[results]);
    rig.finish("t").await;
    eventually("nothing stays reserved", || {
        cluster.monitor.status().reserved_objects == 0
    })
    .await;
    let mut reader = Rig::new(&deployment, &store, &whole());
    assert_eq!(reader.admit("thief", &thief).await, 12);
    let blocks: Vec<BlockId> = (20..24).collect();
    reader.step(&[(("thief", &blocks, 13, 12, 1), &thief)]);
    assert_eq!(reader.right(&blocks, &thief), [true; 3]);
    // Its end may have come before the preemption did.
    let tokens = reader.admit("victim", &victim).await;
    let blocks: Vec<BlockId> = (24..28).collect();
    reader.step(&[(("victim", &blocks, 13, tokens, 1), &victim)]);
    let stored = usize::try_from(tokens / 4).expect("small");
    assert_eq!(reader.right(&blocks[..stored], &victim), vec![true; stored]);
    let dropped = rig.ranks[0].worker.stats().dropped_saves;
    assert_eq!(dropped + tokens / 4, 3, "each block is stored or dropped");
}
