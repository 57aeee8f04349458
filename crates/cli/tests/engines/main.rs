//! The fault matrix: an engine at work while a real master or node, or another engine, is killed or
//! stopped, at each point of a step. Every run ends with the results of an engine without a store, or,
//! where the policy says so, with a reported failure; and whoever uses the pool afterwards gets what is right.

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod publishing;
mod replicas;
mod victims;

use std::time::Duration;

use bench::{Bench, END_WITHIN, Point, Saboteur, Use};
use common::{Cluster, Running, eventually};
use layercake_connector::options::{FailurePolicy, Role};
use rustix::process::Signal;

const POINTS: [Point; 5] = [
    Point::LookUp,
    Point::Start,
    Point::Load,
    Point::Save,
    Point::End,
];

/// How long an engine waits. A fault takes this long, and all else should not; where a machine is so slow that a
/// run did not come to its point, it is made again with more time.
const PATIENCE: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(30),
];

/// Who is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    Master,
    Node,
}

/// Makes a cluster whole again.
fn heal(cluster: &mut Cluster, whom: Whom, signal: Signal) {
    let address = cluster.address.clone();
    match (whom, signal) {
        (Whom::Master, Signal::KILL) => {
            cluster.master = Running::start(&format!("master --listen {address}"));
        }
        (Whom::Node, Signal::KILL) => {
            let flags = "--name another --capacity 16MiB";
            let node = Running::start(&format!("node --master {address} {flags}"));
            cluster.nodes.push(node);
        }
        (Whom::Master, _) => cluster.master.signal(Signal::CONT),
        (Whom::Node, _) => cluster.nodes[0].signal(Signal::CONT),
    }
}

/// One cell of the matrix.
fn cell(bench: &Bench, whom: Whom, signal: Signal, point: Point, policy: FailurePolicy) {
    let what = format!(
        "{point:?}, {signal:?}, {whom:?}, {policy:?}, {} ranks",
        bench.config.ranks
    );
    let struck = PATIENCE.iter().any(|patience| {
        let how = Use {
            role: Role::Both,
            policy,
            patience: *patience,
        };
        strike(bench, whom, signal, point, how, &what)
    });
    assert!(struck, "{what}: the point did not come");
}

/// Whether the point came.
fn strike(bench: &Bench, whom: Whom, signal: Signal, point: Point, how: Use, what: &str) -> bool {
    let mut cluster = Cluster::start(1, "16MiB", "");
    bench.fill(&cluster.address);
    let victim = match whom {
        Whom::Master => &cluster.master,
        Whom::Node => &cluster.nodes[0],
    };
    let saboteur = Saboteur::new(bench, point, victim.pid(), signal);
    let link = bench.link(&cluster.address, how);
    let (engine, found) = bench.sabotaged(link, &saboteur, &bench.asks, what);
    for one in &found {
        let may_fail = how.policy == FailurePolicy::Fail && one.loaded_tokens > 0;
        assert!(!one.failed || may_fail, "{what}: {} failed", one.id);
        if whom == Whom::Node && matches!(point, Point::LookUp | Point::Start) {
            let is_felt = one.loaded_tokens == 0 || one.failed || one.cuts > 0;
            assert!(
                is_felt,
                "{what}: {} read from a node that was not there",
                one.id
            );
        }
    }
    engine.close(END_WITHIN).expect("everything ends");
    if !saboteur.has_struck() {
        return false;
    }
    heal(&mut cluster, whom, signal);
    // The first fills what is missing, once the node is there.
    eventually("the pool is read", || {
        bench.read(&cluster.address, &bench.asks, what) > 0
    });
    true
}

/// All points under `recompute`, some also under `fail`.
fn cells(whom: Whom, signal: Signal, ranks: &[u32], fail: &[Point]) {
    for ranks in ranks {
        let bench = Bench::new(*ranks);
        for point in POINTS {
            cell(&bench, whom, signal, point, FailurePolicy::Recompute);
        }
        for point in fail {
            cell(&bench, whom, signal, *point, FailurePolicy::Fail);
        }
    }
}

#[test]
fn a_node_that_is_killed_at_any_point() {
    let fail = [Point::Start, Point::Load];
    cells(Whom::Node, Signal::KILL, &[1, 2, 4], &fail);
}

#[test]
fn a_node_that_is_stopped_at_any_point() {
    cells(Whom::Node, Signal::STOP, &[1, 4], &[Point::Start]);
}

#[test]
fn a_master_that_is_killed_at_any_point() {
    cells(Whom::Master, Signal::KILL, &[1, 2, 4], &[Point::Start]);
}

#[test]
fn a_master_that_is_stopped_at_any_point() {
    cells(Whom::Master, Signal::STOP, &[1, 4], &[Point::Load]);
}
