//! The main job, with real processes.

mod common;

use common::{Cluster, Scene, assert_fields, finish, layercake, run};

const LAYERS: &str = "--layer-entries 0-2:192,64;3:100,36,8";
const BLOCK: u64 = 3 * 256 + 144;

#[test]
fn with_one_worker_the_counts_are_exactly_those_of_the_trace() {
    let scene = Scene::workload(150, 7);
    let expected = scene.expected();
    let plot = scene.file("plot.svg");
    let said = run(&format!(
        "replay {} {LAYERS} --json --plot {}",
        scene.trace.display(),
        plot.display()
    ))
    .ok();
    assert_eq!(said.err, "", "quiet when nothing is wrong");
    let report = said.json();
    assert_fields(
        &report,
        &[
            ("requests", expected.requests),
            ("blocks", expected.blocks),
            ("distinct_blocks", expected.distinct),
            ("hit_blocks", expected.hits),
            ("saved_blocks", expected.blocks - expected.hits),
            ("bytes_loaded", expected.hits * BLOCK),
            ("bytes_saved", (expected.blocks - expected.hits) * BLOCK),
            ("mismatches", 0),
            ("failed_requests", 0),
            ("evicted_blocks", 0),
            ("refused_puts", 0),
            ("lost_nodes", 0),
            ("workers", 1),
            ("nodes", 1),
        ],
    );
    assert!(expected.hits > 0, "the workload shares prefixes");
    for latency in ["lookup_us", "save_layer_us", "load_layer_us"] {
        let (p50, max) = (
            report[latency]["p50"].as_f64(),
            report[latency]["max"].as_f64(),
        );
        assert!(p50 > Some(0.0) && p50 <= max, "{latency}: {report}");
    }
    let svg = std::fs::read_to_string(plot).expect("drawn");
    assert!(
        svg.starts_with("<svg") && svg.contains("hit ratio"),
        "{svg:.200}"
    );
}

#[test]
fn people_get_tables() {
    let scene = Scene::workload(20, 3);
    let said = run(&format!(
        "replay {} {LAYERS} --workers 2 --nodes 2",
        scene.trace.display()
    ))
    .ok();
    for text in [
        "requests",
        "hit ratio",
        "look-up of a request",
        "p99",
        "transport",
    ] {
        assert!(said.out.contains(text), "{text} in\n{}", said.out);
    }
    assert_eq!(said.err, "", "no progress bar where there is no terminal");
}

#[test]
fn the_transport_in_use_is_what_was_asked_for() {
    let scene = Scene::workload(20, 3);
    let expected = scene.expected();
    let replay = format!("replay {} {LAYERS} --json", scene.trace.display());
    let mut command = layercake(&replay);
    command.env("LAYERCAKE_TRANSPORTS", "tcp");
    let report = finish(command).ok().json();
    assert_eq!(report["transport"], "tcp", "{report}");
    assert_fields(&report, &[("hit_blocks", expected.hits), ("mismatches", 0)]);
    let report = run(&replay).ok().json();
    assert_eq!(report["transport"], "shm", "{report}");
    let mut command = layercake(&replay);
    command.env("LAYERCAKE_TRANSPORTS", "carrier-pigeon");
    let text = finish(command).refused();
    assert!(
        text.contains("carrier-pigeon") && text.contains("tcp"),
        "{text}"
    );
}

#[test]
fn a_small_pool_and_a_killed_node_cost_hits_and_nothing_else() {
    let scene = Scene::workload(600, 11);
    let expected = scene.expected();
    let report = run(&format!(
        "replay {} --layer-entries 0-3:1024,1024;4:512,2048 --workers 2 --nodes 3 --capacity 12MiB --kill-node-after 300 --json",
        scene.trace.display()
    ))
    .ok()
    .json();
    assert_fields(
        &report,
        &[
            ("requests", expected.requests),
            ("blocks", expected.blocks),
            ("distinct_blocks", expected.distinct),
            ("mismatches", 0),
            ("failed_requests", 0),
            ("lost_nodes", 1),
            ("nodes", 3),
        ],
    );
    let number = |name: &str| report[name].as_u64().expect("a number");
    assert!(number("evicted_blocks") > 0, "{report}");
    assert!(
        (1..expected.hits).contains(&number("hit_blocks")),
        "{report}"
    );
}

