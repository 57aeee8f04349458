//! Early reading: an engine loads layers that another engine is still saving, in steps that neither leaves to luck.
//!
//! The engine that saves is held after each layer until the one that loads has it. So every layer but the last is
//! loaded before the next one is saved.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use layercake_connector::worker::{LayerTransfer, TransferObserver};
use layercake_engine::run::{Completion, Engine, EngineConfig};
use layercake_transport::mock::{MockNetwork, Pace};
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{Ask, loaded, on_store, reference, same, sorted, submit, text};

const POOL: u64 = 8 << 20;
/// Whole blocks of the prompt, all in one step.
const BLOCKS: usize = 10;

/// Both engines go on layer by layer.
struct Lockstep {
    /// Rows of a layer, of all ranks.
    rows: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// What happens when a layer has been saved and loaded. Whether the engine that saves goes on alone from there.
    between: Box<dyn Fn(u32) -> bool + Send + Sync>,
}

#[derive(Default)]
struct State {
    saved: Vec<usize>,
    loaded: Vec<usize>,
    /// Layers that were loaded before the next one was saved.
    early: usize,
    /// Nobody is held any more.
    alone: bool,
    /// A wait was in vain.
    late: bool,
}

impl Lockstep {
    fn new(
        config: &EngineConfig,
        between: impl Fn(u32) -> bool + Send + Sync + 'static,
    ) -> Arc<Self> {
        let layers = config.model.cached_layers();
        Arc::new(Self {
            rows: BLOCKS * config.ranks as usize,
            state: Mutex::new(State {
                saved: vec![0; layers],
                loaded: vec![0; layers],
                ..State::default()
            }),
            changed: Condvar::new(),
            between: Box::new(between),
        })
    }

    /// Waits until it is so.
    fn until(&self, so: impl Fn(&State) -> bool) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        while !so(&state) {
            if self.changed.wait_until(&mut state, until).timed_out() {
                state.late = true;
                return;
            }
        }
    }

    fn saved(&self, transfer: &LayerTransfer) {
        let layer = transfer.layer as usize;
        let whole = {
            let mut state = self.state.lock();
            state.saved[layer] += transfer.rows;
            state.saved[layer] == self.rows
        };
        self.changed.notify_all();
        if whole {
            let loaded = |state: &State| state.alone || state.loaded[layer] == self.rows;
            block_in_place(|| self.until(loaded));
            if (self.between)(transfer.layer) {
                self.state.lock().alone = true;
            }
        }
    }

    fn loaded(&self, transfer: &LayerTransfer) {
        let layer = transfer.layer as usize;
        let mut state = self.state.lock();
        state.loaded[layer] += transfer.rows;
        let next = state.saved.get(layer + 1);
        if state.loaded[layer] == self.rows && next.is_some_and(|next| *next < self.rows) {
            state.early += 1;
        }
        self.changed.notify_all();
    }
}

impl TransferObserver for Lockstep {
    fn transferred(&self, transfer: &LayerTransfer) {
        if transfer.save {
            self.saved(transfer);
        } else {
            self.loaded(transfer);
        }
    }
}

impl std::fmt::Debug for Lockstep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lockstep").finish_non_exhaustive()
    }
}

fn ask() -> Vec<Ask> {
    let prompt = text(40, BLOCKS * 4 + 1);
    vec![("both".to_owned(), prompt, 3)]
}

fn early(more: &Value) -> Value {
    let mut options = json!({"per_layer_readiness": true, "save_stall_ms": 60_000});
    let more = more.as_object().expect("a map").clone();
    options.as_object_mut().expect("a map").extend(more);
    options
}

/// What both engines come to: the one that saves, and the one that loads meanwhile.
fn both(
    config: &EngineConfig,
    cluster: &Cluster,
    lockstep: &Arc<Lockstep>,
    (mut writer, reads): (Engine, Value),
) -> (Vec<Completion>, Vec<Completion>, Engine) {
    thread::scope(|scope| {
        let saving = scope.spawn(move || {
            submit(&mut writer, &ask());
            let found = sorted(writer.run().expect("no rank is lost"));
            (found, writer)
        });
        // All its puts have begun by then.
        lockstep.until(|state| state.saved[0] == lockstep.rows);
        let mut link = cluster.link(&reads);
        link.observer = Some(Arc::clone(lockstep) as Arc<dyn TransferObserver>);
        let found = on_store(config, &link, &ask());
        let (written, writer) = saving.join().expect("it ends");
        (written, found, writer)
    })
}

