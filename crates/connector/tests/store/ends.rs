//! Steps that are left in the middle, saves that are behind, tasks that end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use layercake_connector::contract::{
    BlockHash, BlockId, Event, HostEvent, SchedulerSide as _, WorkerSide as _,
};
use layercake_connector::stats::MissReason;
use layercake_connector::worker::{LayerTransfer, TransferObserver};
use serde_json::json;
use tokio::task::block_in_place;

use crate::cluster::{Cluster, deployment, eventually, hashes};
use crate::rig::{Rig, pending};

/// A rig that has stored these blocks, and looked them up for `d`.
async fn stored(cluster: &Cluster, hashes: &[BlockHash]) -> Rig {
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    let tokens = hashes.len() as u64 * 4;
    let table: Vec<BlockId> = (0..hashes.len() as u64).collect();
    rig.step(&[(("p", &table, tokens, 0, tokens), hashes)]);
    rig.finish("p").await;
    assert_eq!(rig.admit("d", hashes).await, tokens);
    rig
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_loaded_into_the_blocks_of_a_step_that_was_left() {
    let cluster = Cluster::start().await;
    let (hashes, other) = (hashes(1, 3), hashes(2, 1));
    let mut rig = stored(&cluster, &hashes).await;
    let table: Vec<BlockId> = vec![10, 11, 12, 13];
    let metadata = rig.plan(&[(("d", &table, 13, 12, 1), &hashes)], &[]);
    let (event, ready) = pending();
    let worker = &mut rig.ranks[0].worker;
    block_in_place(|| worker.start_load(&metadata, ready)).expect("begins");
    block_in_place(|| worker.clear_metadata());
    let results = worker.take_results();
    assert_eq!(results.step, 0, "the step is over");
    // The blocks are another request's now, and its bytes stay.
    for layer in 0..3 {
        rig.ranks[0].fill(layer, 11, &other[0]);
    }
    event.set();
    rig.admit("e", &hashes).await;
    let table: Vec<BlockId> = vec![20, 21, 22, 23];
    rig.step(&[(("e", &table, 13, 12, 1), &hashes)]);
    assert_eq!(rig.right(&table, &hashes), [true; 3]);
    assert_eq!(rig.right(&[11], &other), [true]);
    rig.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_that_is_left_reports_what_had_not_arrived() {
    let cluster = Cluster::start().await;
    let hashes = hashes(1, 2);
    let mut rig = stored(&cluster, &hashes).await;
    let table: Vec<BlockId> = vec![10, 11, 12];
    let metadata = rig.plan(&[(("d", &table, 9, 8, 1), &hashes)], &[]);
    let (_never, ready) = pending();
    let worker = &mut rig.ranks[0].worker;
    block_in_place(|| worker.start_load(&metadata, ready)).expect("begins");
    let results = worker.take_results();
    assert_eq!(results.invalid_blocks, [10, 11]);
    assert!(worker.take_results().invalid_blocks.is_empty(), "told once");
    let stats = worker.stats();
    assert_eq!(
        (stats.failed_loads, stats.missed(MissReason::Aborted)),
        (2, 2)
    );
    block_in_place(|| worker.clear_metadata());
    let absorbed = rig.scheduler.absorb(&[results]);
    assert_eq!(absorbed.recompute, [("d".into(), 0)]);
}

/// The engine goes on without saves that are behind, and nothing of them is left open.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn saves_that_are_behind_are_given_up_and_leave_nothing_open() {
    let cluster = Cluster::start().await;
    let with = json!({"save_stall_ms": 1});
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &with);
    let (event, not_yet) = pending();
    let all: Vec<_> = (0..4).map(|prompt| hashes(prompt, 1)).collect();
    let ids = ["a", "b", "c", "d"];
    for (at, (id, hashes)) in ids.iter().zip(&all).enumerate() {
        let table = [at as BlockId];
        let metadata = rig.plan(&[((id, &table, 4, 0, 4), hashes)], &[]);
        let worker = &mut rig.ranks[0].worker;
        block_in_place(|| {
            worker
                .start_load(&metadata, HostEvent::done())
                .expect("begins");
            let first: Event = not_yet.clone();
            worker.save_layer(0, first).expect("handed over");
        });
        if at == 0 {
            // The task waits for this layer; the next ones fill the queue.
            eventually("the first layer is taken", || {
                cluster.monitor.status().reserved_objects == 1
            })
            .await;
            let worker = &mut rig.ranks[0].worker;
            block_in_place(|| worker.wait_for_save(HostEvent::done())).expect("ends");
        }
        let worker = &mut rig.ranks[0].worker;
        block_in_place(|| worker.clear_metadata());
    }
    let stats = rig.ranks[0].worker.stats();
    assert_eq!(stats.saved_blocks, 0);
    event.set();
    let worker = &rig.ranks[0].worker;
    eventually("all saves are over", || worker.open_sessions() == (0, 0)).await;
    let stats = worker.stats();
    assert_eq!((stats.saved_blocks, stats.dropped_saves), (1, 3));
    eventually("nothing stays reserved", || {
        cluster.monitor.status().reserved_objects == 0
    })
    .await;
    rig.close().await;
}

