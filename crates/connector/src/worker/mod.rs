//! The worker side on a store.
//!
//! ```text
//! compute thread ── StoreWorker ──▶ queue of loads ──▶ receiver task ──▶ store
//!        ▲                │                                │
//!        └──── board ◀────┼────────────────────────────────┘
//!                         └──────▶ queue of saves ──▶ sender task ────▶ store
//! ```
//!
//! The thread that computes never calls the store: it fills bounded queues and waits on boards, each
//! wait with a deadline. The tasks run on the engine's runtime, belong to the worker and end with
//! it: [`StoreWorker::close`] drains them, dropping the worker stops them, and what they held open is
//! ended or revoked by the store's client. A third one removes objects that the receiver found damaged. What is open for whom is in one [`Tracker`](crate::tracker).

mod begin;
mod board;
mod busy;
mod caches;
mod commit;
mod observer;
mod overlap;
mod queue;
mod reads;
mod receiver;
mod remover;
mod saves;
mod sender;
mod shared;
mod staging;
mod step;
mod traffic;

pub use self::observer::{LayerTransfer, TransferObserver};

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use layercake_protocol::key::ObjectKey;
use layercake_store::StoreClient;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use self::board::Board;
use self::caches::Caches;
use self::queue::Queue;
use self::receiver::LoadJob;
use self::remover::Damaged;
use self::sender::{SaveJob, Sender};
use self::shared::Shared;
use self::staging::Staging;
use self::step::Step;
use crate::audit::Audit;
use crate::checks::{Deployment, Identity, check_client};
use crate::contract::{
    BlockHash, CacheRegistration, Event, LayerReady, RequestId, StepMetadata, WorkerResults,
    WorkerSide,
};
use crate::error::ConnectorError;
use crate::keys::BlockKeys;
use crate::options::{LocalFanout, Options};
use crate::plan;
use crate::stats::{ConnectorStats, MissReason};

/// Layers that may wait to be saved.
const SAVES_QUEUED: usize = 8;
const LOADS_QUEUED: usize = 2;

/// The worker side of the layerwise store connector.
pub struct StoreWorker {
    rank: u32,
    /// Its bytes are stored under this rank's keys.
    storing_rank: usize,
    saves: bool,
    /// Other ranks compute with this one: what fails for them makes void what is computed here.
    shares: bool,
    /// Saves wait for the results of this step.
    doubtful: Option<u64>,
    /// The step whose metadata was taken in last.
    last: Option<u64>,
    identity: Identity,
    keys: BlockKeys,
    shared: Arc<Shared>,
    loads_queue: Arc<Queue<LoadJob>>,
    saves_queue: Arc<Queue<SaveJob>>,
    damaged_queue: Arc<Queue<Damaged>>,
    receiver: JoinHandle<()>,
    sender: JoinHandle<()>,
    remover: JoinHandle<()>,
    caches: Option<Arc<Caches>>,
    staging: Option<Arc<Staging>>,
    step: Option<Step>,
    /// Loads of a step that was left in the middle, which have not come back in time.
    stuck: Option<Arc<Board>>,
    /// How long the next step's saves may hold the computation up.
    stall: Duration,
    ending: BTreeSet<RequestId>,
}