#[test]
fn a_running_cluster_keeps_what_a_named_run_stored() {
    let scene = Scene::workload(30, 5);
    let expected = scene.expected();
    let cluster = Cluster::start(2, "32MiB", "");
    let replay = format!(
        "replay {} {LAYERS} --json --master {}",
        scene.trace.display(),
        cluster.address
    );
    let first = run(&format!("{replay} --run-name once")).ok().json();
    assert_fields(
        &first,
        &[
            ("hit_blocks", expected.hits),
            ("mismatches", 0),
            ("nodes", 2),
        ],
    );
    let again = run(&format!("{replay} --run-name once --workers 2"))
        .ok()
        .json();
    assert_fields(
        &again,
        &[
            ("hit_blocks", expected.blocks),
            ("bytes_saved", 0),
            ("mismatches", 0),
        ],
    );
    let other = run(&replay).ok().json();
    assert_fields(&other, &[("hit_blocks", expected.hits), ("mismatches", 0)]);
}

#[test]
fn the_trace_may_come_through_a_pipe_and_at_its_own_pace() {
    let scene = Scene::workload(8, 2);
    // The workload's requests come within seconds: a hundred times faster is soon over.
    let mut command = layercake(&format!("replay - {LAYERS} --json --speed 100"));
    command.stdin(std::fs::File::open(&scene.trace).expect("written"));
    let report = finish(command).ok().json();
    assert_fields(&report, &[("requests", 8), ("mismatches", 0)]);
}

#[test]
fn the_connector_finds_what_sessions_find() {
    let scene = Scene::workload(150, 7);
    let expected = scene.expected();
    let said = run(&format!(
        "replay {} {LAYERS} --connector --json",
        scene.trace.display()
    ))
    .ok();
    let report = said.json();
    assert_fields(
        &report,
        &[
            ("requests", expected.requests),
            ("blocks", expected.blocks),
            ("hit_blocks", expected.hits),
            ("saved_blocks", expected.blocks - expected.hits),
            ("mismatches", 0),
            ("failed_requests", 0),
            ("lost_after_lookup", 0),
        ],
    );
    let keys = report["keys_queried"].as_u64().expect("a number");
    assert!(keys >= expected.hits, "{keys}");
    let bound = report["keys_queried_bound"].as_u64().expect("a number");
    assert_eq!(bound, expected.hits + 64 * expected.requests);
    assert!(keys <= bound, "{keys}");
}

#[test]
fn the_connector_and_sessions_read_each_other_s_blocks() {
    let scene = Scene::workload(20, 5);
    let expected = scene.expected();
    for (first, second) in [("", "--connector"), ("--connector", "")] {
        let cluster = Cluster::start(1, "16MiB", "");
        let replay = |how: &str| {
            let trace = scene.trace.display();
            let to = format!("--master {} --run-name shared", cluster.address);
            run(&format!("replay {trace} {LAYERS} {to} {how} --json"))
                .ok()
                .json()
        };
        assert_fields(&replay(first), &[("hit_blocks", expected.hits)]);
        let all = [("hit_blocks", expected.blocks), ("mismatches", 0)];
        assert_fields(&replay(second), &all);
    }
}

#[test]
fn a_node_that_dies_costs_the_connector_hits_and_no_request() {
    let scene = Scene::workload(60, 2);
    let said = run(&format!(
        "replay {} {LAYERS} --connector --nodes 2 --kill-node-after 20 --json",
        scene.trace.display()
    ))
    .ok();
    let fields = [("requests", 60), ("mismatches", 0), ("lost_nodes", 1)];
    assert_fields(&said.json(), &fields);
}