/// Counts calls that saved a part of the first layer.
#[derive(Debug, Default)]
struct Saved(AtomicUsize);

impl TransferObserver for Saved {
    fn transferred(&self, transfer: &LayerTransfer) {
        let counts = transfer.save && transfer.layer == 0;
        self.0.fetch_add(usize::from(counts), Ordering::Relaxed);
    }
}

/// What is revoked together goes in calls of as many blocks as any other call may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_saves_are_given_up_in_calls_that_are_no_larger_than_others() {
    let cluster = Cluster::start().await;
    let with = json!({"layerwise_max_transfer_blocks": 2});
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &with);
    let saved = Arc::new(Saved::default());
    rig.ranks[0].worker.observe(Arc::clone(&saved) as _);
    let hashes = hashes(1, 5);
    let table: Vec<BlockId> = (0..5).collect();
    let metadata = rig.plan(&[(("p", &table, 20, 0, 20), &hashes)], &[]);
    let worker = &mut rig.ranks[0].worker;
    block_in_place(|| {
        worker
            .start_load(&metadata, HostEvent::done())
            .expect("begins");
        worker
            .save_layer(0, HostEvent::done())
            .expect("handed over");
    });
    eventually("the first layer is saved", || {
        saved.0.load(Ordering::Relaxed) == 3
    })
    .await;
    assert_eq!(cluster.monitor.status().reserved_objects, 5);
    block_in_place(|| worker.clear_metadata());
    eventually("all saves are over", || worker.open_sessions() == (0, 0)).await;
    assert_eq!(worker.stats().dropped_saves, 5);
    assert_eq!(cluster.monitor.status().reserved_objects, 0);
    assert_eq!(cluster.requests("put_revoke"), 3, "of 2, 2 and 1");
    rig.close().await;
}

/// Saves stop, and loads are void at once, when the tasks are gone.
// contract: connector-15
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_runtime_that_ends_holds_nobody_up() {
    let cluster = Cluster::start().await;
    let hashes = hashes(1, 3);
    drop(stored(&cluster, &hashes).await);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let store = cluster.client().await;
    let mut rig = {
        let _inside = runtime.enter();
        Rig::new(&deployment(1), &store, &json!({}))
    };
    let more = [&hashes[..], &crate::cluster::hashes(2, 2)].concat();
    assert_eq!(rig.admit("d", &more).await, 12);
    runtime.shutdown_background();
    let table: Vec<BlockId> = (10..16).collect();
    let metadata = rig.plan(&[(("d", &table, 21, 12, 9), &more)], &[]);
    let worker = &mut rig.ranks[0].worker;
    let results = block_in_place(|| {
        worker
            .start_load(&metadata, HostEvent::done())
            .expect("begins");
        for layer in 0..3 {
            let ready = worker.wait_for_layer(layer).expect("not in vain");
            assert_eq!(ready.invalid_blocks, [10, 11, 12]);
            worker
                .save_layer(layer, HostEvent::done())
                .expect("handed over");
        }
        worker.wait_for_save(HostEvent::done()).expect("ends");
        worker.take_results()
    });
    assert_eq!(results.invalid_blocks, [10, 11, 12]);
    assert_eq!(worker.open_sessions().0, 0, "no save is under way");
    assert_eq!(worker.stats().dropped_saves, 2);
    rig.close().await;
}