impl StoreWorker {
    /// Checks the deployment and makes the worker side of one rank. Its tasks run on `runtime`.
    pub fn new(
        deployment: &Deployment,
        rank: u32,
        options: Options,
        store: StoreClient,
        runtime: &Handle,
    ) -> Result<Self, ConnectorError> {
        let checked = deployment.check(&options)?;
        check_client(&options, &store)?;
        let keys = BlockKeys::new(deployment, &checked)?;
        let (storing_rank, stores) = deployment.storing_rank(rank)?;
        let fingerprint = deployment.fingerprint(&checked.layout);
        let fingerprint = (!deployment.compatible_keys).then_some(fingerprint);
        let saves = options.role.saves() && stores;
        let audit = match &options.audit_log {
            Some(path) => Audit::to(path, rank)?,
            None => Audit::off(),
        };
        let place = (deployment.storing_ranks, storing_rank);
        let stall = options.save_stall;
        let owned = (store, runtime.clone());
        let shared = Shared::new(owned, options, checked.layout, fingerprint, place, audit);
        let shared = Arc::new(shared);
        let loads_queue = Arc::new(Queue::new(LOADS_QUEUED));
        let saves_queue = Arc::new(Queue::new(SAVES_QUEUED));
        let damaged_queue = Arc::new(Queue::new(remover::QUEUED));
        let receiver = receiver::run(
            Arc::clone(&shared),
            Arc::clone(&loads_queue),
            Arc::clone(&damaged_queue),
        );
        let remover = remover::run(Arc::clone(&shared), Arc::clone(&damaged_queue));
        let sender = Sender::new(Arc::clone(&shared)).run(Arc::clone(&saves_queue));
        Ok(Self {
            rank,
            storing_rank: usize::try_from(storing_rank).unwrap_or(usize::MAX),
            saves,
            shares: deployment.tp_size > 1,
            doubtful: None,
            last: None,
            identity: checked.identity,
            keys,
            shared,
            loads_queue,
            saves_queue,
            damaged_queue,
            receiver: runtime.spawn(receiver),
            sender: runtime.spawn(sender),
            remover: runtime.spawn(remover),
            caches: None,
            staging: None,
            step: None,
            stuck: None,
            stall,
            ending: BTreeSet::new(),
        })
    }

    /// What this side must have in common with the scheduler and with other workers.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Counters of this side.
    pub fn stats(&self) -> ConnectorStats {
        self.shared.counters.snapshot()
    }

    /// Objects that are being saved, and sessions that are open on objects to load.
    pub fn open_sessions(&self) -> (usize, usize) {
        let saving = self.shared.tracker(|tracker| tracker.open_puts());
        (saving, self.shared.open_gets.load(Ordering::Relaxed))
    }

    /// Tells `observer` about every transfer of a layer from here on. The first one stays.
    pub fn observe(&self, observer: Arc<dyn TransferObserver>) {
        // A second one is not told: it is the caller's to have one.
        self.shared.observer.set(observer).ok();
    }

    /// Waits until one of the requests that end has no save under way any more, but no longer than this:
    /// for an engine that has nothing to compute until then.
    pub fn wait_for_ends(&self, at_most: Duration) {
        if !self.ending.is_empty() {
            self.shared.wait_any_settled(&self.ending, at_most);
        }
    }

    /// Waits until nothing is read into the engine's blocks any more, but no longer than this. `false`: something
    /// is. For an engine that goes on behind a [`Deadline`](ConnectorError::Deadline).
    pub fn wait_for_loads(&self, at_most: Duration) -> bool {
        self.shared.loading.wait_quiet(at_most)
    }

    /// Saves what was handed over and ends the tasks. Waits for all of it, and until nothing is read into the engine's
    /// blocks any more, as long as `deadline`.
    pub async fn close(mut self, deadline: Duration) -> Result<(), ConnectorError> {
        // The tasks see it through; nothing waits here but for them.
        self.leave_step();
        self.loads_queue.close();
        self.saves_queue.close();
        let all = async {
            // A task that broke off has ended, too.
            drop((&mut self.receiver).await);
            self.damaged_queue.close();
            drop((&mut self.sender).await);
            drop((&mut self.remover).await);
            self.shared.loading.quiet().await;
        };
        tokio::time::timeout(deadline, all)
            .await
            .map_err(|_| ConnectorError::Deadline {
                what: "the end of the worker's tasks and loads",
                after: deadline,
            })
    }

    fn patience(&self) -> Duration {
        self.shared.options.layer_timeout
    }

