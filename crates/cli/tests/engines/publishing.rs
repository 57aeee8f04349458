//! An engine that is killed while another one reads what it has not saved to the end.
//!
//! It stands still where its first layers are published, or all of them and none is committed, and is killed when the
//! other one has loaded a layer.

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use layercake_connector::options::{FailurePolicy, Role};
use rustix::process::{Pid, Signal};

use crate::bench::{Bench, END_WITHIN, Point, Saboteur, Use};
use crate::common::{Cluster, DEADLINE, eventually, wait};
use crate::victims::{Orders, Part, Victim};

/// How long a layer is waited for, its writer for half of it. Where a machine is so slow that nothing was loaded by then, the run is
/// made again with more time.
const LAYER: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(20),
    Duration::from_mins(2),
];

/// Whether a layer was loaded before its writer was killed.
fn cell(bench: &Bench, point: Point, policy: FailurePolicy, layer: Duration) -> bool {
    let what = format!("{point:?}, {policy:?}, {} ranks", bench.config.ranks);
    let cluster = Cluster::start(1, "16MiB", "");
    bench.fill(&cluster.address);
    let mut victim = Victim::start(&Orders {
        master: cluster.address.clone(),
        part: Part::Publish,
        point,
        ranks: bench.config.ranks,
        kill: false,
    });
    eventually("it stands still", || victim.stands_still());
    let stored = bench.asks[0].1.len() / bench.config.block_size as usize;

    let writer = Pid::from_child(&victim.0);
    let saboteur = Saboteur::new(bench, Point::Load, writer, Signal::KILL);
    let how = Use {
        role: Role::Consumer,
        policy,
        ..Use::PLAIN
    };
    let mut link = bench.link(&cluster.address, how);
    link.options.per_layer_readiness = true;
    link.options.layer_timeout = layer;
    let (engine, found) = bench.sabotaged(link, &saboteur, &bench.asks[1..2], &what);
    let one = &found[0];
    // Blocks that were not complete are loaded, too, as far as they come.
    let early = one.loaded_tokens > stored * bench.config.block_size as usize;
    let may_fail = policy == FailurePolicy::Fail && early;
    assert!(!one.failed || may_fail, "{what}: it failed");
    engine.close(END_WITHIN).expect("everything ends");
    if !(saboteur.has_struck() && early) {
        return false;
    }
    if point == Point::Saving && !one.failed && one.cuts == 0 {
        // All of its layers had come before every thread of it stood still.
        return false;
    }
    let status = wait(&mut victim.0, DEADLINE).expect("it is killed");
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{what}");
    for reader in ["computes the rest", "reads"] {
        let loaded = bench.read(&cluster.address, &bench.asks, &format!("{what}: {reader}"));
        assert!(loaded > 0, "{what}: {reader}");
    }
    true
}

#[test]
fn an_engine_that_is_killed_while_it_publishes_costs_its_readers_a_recomputation_at_most() {
    for ranks in [1, 2] {
        let bench = Bench::new(ranks);
        for point in [Point::Saving, Point::End] {
            for policy in [FailurePolicy::Recompute, FailurePolicy::Fail] {
                let mut tries = LAYER.iter();
                let struck = tries.any(|layer| cell(&bench, point, policy, *layer));
                assert!(struck, "{point:?}, {policy:?}: nothing was read early");
            }
        }
    }
}
