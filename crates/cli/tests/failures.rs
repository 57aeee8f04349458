//! One clear line and a non-zero exit when the world is not as it should be.

mod common;

use std::net::TcpListener;
use std::time::Instant;

use common::{Cluster, DEADLINE, NobodyThere, Scene, finish, layercake, run};

const LAYERS: &str = "--layers 2 --entry-bytes 64,64";

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    let text = run(&format!("master --listen {address}")).refused();
    assert!(
        text.contains(&address) && text.to_lowercase().contains("in use"),
        "{text}"
    );
    let text = run(&format!("master --listen 127.0.0.1:0 --http {address}")).refused();
    assert!(
        text.contains(&address) && text.to_lowercase().contains("in use"),
        "{text}"
    );

    let cluster = Cluster::start(0, "", "");
    let text = run(&format!(
        "node --master {} --capacity 1MiB --listen {address}",
        cluster.address
    ))
    .refused();
    assert!(
        text.contains(&address) && text.to_lowercase().contains("in use"),
        "{text}"
    );
    assert_eq!(text.matches("os error").count(), 1, "told once: {text}");
}

#[test]
fn an_address_without_a_port_is_refused_by_the_name_of_its_flag() {
    let scene = Scene::workload(3, 1);
    for args in [
        format!("replay {} {LAYERS}", scene.trace.display()),
        "ls".to_owned(),
        "node --capacity 1MiB".to_owned(),
    ] {
        let text = run(&format!("{args} --master localhost")).refused();
        for part in ["--master", "\"localhost\" has no port", "HOST:PORT"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}

#[test]
fn a_master_that_is_not_there_is_named_by_everyone_in_time() {
    let nobody = NobodyThere::reserve();
    let free = nobody.address();
    let scene = Scene::workload(3, 1);
    let begun = Instant::now();
    for args in [
        format!("node --master {free} --capacity 1MiB"),
        format!("ls --master {free}"),
        format!("health --master {free} --json"),
        format!("replay {} {LAYERS} --master {free}", scene.trace.display()),
    ] {
        let text = run(&args).refused();
        assert!(text.contains(&free.to_string()), "{args}: {text}");
    }
    assert!(begun.elapsed() < DEADLINE, "each gives up within seconds");
}

#[test]
fn something_that_is_no_master_is_told_apart() {
    let cluster = Cluster::start(0, "", "--http 127.0.0.1:0");
    let http = cluster.master.ready["http"]
        .as_str()
        .expect("served")
        .to_owned();
    let text = run(&format!("segments --master {http}")).refused();
    assert!(text.contains(&http), "{text}");
}

#[test]
fn more_memory_than_there_is_is_refused_before_anything_is_taken() {
    let cluster = Cluster::start(0, "", "");
    let text = run(&format!(
        "node --master {} --capacity 900TiB",
        cluster.address
    ))
    .refused();
    assert!(text.contains("TiB") && text.contains("free"), "{text}");
    assert!(text.contains("--capacity"), "the setting is named: {text}");
    let segments = run(&format!("segments --master {} --json", cluster.address))
        .ok()
        .json();
    assert_eq!(segments["segments"].as_array().map(Vec::len), Some(0));

    let scene = Scene::workload(3, 1);
    let text = run(&format!(
        "replay {} {LAYERS} --capacity 900TiB",
        scene.trace.display()
    ))
    .refused();
    assert!(
        text.contains("--capacity") && text.contains("memory"),
        "{text}"
    );
    let text = run(&format!(
        "replay {} {LAYERS} --capacity 1KiB",
        scene.trace.display()
    ))
    .refused();
    assert!(text.contains("--capacity 1KiB"), "{text}");
    let text = run(&format!(
        "replay {} --layers 4096 --entry-bytes 99999999999",
        scene.trace.display()
    ))
    .refused();
    assert!(text.contains("memory") || text.contains("larger"), "{text}");
}

#[test]
fn off_loopback_a_token_or_insecure_is_needed() {
    let text = run("master --listen 0.0.0.0:0").refused();
    assert!(
        text.contains("token") && text.contains("insecure"),
        "{text}"
    );
    let cluster = Cluster::start(0, "", "");
    let text = run(&format!(
        "node --master {} --capacity 1MiB --listen 0.0.0.0:0",
        cluster.address
    ))
    .refused();
    assert!(
        text.contains("token") && text.contains("insecure"),
        "{text}"
    );
}

#[test]
fn a_token_is_asked_for_and_compared() {
    let scene = Scene::with_trace("");
    let file = scene.file("token");
    std::fs::write(&file, "the right secret of the cluster\n").expect("written");
    let cluster = Cluster::start(0, "", &format!("--token-file {}", file.display()));
    let tool = format!("segments --master {} --json", cluster.address);
    let text = run(&tool).refused();
    assert!(text.contains("token"), "{text}");
    let mut wrong = layercake(&tool);
    wrong.env("LAYERCAKE_TOKEN", "the wrong secret of the cluster");
    let text = finish(wrong).refused();
    assert!(
        text.contains("token") && !text.contains("secret of"),
        "{text}"
    );
    let mut right = layercake(&tool);
    right.env("LAYERCAKE_TOKEN", "the right secret of the cluster");
    finish(right).ok();
}

#[test]
fn bad_trace_lines_are_skipped_by_number_or_refused() {
    let good = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    let scene = Scene::with_trace(&format!("{good}\nnot a request\n{good}\n"));
    let replay = format!("replay {} {LAYERS} --json", scene.trace.display());
    let said = run(&replay).ok();
    assert!(said.err.contains("line 2"), "{}", said.err);
    common::assert_fields(
        &said.json(),
        &[
            ("requests", 2),
            ("skipped_lines", 1),
            ("blocks", 4),
            ("hit_blocks", 2),
            ("mismatches", 0),
        ],
    );
    let text = run(&format!("{replay} --strict")).refused();
    assert!(text.contains("line 2"), "{text}");
    let empty = Scene::with_trace("\n");
    let text = run(&format!("replay {} {LAYERS}", empty.trace.display())).refused();
    assert!(text.contains("empty"), "{text}");
    let text = run(&format!("replay /nowhere/trace.jsonl {LAYERS}")).refused();
    assert!(text.contains("/nowhere/trace.jsonl"), "{text}");
}
