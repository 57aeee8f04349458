//! Engines that keep no blocks between chunks.

use layercake_connector::contract::BlockId;
use layercake_protocol::replica::Recency;
use serde_json::json;

use crate::cluster::{Cluster, deployment, eventually, hashes};
use crate::rig::Rig;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_engine_that_keeps_no_blocks_gets_its_committed_prefix_back() {
    let cluster = Cluster::start().await;
    let store = cluster.client().await;
    let mut deployment = deployment(1);
    deployment.retains_blocks = false;
    let hashes = hashes(1, 4);
    let producer = json!({"kv_role": "kv_producer"});
    let mut rig = Rig::new(&deployment, &store, &producer);
    let table: Vec<BlockId> = vec![0, 1, 2, 3];
    rig.step(&[(("r", &table[..2], 16, 0, 8), &hashes)]);
    // Nobody waits for the first chunk to be committed: the next one does.
    let absorbed = rig.step(&[(("r", &table[..3], 16, 8, 4), &hashes)]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    eventually("its two blocks have come back", || {
        rig.ranks[0].worker.stats().loaded_blocks == 2
    })
    .await;
    rig.ranks[0].wipe();
    // What is not there any more is void, computed and saved again.
    let gone = [rig.key(0, &hashes[1])];
    eventually("the second chunk is committed", || {
        rig.ranks[0].worker.stats().saved_blocks == 3
    })
    .await;
    assert!(store.remove(&gone, true).await[0].is_ok());
    let absorbed = rig.step(&[(("r", &table, 16, 12, 4), &hashes)]);
    assert_eq!(absorbed.recompute, [("r".into(), 4)]);
    rig.ranks[0].wipe();
    let absorbed = rig.step(&[(("r", &table, 16, 4, 12), &hashes)]);
    assert!(absorbed.is_empty(), "{absorbed:?}");
    assert_eq!(rig.right(&table, &hashes), [true; 4]);
    rig.finish("r").await;
    assert_eq!(
        store.exists(&gone, Recency::default()).await[0]
            .as_ref()
            .ok(),
        Some(&true)
    );
}
