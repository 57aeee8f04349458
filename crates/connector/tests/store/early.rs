//! Blocks that are loaded while another engine still saves them.
//!
//! The engine that saves is held between its layers by events that only the test sets, so that what the other has loaded
//! meanwhile can't have been there by luck.

use layercake_connector::checks::Deployment;
use layercake_connector::contract::{
    BlockHash, BlockId, Event, HostEvent, SchedulerSide as _, WorkerSide as _,
};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::{Progress, StoreClient};
use layercake_transport::mock::{Conditions, MockNetwork, Pace};
use serde_json::{Value, json};

use crate::cluster::{Cluster, PATIENCE, deployment, eventually, hashes};
use crate::rig::{Rig, pending};

const LAYERS: u32 = 3;
const TABLE: [BlockId; 5] = [3, 1, 4, 15, 9];

fn early() -> Value {
    json!({"per_layer_readiness": true})
}

/// A step that computes 4 blocks and a token, and saves the layers as these events say.
fn prefill(rig: &mut Rig, hashes: &[BlockHash], ready: &[Event]) {
    let part = ("p", TABLE.as_slice(), 17, 0, 17);
    let parts = [(part, hashes)];
    let metadata = rig.plan(&parts, &[]);
    for rank in &mut rig.ranks {
        let begun = rank.worker.start_load(&metadata, HostEvent::done());
        begun.expect("begins");
        for layer in 0..LAYERS {
            rank.worker.wait_for_layer(layer).expect("nothing to load");
            let at = usize::try_from(layer).expect("few");
            rank.compute(at, &parts);
            let saved = rank.worker.save_layer(layer, ready[at].clone());
            saved.expect("handed over");
        }
        rank.worker.wait_for_save(HostEvent::done()).expect("ends");
        rank.worker.clear_metadata();
    }
}

fn has_layer(rig: &Rig, layer: u32, table: &[BlockId], hashes: &[BlockHash]) -> bool {
    let layer = usize::try_from(layer).expect("few");
    rig.ranks.iter().all(|rank| {
        let mut blocks = table.iter().zip(hashes);
        blocks.all(|(block, hash)| rank.has_layer(layer, *block, hash))
    })
}

