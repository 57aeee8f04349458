//! In which order layers are asked for, and how many at once.

use std::sync::{Arc, Mutex};

use layercake_connector::contract::{BlockId, CacheLayout};
use layercake_connector::worker::{LayerTransfer, TransferObserver};
use layercake_protocol::layout::LayerSpec;
use serde_json::{Value, json};

use crate::cluster::{Cluster, deployment, hashes};
use crate::rig::Rig;

const LAYERS: u32 = 6;
/// A layer of two blocks is as much as may be under way before anything is known of the link.
const ENTRY: u64 = 4 << 20;

#[derive(Debug, Default)]
struct Record(Mutex<Vec<LayerTransfer>>);

impl TransferObserver for Record {
    fn transferred(&self, transfer: &LayerTransfer) {
        self.0.lock().expect("no panic").push(*transfer);
    }
}

/// Loads two blocks into a new engine. What was moved, by layer.
async fn load(cluster: &Cluster, options: Value) -> Vec<LayerTransfer> {
    let mut deployment = deployment(1);
    let layers = (0..LAYERS).map(|layer| LayerSpec::new(layer, [("kv", ENTRY)]));
    deployment.groups = vec![CacheLayout {
        layers: layers.collect(),
    }];
    let hashes = hashes(1, 2);
    let table: Vec<BlockId> = vec![3, 1, 4];
    let mut rig = Rig::new(&deployment, &cluster.client().await, &options);
    let record = Arc::new(Record::default());
    rig.ranks[0].worker.observe(Arc::clone(&record) as _);
    let matched = rig.admit("r", &hashes).await;
    if matched == 0 {
        rig.step(&[(("r", &table, 9, 0, 9), &hashes)]);
    } else {
        let absorbed = rig.step(&[(("r", &table, 9, 8, 1), &hashes)]);
        assert!(absorbed.is_empty(), "{absorbed:?}");
        assert_eq!(rig.right(&table, &hashes), [true; 2]);
    }
    rig.finish("r").await;
    rig.close().await;
    let mut moved = record.0.lock().expect("no panic").clone();
    moved.retain(|transfer| !transfer.save);
    moved.sort_by_key(|transfer| transfer.layer);
    moved
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_first_layer_does_not_share_the_link_with_all_others() {
    let cluster = Cluster::with(64 << 20).await;
    assert_eq!(load(&cluster, json!({})).await.len(), 0, "it is saved");

    let moved = load(&cluster, json!({})).await;
    assert_eq!(moved.len(), LAYERS as usize);
    let there = moved[0].begun + moved[0].took;
    assert!(
        moved[1..].iter().all(|transfer| transfer.begun >= there),
        "{moved:?}"
    );
    assert!(
        moved.is_sorted_by_key(|transfer| transfer.begun),
        "{moved:?}"
    );

    // A depth that is set is kept to, whatever it costs.
    let moved = load(&cluster, json!({"layerwise_prefetch_layers": LAYERS})).await;
    assert!(
        moved.is_sorted_by_key(|transfer| transfer.begun),
        "{moved:?}"
    );
    assert_eq!(moved.len(), LAYERS as usize);
}
