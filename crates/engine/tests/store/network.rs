//! The made-up network: pieces that fail, come late, overtake each other; peers that stand still.

use std::time::Duration;

use layercake_engine::run::EngineConfig;
use layercake_transport::PieceError;
use layercake_transport::mock::{Conditions, MockNetwork, Pace};
use serde_json::json;

use crate::cluster::{Cluster, config};
use crate::rig::{asks, loaded, on_store, reference, same};

fn conditions(failures: f64) -> Conditions {
    Conditions {
        latency: Duration::ZERO..=Duration::from_millis(30),
        failures,
        error: PieceError::PeerGone,
        // Parts of a piece overtake each other, too.
        part_bytes: 40,
    }
}

#[test]
fn reordered_and_delayed_pieces_change_nothing() {
    let expected = reference(&config(), &asks());
    for seed in 1..=3 {
        let network = MockNetwork::new(seed, Pace::Immediate);
        network.set_conditions(conditions(0.0));
        let cluster = Cluster::with(&[8 << 20], Some(network));
        for what in ["cold", "warm"] {
            let all = on_store(&config(), &cluster.link(&json!({})), &asks());
            same(&all, &expected, what);
            assert_eq!(loaded(&all) > 0, what == "warm");
        }
    }
}

/// Some pieces fail, of saves and of loads: requests recompute, and are equal.
#[test]
fn dropped_pieces_cost_recomputation_and_nothing_else() {
    let expected = reference(&config(), &asks());
    let mut cuts = 0;
    for (seed, ranks) in [(1, 1), (2, 2), (3, 4), (4, 1)] {
        let config = EngineConfig {
            ranks,
            step_tokens: 23,
            ..config()
        };
        for layerwise in [true, false] {
            let options = json!({"use_layerwise": layerwise});
            let network = MockNetwork::new(seed, Pace::Immediate);
            let cluster = Cluster::with(&[8 << 20], Some(network.clone()));
            same(
                &on_store(&config, &cluster.link(&options), &asks()),
                &expected,
                "cold",
            );
            network.set_conditions(conditions(0.02));
            for round in 0..3 {
                let all = on_store(&config, &cluster.link(&options), &asks());
                same(&all, &expected, &format!("round {round}"));
                cuts += all.iter().map(|one| one.cuts).sum::<u32>();
            }
            network.set_conditions(conditions(0.0));
            let all = on_store(&config, &cluster.link(&options), &asks());
            same(&all, &expected, "afterwards");
            assert!(loaded(&all) > 0, "the pool is used afterwards");
        }
    }
    assert!(cuts > 0, "some loads have failed");
}

/// Nothing can be read any more, though the master promises it.
#[test]
fn a_node_that_is_cut_off_costs_all_hits_under_both_policies() {
    let expected = reference(&config(), &asks());
    let network = MockNetwork::new(7, Pace::Immediate);
    let cluster = Cluster::with(&[8 << 20], Some(network.clone()));
    same(
        &on_store(&config(), &cluster.link(&json!({})), &asks()),
        &expected,
        "cold",
    );
    for (policy, fails) in [("recompute", false), ("fail", true)] {
        let options = json!({"kv_load_failure_policy": policy});
        let link = cluster.link(&options);
        let (node, engine) = (
            cluster.nodes[0].0.endpoint().engine,
            link.store.engine().endpoint().engine,
        );
        network.cut(node, engine);
        let all = on_store(&config(), &link, &asks());
        if fails {
            for one in &all {
                let reads = one.loaded_tokens > 0;
                assert_eq!(one.failed, reads, "{}: {reads}", one.id);
            }
        } else {
            same(&all, &expected, "recomputed");
            assert!(all.iter().any(|one| one.cuts > 0));
        }
    }
}
