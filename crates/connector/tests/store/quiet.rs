//! Runtimes that end, and steps that are left, in the middle of a load.
//!
//! Bytes move when a network's made-up time passes, and not before: so what has not landed has not for certain.

use std::time::Duration;

use layercake_connector::ConnectorError;
use layercake_connector::contract::{HostEvent, SchedulerSide as _, WorkerSide as _};
use layercake_transport::mock::{Conditions, MockNetwork, Pace};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::block_in_place;

use crate::cluster::{Cluster, PATIENCE, deployment, eventually, hashes};
use crate::rig::{Rank, Rig, options};

/// From the submission of a piece to its end.
const LATENCY: Duration = Duration::from_secs(1);

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let built = builder.worker_threads(1).enable_all().build();
    built.expect("a runtime")
}

/// Lets time pass by itself until this is dropped.
struct Passing(Option<(std::sync::mpsc::Sender<()>, std::thread::JoinHandle<()>)>);

impl Passing {
    fn of(network: &MockNetwork) -> Self {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let network = network.clone();
        let passing = std::thread::spawn(move || {
            while stopped.recv_timeout(Duration::from_millis(1))
                == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                network.advance(LATENCY);
            }
        });
        Self(Some((stop, passing)))
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if let Some((stop, passing)) = self.0.take() {
            drop(stop);
            passing.join().expect("no panic");
        }
    }
}

/// A rig whose worker reads into blocks 10 and 11 of a network that stands still. The runtime of the worker, and perhaps that of
/// its store's client, has ended.
async fn ended_in_the_middle(
    network: &MockNetwork,
    with: &Value,
    client_too: bool,
) -> (Cluster, Rig) {
    network.set_conditions(Conditions {
        latency: LATENCY..=LATENCY,
        ..Conditions::default()
    });
    let cluster = Cluster::on(network).await;
    let (deployment, hashes) = (deployment(1), hashes(1, 2));
    let passing = Passing::of(network);
    let mut saving = Rig::new(&deployment, &cluster.client().await, &json!({}));
    saving.step(&[(("p", &[1, 2], 8, 0, 8), &hashes)]);
    saving.finish("p").await;
    saving.close().await;
    drop(passing);

    let runtime = runtime();
    let store = if client_too {
        block_in_place(|| runtime.block_on(cluster.client()))
    } else {
        cluster.client().await
    };
    let options = options(with);
    let mut rig = Rig::with(&deployment, &store, &options);
    rig.ranks = vec![Rank::new(
        &deployment,
        0,
        &options,
        &store,
        runtime.handle(),
    )];
    assert_eq!(rig.admit("d", &hashes).await, 8);
    let parts = [(("d", &[10, 11, 12][..], 9, 8, 1), &hashes[..])];
    let metadata = rig.plan(&parts, &[]);
    let worker = &mut rig.ranks[0].worker;
    block_in_place(|| worker.start_load(&metadata, HostEvent::done())).expect("begins");
    // Steps that are shorter than a read: of those that follow on the sessions none has ended when these are seen.
    eventually("the sessions are open", || {
        network.advance(LATENCY / 2);
        worker.open_sessions().1 == 2
    })
    .await;
    // Waits until the task that opened them pauses: then it has asked for the first layer.
    block_in_place(|| drop(runtime));
    (cluster, rig)
}

/// Blocks whose first layer is there.
fn landed(rig: &Rig) -> usize {
    let blocks = [10, 11].into_iter().zip(hashes(1, 2));
    let landed = blocks.filter(|(block, hash)| rig.ranks[0].has_layer(0, *block, hash));
    landed.count()
}

