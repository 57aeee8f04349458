//! The link and a real master over a simulated network, in virtual time: delays, partitions, messages
//! that are held back, and a master that dies and comes back in a later term.
//!
//! Whatever happens, a call ends by its deadline with an answer or an error, and no answer is wrong:
//! see `model` for what that means. The network and what the clients do follow from a seed, which is
//! printed; only ids are drawn at random.

mod model;
mod network;
mod run;

use model::Report;
use run::{Chaos, run};

#[test]
fn a_calm_network_serves_every_call() {
    let report = run(1, Chaos::None);
    assert_eq!(report.failed, 0);
    assert!(report.committed > 30, "{report:?}");
}

/// Runs several seeds; what they came to together.
fn runs(seeds: std::ops::RangeInclusive<u64>, chaos: Chaos) -> Report {
    let mut total = Report::default();
    for seed in seeds {
        let report = run(seed, chaos);
        total.calls += report.calls;
        total.failed += report.failed;
        total.committed += report.committed;
        total.restarts += report.restarts;
    }
    total
}

#[test]
fn partitions_and_held_messages_cost_time_but_never_truth() {
    let report = runs(1..=3, Chaos::Network);
    // It did hurt, and it did work.
    assert!(report.failed > 0 && report.committed > 60, "{report:?}");
}

#[test]
fn a_master_that_dies_takes_objects_with_it_but_never_truth() {
    let report = runs(11..=12, Chaos::Master);
    assert!(report.restarts > 0 && report.committed > 40, "{report:?}");
}

#[test]
fn everything_at_once() {
    let report = runs(21..=22, Chaos::Both);
    assert!(report.failed > 0 && report.restarts > 0, "{report:?}");
}