    fn local_layer(&self, physical: u32) -> Result<usize, ConnectorError> {
        let layer = self.shared.layout.local_layer(physical);
        layer.ok_or_else(|| ConnectorError::Unsupported {
            setting: "layer",
            value: physical.to_string(),
            accepted: "it must be one of the registered layers",
        })
    }

    fn step(&mut self, call: &'static str) -> Result<&mut Step, ConnectorError> {
        self.step.as_mut().ok_or(ConnectorError::OutOfOrder {
            call,
            detail: "start_load begins a step",
        })
    }

    fn key(&self, hash: &BlockHash) -> Result<ObjectKey, ConnectorError> {
        self.keys.key(self.storing_rank, hash)
    }

    /// Leaves the step, wherever it is: nothing more is loaded, and saves that are not whole are given up. Its
    /// loads, unless the engine has been told that they don't come back.
    fn leave_step(&mut self) -> Option<Arc<Board>> {
        self.give_up_saves();
        self.stop_loads();
        let step = self.step.take()?;
        (!step.late).then_some(step.board).flatten()
    }

    /// Nothing more of the step is loaded: what has not arrived is void.
    fn stop_loads(&mut self) {
        let Some(step) = &self.step else {
            return;
        };
        if let Some(board) = &step.board {
            let reason = if step.late {
                MissReason::TimeOut
            } else {
                MissReason::Aborted
            };
            board.stop(&self.shared.counters, reason);
            self.cancel_void();
        }
    }

    /// Nobody saves what follows from the step's void blocks, now that it is known which these are.
    fn cancel_void(&mut self) {
        let Some(step) = self.step.as_mut() else {
            return;
        };
        let requests = std::mem::take(&mut step.requests);
        let Some(board) = &step.board else {
            return;
        };
        let void = board.look(|state| state.invalid().clone());
        self.shared
            .tracker(|tracker| tracker.cancel_users_of(&void, &requests));
    }

    fn note_computed(&mut self) {
        if let Some(step) = self.step.as_mut()
            && let Some((layer, since)) = step.computing.take()
        {
            let took = since.elapsed();
            step.computed += took;
            let mut prefetch = self.shared.prefetch.lock();
            prefetch.note_compute(layer, took, step.waited);
        }
    }
}

impl WorkerSide for StoreWorker {
    fn register_caches(&mut self, caches: &CacheRegistration) -> Result<(), ConnectorError> {
        if self.step.is_some() {
            return Err(ConnectorError::OutOfOrder {
                call: "register_caches",
                detail: "a step is under way",
            });
        }
        overlap::check(caches)?;
        let unit = self.shared.options.max_transfer_bytes;
        let caches = Arc::new(Caches::new(caches, &self.shared.layout, unit)?);
        let copies = self.shared.options.local_fanout != LocalFanout::Off;
        self.staging = copies
            .then(|| Staging::new(self.shared.store.engine(), &caches))
            .flatten();
        self.caches = Some(caches);
        Ok(())
    }

    fn start_load(&mut self, step: &StepMetadata, ready: Event) -> Result<(), ConnectorError> {
        step.check_version()?;
        self.clear_metadata();
        let caches = self.caches.clone().ok_or(ConnectorError::OutOfOrder {
            call: "start_load",
            detail: "register_caches comes first",
        })?;
        let (over, begun) = self.apply(step)?;
        let fenced = self.fence(&over);
        // It leaves no results: who can't be told what to load can't say what it lacks.
        begun?;
        if let Err(late) = fenced {
            // The engine computes it all the same: its results tell what it lacks.
            self.step = Some(self.void_step(step, &caches));
            return Err(late);
        }
        let key = |hash: &BlockHash| self.key(hash);
        let planned = self.shared.tracker(|tracker| {
            let planned = plan::loads(tracker, step, key).and_then(|loads| {
                if !self.saves {
                    return Ok((loads, false, Vec::new()));
                }
                let doubtful = self.shares && plan::doubt(tracker, step);
                Ok((loads, doubtful, plan::saves(tracker, step, key)?))
            });
            planned.inspect_err(|_| plan::refuse(tracker, step))
        });
        let (loads, doubtful, saves) = planned?;
        if doubtful {
            self.doubtful = Some(step.step);
        }
        let board = self.begin_loads(&caches, loads, ready);
        let save = self.begin_saves(&caches, saves, board.is_some());
        self.step = Some(Step {
            board,
            save,
            ..Step::new(step)
        });
        Ok(())
    }

