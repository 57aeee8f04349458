//! Where the sessions of saves put their objects.

use layercake_connector::contract::BlockId;
use layercake_protocol::key::ObjectKey;
use serde_json::json;

use crate::cluster::{Cluster, deployment, hashes};
use crate::rig::Rig;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_lie_where_the_options_say() {
    let cluster = Cluster::start().await;
    let (store, _here) = cluster.member("here", 16 << 20).await;
    let (other, _elsewhere) = cluster.member("elsewhere", 16 << 20).await;
    let table: Vec<BlockId> = (0..17).collect();
    let all = [
        (json!({"preferred_segment": "elsewhere"}), "elsewhere"),
        (json!({"preferred_segment": "node"}), "node"),
        (json!({"prefer_alloc_in_same_node": true}), "here"),
    ];
    for (n, (mut with, place)) in all.into_iter().enumerate() {
        for layerwise in [true, false] {
            with["use_layerwise"] = layerwise.into();
            let seed = u8::try_from(2 * n).expect("few") + u8::from(layerwise);
            let hashes = hashes(seed, 16);
            let mut rig = Rig::new(&deployment(1), &store, &with);
            assert_eq!(rig.admit("r", &hashes).await, 0);
            rig.step(&[(("r", &table, 65, 0, 65), &hashes)]);
            rig.finish("r").await;
            let keys: Vec<ObjectKey> = hashes.iter().map(|hash| rig.key(0, hash)).collect();
            for found in other.locate(&keys).await {
                let replicas = found.expect("stored").replicas;
                let names: Vec<_> = replicas.iter().map(|(_, at)| at.name.as_str()).collect();
                assert_eq!(names, [place], "{with}");
            }
            rig.close().await;
        }
    }
}
