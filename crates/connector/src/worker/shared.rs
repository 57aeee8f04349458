//! What the thread that computes and the two tasks have in common.
//!
//! Each lock is held for a few instructions, never across an await and never while another is taken.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::ObjectLayout;
use layercake_store::StoreClient;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::board::Loads;
use super::caches::Part;
use super::observer::{LayerTransfer, TransferObserver};
use super::sender::SaveStep;
use super::traffic::Traffic;
use crate::audit::Audit;
use crate::batcher::Batcher;
use crate::contract::{ComputeEvent, RequestId};
use crate::fanout::FanOut;
use crate::options::Options;
use crate::prefetch::Prefetch;
use crate::stats::Counters;
use crate::tracker::{PutOutcome, Tracker};

pub(crate) struct Shared {
    pub(crate) store: StoreClient,
    /// What the worker's tasks run on.
    pub(crate) runtime: Handle,
    pub(crate) options: Options,
    pub(crate) layout: ObjectLayout,
    /// Of objects that are written and expected; none with compatible keys.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Storing ranks, and this worker's place among them.
    pub(crate) place: (u32, u32),
    pub(crate) counters: Arc<Counters>,
    pub(crate) audit: Audit,
    pub(crate) prefetch: Mutex<Prefetch>,
    pub(crate) fanout: Mutex<FanOut>,
    pub(crate) loads: Mutex<Batcher>,
    pub(crate) saves: Mutex<Batcher>,
    pub(crate) observer: OnceLock<Arc<dyn TransferObserver>>,
    /// Something was cancelled or confirmed that the task that saves may wait for.
    pub(crate) saves_told: Notify,
    pub(crate) traffic: Arc<Traffic>,
    /// Sessions that are open on objects to load.
    pub(crate) open_gets: AtomicUsize,
    /// Jobs whose reads may be under way.
    pub(crate) loading: Arc<Loads>,
    tracker: Mutex<Tracker<ObjectKey>>,
    settled: Condvar,
}

impl Shared {
    pub(crate) fn new(
        (store, runtime): (StoreClient, Handle),
        options: Options,
        layout: ObjectLayout,
        fingerprint: Option<Fingerprint>,
        place: (u32, u32),
        audit: Audit,
    ) -> Self {
        let batcher = Batcher::new(options.max_transfer_blocks, options.max_transfer_bytes);
        Self {
            prefetch: Mutex::new(Prefetch::new(options.prefetch_layers)),
            fanout: Mutex::new(FanOut::new(options.local_fanout)),
            loads: Mutex::new(batcher.clone()),
            saves: Mutex::new(batcher),
            store,
            runtime,
            options,
            layout,
            fingerprint,
            place,
            counters: Arc::default(),
            audit,
            observer: OnceLock::new(),
            saves_told: Notify::new(),
            traffic: Arc::default(),
            open_gets: AtomicUsize::new(0),
            loading: Arc::default(),
            tracker: Mutex::new(Tracker::default()),
            settled: Condvar::new(),
        }
    }

    /// The place of a block's object in its prefix, as look-ups count it: all ranks of a block together. So
    /// that prefixes are shortened from their tail, whoever touched which block last.
    pub(crate) fn prefix_index(&self, block: u32) -> u32 {
        let (ranks, rank) = self.place;
        block.saturating_mul(ranks).saturating_add(rank)
    }

    /// A part of so many rows has been moved, after its writers had been waited for so long. Only layers are told of.
    pub(crate) fn observed(
        &self,
        part: Part,
        save: bool,
        rows: usize,
        begun: Instant,
        waited: Duration,
    ) {
        let (Some(observer), Part::Layer(layer)) = (self.observer.get(), part) else {
            return;
        };
        if let Some(layer) = self.layout.physical_layer(layer) {
            observer.transferred(&LayerTransfer {
                layer,
                save,
                rows,
                begun,
                took: begun.elapsed(),
                waited,
            });
        }
    }

    pub(crate) fn tracker<T>(&self, f: impl FnOnce(&mut Tracker<ObjectKey>) -> T) -> T {
        f(&mut self.tracker.lock())
    }

    /// A put is over.
    pub(crate) fn settle(&self, key: &ObjectKey, outcome: PutOutcome) {
        self.tracker.lock().settle(key, outcome);
        self.settled.notify_all();
    }

    /// A step's saves are given up. Whoever has them revokes them.
    pub(crate) fn give_up(&self, step: &SaveStep) {
        step.given_up.store(true, Ordering::Release);
        self.saves_told.notify_one();
    }

    /// Nobody saves any more. What was read meanwhile is never committed.
    pub(crate) fn settle_all(&self) {
        let lost = self.tracker.lock().lose_all();
        self.counters.dropped_saves.add(lost);
        self.settled.notify_all();
    }

    /// Waits until no save of these requests is under way. `false`: not in time.
    pub(crate) fn wait_until_none(
        &self,
        requests: &[RequestId],
        holds: impl Fn(&Tracker<ObjectKey>, &RequestId) -> bool,
        patience: Duration,
    ) -> bool {
        let until = Instant::now() + patience;
        let mut tracker = self.tracker.lock();
        while requests.iter().any(|request| holds(&tracker, request)) {
            if self.settled.wait_until(&mut tracker, until).timed_out() {
                return false;
            }
        }
        true
    }

    /// Waits until no save of one of these requests is under way, but no longer than this.
    pub(crate) fn wait_any_settled(&self, requests: &BTreeSet<RequestId>, at_most: Duration) {
        let until = Instant::now() + at_most;
        let mut tracker = self.tracker.lock();
        while requests
            .iter()
            .all(|request| tracker.unsettled(request) > 0)
        {
            if self.settled.wait_until(&mut tracker, until).timed_out() {
                return;
            }
        }
    }
}

/// Waits for an event of the engine's. `false`: it did not come in time.
pub(crate) async fn reached(event: &Arc<dyn ComputeEvent>, patience: Duration) -> bool {
    if event.is_done() {
        return true;
    }
    let (tell, told) = oneshot::channel();
    event.notify(Box::new(move || {
        // Nobody listens once the patience below is over.
        tell.send(()).ok();
    }));
    matches!(tokio::time::timeout(patience, told).await, Ok(Ok(())))
}