    fn wait_for_layer(&mut self, layer: u32) -> Result<LayerReady, ConnectorError> {
        let layer = self.local_layer(layer)?;
        self.note_computed();
        let patience = self.patience();
        let layerwise = self.shared.options.layerwise;
        let step = self.step("wait_for_layer")?;
        let begun = Instant::now();
        let ready = match &step.board {
            Some(board) if layerwise => board.wait(layer, patience),
            // Whole objects come all at once.
            Some(board) => board.wait_all(patience).then(|| board.ready()).flatten(),
            None => Some(LayerReady::default()),
        };
        step.waited = begun.elapsed();
        step.computing = Some((layer, Instant::now()));
        step.late = ready.is_none();
        ready.ok_or(ConnectorError::Deadline {
            what: "the load of a layer",
            after: patience,
        })
    }

    fn save_layer(&mut self, layer: u32, ready: Event) -> Result<(), ConnectorError> {
        let layer = self.local_layer(layer)?;
        self.step("save_layer")?;
        self.hand_over(layer, ready);
        Ok(())
    }

    fn wait_for_save(&mut self, ready: Event) -> Result<(), ConnectorError> {
        self.note_computed();
        let patience = self.patience();
        let step = self.step("wait_for_save")?;
        if let Some(board) = step.board.clone() {
            if !board.wait_all(patience) {
                step.late = true;
                return Err(ConnectorError::Deadline {
                    what: "the end of a step's loads",
                    after: patience,
                });
            }
            self.cancel_void();
        }
        let layers = self.caches.as_ref().map_or(0, |caches| caches.layers());
        for layer in 0..layers {
            self.hand_over(layer, Arc::clone(&ready));
        }
        self.end_saves(ready);
        Ok(())
    }

    fn take_results(&mut self) -> WorkerResults {
        let mut results = WorkerResults {
            rank: self.rank,
            ..WorkerResults::default()
        };
        if self.step.as_ref().is_some_and(|step| !step.told) {
            // In a step that was left in the middle, what is missing is void.
            self.stop_loads();
        }
        let Some(step) = self.step.as_mut() else {
            return results;
        };
        results.step = step.number;
        let ending = &mut self.ending;
        results.finished = self.shared.tracker(|tracker| plan::ended(tracker, ending));
        let micros = std::mem::take(&mut step.computed).as_micros();
        results.compute_micros = u64::try_from(micros).unwrap_or(u64::MAX);
        if let Some(board) = step.board.as_ref().filter(|_| !step.told) {
            step.told = true;
            results.invalid_blocks = board.look(|state| state.invalid().iter().copied().collect());
            results.loaded_bytes = board.loaded_bytes.load(Ordering::Relaxed);
            results.load_micros = u64::try_from(board.busy().as_micros()).unwrap_or(u64::MAX);
        }
        results
    }

    fn clear_metadata(&mut self) {
        if let Some(board) = self.leave_step()
            && !board.wait_all(self.patience())
        {
            tracing::warn!(
                "loads of a step that was left in the middle have not come back in time"
            );
            self.stuck = Some(board);
        }
    }
}

impl Drop for StoreWorker {
    fn drop(&mut self) {
        self.loads_queue.abandon();
        self.saves_queue.abandon();
        self.damaged_queue.abandon();
        self.receiver.abort();
        self.sender.abort();
        self.remover.abort();
    }
}

impl fmt::Debug for StoreWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreWorker")
            .field("rank", &self.rank)
            .field("step", &self.step.as_ref().map(|step| step.number))
            .finish_non_exhaustive()
    }
}
