//! Deadlines that pass, and steps that a rank never sees.
//!
//! The worker's tasks run on a runtime that a test drives by itself, or not at all: so what stands still does so for
//! certain, whatever the machine does.

use layercake_connector::ConnectorError;
use layercake_connector::contract::{
    BlockHash, BlockId, FreeBlocks, HostEvent, SchedulerSide as _, StepMetadata, WorkerResults,
    WorkerSide as _,
};
use layercake_connector::stats::MissReason;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::block_in_place;

use crate::cluster::{Cluster, deployment, hashes};
use crate::rig::{Part, Rank, Rig, options};

/// Stores these prompts.
async fn store(cluster: &Cluster, prompts: &[&[BlockHash]]) {
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    for (id, hashes) in ["a", "b", "c"].into_iter().zip(prompts) {
        let tokens = hashes.len() as u64 * 4;
        let table: Vec<BlockId> = (0..hashes.len() as u64).collect();
        rig.step(&[((id, &table, tokens, 0, tokens), hashes)]);
        rig.finish(id).await;
    }
    rig.close().await;
}

/// A rig whose worker's tasks stand still until the runtime is driven.
async fn standing(cluster: &Cluster, retains_blocks: bool) -> (Rig, Runtime) {
    let (mut deployment, store) = (deployment(1), cluster.client().await);
    deployment.retains_blocks = retains_blocks;
    let role = if retains_blocks {
        "kv_both"
    } else {
        "kv_producer"
    };
    let options = options(&json!({"layer_timeout_ms": 20, "kv_role": role}));
    let mut rig = Rig::with(&deployment, &store, &options);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    rig.ranks = vec![Rank::new(
        &deployment,
        0,
        &options,
        &store,
        runtime.handle(),
    )];
    (rig, runtime)
}

