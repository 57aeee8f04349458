//! One rank: a thread that computes steps, with its worker side of the connector.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use layercake_connector::ConnectorError;
use layercake_connector::contract::{HostEvent, StepMetadata, WorkerResults, WorkerSide};
use layercake_connector::stats::ConnectorStats;
use layercake_connector::worker::StoreWorker;
use tokio::runtime::Handle;

use super::IDLE;
use super::timeline::{Activity, Timeline};
use super::waiting::{InVain, wait_for};
use crate::error::EngineError;
use crate::model::{BatchItem, LayerHooks, Logits, RankModel};
use crate::parallel::Port;

/// How much longer than a worker's own deadline its end is waited for: in vain only if the runtime has ended.
const GRACE: Duration = Duration::from_secs(10);

/// A step's work, the same for all ranks.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) batch: Vec<BatchItem>,
    pub(super) metadata: Option<StepMetadata>,
}

/// What a rank has to say after a step.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) rank: u32,
    pub(super) logits: Vec<Option<Logits>>,
    pub(super) results: Option<WorkerResults>,
    pub(super) stats: Option<ConnectorStats>,
    /// The connector did not come to an end in time: what of the step's loads has not arrived is void.
    pub(super) late: bool,
    /// Something may still be read into the cache.
    pub(super) loading: bool,
}

/// A rank's thread, seen from the engine.
#[derive(Debug)]
pub(super) struct Rank {
    number: u32,
    work: Option<Sender<Arc<Work>>>,
    output: Receiver<Result<Output, EngineError>>,
    thread: Option<JoinHandle<Option<StoreWorker>>>,
}

/// What a rank's thread starts with.
pub(super) struct Parts {
    pub(super) model: RankModel,
    pub(super) port: Port,
    pub(super) worker: Option<StoreWorker>,
    pub(super) layer_time: Duration,
    pub(super) timeline: Option<Timeline>,
}

impl Rank {
    pub(super) fn start(parts: Parts) -> Result<Self, EngineError> {
        let number = parts.port.rank();
        let (work, tasks) = channel();
        let (done, output) = channel();
        let thread = thread::Builder::new()
            .name(format!("rank-{number}"))
            .spawn(move || run(parts, &tasks, &done))
            .map_err(|_| EngineError::RankLost { rank: number })?;
        Ok(Self {
            number,
            work: Some(work),
            output,
            thread: Some(thread),
        })
    }

    pub(super) fn begin(&self, work: &Arc<Work>) -> Result<(), EngineError> {
        let sender = self.work.as_ref();
        let sent = sender.map(|sender| sender.send(Arc::clone(work)));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(EngineError::RankLost { rank: self.number }),
        }
    }

    /// Waits for the step's end. Whatever a rank waits for has a deadline, so this has one.
    pub(super) fn end(&self) -> Result<Output, EngineError> {
        let lost = |_| EngineError::RankLost { rank: self.number };
        self.output.recv().map_err(lost)?
    }

    /// As if its thread had died.
    #[cfg(test)]
    pub(super) fn lose(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join().expect("no panic"));
        }
    }

    /// Ends the thread, then the worker.
    pub(super) fn close(
        mut self,
        runtime: Option<&Handle>,
        deadline: Duration,
    ) -> Result<(), EngineError> {
        self.work = None;
        let lost = EngineError::RankLost { rank: self.number };
        let Some(thread) = self.thread.take() else {
            return Err(lost);
        };
        let worker = thread.join().map_err(|_| lost)?;
        match (worker, runtime) {
            (Some(worker), Some(runtime)) => {
                let closing = worker.close(deadline);
                let closed = wait_for(runtime, deadline.saturating_add(GRACE), closing);
                Ok(closed.map_err(|why| match why {
                    InVain::TimedOut => ConnectorError::Deadline {
                        what: "the store's runtime, for the end of the worker's tasks",
                        after: deadline.saturating_add(GRACE),
                    },
                    InVain::Ended => ConnectorError::OutOfOrder {
                        call: "close",
                        detail: "the store's runtime has ended before its engine",
                    },
                })??)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so already.
            drop(thread.join());
        }
    }
}