/// Blocks are not given back while transfers that nobody waits for can still write to them.
// contract: connector-13
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_read_when_the_runtime_ends_is_waited_for() {
    for (early, client_too) in [(false, false), (false, true), (true, false), (true, true)] {
        let with = json!({"layer_timeout_ms": 20, "per_layer_readiness": early});
        let network = MockNetwork::new(5, Pace::Manual);
        let (_cluster, mut rig) = ended_in_the_middle(&network, &with, client_too).await;
        assert_eq!(landed(&rig), 0, "nothing has come");
        let worker = &mut rig.ranks[0].worker;
        let ready = worker.wait_for_layer(0).expect("its task is gone");
        assert_eq!(ready.invalid_blocks, [10, 11]);
        let late = block_in_place(|| worker.wait_for_save(HostEvent::done()));
        let late = late.expect_err("they are read into");
        assert!(matches!(late, ConnectorError::Deadline { .. }), "{late}");
        assert!(!worker.wait_for_loads(Duration::ZERO));
        assert_eq!(worker.take_results().invalid_blocks, [10, 11]);
        worker.clear_metadata();
        assert!(!worker.wait_for_loads(Duration::ZERO));
        assert_eq!(landed(&rig), 0, "nothing has come");

        let passing = Passing::of(&network);
        let worker = &rig.ranks[0].worker;
        assert!(block_in_place(|| worker.wait_for_loads(PATIENCE)));
        assert_eq!(landed(&rig), 2, "{early}, {client_too}: they came late");
        rig.close().await;
        drop(passing);
    }
}

/// A step that is left then is waited for by the next one, and a worker is not closed before.
// contract: connector-13
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_step_begins_and_no_worker_is_closed_while_blocks_are_read_into() {
    let network = MockNetwork::new(5, Pace::Manual);
    let with = json!({"layer_timeout_ms": 20});
    let (_cluster, mut rig) = ended_in_the_middle(&network, &with, true).await;
    let next = rig.plan(&[], &[]);
    let rank = rig.ranks.remove(0);
    let mut worker = rank.worker;
    block_in_place(|| worker.clear_metadata());
    let begun = block_in_place(|| worker.start_load(&next, HostEvent::done()));
    let late = begun.expect_err("the one before is not over");
    assert!(matches!(late, ConnectorError::Deadline { .. }), "{late}");
    let closed = worker.close(Duration::from_millis(20)).await;
    let late = closed.expect_err("blocks are read into");
    assert!(matches!(late, ConnectorError::Deadline { .. }), "{late}");
}

/// Bytes that come late into blocks that are others' by then make void what these compute.
// contract: connector-22
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn loads_of_a_step_that_was_left_void_what_a_later_one_computes_there() {
    let network = MockNetwork::new(11, Pace::Manual);
    network.set_conditions(Conditions {
        latency: LATENCY..=LATENCY,
        ..Conditions::default()
    });
    let cluster = Cluster::on(&network).await;
    let (stored, other) = (hashes(1, 2), hashes(2, 2));
    let passing = Passing::of(&network);
    let mut saving = Rig::new(&deployment(1), &cluster.client().await, &json!({}));
    saving.step(&[(("p", &[1, 2], 8, 0, 8), &stored)]);
    saving.finish("p").await;
    saving.close().await;
    drop(passing);

    let store = cluster.client().await;
    let mut rig = Rig::new(&deployment(1), &store, &json!({"layer_timeout_ms": 20}));
    assert_eq!(rig.admit("d", &stored).await, 8);
    let metadata = rig.plan(&[(("d", &[10, 11, 12], 9, 8, 1), &stored)], &[]);
    let worker = &mut rig.ranks[0].worker;
    block_in_place(|| worker.start_load(&metadata, HostEvent::done())).expect("begins");
    eventually("the sessions are open", || {
        network.advance(LATENCY / 2);
        worker.open_sessions().1 == 2
    })
    .await;
    eventually("a layer is being read", || !network.is_idle()).await;
    // It is left, and its blocks are computed by another request.
    block_in_place(|| worker.clear_metadata());
    let parts = [(("q", &[10, 11][..], 8, 0, 8), &other[..])];
    let metadata = rig.plan(&parts, &["d"]);
    let worker = &mut rig.ranks[0].worker;
    let begun = block_in_place(|| worker.start_load(&metadata, HostEvent::done()));
    assert!(
        matches!(begun, Err(ConnectorError::Deadline { .. })),
        "{begun:?}"
    );
    let results = worker.take_results();
    worker.clear_metadata();
    assert_eq!(results.invalid_blocks, [10, 11]);
    let absorbed = rig.scheduler.absorb(&[results]);
    assert_eq!(absorbed.recompute, [("q".into(), 0)]);
    let passing = Passing::of(&network);
    eventually("nothing is read any more", || {
        rig.ranks[0].worker.wait_for_loads(Duration::ZERO)
    })
    .await;
    assert!(rig.step(&parts).is_empty());
    rig.finish("q").await;
    rig.finish("d").await;
    assert_eq!(rig.ranks[0].worker.stats().saved_blocks, 2);
    rig.close().await;
    drop(passing);
}