/// Runs a step, and gives up where it has to.
fn try_step(
    rank: &mut Rank,
    metadata: &StepMetadata,
    parts: &[(Part<'_>, &[BlockHash])],
) -> (Result<(), ConnectorError>, WorkerResults) {
    block_in_place(|| {
        let begun = rank.worker.start_load(metadata, HostEvent::done());
        for layer in 0..3 {
            rank.compute(usize::try_from(layer).expect("small"), parts);
            if begun.is_ok() {
                let saved = rank.worker.save_layer(layer, HostEvent::done());
                saved.expect("handed over");
            }
        }
        if begun.is_ok() {
            let ended = rank.worker.wait_for_save(HostEvent::done());
            ended.expect("nothing to load");
        }
        let results = rank.worker.take_results();
        rank.worker.clear_metadata();
        (begun, results)
    })
}

/// A step that can't begin in time has results like any other: what it was to load is void. What its metadata told is
/// known all the same, so that what is saved later is what it is called.
// contract: connector-22
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_that_begins_too_late_is_void_and_its_metadata_is_not_lost() {
    let cluster = Cluster::start().await;
    let (old, stored, long) = (hashes(1, 2), hashes(2, 3), hashes(3, 4));
    store(&cluster, &[&stored, &long[..1]]).await;
    let (mut rig, runtime) = standing(&cluster, true).await;
    assert_eq!(rig.admit("d", &stored).await, 12);

    // Saves that stand still.
    let first = [(("p", &[0, 1][..], 8, 0, 8), &old[..])];
    let metadata = rig.plan(&first, &[]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &first);
    begun.expect("nothing to wait for");
    rig.scheduler.absorb(&[results]);

    // Their blocks are taken away, which needs their end.
    let second = [
        (("d", &[10, 11, 12, 13][..], 13, 12, 1), &stored[..]),
        (("q", &[20, 21][..], 17, 0, 4), &long[..]),
    ];
    let metadata = rig.plan(&second, &["p"]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &second);
    let late = begun.expect_err("it can't begin");
    assert!(matches!(late, ConnectorError::Deadline { .. }), "{late}");
    assert_eq!(results.step, metadata.step);
    assert_eq!(results.invalid_blocks, [10, 11, 12]);
    let absorbed = rig.scheduler.absorb(&[results]);
    assert_eq!(absorbed.recompute, [("d".into(), 0)]);
    let stats = rig.ranks[0].worker.stats();
    assert_eq!(
        (stats.failed_loads, stats.missed(MissReason::TimeOut)),
        (3, 3)
    );
    assert_eq!(stats.dropped_saves, 1, "what it was to save");

    // The next step adds to a table that the late one began.
    let (stop, stopped) = oneshot::channel::<()>();
    let driver = std::thread::spawn(move || drop(runtime.block_on(stopped)));
    let third = [(("q", &[20, 21, 22, 23][..], 17, 4, 12), &long[..])];
    let metadata = rig.plan(&third, &[]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &third);
    begun.expect("begins");
    rig.scheduler.absorb(&[results]);
    rig.finish("q").await;
    let mut reader = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    assert_eq!(reader.admit("r", &long).await, 16);
    let table: Vec<BlockId> = (5..10).collect();
    reader.step(&[(("r", &table, 17, 16, 1), &long)]);
    assert_eq!(reader.right(&table, &long), [true; 4]);
    reader.close().await;
    rig.close().await;
    drop(stop);
    driver.join().expect("no panic");
}

/// Loads that don't come in time are named, counted, and saved by nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn loads_that_come_too_late_are_void_and_counted() {
    let cluster = Cluster::start().await;
    let stored = hashes(2, 3);
    store(&cluster, &[&stored]).await;
    let (mut rig, runtime) = standing(&cluster, true).await;
    assert_eq!(rig.admit("d", &stored).await, 12);
    let metadata = rig.plan(&[(("d", &[10, 11, 12, 13], 13, 12, 1), &stored)], &[]);
    let worker = &mut rig.ranks[0].worker;
    let begun = block_in_place(|| worker.start_load(&metadata, HostEvent::done()));
    begun.expect("begins");
    let late = block_in_place(|| worker.wait_for_layer(0)).expect_err("nothing moves");
    assert!(matches!(late, ConnectorError::Deadline { .. }), "{late}");
    let results = worker.take_results();
    assert_eq!(results.invalid_blocks, [10, 11, 12]);
    worker.clear_metadata();
    let (stop, stopped) = oneshot::channel::<()>();
    let driver = std::thread::spawn(move || drop(runtime.block_on(stopped)));
    rig.scheduler.absorb(&[results]);
    let again = [(("d", &[20, 21, 22, 23][..], 13, 0, 13), &stored[..])];
    let absorbed = rig.step_after(&again, &["d"]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    rig.finish("d").await;
    let stats = rig.ranks[0].worker.stats();
    assert_eq!((stats.failed_loads, stats.loaded_blocks), (3, 0));
    assert_eq!(stats.missed(MissReason::TimeOut), 3, "each once");
    rig.close().await;
    drop(stop);
    driver.join().expect("no panic");
}

/// A rank that was not given a step has holes in what it knows: it saves nothing that they could make wrong, and says
/// which request has to start over.
// contract: connector-22
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_that_a_rank_never_saw_makes_all_void_that_it_knew() {
    let cluster = Cluster::start().await;
    let long = hashes(3, 4);
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    let first = [(("q", &[20][..], 17, 0, 2), &long[..])];
    rig.step(&first);
    let missed = [(("q", &[20, 21][..], 17, 2, 3), &long[..])];
    rig.plan(&missed, &[]);
    let third = [(("q", &[20, 21, 22, 23][..], 17, 5, 11), &long[..])];
    let metadata = rig.plan(&third, &[]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &third);
    let refused = begun.expect_err("its table is not known").to_string();
    assert!(
        refused.contains("\"q\"") && refused.contains("start over"),
        "{refused}"
    );
    assert_eq!(results.step, 0, "there is no such step");
    let (begun, _) = try_step(&mut rig.ranks[0], &metadata, &third);
    let again = begun.expect_err("it was told before").to_string();
    assert!(
        again.contains(&format!("step {}", metadata.step)),
        "{again}"
    );

    // With a new attempt it is known again, and its bytes are right.
    let fourth = [(("q", &[1, 2, 3, 4][..], 17, 0, 16), &long[..])];
    let absorbed = rig.step_after(&fourth, &["q"]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    rig.finish("q").await;
    assert_eq!(rig.ranks[0].worker.stats().saved_blocks, 4);
    assert_eq!(rig.admit("r", &long).await, 16);
    let table: Vec<BlockId> = (5..10).collect();
    rig.step(&[(("r", &table, 17, 16, 1), &long)]);
    assert_eq!(rig.right(&table, &long), [true; 4]);
    rig.close().await;
}

/// A step that a rank refuses for one request is one that it doesn't run for any: none of them saves what it computes without
/// its loads, nor what follows from that.
// contract: connector-22
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_saved_behind_a_step_that_was_refused() {
    let cluster = Cluster::start().await;
    let (long, other) = (hashes(3, 4), hashes(4, 4));
    store(&cluster, &[&long[..2]]).await;
    let mut rig = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    rig.step(&[(("q", &[20][..], 17, 0, 2), &other[..])]);
    rig.plan(&[(("q", &[20, 21][..], 17, 2, 3), &other[..])], &[]);
    assert_eq!(rig.admit("c", &long[..2]).await, 8);
    let third = [
        (("q", &[20, 21][..], 17, 5, 1), &other[..]),
        (("c", &[1, 2, 3][..], 17, 8, 4), &long[..]),
    ];
    let metadata = rig.plan(&third, &[]);
    let (begun, _) = try_step(&mut rig.ranks[0], &metadata, &third);
    begun.expect_err("the table of one is not known");
    // The engine goes on all the same, and takes in what came of it only when all saves are over.
    let fourth = [(("c", &[1, 2, 3, 4][..], 17, 12, 4), &long[..])];
    let metadata = rig.plan(&fourth, &[]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &fourth);
    begun.expect("begins");
    let mut reports = vec![results];
    let id = "c".into();
    assert_eq!(rig.scheduler.request_finished(&id), FreeBlocks::Delayed);
    while !reports.iter().any(|results| results.finished.contains(&id)) {
        let metadata = rig.plan(&[], &[]);
        reports.push(try_step(&mut rig.ranks[0], &metadata, &[]).1);
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.scheduler.absorb(&reports).free, [id]);
    rig.finish("q").await;
    assert_eq!(rig.ranks[0].worker.stats().saved_blocks, 0);
    assert_eq!(rig.matched("r", &long).await, 8, "as it was stored");
    rig.close().await;
}

/// What can't be told what to load can't say what it lacks: its step counts as one that was never run.
// contract: connector-22
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_step_that_is_refused_leaves_no_results_though_it_is_late_too() {
    let cluster = Cluster::start().await;
    let (mut rig, runtime) = standing(&cluster, false).await;
    let hashes = hashes(1, 4);
    let first = [(("r", &[0, 1][..], 16, 0, 8), &hashes[..])];
    let metadata = rig.plan(&first, &[]);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &first);
    begun.expect("begins");
    rig.scheduler.absorb(&[results]);
    // The rank is not given the second step. In the third, its save of the first stands still.
    rig.plan(&[], &[]);
    let third = [(("r", &[0, 1, 2][..], 16, 8, 4), &hashes[..])];
    let metadata = rig.plan(&third, &[]);
    assert_eq!(metadata.requests[0].restore, 2);
    let (begun, results) = try_step(&mut rig.ranks[0], &metadata, &third);
    let refused = begun.expect_err("its table is not known");
    assert!(
        matches!(refused, ConnectorError::Metadata { .. }),
        "{refused}"
    );
    assert_eq!((results.step, results.invalid_blocks), (0, vec![]));
    let (stop, stopped) = oneshot::channel::<()>();
    let driver = std::thread::spawn(move || drop(runtime.block_on(stopped)));
    let absorbed = rig.step(&[]);
    assert_eq!(absorbed.recompute, [("r".into(), 0)]);
    rig.finish("r").await;
    rig.close().await;
    drop(stop);
    driver.join().expect("no panic");
}