fn run(
    mut parts: Parts,
    tasks: &Receiver<Arc<Work>>,
    done: &Sender<Result<Output, EngineError>>,
) -> Option<StoreWorker> {
    while let Ok(work) = tasks.recv() {
        let output = step(&mut parts, &work);
        let failed = output.is_err();
        if failed {
            parts.port.leave();
        }
        if done.send(output).is_err() || failed {
            break;
        }
    }
    parts.worker
}

fn step(parts: &mut Parts, work: &Work) -> Result<Output, EngineError> {
    let mut hooks = Hooks {
        worker: parts.worker.as_mut().filter(|_| work.metadata.is_some()),
        layer_time: parts.layer_time,
        timeline: parts.timeline.as_ref(),
        late: false,
        began: Instant::now(),
        spent: Duration::ZERO,
    };
    if let (Some(worker), Some(metadata)) = (&mut hooks.worker, &work.metadata) {
        // This engine computes on the thread that calls: whatever it calls after is done.
        hooks.late = is_late(worker.start_load(metadata, HostEvent::done()))?;
    }
    let logits = if work.batch.is_empty() {
        if let Some(worker) = &hooks.worker {
            worker.wait_for_ends(IDLE);
            worker.wait_for_loads(IDLE);
        }
        Vec::new()
    } else {
        hooks.began = Instant::now();
        parts
            .model
            .forward(&work.batch, &mut parts.port, &mut hooks)?
    };
    let mut late = hooks.late;
    let mut results = None;
    let mut loading = false;
    if let Some(worker) = hooks.worker {
        late = late || is_late(worker.wait_for_save(HostEvent::done()))?;
        results = Some(worker.take_results());
        worker.clear_metadata();
        loading = !worker.wait_for_loads(Duration::ZERO);
    }
    Ok(Output {
        rank: parts.port.rank(),
        logits,
        results,
        stats: parts.worker.as_ref().map(StoreWorker::stats),
        late,
        loading,
    })
}

/// Whether a call of the connector's was not over in time. Then the step is computed to its end, for the
/// other ranks, but without the connector, whose results tell what of its loads is void.
fn is_late<T>(result: Result<T, ConnectorError>) -> Result<bool, EngineError> {
    match result {
        Ok(_) => Ok(false),
        Err(error @ ConnectorError::Deadline { .. }) => {
            tracing::warn!(%error, "a step goes on without the connector");
            Ok(true)
        }
        Err(error) => Err(error.into()),
    }
}

/// The connector's place in a step.
struct Hooks<'a> {
    worker: Option<&'a mut StoreWorker>,
    layer_time: Duration,
    timeline: Option<&'a Timeline>,
    /// The connector was late: it is not asked any more.
    late: bool,
    /// When what goes on now began.
    began: Instant,
    /// Time for which this layer has been computed.
    spent: Duration,
}

impl Hooks<'_> {
    /// What went on until now was this.
    fn note(&mut self, layer: u32, activity: Activity) {
        let end = Instant::now();
        if activity == Activity::Compute {
            self.spent += end - self.began;
        }
        if let Some(timeline) = self.timeline {
            timeline.note(layer, activity, self.began, end);
        }
        self.began = end;
    }
}

impl LayerHooks for Hooks<'_> {
    fn before(&mut self, layer: u32) -> Result<(), EngineError> {
        self.note(layer, Activity::Compute);
        if let Some(worker) = self.worker.as_mut().filter(|_| !self.late) {
            // What failed comes back with the results; the layer is computed all the same, and what
            // follows from void bytes is thrown away then.
            self.late = is_late(worker.wait_for_layer(layer))?;
            self.note(layer, Activity::Wait);
        }
        Ok(())
    }

    fn written(&mut self, layer: u32) -> Result<(), EngineError> {
        if let Some(worker) = self.worker.as_mut().filter(|_| !self.late) {
            worker.save_layer(layer, HostEvent::done())?;
        }
        Ok(())
    }

    fn computed(&mut self, layer: u32) {
        let spent = self.spent + self.began.elapsed();
        simulate(self.layer_time.saturating_sub(spent));
        self.note(layer, Activity::Compute);
        self.spent = Duration::ZERO;
    }
}

/// Stands for computation on a device: this thread has nothing to do meanwhile.
fn simulate(time: Duration) {
    if !time.is_zero() {
        #[expect(
            clippy::disallowed_methods,
            reason = "simulated computation waits for nothing but time"
        )]
        thread::sleep(time);
    }
}
