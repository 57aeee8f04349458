//! Ranks compute together: what one can't load is void for all.

use layercake_engine::run::{Engine, EngineConfig};
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::damage::{damage, stored};
use crate::rig::{Ask, loaded, on_store, reference, run, same, text};

const POOL: u64 = 8 << 20;

/// A rank's load fails in the first layer; the others have all that they load, and compute from what
/// that rank brings in. Whether the request fails or computes again, a later engine finds nothing wrong.
#[test]
fn a_load_that_fails_on_one_rank_leaves_nothing_wrong_behind() {
    let ask = |id: &str, len: usize| -> Vec<Ask> {
        let prompt = [&text(20, 24)[..], &text(21, len)].concat();
        vec![(id.to_owned(), prompt, 4)]
    };
    for (ranks, lost) in [(2, 0), (2, 1), (4, 2)] {
        for policy in ["fail", "recompute"] {
            for layerwise in [true, false] {
                let what = format!("rank {lost} of {ranks}, {policy}, layerwise {layerwise}");
                let config = EngineConfig { ranks, ..config() };
                let folder = tempfile::tempdir().expect("a folder");
                let audit_log = folder.path().join("audit.jsonl");
                let cluster = Cluster::start(POOL);
                let link = cluster.link(&json!({
                    "audit_log": 1, "audit_log_path": audit_log.to_str().expect("plain"),
                }));
                on_store(&config, &link, &ask("start", 0));
                let keys = stored(&audit_log, lost);
                assert_eq!(keys.len(), 6, "{what}");
                let damaged = damage(&cluster, &link.store, &keys[4]);

                let link = cluster.link(&json!({
                    "kv_load_failure_policy": policy, "use_layerwise": layerwise,
                }));
                let mut engine = Engine::with_store(&config, &link).expect("good");
                let found = run(&mut engine, &ask("r", 23));
                engine.close(PATIENCE).expect("everything ends");
                assert!(loaded(&found) > 0, "{what}: it was to be loaded");
                assert_eq!(found[0].failed, policy == "fail", "{what}");
                assert_eq!(found[0].cuts, u32::from(policy == "recompute"), "{what}");

                let expected = reference(&config, &ask("r", 23));
                if policy == "recompute" {
                    same(&found, &expected, &what);
                }
                // So that the block can be saved again, which this engine may have done.
                cluster.eventually("the damaged object goes", |cluster| {
                    let stat = cluster.runtime.block_on(link.store.stat(&keys[4]));
                    !stat.is_ok_and(|stat| stat.object.generation == damaged)
                });
                for reader in ["fills the gap", "reads all"] {
                    let again = on_store(&config, &cluster.link(&json!({})), &ask("r", 23));
                    same(&again, &expected, &format!("{what}, {reader}"));
                }
            }
        }
    }
}