/// Waits until the saves of these blocks have begun, on all ranks.
async fn all_published(rig: &Rig, store: &StoreClient, hashes: &[BlockHash]) {
    let ranks = 0..rig.ranks.len();
    let keys = ranks.flat_map(|rank| hashes.iter().map(move |hash| rig.key(rank, hash)));
    let keys: Vec<ObjectKey> = keys.collect();
    let until = tokio::time::Instant::now() + PATIENCE;
    let publishing = |found: Vec<Progress>| found.iter().all(|it| *it == Progress::Publishing);
    while !publishing(store.progress(&keys).await.expect("up")) {
        assert!(tokio::time::Instant::now() < until, "the puts begin");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn layers_are_loaded_while_later_ones_are_not_saved() {
    let cluster = Cluster::start().await;
    for ranks in [1, 2] {
        let (deployment, hashes) = (
            deployment(ranks),
            hashes(u8::try_from(ranks).expect("few"), 4),
        );
        let store = cluster.client().await;
        let mut saving = Rig::new(&deployment, &store, &early());
        assert_eq!(saving.admit("p", &hashes).await, 0);
        let (second, may_second) = pending();
        let (third, may_third) = pending();
        let events = [HostEvent::done(), may_second, may_third];
        tokio::task::block_in_place(|| prefill(&mut saving, &hashes, &events));
        all_published(&saving, &store, &hashes).await;

        // Who did not ask for it finds nothing.
        let mut plain = Rig::new(&deployment, &cluster.client().await, &json!({}));
        assert_eq!(plain.matched("n", &hashes).await, 0);
        let mut loading = Rig::new(&deployment, &cluster.client().await, &early());
        assert_eq!(
            loading.admit("d", &hashes).await,
            16,
            "all blocks are published"
        );
        // Looked up, and asked once more how far their writers are.
        let keys = 4 * u64::from(ranks);
        assert_eq!(loading.scheduler.stats().keys_queried, 2 * keys);
        let table: Vec<BlockId> = (20..25).collect();
        let metadata = loading.plan(&[(("d", &table, 17, 16, 1), &hashes)], &[]);
        for rank in &mut loading.ranks {
            let begun = rank.worker.start_load(&metadata, HostEvent::done());
            begun.expect("begins");
        }
        let layer = |loading: &mut Rig, layer| {
            tokio::task::block_in_place(|| {
                for rank in &mut loading.ranks {
                    let ready = rank.worker.wait_for_layer(layer).expect("in time");
                    assert!(ready.invalid_blocks.is_empty(), "{ready:?}");
                }
            });
            assert!(
                has_layer(loading, layer, &table[..4], &hashes),
                "layer {layer}"
            );
        };
        let complete = cluster.monitor.status().objects;
        layer(&mut loading, 0);
        assert!(!has_layer(&loading, 1, &table[..4], &hashes));
        second.set();
        layer(&mut loading, 1);
        assert!(!has_layer(&loading, 2, &table[..4], &hashes));
        assert_eq!(cluster.monitor.status().objects, complete, "none is whole");
        third.set();
        layer(&mut loading, 2);
        for rank in &mut loading.ranks {
            rank.worker.wait_for_save(HostEvent::done()).expect("ends");
            let results = rank.worker.take_results();
            assert!(results.invalid_blocks.is_empty());
            let waited = rank.worker.stats().early_wait_micros;
            assert!(waited > 0, "the later layers were waited for");
            rank.worker.clear_metadata();
        }
        saving.close().await;
        loading.close().await;
        plain.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_complete_between_what_is_published_is_looked_up_once_more() {
    let cluster = Cluster::start().await;
    let (store, deployment, hashes) = (cluster.client().await, deployment(1), hashes(1, 4));
    let mut first = Rig::new(&deployment, &store, &early());
    assert_eq!(first.admit("a", &hashes[1..2]).await, 0);
    first.step(&[(("a", &TABLE[..2], 5, 0, 5), &hashes[1..2])]);
    first.finish("a").await;
    let mut saving = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(saving.admit("p", &hashes).await, 0);
    let (later, may_later) = pending();
    let events = [HostEvent::done(), may_later.clone(), may_later];
    tokio::task::block_in_place(|| prefill(&mut saving, &hashes, &events));
    let published = [0, 2, 3].map(|at: usize| hashes[at].clone());
    all_published(&saving, &store, &published).await;

    let mut loading = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(loading.matched("d", &hashes).await, 16);
    assert_eq!(loading.scheduler.stats().keys_queried, 4 + 4 + 1);
    later.set();
    for rig in [first, saving, loading] {
        rig.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocks_that_their_writer_loses_are_invalid() {
    let cluster = Cluster::start().await;
    let (store, deployment, hashes) = (cluster.client().await, deployment(1), hashes(1, 4));
    let mut saving = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(saving.admit("p", &hashes).await, 0);
    let (later, may_later) = pending();
    let events = [HostEvent::done(), may_later.clone(), may_later];
    tokio::task::block_in_place(|| prefill(&mut saving, &hashes, &events));
    all_published(&saving, &store, &hashes).await;
    let mut loading = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(loading.admit("d", &hashes).await, 16);
    let table: Vec<BlockId> = (20..25).collect();
    let metadata = loading.plan(&[(("d", &table, 17, 16, 1), &hashes)], &[]);
    let worker = &mut loading.ranks[0].worker;
    worker
        .start_load(&metadata, HostEvent::done())
        .expect("begins");
    let ready = tokio::task::block_in_place(|| worker.wait_for_layer(0)).expect("in time");
    assert!(ready.invalid_blocks.is_empty(), "{ready:?}");

    // Somebody takes one of the blocks over, and the writer goes on with the others.
    let put = PutStart::new(saving.key(0, &hashes[1]), 64);
    let config = ReplicateConfig::default();
    let taken = store
        .start_upserts(vec![put], &config, Recency::default())
        .await;
    assert!(taken[0].is_ok(), "{taken:?}");
    later.set();
    let worker = &mut loading.ranks[0].worker;
    let mut invalid = Vec::new();
    for layer in [1, 2] {
        let ready = tokio::task::block_in_place(|| worker.wait_for_layer(layer));
        invalid = ready.expect("in time").invalid_blocks;
    }
    assert_eq!(invalid, [21], "the block that was lost, and no other");
    let good = [20, 22, 23];
    let theirs = [&hashes[0], &hashes[2], &hashes[3]].map(Clone::clone);
    for layer in 0..LAYERS {
        assert!(has_layer(&loading, layer, &good, &theirs));
    }
    loading.ranks[0].worker.clear_metadata();
    saving.close().await;
    loading.close().await;
}

/// What is computed beside a load may turn out void: it is not published.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_published_in_a_step_that_loads() {
    let cluster = Cluster::start().await;
    let (store, deployment, hashes) = (cluster.client().await, deployment(1), hashes(1, 4));
    let mut first = Rig::new(&deployment, &store, &early());
    assert_eq!(first.admit("a", &hashes[..2]).await, 0);
    first.step(&[(("a", &TABLE[..3], 9, 0, 9), &hashes[..2])]);
    first.finish("a").await;

    let mut second = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(second.admit("p", &hashes).await, 8);
    let (later, event) = pending();
    let parts = [(("p", TABLE.as_slice(), 17, 8, 9), hashes.as_slice())];
    let metadata = second.plan(&parts, &[]);
    let worker = &mut second.ranks[0].worker;
    worker
        .start_load(&metadata, HostEvent::done())
        .expect("begins");
    for layer in 0..LAYERS {
        tokio::task::block_in_place(|| worker.wait_for_layer(layer)).expect("in time");
        worker
            .save_layer(layer, event.clone())
            .expect("handed over");
    }
    eventually("the puts have begun", || {
        cluster.monitor.status().reserved_objects == 2
    })
    .await;
    let mut third = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(
        third.matched("d", &hashes).await,
        8,
        "only what is complete"
    );
    later.set();
    second.ranks[0].worker.clear_metadata();
    for rig in [first, second, third] {
        rig.close().await;
    }
}

/// Which blocks are void one rank alone may know. What another computes from them in the steps until all have reported is
/// published no more than it is committed, though these steps load nothing.
// contract: connector-17
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_published_before_all_ranks_have_reported_the_load_it_was_computed_from() {
    let cluster = Cluster::start().await;
    let (store, hashes) = (cluster.client().await, hashes(1, 4));
    let deployment = Deployment {
        storing_ranks: 1,
        ..deployment(2)
    };
    let mut first = Rig::new(&deployment, &store, &early());
    assert_eq!(first.admit("a", &hashes[..2]).await, 0);
    first.step(&[(("a", &TABLE[..3], 9, 0, 9), &hashes[..2])]);
    first.finish("a").await;

    let mine = cluster.client().await;
    let mut second = Rig::new(&deployment, &mine, &early());
    assert_eq!(second.admit("p", &hashes).await, 8);
    let loads = [(("p", TABLE.as_slice(), 17, 8, 3), hashes.as_slice())];
    let metadata = second.plan(&loads, &[]);
    let good = tokio::task::block_in_place(|| second.ranks[0].step(&metadata, &loads));
    let key = second.key(0, &hashes[0]);
    let removed = store.remove(std::slice::from_ref(&key), true).await;
    assert!(removed[0].is_ok(), "{removed:?}");
    let bad = tokio::task::block_in_place(|| second.ranks[1].step(&metadata, &loads));
    assert_eq!(
        (&good.invalid_blocks[..], &bad.invalid_blocks[..]),
        (&[][..], &TABLE[..1])
    );
    // The block comes back, so that whoever looks finds what is behind it.
    assert_eq!(first.admit("b", &hashes[..1]).await, 0);
    first.step(&[(("b", &TABLE[..2], 5, 0, 5), &hashes[..1])]);
    first.finish("b").await;

    // Planned before these results are absorbed.
    let goes_on = [(("p", TABLE.as_slice(), 17, 11, 6), hashes.as_slice())];
    let metadata = second.plan(&goes_on, &[]);
    assert_eq!((metadata.step, metadata.confirmed), (2, 0));
    let later = tokio::task::block_in_place(|| second.ranks[0].step(&metadata, &goes_on));
    eventually("the puts of both blocks have begun", || {
        cluster.monitor.status().reserved_objects == 2
    })
    .await;
    let keys = [2, 3].map(|block: usize| second.key(0, &hashes[block]));
    let progress = store.progress(&keys).await.expect("up");
    assert_eq!(progress, [Progress::Unreadable; 2]);
    let mut third = Rig::new(&deployment, &cluster.client().await, &early());
    assert_eq!(third.matched("d", &hashes).await, 8, "what is complete");
    assert_eq!(mine.stats().ranges_published, 0);

    let absorbed = second.scheduler.absorb(&[good, bad, later]);
    assert_eq!(absorbed.recompute, [("p".into(), 0)]);
    second.step(&[(("p", TABLE.as_slice(), 17, 0, 17), &hashes)]);
    second.finish("p").await;
    let table = [20, 21, 22, 23, 24];
    assert_eq!(third.admit("e", &hashes).await, 16);
    third.step(&[(("e", &table, 17, 16, 1), &hashes)]);
    assert_eq!(third.right(&table, &hashes), [true; 4]);
    for rig in [first, second, third] {
        rig.close().await;
    }
}

/// Saves of a request that lost its blocks, and of one whose blocks were not kept, when nobody can wait for them any longer:
/// half of their bytes were read before the blocks were written again, and half behind that.
// contract: connector-17, connector-18
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_read_from_blocks_after_they_were_given_up_is_never_published() {
    for retains in [true, false] {
        let network = MockNetwork::new(7, Pace::Manual);
        network.set_conditions(Conditions {
            part_bytes: 16,
            ..Conditions::default()
        });
        let cluster = Cluster::on(&network).await;
        let mut deployment = deployment(1);
        deployment.retains_blocks = retains;
        let role = if retains { "kv_both" } else { "kv_producer" };
        let options = json!({"per_layer_readiness": true, "layer_timeout_ms": 20, "kv_role": role});
        let (store, hashes) = (cluster.client().await, hashes(1, 4));
        let mut rig = Rig::new(&deployment, &store, &options);
        assert_eq!(rig.admit("p", &hashes).await, 0);
        let first = [(("p", &TABLE[..2], 17, 0, 8), hashes.as_slice())];
        let metadata = rig.plan(&first, &[]);
        let rank = &mut rig.ranks[0];
        let begun = rank.worker.start_load(&metadata, HostEvent::done());
        begun.expect("begins");
        for layer in 0..LAYERS {
            rank.compute(usize::try_from(layer).expect("few"), &first);
            let saved = rank.worker.save_layer(layer, HostEvent::done());
            saved.expect("handed over");
        }
        rank.worker.wait_for_save(HostEvent::done()).expect("ends");
        let results = rank.worker.take_results();
        rank.worker.clear_metadata();
        rig.scheduler.absorb(&[results]);
        eventually("its first layer is under way", || !network.is_idle()).await;
        network.advance(Conditions::default().latency.end().div_f64(2.0));

        let (table, preempted) = ([TABLE[0], TABLE[1], 4, 15], ["p"]);
        let second = if retains {
            [(("q", &table[..], 17, 0, 16), hashes.as_slice())]
        } else {
            [(("p", &table[..], 17, 8, 8), hashes.as_slice())]
        };
        let metadata = rig.plan(&second, if retains { &preempted } else { &[] });
        let worker = &mut rig.ranks[0].worker;
        let begun = tokio::task::block_in_place(|| worker.start_load(&metadata, HostEvent::done()));
        assert_eq!(
            begun.is_err(),
            retains,
            "only lost blocks are waited for in vain"
        );
        let other = BlockHash::new(b"what comes next");
        for layer in 0..3 {
            rig.ranks[0].fill(layer, TABLE[0], &other);
            rig.ranks[0].fill(layer, TABLE[1], &other);
        }
        let worker = &mut rig.ranks[0].worker;
        eventually("the saves are given up", || {
            network.run_until_idle();
            worker.open_sessions().0 == 0
        })
        .await;
        worker.clear_metadata();
        assert_eq!(store.stats().ranges_published, 0);
        assert_eq!(worker.stats().saved_blocks, 0);
        let (dropped, failed) = (worker.stats().dropped_saves, worker.stats().failed_saves);
        assert!(
            dropped >= 2 && failed == 0,
            "{dropped} dropped, {failed} failed"
        );
        rig.close().await;
    }
}

/// Waiting for a writer is no traffic that saves give way to: engines that load what the other still saves, or what they
/// still save themselves, go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn engines_that_wait_for_each_other_s_saves_come_to_an_end() {
    let cluster = Cluster::start().await;
    for engines in [1, 2] {
        let prompts = [hashes(10 * engines, 4), hashes(10 * engines + 1, 4)];
        let mut rigs = Vec::new();
        let mut saves = Vec::new();
        for prompt in &prompts[..usize::from(engines)] {
            let mut rig = Rig::new(&deployment(1), &cluster.client().await, &early());
            assert_eq!(rig.admit("p", prompt).await, 0);
            let (go, ready) = pending();
            let events = [ready.clone(), ready.clone(), ready];
            tokio::task::block_in_place(|| prefill(&mut rig, prompt, &events));
            all_published(&rig, &cluster.client().await, prompt).await;
            rigs.push(rig);
            saves.push(go);
        }
        let table: Vec<BlockId> = (20..25).collect();
        for (at, rig) in rigs.iter_mut().enumerate() {
            // The other's, or its own.
            let prompt = &prompts[(at + 1) % usize::from(engines)];
            assert_eq!(rig.admit("d", prompt).await, 16);
            let metadata = rig.plan(&[(("d", &table, 17, 16, 1), prompt)], &[]);
            let worker = &mut rig.ranks[0].worker;
            let begun =
                tokio::task::block_in_place(|| worker.start_load(&metadata, HostEvent::done()));
            begun.expect("begins");
        }
        for rig in &rigs {
            let worker = &rig.ranks[0].worker;
            eventually("reads are open", || worker.open_sessions().1 > 0).await;
        }
        for go in saves {
            go.set();
        }
        for (at, rig) in rigs.iter_mut().enumerate() {
            let worker = &mut rig.ranks[0].worker;
            for layer in 0..LAYERS {
                let ready = tokio::task::block_in_place(|| worker.wait_for_layer(layer));
                let ready = ready.expect("in time");
                assert!(ready.invalid_blocks.is_empty(), "{ready:?}");
            }
            worker.clear_metadata();
            let prompt = &prompts[(at + 1) % usize::from(engines)];
            assert_eq!(rig.right(&table[..4], prompt), [true; 4]);
        }
        for rig in rigs {
            rig.close().await;
        }
    }
}
