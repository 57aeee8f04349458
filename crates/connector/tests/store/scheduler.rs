//! The scheduler side asks a real master.

use std::time::Duration;

use layercake_connector::checks::{Deployment, Execution};
use layercake_connector::contract::{
    BlockHash, Matched, RequestId, RequestView, SchedulerSide as _,
};
use layercake_connector::keys::BlockKeys;
use layercake_connector::options::Options;
use layercake_connector::scheduler::StoreScheduler;
use layercake_connector::stats::MissReason;
use layercake_connector::worker::StoreWorker;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{ClientConfig, StoreClient};
use serde_json::json;
use tokio::runtime::Handle;

use crate::cluster::{Cluster, PATIENCE, deployment, hashes};

fn options(value: &serde_json::Value) -> Options {
    Options::from_json(value.as_object().expect("a map")).expect("good options")
}

fn scheduler(deployment: &Deployment, store: &StoreClient) -> StoreScheduler {
    let options = options(&json!({"lookup_window_blocks": 2, "lookup_timeout_ms": 10_000}));
    StoreScheduler::new(deployment, options, store.clone(), Handle::current()).expect("covered")
}

/// Stores whole objects of these blocks for these ranks.
async fn store_blocks(
    store: &StoreClient,
    deployment: &Deployment,
    blocks: &[(usize, &BlockHash)],
) {
    let checked = deployment.check(&Options::default()).expect("covered");
    let keys = BlockKeys::new(deployment, &checked).expect("keys");
    let len = usize::try_from(checked.layout.object_len()).expect("small");
    for (rank, hash) in blocks {
        let key = keys.key(*rank, hash).expect("a key");
        let (bytes, config) = (vec![7; len], ReplicateConfig::default());
        let put = store.put_bytes(&[(key, &bytes)], &config).await;
        assert!(put[0].is_ok(), "{put:?}");
    }
}

async fn matched(scheduler: &mut StoreScheduler, id: &str, hashes: &[BlockHash]) -> u64 {
    let request = RequestId::from(id);
    let view = RequestView {
        request: &request,
        tokens: hashes.len() as u64 * 4 + 1,
        hashes,
        computed: 0,
    };
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        match scheduler.matched_tokens(&view) {
            Matched::Tokens(tokens) => return tokens,
            Matched::NotKnownYet => {
                assert!(tokio::time::Instant::now() < until, "the look-up ends");
                tokio::task::yield_now().await;
            }
        }
    }
}

