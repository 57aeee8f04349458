//! Objects that are not what was written: what becomes of their blocks, and how they go.

use layercake_connector::checks::Deployment;
use layercake_connector::contract::{BlockId, HostEvent, SchedulerSide as _, WorkerSide as _};
use layercake_connector::stats::MissReason;
use serde_json::json;
use tokio::task::block_in_place;

use crate::cluster::{Cluster, deployment, eventually, hashes};
use crate::rig::{Rig, options};

/// A byte of the last layer.
fn last_layer(deployment: &Deployment) -> u64 {
    let checked = deployment.check(&options(&json!({}))).expect("covered");
    let last = checked.layout.layer_range(2).expect("three layers");
    last.start() + 5
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_range_that_fails_is_its_blocks_matter_alone() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 4);
    let mut rig = Rig::new(
        &deployment,
        &store,
        &json!({"kv_load_failure_policy": "fail"}),
    );
    rig.step(&[(("p", &[0, 1, 2, 3], 16, 0, 16), &hashes)]);
    rig.finish("p").await;
    // In the last layer of the third block: the sessions and two layers are fine.
    let damaged = rig.key(0, &hashes[2]);
    let last = last_layer(&deployment);
    cluster.damage(&store, &damaged, last).await;
    assert_eq!(rig.admit("d", &hashes).await, 16);
    let table: Vec<BlockId> = vec![10, 11, 12, 13, 14];
    let metadata = rig.plan(&[(("d", &table, 17, 16, 1), &hashes)], &[]);
    let worker = &mut rig.ranks[0].worker;
    let results = block_in_place(|| {
        worker
            .start_load(&metadata, HostEvent::done())
            .expect("begins");
        for layer in 0..2 {
            let ready = worker.wait_for_layer(layer).expect("in time");
            // The last layer may have been tried already.
            assert!(ready.invalid_blocks.is_empty() || ready.invalid_blocks == [12]);
        }
        assert_eq!(
            worker.wait_for_layer(2).expect("in time").invalid_blocks,
            [12]
        );
        worker.wait_for_save(HostEvent::done()).expect("ends");
        worker.take_results()
    });
    assert_eq!(results.invalid_blocks, [12]);
    assert!(worker.take_results().invalid_blocks.is_empty(), "told once");
    let absorbed = rig.scheduler.absorb(&[results]);
    assert_eq!(absorbed.failed, [("d".into(), 8)]);
    assert_eq!(rig.right(&table, &hashes), [true, true, false, true]);
    assert_eq!(rig.ranks[0].worker.stats().missed(MissReason::Damaged), 1);
    // The damaged object goes, so that whoever computes its block again can save it.
    let worker = &rig.ranks[0].worker;
    eventually("the damaged object is removed", || {
        worker.stats().removed_damaged == 1
    })
    .await;
    assert_eq!(rig.admit("e", &hashes).await, 8);
    rig.step(&[(("e", &[20, 21, 22, 23, 24], 17, 8, 9), &hashes)]);
    rig.finish("e").await;
    assert_eq!(rig.admit("f", &hashes).await, 16);
    let table: Vec<BlockId> = vec![25, 26, 27, 28, 29];
    rig.step(&[(("f", &table, 17, 16, 1), &hashes)]);
    assert_eq!(rig.right(&table, &hashes), [true; 4]);
}

