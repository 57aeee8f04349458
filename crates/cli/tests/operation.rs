//! What operators do with a running cluster.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use common::{Cluster, Scene, assert_fields, run};
use serde_json::Value;

const LAYERS: &str = "--layers 2 --entry-bytes 64,64";

fn filled() -> (Cluster, u64) {
    let scene = Scene::workload(20, 5);
    let cluster = Cluster::start(2, "16MiB", "--http 127.0.0.1:0");
    let replay = format!(
        "replay {} {LAYERS} --json --master {}",
        scene.trace.display(),
        cluster.address
    );
    run(&replay).ok();
    (cluster, scene.expected().distinct)
}

fn keys(cluster: &Cluster, flags: &str) -> (Vec<String>, bool) {
    let listing = run(&format!("ls --json --master {} {flags}", cluster.address))
        .ok()
        .json();
    let keys = listing["objects"].as_array().expect("a list").iter();
    let keys = keys
        .map(|object| object["key"].as_str().expect("text").to_owned())
        .collect();
    (keys, listing["more"].as_bool().expect("a truth"))
}

#[test]
fn objects_are_listed_shown_and_removed() {
    let (cluster, distinct) = filled();
    let (all, more) = keys(&cluster, "--limit 100000");
    assert_eq!((all.len() as u64, more), (distinct, false));
    assert!(all.is_sorted(), "in the order of their keys");
    let (first, more) = keys(&cluster, "--limit 3");
    assert_eq!((&first[..], more), (&all[..3], true));
    let (next, _) = keys(&cluster, &format!("--limit 2 --after {}", first[2]));
    assert_eq!(next, all[3..5]);

    let stat = run(&format!(
        "stat {} --json --master {}",
        all[0], cluster.address
    ))
    .ok()
    .json();
    assert_fields(&stat, &[("size", 256), ("open_readers", 0)]);
    assert_eq!(stat["state"], "complete");
    let node = stat["replicas"][0]["node"].as_str().expect("a node");
    assert!(node.starts_with("node-"), "{stat}");
    let table = run(&format!("stat {} --master {}", all[0], cluster.address))
        .ok()
        .out;
    assert!(
        table.contains(&all[0]) && table.contains("complete"),
        "{table}"
    );

    // Probes of the replay may still protect an object.
    let removed = run(&format!(
        "rm {} --force --json --master {}",
        all[0], cluster.address
    ))
    .ok()
    .json();
    assert_fields(&removed, &[("removed", 1)]);
    let text = run(&format!("stat {} --master {}", all[0], cluster.address)).refused();
    assert!(
        text.contains(&all[0]) && text.contains("no such object"),
        "{text}"
    );
    let said = run(&format!("rm {} --master {}", all[0], cluster.address));
    assert_eq!(said.out, "", "the outcome is the refusal");
    let text = said.refused();
    assert!(text.contains(&all[0]), "{text}");

    let pattern = regex_of(&all[1]);
    let removed = run(&format!(
        "rm --matching {pattern} --force --json --master {}",
        cluster.address
    ))
    .ok()
    .json();
    assert_fields(&removed, &[("removed", 1)]);
    assert_eq!(keys(&cluster, "--limit 100000").0, all[2..]);
    let other = run(&format!(
        "ls --json --tenant other --master {}",
        cluster.address
    ))
    .ok()
    .json();
    assert_eq!(
        other["objects"].as_array().map(Vec::len),
        Some(0),
        "tenants are apart"
    );
}

/// A pattern that only this key matches: its keys hold nothing that patterns give a meaning.
fn regex_of(key: &str) -> String {
    format!("^{key}$")
}

#[test]
fn segments_and_health_are_told() {
    let (cluster, distinct) = filled();
    let segments = run(&format!("segments --json --master {}", cluster.address))
        .ok()
        .json();
    let segments = segments["segments"].as_array().expect("a list");
    let sum = |name: &str| {
        segments
            .iter()
            .map(|s| s[name].as_u64().expect("a number"))
            .sum::<u64>()
    };
    assert_eq!(
        (segments.len(), sum("size_bytes"), sum("objects")),
        (2, 32 << 20, distinct)
    );
    let table = run(&format!("segments --master {}", cluster.address))
        .ok()
        .out;
    assert!(
        table.contains("node-1") && table.contains("node-2") && table.contains("16.0 MiB"),
        "{table}"
    );

    let health = run(&format!("health --json --master {}", cluster.address))
        .ok()
        .json();
    assert_eq!(health["healthy"], true);
    assert_fields(
        &health,
        &[
            ("segments", 2),
            ("objects", distinct),
            ("lost_nodes", 0),
            // The nodes, and not the tool that asks.
            ("members", 2),
        ],
    );

    let table = run(&format!("health --master {}", cluster.address))
        .ok()
        .out;
    assert!(table.contains("held back"), "{table}");

    let refused = run(&format!("rm --matching ( --master {}", cluster.address)).refused();
    assert!(
        refused.contains("unclosed group") && !refused.contains('^'),
        "{refused}"
    );

    let empty = Cluster::start(0, "", "");
    for (tool, hint) in [("ls", "no objects"), ("segments", "layercake node")] {
        let said = run(&format!("{tool} --master {}", empty.address)).ok();
        assert_eq!(said.out, "", "nothing is listed");
        assert!(said.err.contains(hint), "{tool}: {}", said.err);
        let said = run(&format!("{tool} --json --master {}", empty.address)).ok();
        assert_eq!(said.err, "", "programs need no hints");
    }
    let said = run(&format!("health --json --master {}", empty.address));
    assert!(!said.status.success());
    assert_eq!(said.json()["healthy"], false);
    assert!(said.err.contains("no node"), "{}", said.err);
}

fn http_get(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("served");
    stream
        .set_read_timeout(Some(common::DEADLINE))
        .expect("a deadline");
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head
        .split_whitespace()
        .nth(1)
        .and_then(|status| status.parse().ok());
    // Bodies of known length are plain; others come in chunks, whose lengths don't disturb a search.
    (status.expect("a status"), body.to_owned())
}

#[test]
fn metrics_and_health_are_served_where_configured() {
    let (cluster, distinct) = filled();
    let http = cluster.master.ready["http"].as_str().expect("configured");
    let (status, metrics) = http_get(http, "/metrics");
    assert_eq!(status, 200);
    for line in [
        format!("layercake_master_objects {distinct}"),
        "layercake_master_segments 2".to_owned(),
        "layercake_master_requests_total{method=\"put_end\",code=\"ok\"}".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} in\n{metrics}");
    }
    let (status, health) = http_get(http, "/health");
    let health: Value = serde_json::from_str(&health).expect("JSON");
    assert_eq!((status, &health["serving"]), (200, &Value::Bool(true)));
    assert_eq!(http_get(http, "/else").0, 404);

    let node = common::Running::start(&format!(
        "node --master {} --name n --capacity 1MiB --http 127.0.0.1:0",
        cluster.address
    ));
    let http = node.ready["http"].as_str().expect("configured");
    let (_, metrics) = http_get(http, "/metrics");
    assert!(
        metrics.contains("layercake_transfer_served_bytes_total{transport=\"tcp\""),
        "{metrics}"
    );
    assert_eq!(http_get(http, "/health").0, 200);
    assert_eq!(
        cluster.nodes[0].ready["http"],
        Value::Null,
        "only where configured"
    );
}