// contract: connector-2
#[tokio::test]
async fn the_engine_is_told_how_to_run_and_which_workers_are_its_own() {
    let cluster = Cluster::start().await;
    let store = cluster.client().await;
    let deployment = Deployment {
        execution: Execution::FullGraph { can_lower: true },
        ..deployment(2)
    };
    let scheduler = scheduler(&deployment, &store);
    assert_eq!(scheduler.execution(), Execution::PiecewiseGraph);
    let worker = |deployment: &Deployment| {
        let (options, runtime) = (Options::default(), Handle::current());
        StoreWorker::new(deployment, 1, options, store.clone(), &runtime).expect("covered")
    };
    let own = worker(&deployment);
    scheduler
        .identity()
        .check_peer(own.identity())
        .expect("of one engine");
    let other = worker(&Deployment {
        revision: "another".to_owned(),
        ..deployment
    });
    let error = scheduler.identity().check_peer(other.identity());
    let error = error.expect_err("other weights").to_string();
    assert!(error.contains("revision"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hit_is_the_prefix_that_all_ranks_have() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(2));
    let hashes = hashes(1, 8);
    let mut blocks: Vec<_> = hashes[..7]
        .iter()
        .flat_map(|hash| [(0, hash), (1, hash)])
        .collect();
    // One rank lacks block 4; what follows is of no use.
    blocks.remove(9);
    store_blocks(&store, &deployment, &blocks).await;

    let mut scheduler = scheduler(&deployment, &store);
    assert_eq!(matched(&mut scheduler, "r", &hashes).await, 16);
    assert_eq!(
        matched(&mut scheduler, "other", &crate::cluster::hashes(2, 8)).await,
        0
    );
    let stats = scheduler.stats();
    assert_eq!(stats.hit_blocks, 4);
    assert_eq!(stats.missed(MissReason::NeverStored), 4 + 8);
    let bound = (4 + 2) * 2 + 2 * 2;
    assert!(stats.keys_queried <= bound, "{stats:?}");
    assert_eq!(scheduler.open_requests(), 2);
}

// contract: connector-1
#[tokio::test]
async fn early_reading_by_a_client_without_checksums_is_refused_by_name() {
    let cluster = Cluster::start().await;
    let config = ClientConfig {
        checksums: false,
        ..ClientConfig::default()
    };
    let store = cluster.client_with(config).await;
    let (deployment, early) = (
        deployment(1),
        options(&json!({"per_layer_readiness": true})),
    );
    let scheduler =
        StoreScheduler::new(&deployment, early.clone(), store.clone(), Handle::current());
    let worker = StoreWorker::new(&deployment, 0, early, store, &Handle::current());
    for error in [scheduler.err(), worker.err()] {
        let error = error.expect("refused").to_string();
        assert!(error.contains("per_layer_readiness"), "{error}");
        assert!(error.contains("checksums = false"), "{error}");
    }
}

/// The master protects what it told of for as long as its leases are, not as long as they are by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_not_acted_upon_longer_than_the_masters_lease_allows() {
    let lease = Duration::from_millis(40);
    let cluster = Cluster::configured(16 << 20, |config| config.state.lease = lease).await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    assert_eq!(store.link().lease(), Some(lease));
    let hashes = hashes(1, 3);
    let blocks: Vec<_> = hashes.iter().map(|hash| (0, hash)).collect();
    store_blocks(&store, &deployment, &blocks).await;
    let mut scheduler = scheduler(&deployment, &store);
    let request = RequestId::from("r");
    let view = RequestView {
        request: &request,
        tokens: 13,
        hashes: &hashes,
        computed: 0,
    };
    // An engine whose steps take as long as a lease: every answer is old when it looks.
    let mut matched = scheduler.matched_tokens(&view);
    while matched == Matched::NotKnownYet {
        tokio::time::sleep(lease).await;
        matched = scheduler.matched_tokens(&view);
    }
    assert_eq!(matched, Matched::Tokens(0));
    assert_eq!(scheduler.stats().missed(MissReason::TimeOut), 3);
}

// contract: connector-11
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_gone_is_a_miss() {
    let mut cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    let hashes = hashes(1, 3);
    let blocks: Vec<_> = hashes.iter().map(|hash| (0, hash)).collect();
    store_blocks(&store, &deployment, &blocks).await;
    let mut scheduler = scheduler(&deployment, &store);
    assert_eq!(matched(&mut scheduler, "before", &hashes).await, 12);
    cluster.stop_master().await;
    assert_eq!(matched(&mut scheduler, "after", &hashes).await, 0);
    assert_eq!(scheduler.stats().missed(MissReason::Master), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_ends_asks_no_further() {
    let cluster = Cluster::start().await;
    let (store, deployment) = (cluster.client().await, deployment(1));
    // Look-ups get on only when the test lets them.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let turns = |turns: usize| {
        tokio::task::block_in_place(|| {
            runtime.block_on(async {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            });
        });
    };
    let handle = runtime.handle().clone();
    let with = options(&json!({"lookup_timeout_ms": 10_000}));
    let mut scheduler = StoreScheduler::new(&deployment, with, store, handle).expect("covered");
    let request = RequestId::from("r");
    let hashes = hashes(1, 3);
    let view = |count: usize| RequestView {
        request: &request,
        tokens: count as u64 * 4 + 1,
        hashes: &hashes[..count],
        computed: 0,
    };
    assert_eq!(scheduler.matched_tokens(&view(2)), Matched::NotKnownYet);
    // Another question takes the place of the first.
    assert_eq!(scheduler.matched_tokens(&view(3)), Matched::NotKnownYet);
    assert_eq!(scheduler.open_lookups(), 2);
    scheduler.request_finished(&request);
    turns(2);
    assert_eq!(scheduler.open_lookups(), 0);
    assert_eq!(scheduler.stats().keys_queried, 0);
    drop(scheduler);
    runtime.shutdown_background();
}
