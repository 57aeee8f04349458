//! Processes end when they should, in time, and leave nothing behind.

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{
    Cluster, DEADLINE, Running, Scene, alive, assert_fields, children_of, eventually, finish_child,
    layercake, run,
};
use rustix::process::{Pid, Signal, kill_process};

/// Three times what an end takes at most, for a busy machine.
const STOP_WITHIN: Duration = Duration::from_secs(15);

#[test]
fn a_signal_ends_master_and_node_cleanly_and_silently() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut cluster = Cluster::start(2, "4MiB", "");
        let node = cluster.nodes.pop().expect("two");
        node.signal(signal);
        let (status, err) = node.end(STOP_WITHIN);
        assert!(status.success(), "{status}: {err}");
        assert_eq!(err, "");
        // It unmounted on its way out: the master does not wait for its time to live.
        let segments = run(&format!("segments --json --master {}", cluster.address))
            .ok()
            .json();
        assert_eq!(segments["segments"].as_array().map(Vec::len), Some(1));
        let health = run(&format!("health --json --master {}", cluster.address))
            .ok()
            .json();
        assert_eq!(health["lost_nodes"], 0);

        let Cluster { master, nodes, .. } = cluster;
        master.signal(signal);
        let (status, err) = master.end(STOP_WITHIN);
        assert!(status.success(), "{status}: {err}");
        assert_eq!(err, "");
        // A node whose master is gone still ends in time.
        for node in nodes {
            node.signal(signal);
            let (status, err) = node.end(STOP_WITHIN);
            assert!(status.success(), "{status}: {err}");
        }
    }
}

#[test]
fn a_closed_standard_input_ends_them_too() {
    let cluster = Cluster::start(1, "4MiB", "");
    let Cluster {
        mut master, nodes, ..
    } = cluster;
    for mut node in nodes {
        node.close_stdin();
        assert!(node.end(STOP_WITHIN).0.success());
    }
    master.close_stdin();
    assert!(master.end(STOP_WITHIN).0.success());
}

#[test]
fn a_node_that_was_killed_is_lost_and_its_successor_takes_its_name() {
    let mut cluster = Cluster::start(1, "4MiB", "--client-ttl 3s");
    cluster.nodes[0].signal(Signal::KILL);
    cluster.nodes.clear();
    eventually("the master notices", || {
        let said = run(&format!("health --json --master {}", cluster.address));
        said.json()["lost_nodes"] == 1
    });
    let next = Running::start(&format!(
        "node --master {} --name node-1 --capacity 4MiB",
        cluster.address
    ));
    let health = run(&format!("health --json --master {}", cluster.address))
        .ok()
        .json();
    assert_eq!(
        (&health["segments"], &health["lost_nodes"]),
        (&1.into(), &1.into())
    );
    drop(next);
}

/// A replay that goes on for long, paced by its trace, and the processes it started.
fn long_replay(scene: &Scene) -> (std::process::Child, Vec<u32>) {
    let child = layercake(&format!(
        "replay {} --layers 2 --entry-bytes 64 --workers 2 --nodes 2 --speed 0.01",
        scene.trace.display()
    ))
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("starts");
    let mut children = Vec::new();
    eventually("master, nodes and workers run", || {
        children = children_of(child.id());
        children.len() == 5
    });
    (child, children)
}

#[test]
fn no_child_outlives_a_replay_that_was_killed() {
    let scene = Scene::workload(50, 1);
    let (mut replay, children) = long_replay(&scene);
    replay.kill().expect("it runs");
    replay.wait().expect("our child");
    eventually("all children are gone", || {
        !children.iter().any(|child| alive(*child))
    });
}

fn arguments(pid: u32) -> Vec<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

/// The children of a replay that run this subcommand.
fn children_that(are: &str, children: &[u32]) -> Vec<u32> {
    let runs = |pid: &u32| arguments(*pid).get(1).is_some_and(|word| word == are);
    children.iter().copied().filter(runs).collect()
}

/// Waits until workers have stored something.
fn workers_work(replay: u32) {
    let address = || {
        let node = *children_that("node", &children_of(replay)).first()?;
        let words = arguments(node);
        let flag = words.iter().position(|word| word == "--master")?;
        words.get(flag + 1).cloned()
    };
    eventually("objects are stored", || {
        let Some(address) = address() else {
            return false;
        };
        let said = run(&format!("ls --json --master {address}"));
        said.status.success()
            && said.json()["objects"]
                .as_array()
                .is_some_and(|list| !list.is_empty())
    });
}

fn kill(pid: u32) {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .expect("a process id");
    kill_process(pid, Signal::KILL).expect("it runs");
}

#[test]
fn a_worker_and_a_node_killed_by_another_hand_cost_their_part_only() {
    // The second half comes long enough after the first for somebody to find the processes and kill them.
    let scene = Scene::workload(60, 1).paced(|request| {
        let pause = if request < 30 { 0 } else { 10_000 };
        pause + request * 20
    });
    let child = layercake(&format!(
        "replay {} --layers 2 --entry-bytes 64 --workers 2 --nodes 2 --speed 1 --json",
        scene.trace.display()
    ))
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("starts");
    workers_work(child.id());
    let children = children_of(child.id());
    kill(children_that("replay-worker", &children)[0]);
    kill(children_that("node", &children)[0]);
    let said = finish_child(child).ok();
    let report = said.json();
    assert_fields(
        &report,
        &[("requests", 60), ("mismatches", 0), ("lost_nodes", 1)],
    );
    assert!(
        report["failed_requests"].as_u64() <= Some(2),
        "at most what the worker had: {report}"
    );
    assert!(
        said.err.contains("worker-") && said.err.contains("node-"),
        "{}",
        said.err
    );
}

#[test]
fn a_killed_master_ends_the_replay_with_one_line() {
    let scene = Scene::workload(50, 1);
    let (replay, children) = long_replay(&scene);
    let begun = Instant::now();
    kill(children_that("master", &children)[0]);
    let said = finish_child(replay);
    assert!(!said.status.success());
    let last = said.err.lines().last().expect("a line");
    assert!(
        last.contains("master") && last.contains("signal 9"),
        "{}",
        said.err
    );
    assert!(begun.elapsed() < DEADLINE / 3);
    eventually("all children are gone", || {
        !children.iter().any(|child| alive(*child))
    });
}

#[test]
fn a_signal_ends_a_replay_and_its_children() {
    let scene = Scene::workload(50, 1);
    let (replay, children) = long_replay(&scene);
    let begun = Instant::now();
    kill_process(Pid::from_child(&replay), Signal::TERM).expect("it runs");
    let text = finish_child(replay).refused();
    assert!(text.contains("interrupted"), "{text}");
    assert!(begun.elapsed() < STOP_WITHIN);
    eventually("all children are gone", || {
        !children.iter().any(|child| alive(*child))
    });
}