fn saving(config: &EngineConfig, cluster: &Cluster, lockstep: &Arc<Lockstep>) -> Engine {
    let mut link = cluster.link(&early(&json!({"kv_role": "kv_producer"})));
    link.observer = Some(Arc::clone(lockstep) as Arc<dyn TransferObserver>);
    Engine::with_store(config, &link).expect("good")
}

#[test]
fn layers_are_read_while_later_ones_are_still_saved() {
    for ranks in [1, 2, 4] {
        let config = EngineConfig { ranks, ..config() };
        let what = format!("{ranks} ranks");
        let cluster = Cluster::start(POOL);
        let expected = reference(&config, &ask());
        let lockstep = Lockstep::new(&config, |_| false);
        let writer = saving(&config, &cluster, &lockstep);
        let reads = early(&json!({"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}));
        let (written, found, writer) = both(&config, &cluster, &lockstep, (writer, reads));
        writer.close(PATIENCE).expect("everything ends");
        same(&written, &expected, &format!("saving, {what}"));
        same(&found, &expected, &format!("loading, {what}"));
        assert_eq!(loaded(&found), BLOCKS * 4, "{what}");
        let state = lockstep.state.lock();
        assert!(!state.late, "{what}");
        assert_eq!(state.early, config.model.cached_layers() - 1, "{what}");
        // What was committed afterwards is the same.
        let again = on_store(&config, &cluster.link(&json!({})), &ask());
        same(&again, &expected, &format!("afterwards, {what}"));
        assert_eq!(loaded(&again), BLOCKS * 4, "{what}");
    }
}

/// The engine that saves can't reach the node any more after half of the layers, which the other has loaded by then.
#[test]
fn a_writer_that_fails_half_way_is_a_load_that_fails() {
    for (ranks, policy) in [(1, "recompute"), (2, "recompute"), (2, "fail")] {
        let config = EngineConfig { ranks, ..config() };
        let what = format!("{ranks} ranks, {policy}");
        let network = MockNetwork::new(11, Pace::Immediate);
        let cluster = Cluster::with(&[POOL], Some(network.clone()));
        let expected = reference(&config, &ask());
        let node = cluster.nodes[0].0.endpoint().engine;
        let struck = Arc::new(Mutex::new(None));
        let half = u32::try_from(config.model.cached_layers() / 2).expect("few");
        let victim = Arc::clone(&struck);
        let lockstep = Lockstep::new(&config, move |layer| {
            if let (true, Some(victim)) = (layer == half, *victim.lock()) {
                network.cut(node, victim);
            }
            layer == half
        });
        let mut link = cluster.link(&early(&json!({"kv_role": "kv_producer"})));
        *struck.lock() = Some(link.store.engine().endpoint().engine);
        link.observer = Some(Arc::clone(&lockstep) as Arc<dyn TransferObserver>);
        let writer = Engine::with_store(&config, &link).expect("good");
        let reads = early(&json!({"kv_role": "kv_consumer", "kv_load_failure_policy": policy}));
        let (written, found, writer) = both(&config, &cluster, &lockstep, (writer, reads));
        same(&written, &expected, &format!("saving, {what}"));
        let (_, workers) = writer.connector_stats().expect("it has a store");
        let failed: u64 = workers.iter().map(|worker| worker.failed_saves).sum();
        // The rank that was last with that layer can't have saved more.
        assert!(failed >= BLOCKS as u64, "{what}: {failed}");
        writer.close(PATIENCE).expect("everything ends");

        assert_eq!(loaded(&found), BLOCKS * 4, "{what}: it was to be loaded");
        if policy == "fail" {
            assert!(found[0].failed, "{what}");
        } else {
            same(&found, &expected, &format!("loading, {what}"));
            assert_eq!(found[0].cuts, 1, "{what}");
        }
        let state = lockstep.state.lock();
        assert!(!state.late && state.early > half as usize, "{what}");
        // Nothing of it is left to be found.
        let again = on_store(&config, &cluster.link(&json!({})), &ask());
        same(&again, &expected, &format!("afterwards, {what}"));
        assert_eq!(loaded(&again), 0, "{what}");
    }
}
