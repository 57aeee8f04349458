//! Stored objects that are damaged behind everybody's back.

use std::path::Path;

use layercake_engine::run::Engine;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_store::StoreClient;
use layercake_transport::RemoteSlice;
use layercake_transport::testing::poke;
use serde_json::{Value, json};

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{Ask, on_store, reference, run, same, text};

/// What a rank has stored, in the order of its blocks.
pub(crate) fn stored(audit_log: &Path, rank: u32) -> Vec<ObjectKey> {
    let text = std::fs::read_to_string(audit_log).expect("written");
    let lines = text.lines().map(serde_json::from_str::<Value>);
    let lines = lines.map(|line| line.expect("JSON"));
    let ends = lines.filter(|line| line["operation"] == "put_end" && line["rank"] == rank);
    let keys = ends.filter_map(|line| line["key"].as_str().map(ObjectKey::new));
    keys.map(|key| key.expect("a key")).collect()
}

/// Damages the first byte of an object, behind everybody's back; which it was.
pub(crate) fn damage(cluster: &Cluster, store: &StoreClient, key: &ObjectKey) -> Generation {
    let stat = cluster.runtime.block_on(store.stat(key));
    let object = stat.expect("it is stored").object;
    let replica = object.replicas[0];
    let segment = cluster.nodes[0].2.segments().remove(0);
    let place = RemoteSlice {
        region: segment.region,
        capability: segment.capability,
        offset: replica.payload_offset(),
        len: 1,
        generation: None,
    };
    let written = poke(store.engine(), segment.endpoint, place, vec![0xA5]);
    assert!(cluster.runtime.block_on(written).is_ok());
    object.generation
}

/// A request that fails by policy takes nothing from others: what is good of its cache is still found by them.
#[test]
fn a_request_that_fails_leaves_the_prefix_that_it_shares() {
    let cluster = Cluster::start(8 << 20);
    let folder = tempfile::tempdir().expect("a folder");
    let audit_log = folder.path().join("audit.jsonl");
    let ask = |id: &str, len| -> Vec<Ask> { vec![(id.to_owned(), text(50, len), 2)] };
    let link = cluster.link(&json!({
        "audit_log": 1, "audit_log_path": audit_log.to_str().expect("plain"),
    }));
    on_store(&config(), &link, &ask("start", 33));
    let keys = stored(&audit_log, 0);
    assert_eq!(keys.len(), 8);
    damage(&cluster, &link.store, &keys[6]);

    let link = cluster.link(&json!({"kv_load_failure_policy": "fail"}));
    let mut engine = Engine::with_store(&config(), &link).expect("good");
    let first = run(&mut engine, &ask("prefix", 17));
    same(&first, &reference(&config(), &ask("prefix", 17)), "prefix");
    let failed = run(&mut engine, &ask("fails", 33));
    assert!(failed[0].failed && failed[0].local_tokens == 16 && failed[0].loaded_tokens > 0);
    assert_eq!(failed[0].cuts, 0, "it failed, and was not cut back");
    let again = run(&mut engine, &ask("again", 21));
    assert_eq!(again[0].local_tokens, 16, "it is still here");
    same(&again, &reference(&config(), &ask("again", 21)), "again");
    engine.close(PATIENCE).expect("everything ends");
}
