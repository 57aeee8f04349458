//! The worker side moves real bytes.

use layercake_connector::contract::{BlockId, HostEvent, SchedulerSide as _, WorkerSide as _};
use layercake_connector::stats::MissReason;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Recency;
use serde_json::{Value, json};

use crate::cluster::{Cluster, deployment, eventually, hashes};
use crate::rig::Rig;

/// Saves a prompt of 8 blocks in chunks that don't divide the block, and loads it elsewhere.
async fn save_and_load(tp_size: u32, save: Value, load: Value) {
    let cluster = Cluster::start().await;
    let deployment = deployment(tp_size);
    let hashes = hashes(1, 8);
    let table: Vec<BlockId> = vec![3, 1, 4, 15, 9, 2, 6, 5, 30];
    let mut prefill = Rig::new(&deployment, &cluster.client().await, &save);
    assert_eq!(prefill.admit("p", &hashes).await, 0);
    let mut computed = 0;
    for chunk in [7, 6, 11, 9] {
        let part = ("p", table.as_slice(), 33, computed, chunk);
        prefill.step(&[(part, &hashes)]);
        computed += chunk;
    }
    prefill.finish("p").await;
    let stats: u64 = prefill
        .ranks
        .iter()
        .map(|rank| rank.worker.stats().saved_blocks)
        .sum();
    assert_eq!(stats, 8 * u64::from(tp_size));
    // One object per block and rank, however many layers there are.
    assert_eq!(cluster.monitor.status().objects, 8 * u64::from(tp_size));

    let mut decode = Rig::new(&deployment, &cluster.client().await, &load);
    assert_eq!(decode.admit("d", &hashes).await, 32);
    let table: Vec<BlockId> = (10..19).rev().collect();
    let absorbed = decode.step(&[(("d", &table, 33, 32, 1), &hashes)]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    assert_eq!(decode.right(&table, &hashes), [true; 8]);
    for rank in &decode.ranks {
        eventually("the reads have ended", || {
            rank.worker.stats().loaded_blocks == 8 && rank.worker.open_sessions() == (0, 0)
        })
        .await;
    }
    decode.finish("d").await;
    assert_eq!(decode.scheduler.open_requests(), 0);
    prefill.close().await;
    decode.close().await;
}

// DEV-06: layers differ in number and length of entries.
// contract: connector-16
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dev_06_what_one_engine_saves_layer_by_layer_another_loads() {
    save_and_load(1, json!({}), json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ranks_store_and_load_their_own_objects() {
    save_and_load(2, json!({}), json!({"kv_role": "kv_consumer"})).await;
}

// contract: connector-21
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_request_is_one_epoch_and_its_blocks_are_in_order_over_chunks_and_ranks() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(2));
    let hashes = hashes(1, 6);
    let table: Vec<BlockId> = (0..6).collect();
    // With a look-up, and without one.
    for role in ["kv_both", "kv_producer"] {
        store.remove_all(true).await.expect("removed");
        let mut rig = Rig::new(&deployment, &store, &json!({"kv_role": role}));
        rig.admit("r", &hashes).await;
        for chunk in 0..3 {
            rig.step(&[(("r", &table, 24, chunk * 8, 8), &hashes)]);
        }
        rig.finish("r").await;
        for rank in 0..2_u32 {
            let mut epochs = Vec::new();
            for (block, hash) in (0..).zip(&hashes) {
                let key = rig.key(usize::try_from(rank).expect("small"), hash);
                let object = store.stat(&key).await.expect("stored").object;
                assert_eq!(object.prefix_index, block * 2 + rank, "{role}");
                epochs.push(object.epoch);
            }
            epochs.dedup();
            assert_eq!(epochs.len(), 1, "{role}: {epochs:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn small_calls_small_pieces_and_a_small_window_change_nothing() {
    let small = json!({
        "layerwise_max_transfer_blocks": 3,
        "layerwise_max_transfer_bytes": 100,
        "layerwise_prefetch_layers": 1,
        "session_window_blocks": 3,
        "lookup_window_blocks": 3,
    });
    save_and_load(1, small.clone(), small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whole_objects_and_layers_are_the_same_objects() {
    let whole = json!({"use_layerwise": false});
    save_and_load(1, whole.clone(), whole.clone()).await;
    save_and_load(1, json!({}), whole.clone()).await;
    save_and_load(1, whole, json!({})).await;
}

// contract: connector-17
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_block_that_is_gone_is_invalid_and_what_depends_on_it_is_not_saved() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 6);
    let table: Vec<BlockId> = (0..7).collect();
    let mut first = Rig::new(&deployment, &store, &json!({}));
    first.admit("p", &hashes[..4]).await;
    first.step(&[(("p", &table, 16, 0, 16), &hashes[..4])]);
    first.finish("p").await;

    let mut second = Rig::new(&deployment, &cluster.client().await, &json!({}));
    assert_eq!(second.admit("d", &hashes).await, 16);
    let removed = store.remove(&[second.key(0, &hashes[2])], true).await;
    assert!(removed[0].is_ok());
    let table: Vec<BlockId> = (10..17).collect();
    let part = ("d", table.as_slice(), 25, 16, 9);
    let absorbed = second.step(&[(part, &hashes)]);
    assert_eq!(absorbed.recompute, [("d".into(), 8)]);
    assert_eq!(
        second.right(&table[..2], &hashes),
        [true; 2],
        "the rest is loaded"
    );
    eventually("the reads have ended", || {
        second.ranks[0].worker.stats().loaded_blocks == 3
    })
    .await;
    let stats = second.ranks[0].worker.stats();
    assert_eq!(stats.failed_loads, 1);
    assert_eq!(stats.missed(MissReason::Evicted), 1);
    let keys: Vec<_> = hashes.iter().map(|hash| second.key(0, hash)).collect();
    eventually("the void saves are over", || {
        second.ranks[0].worker.open_sessions() == (0, 0)
    })
    .await;
    assert_eq!(
        readable(&store, &keys).await,
        [true, true, false, true, false, false]
    );

    // The next attempt computes from there, and saves what is missing: not what is there.
    let part = ("d", table.as_slice(), 25, 8, 17);
    let absorbed = second.step(&[(part, &hashes)]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    second.finish("d").await;
    assert_eq!(readable(&store, &keys).await, [true; 6]);
    let stats = second.ranks[0].worker.stats();
    assert_eq!((stats.saved_blocks, stats.saved_elsewhere), (3, 1));
}

/// Ranks compute together: what one computes is void if another's load failed.
// contract: connector-17
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_load_that_fails_on_one_rank_keeps_all_ranks_from_saving() {
    for with in [
        json!({"kv_load_failure_policy": "fail"}),
        json!({"kv_load_failure_policy": "fail", "use_layerwise": false}),
        json!({}),
    ] {
        let cluster = Cluster::start().await;
        let (store, deployment) = (cluster.client().await, deployment(2));
        let hashes = hashes(1, 4);
        let mut rig = Rig::new(&deployment, &store, &with);
        rig.step(&[(("p", &[0, 1], 8, 0, 8), &hashes[..2])]);
        rig.finish("p").await;
        assert_eq!(rig.admit("d", &hashes).await, 8);
        let removed = store.remove(&[rig.key(0, &hashes[1])], true).await;
        assert!(removed[0].is_ok());
        let table: Vec<BlockId> = vec![10, 11, 12, 13, 14];
        let alone = crate::cluster::hashes(2, 1);
        let absorbed = rig.step(&[
            (("d", &table, 17, 8, 9), &hashes),
            (("alone", &[20], 4, 0, 4), &alone),
        ]);
        assert_eq!(absorbed.failed.len() + absorbed.recompute.len(), 1);
        // A request without loads is saved at once.
        let alone: Vec<_> = (0..2).map(|rank| rig.key(rank, &alone[0])).collect();
        let until = tokio::time::Instant::now() + crate::cluster::PATIENCE;
        while !readable(&store, &alone).await.iter().all(|there| *there) {
            assert!(tokio::time::Instant::now() < until, "saved at once");
        }
        // The other rank has all that it was to load, and does not commit what it computed.
        rig.step(&[]);
        for rank in &rig.ranks {
            eventually("its saves are over", || {
                rank.worker.open_sessions() == (0, 0)
            })
            .await;
        }
        let computed: Vec<_> = (0..2)
            .flat_map(|rank| [2, 3].map(|block| rig.key(rank, &hashes[block])))
            .collect();
        assert_eq!(readable(&store, &computed).await, [false; 4], "{with}");
        let saved: Vec<u64> = rig
            .ranks
            .iter()
            .map(|rank| rank.worker.stats().saved_blocks)
            .collect();
        assert_eq!(saved, [3, 3]);
    }
}

async fn readable(store: &layercake_store::StoreClient, keys: &[ObjectKey]) -> Vec<bool> {
    let found = store.readable(keys, Recency::default()).await.into_iter();
    found.map(|found| found.expect("answered")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_audit_log_has_every_range_and_commit() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit.jsonl");
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 2);
    let options = json!({"audit_log": 1, "audit_log_path": path.to_str().expect("a plain path")});
    let mut rig = Rig::new(&deployment, &store, &options);
    rig.step(&[(("p", &[0, 1], 8, 0, 8), &hashes)]);
    rig.finish("p").await;
    rig.admit("d", &hashes).await;
    rig.step(&[(("d", &[4, 5, 6], 9, 8, 1), &hashes)]);
    let keys: Vec<String> = hashes
        .iter()
        .map(|hash| rig.key(0, hash).to_string())
        .collect();
    rig.close().await;
    let text = std::fs::read_to_string(&path).expect("written");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    for key in &keys {
        for (operation, count) in [
            ("put_start", 1),
            ("write", 3),
            ("put_end", 1),
            ("get_start", 1),
            ("read", 3),
            ("get_end", 1),
        ] {
            let found = lines.iter().filter(|line| {
                line["key"] == **key && line["operation"] == operation && line["ok"] == true
            });
            assert_eq!(found.count(), count, "{operation} of {key}");
        }
    }
    assert_eq!(lines.len(), 20);
    // Ranges say where they are, and are all of the object.
    let layout = deployment.check(&crate::rig::options(&json!({})));
    let object = layout.expect("covered").layout.object_len();
    for operation in ["write", "read"] {
        let ranges = lines.iter().filter(|line| line["operation"] == operation);
        let mut ranges: Vec<[Option<u64>; 3]> = ranges
            .map(|line| ["offset", "len", "rows"].map(|field| line[field].as_u64()))
            .collect();
        ranges.sort_unstable();
        ranges.dedup();
        let mut end = 0;
        for range in ranges {
            let [Some(offset), Some(len), Some(2)] = range else {
                panic!("{operation}: {range:?}");
            };
            assert_eq!(offset, end, "{operation}");
            end += len;
        }
        assert_eq!(end, object, "{operation}");
    }
}

/// Layers are saved and loaded while others compute, so none may have another's memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn layers_that_share_memory_are_refused_by_name() {
    let cluster = Cluster::start().await;
    let rig = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    let mut registration = rig.ranks[0].registration();
    let [first, _, third] = &mut registration.layers[..] else {
        panic!("three layers");
    };
    third.entries[0].memory = first.entries[0].memory.clone();
    let mut ranks = rig.ranks;
    let worker = &mut ranks[0].worker;
    let refused = worker.register_caches(&registration).expect_err("shared");
    let refused = refused.to_string();
    assert!(
        refused.contains("layer 0") && refused.contains("layer 2"),
        "{refused}"
    );
}

// DEV-13: what a preempted request had queued is never stored under its key.
// contract: connector-18
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dev_13_a_preempted_save_never_stores_what_overwrites_its_blocks() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let (victim, thief) = (hashes(1, 3), hashes(2, 3));
    let mut rig = Rig::new(&deployment, &store, &json!({}));
    let table: Vec<BlockId> = vec![1, 2, 3];
    let metadata = rig.plan(&[(("v", &table, 12, 0, 12), &victim)], &[]);
    // The last layer's event comes about when the request is preempted.
    let (event, last) = crate::rig::pending();
    let parts = [(("v", table.as_slice(), 12, 0, 12), victim.as_slice())];
    tokio::task::block_in_place(|| {
        let rank = &mut rig.ranks[0];
        rank.worker
            .start_load(&metadata, HostEvent::done())
            .expect("begins");
        for layer in 0..2 {
            rank.compute(layer, &parts);
            rank.worker
                .save_layer(u32::try_from(layer).expect("small"), HostEvent::done())
                .expect("handed over");
        }
        rank.worker
            .save_layer(2, last.clone())
            .expect("handed over");
        rank.compute(2, &parts);
        rank.worker.wait_for_save(last).expect("ends");
        rank.worker.take_results();
        rank.worker.clear_metadata();
    });
    let metadata = rig.plan(&[(("t", &table, 12, 0, 12), &thief)], &["v"]);
    let setter = std::thread::spawn(move || event.set());
    let parts = [(("t", table.as_slice(), 12, 0, 12), thief.as_slice())];
    let results = tokio::task::block_in_place(|| rig.ranks[0].step(&metadata, &parts));
    setter.join().expect("no panic");
    rig.scheduler.absorb(&[results]);
    rig.finish("t").await;

    // Whatever is readable has its own bytes.
    let mut reader = Rig::new(&deployment, &cluster.client().await, &json!({}));
    let blocks: Vec<BlockId> = vec![20, 21, 22, 23];
    assert_eq!(reader.admit("thief", &thief).await, 12);
    reader.step(&[(("thief", &blocks, 13, 12, 1), &thief)]);
    assert_eq!(reader.right(&blocks, &thief), [true; 3]);
    // The last layer may have come before the preemption did: then all of it was read, and is stored.
    let tokens = reader.admit("victim", &victim).await;
    let blocks: Vec<BlockId> = vec![24, 25, 26, 27];
    reader.step(&[(("victim", &blocks, 13, tokens, 1), &victim)]);
    let stored = usize::try_from(tokens / 4).expect("small");
    assert_eq!(reader.right(&blocks[..stored], &victim), vec![true; stored]);
    let dropped = rig.ranks[0].worker.stats().dropped_saves;
    assert_eq!(dropped + tokens / 4, 3, "each block is stored or dropped");
    eventually("nothing stays reserved", || {
        cluster.monitor.status().reserved_objects == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_that_is_left_in_the_middle_commits_nothing_and_leaks_nothing() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 3);
    let mut rig = Rig::new(&deployment, &store, &json!({}));
    let metadata = rig.plan(&[(("r", &[0, 1, 2], 12, 0, 12), &hashes)], &[]);
    let worker = &mut rig.ranks[0].worker;
    worker
        .start_load(&metadata, HostEvent::done())
        .expect("begins");
    worker
        .save_layer(0, HostEvent::done())
        .expect("handed over");
    worker.clear_metadata();
    eventually("the saves are given up", || {
        worker.open_sessions() == (0, 0)
    })
    .await;
    eventually("nothing stays reserved", || {
        cluster.monitor.status().reserved_objects == 0
    })
    .await;
    assert_eq!(cluster.monitor.status().objects, 0);
    assert_eq!(worker.stats().dropped_saves, 3);
}

// contract: connector-19
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocks_that_several_requests_need_are_read_once_or_once_each() {
    for (setting, copied, repeated) in [("on", 6, 0), ("off", 0, 6)] {
        let cluster = Cluster::start().await;
        let (store, deployment) = (cluster.client().await, deployment(1));
        let hashes = hashes(1, 3);
        let mut rig = Rig::new(&deployment, &store, &json!({"local_fanout": setting}));
        rig.step(&[(("p", &[0, 1, 2], 12, 0, 12), &hashes)]);
        rig.finish("p").await;
        rig.ranks[0].wipe();
        assert_eq!(rig.admit("a", &hashes).await, 12);
        assert_eq!(rig.admit("b", &hashes).await, 12);
        let before = store.stats().bytes_read;
        let (a, b): (Vec<BlockId>, Vec<BlockId>) = (vec![4, 5, 6, 7], vec![11, 10, 9, 8]);
        let absorbed = rig.step(&[
            (("a", &a, 13, 12, 1), &hashes),
            (("b", &b, 13, 12, 1), &hashes),
        ]);
        assert!(absorbed.is_empty(), "{absorbed:?}");
        assert_eq!(rig.right(&a, &hashes), [true; 3]);
        assert_eq!(rig.right(&b, &hashes), [true; 3]);
        let stats = rig.ranks[0].worker.stats();
        assert_eq!(
            (stats.fanned_out_blocks, stats.repeated_reads),
            (copied, repeated),
            "{setting}"
        );
        let object = deployment
            .check(&crate::rig::options(&json!({})))
            .expect("covered")
            .layout
            .object_len();
        let reads = if setting == "on" { 3 } else { 6 };
        assert_eq!(
            store.stats().bytes_read - before,
            reads * object,
            "{setting}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_master_that_is_gone_costs_blocks_and_holds_nobody_up() {
    let mut cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 5);
    let mut rig = Rig::new(&deployment, &store, &json!({}));
    rig.step(&[(("p", &[0, 1, 2], 12, 0, 12), &hashes[..3])]);
    rig.finish("p").await;
    assert_eq!(rig.admit("d", &hashes).await, 12);
    cluster.stop_master().await;
    let table: Vec<BlockId> = (4..10).collect();
    let absorbed = rig.step(&[(("d", &table, 21, 12, 9), &hashes)]);
    assert_eq!(absorbed.recompute, [("d".into(), 0)]);
    let absorbed = rig.step(&[(("d", &table, 21, 0, 21), &hashes)]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    rig.finish("d").await;
    let stats = rig.ranks[0].worker.stats();
    assert_eq!(stats.saved_blocks, 3);
    assert!(stats.failed_saves + stats.dropped_saves >= 5, "{stats:?}");
    rig.close().await;
}