/// Two workers read one damaged object. One has it removed and a good version saved before the other comes to the damage,
/// whose removal then finds another version.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_good_version_is_not_removed_for_the_damaged_one_before_it() {
    let cluster = Cluster::start().await;
    let (deployment, hashes) = (deployment(1), hashes(1, 4));
    let options = json!({"kv_load_failure_policy": "fail", "layerwise_prefetch_layers": 1});
    let store = cluster.client().await;
    let mut first = Rig::new(&deployment, &store, &options);
    let mut second = Rig::new(&deployment, &cluster.client().await, &options);
    first.step(&[(("p", &[0, 1, 2, 3], 16, 0, 16), &hashes)]);
    first.finish("p").await;
    let key = first.key(0, &hashes[2]);
    cluster.damage(&store, &key, last_layer(&deployment)).await;

    // The second one's sessions are open; the last layer is too far ahead to be asked for.
    assert_eq!(second.admit("s", &hashes).await, 16);
    let table: Vec<BlockId> = vec![10, 11, 12, 13, 14];
    let metadata = second.plan(&[(("s", &table, 17, 16, 1), &hashes)], &[]);
    let worker = &mut second.ranks[0].worker;
    block_in_place(|| {
        let begun = worker.start_load(&metadata, HostEvent::done());
        begun.expect("begins");
        let ready = worker.wait_for_layer(0).expect("in time");
        assert!(ready.invalid_blocks.is_empty());
    });

    assert_eq!(first.admit("f", &hashes).await, 16);
    let absorbed = first.step(&[(("f", &table, 17, 16, 1), &hashes)]);
    assert_eq!(absorbed.failed, [("f".into(), 8)]);
    let removed = |rig: &Rig| rig.ranks[0].worker.stats().removed_damaged;
    eventually("the damaged object is removed", || removed(&first) == 1).await;
    assert_eq!(first.admit("g", &hashes).await, 8);
    first.step(&[(("g", &[20, 21, 22, 23, 24], 17, 8, 9), &hashes)]);
    first.finish("g").await;
    let good = store.stat(&key).await.expect("saved again").object;

    let results = block_in_place(|| {
        worker.wait_for_layer(1).expect("in time");
        let ready = worker.wait_for_layer(2).expect("in time");
        assert_eq!(ready.invalid_blocks, [12]);
        worker.wait_for_save(HostEvent::done()).expect("ends");
        worker.take_results()
    });
    assert_eq!(
        second.scheduler.absorb(&[results]).failed,
        [("s".into(), 8)]
    );
    let stats = second.ranks[0].worker.stats();
    assert_eq!(stats.missed(MissReason::Damaged), 1);
    // Its removal has been answered then.
    second.close().await;
    let stat = store.stat(&key).await.expect("it is still there");
    assert_eq!(stat.object.generation, good.generation);
}

/// As many workers as there are come upon one damaged object in the same step: one of them removes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_workers_that_find_one_damaged_object_one_removes_it() {
    let cluster = Cluster::start().await;
    let (deployment, hashes) = (deployment(1), hashes(1, 4));
    let options = json!({"kv_load_failure_policy": "fail"});
    let store = cluster.client().await;
    let mut writer = Rig::new(&deployment, &store, &options);
    writer.step(&[(("p", &[0, 1, 2, 3], 16, 0, 16), &hashes)]);
    writer.finish("p").await;
    // Whole headers and single bytes: what opens no session is removed as well.
    for (block, header) in [(1, true), (2, false)] {
        let key = writer.key(0, &hashes[block]);
        let damaged = store.stat(&key).await.expect("stored").object.generation;
        let mut readers = Vec::new();
        for name in ["a", "b"] {
            let mut reader = Rig::new(&deployment, &cluster.client().await, &options);
            assert_eq!(reader.admit(name, &hashes).await, 16);
            readers.push((name, reader));
        }
        if header {
            cluster.damage_header(&store, &key).await;
        } else {
            cluster.damage(&store, &key, last_layer(&deployment)).await;
        }
        let begun: Vec<_> = readers
            .iter_mut()
            .map(|(name, reader)| {
                let part = (*name, [10, 11, 12, 13, 14].as_slice(), 17, 16, 1);
                let metadata = reader.plan(&[(part, &hashes)], &[]);
                let worker = &mut reader.ranks[0].worker;
                let begun = worker.start_load(&metadata, HostEvent::done());
                begun.expect("begins");
                worker
            })
            .collect();
        let mut removed = 0;
        block_in_place(|| {
            for worker in begun {
                worker.wait_for_save(HostEvent::done()).expect("ends");
                assert_eq!(worker.take_results().invalid_blocks.len(), 1);
            }
        });
        eventually("one of them removes it", || {
            let stats = readers.iter().map(|(_, rig)| rig.ranks[0].worker.stats());
            removed = stats.map(|stats| stats.removed_damaged).sum();
            removed > 0
        })
        .await;
        assert_eq!(removed, 1);
        for (_, reader) in readers {
            reader.close().await;
        }
        let stat = store.stat(&key).await;
        assert!(stat.is_err(), "{damaged} is gone: {stat:?}");
        // For the next turn.
        let table: &[BlockId] = &[0, 1, 2, 3];
        writer.step(&[((if header { "q" } else { "r" }, table, 16, 0, 16), &hashes)]);
        writer.finish(if header { "q" } else { "r" }).await;
    }
}
