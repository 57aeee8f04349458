//! The engine: scheduler, ranks and connector together.
//!
//! ```text
//! submit ─▶ Scheduler ──plan──▶ ranks (threads) ──logits, results──▶ Scheduler ─▶ take_finished
//!               │                  │
//!        StoreScheduler        StoreWorker          the connector, by its public API
//! ```
//!
//! One thread calls [`Engine`]. A step is synchronous: planned, computed by all ranks, and applied. A rank
//! for which the connector does not come to an end in time makes loads of the step void: their requests start
//! over or fail, as the policy says, and the blocks they loaded into rest until nothing is read into them any
//! more. A step that fails otherwise ends the engine: every later call says why, and all its requests have failed.

mod rank;
#[cfg(test)]
mod tests;
pub mod timeline;
mod waiting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_connector::checks::{Deployment, Execution};
use layercake_connector::contract::{Absorbed, RequestId, SchedulerSide, WorkerSide as _};
use layercake_connector::options::Options;
use layercake_connector::scheduler::StoreScheduler;
use layercake_connector::stats::ConnectorStats;
use layercake_connector::worker::{StoreWorker, TransferObserver};
use layercake_store::StoreClient;
use layercake_transport::Engine as Transport;
use tokio::runtime::Handle;

use self::rank::{Parts, Rank, Work};
use self::timeline::{Observers, Span, Timeline};
use self::waiting::{InVain, wait_for};
use crate::cache::PagedCache;
use crate::error::EngineError;
use crate::model::{LogitsDigest, ModelConfig, RankModel};
use crate::parallel;
use crate::scheduler::{Ended, Limits, Link, Scheduler};

/// How long an engine that has nothing to compute waits for a look-up, or for saves, before it looks for
/// the other.
pub(crate) const IDLE: Duration = Duration::from_millis(1);

/// How long an engine waits for its sharing group: longer than it takes to say that the store does not answer.
const AGREEMENT: Duration = Duration::from_mins(1);

/// What an engine is.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The model.
    pub model: ModelConfig,
    /// Ranks that share its heads.
    pub ranks: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of the cache.
    pub blocks: u64,
    /// The most tokens of a step: longer prompts are computed in chunks.
    pub step_tokens: usize,
    /// The most requests of a step.
    pub sequences: usize,
    /// Whether requests share blocks of equal content in this engine.
    pub prefix_caching: bool,
    /// The least time that a layer takes to compute, for the study of overlap.
    pub layer_time: Duration,
    /// Whether the first rank keeps a record of its time; see [`Engine::take_spans`].
    pub timeline: bool,
}

impl EngineConfig {
    /// An engine for this model with room for a few requests.
    pub fn new(model: ModelConfig) -> Self {
        Self {
            model,
            ranks: 1,
            block_size: 16,
            blocks: 256,
            step_tokens: 512,
            sequences: 16,
            prefix_caching: true,
            layer_time: Duration::ZERO,
            timeline: false,
        }
    }
}

/// The store that an engine saves to and loads from.
#[derive(Clone, Debug)]
pub struct StoreLink {
    /// Its client. Its transfer engine has the cache's memory.
    pub store: StoreClient,
    /// The connector's options.
    pub options: Options,
    /// Namespace of the objects.
    pub tenant: String,
    /// Where the connector's tasks run.
    pub runtime: Handle,
    /// Is told about every transfer of a layer, of all ranks.
    pub observer: Option<Arc<dyn TransferObserver>>,
}

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Its id.
    pub id: RequestId,
    /// What was generated.
    pub tokens: Vec<u32>,
    /// The logits of each generated token.
    pub logits: Vec<LogitsDigest>,
    /// It failed, or was given up: `tokens` ends early.
    pub failed: bool,
    /// From its arrival to its first token.
    pub first_token: Option<Duration>,
    /// Tokens of its prompt that were in this engine's cache when it was admitted first.
    pub local_tokens: usize,
    /// Tokens that were to be loaded from the store then.
    pub loaded_tokens: usize,
    /// How often it lost its blocks.
    pub preemptions: u32,
    /// How often a failed load cut it back.
    pub cuts: u32,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It computed.
    Computed,
    /// There was nothing to compute: look-ups or saves are under way.
    Waited,
    /// There is nothing left to do.
    Idle,
}

/// The reference engine.
#[derive(Debug)]
pub struct Engine {
    scheduler: Scheduler,
    connector: Option<StoreScheduler>,
    ranks: Vec<Rank>,
    runtime: Option<Handle>,
    vocab: u32,
    /// What a step failed with: nothing more is computed.
    broken: Option<String>,
    timeline: Option<Timeline>,
    worker_stats: Vec<ConnectorStats>,
}

impl EngineConfig {
    /// What the connector is told of this engine.
    pub fn deployment(&self, tenant: &str) -> Deployment {
        Deployment {
            tenant: tenant.to_owned(),
            model: "reference".to_owned(),
            revision: self.model.revision(),
            kv_dtype: "f32".to_owned(),
            block_size: self.block_size,
            tp_size: self.ranks,
            storing_ranks: self.ranks,
            pp_size: 1,
            pcp_size: 1,
            dcp_size: 1,
            groups: vec![self.model.cache_layout(self.ranks, self.block_size)],
            compatible_keys: false,
            execution: Execution::Eager,
            retains_blocks: true,
        }
    }

    fn check(&self) -> Result<(), EngineError> {
        self.model.check(self.ranks)?;
        for (name, value) in [
            ("block_size", self.block_size as usize),
            ("blocks", usize::try_from(self.blocks).unwrap_or(usize::MAX)),
            ("step_tokens", self.step_tokens),
            ("sequences", self.sequences),
        ] {
            if value == 0 {
                return Err(EngineError::Setting {
                    name,
                    value: "0".to_owned(),
                    accepted: "at least 1 is needed".to_owned(),
                });
            }
        }
        Ok(())
    }
}

impl Engine {
    /// An engine that computes everything itself. Its cache lies in memory of `transport`.
    pub fn local(config: &EngineConfig, transport: &Transport) -> Result<Self, EngineError> {
        Self::start(config, transport, None)
    }

    /// An engine that saves what it computes to a store, and loads what it finds there. With a sharing group it waits for the
    /// store here, and is refused if it differs from the group's others. So a thread that may block starts it: not one that
    /// [`StoreLink::runtime`] needs to go on.
    pub fn with_store(config: &EngineConfig, link: &StoreLink) -> Result<Self, EngineError> {
        Self::start(config, link.store.engine(), Some(link))
    }

    fn start(
        config: &EngineConfig,
        transport: &Transport,
        link: Option<&StoreLink>,
    ) -> Result<Self, EngineError> {
        config.check()?;
        let timeline = config.timeline.then(|| Timeline::new(Instant::now()));
        let deployment = link.map(|link| config.deployment(&link.tenant));
        let store = link.zip(deployment.as_ref());
        let connector = match store {
            Some((link, deployment)) => Some(StoreScheduler::new(
                deployment,
                link.options.clone(),
                link.store.clone(),
                link.runtime.clone(),
            )?),
            None => None,
        };
        if let (Some((link, _)), Some(scheduler)) = (store, &connector)
            && let Some(group) = &link.options.sharing_group
        {
            let agreed = wait_for(&link.runtime, AGREEMENT, scheduler.agree());
            agreed.map_err(|why| EngineError::Setting {
                name: "sharing_group",
                value: group.clone(),
                accepted: match why {
                    InVain::TimedOut => "an engine of a group waits for the store when it starts: its runtime has to run meanwhile, so no task of a runtime of one thread may start it",
                    InVain::Ended => "an engine of a group waits for the store when it starts, and the runtime of its store has ended",
                }
                .to_owned(),
            })??;
        }
        let blocks = usize::try_from(config.blocks).unwrap_or(usize::MAX);
        let room = blocks.saturating_mul(config.block_size as usize);
        let shapes = config.model.shapes(config.ranks);
        let mut ranks = Vec::new();
        let patience = parallel::patience(link.map(|link| &link.options));
        for port in parallel::ports(config.ranks, patience) {
            let rank = port.rank();
            let cache = PagedCache::new(&shapes, config.block_size, config.blocks, transport)?;
            let worker = match store {
                Some((link, deployment)) => {
                    let (options, store) = (link.options.clone(), link.store.clone());
                    let mut worker =
                        StoreWorker::new(deployment, rank, options, store, &link.runtime)?;
                    if let Some(scheduler) = &connector {
                        scheduler.identity().check_peer(worker.identity())?;
                    }
                    worker.register_caches(&cache.registration()?)?;
                    let observers = Observers {
                        timeline: timeline.clone().filter(|_| rank == 0),
                        owner: link.observer.clone(),
                    };
                    if observers.timeline.is_some() || observers.owner.is_some() {
                        worker.observe(Arc::new(observers));
                    }
                    Some(worker)
                }
                None => None,
            };
            let model = RankModel::new(&config.model, (rank, config.ranks), room, cache);
            ranks.push(Rank::start(Parts {
                model,
                port,
                worker,
                layer_time: config.layer_time,
                timeline: timeline.clone().filter(|_| rank == 0),
            })?);
        }
        Ok(Self {
            scheduler: Scheduler::new(Limits {
                block_size: config.block_size as usize,
                blocks: config.blocks,
                step_tokens: config.step_tokens,
                sequences: config.sequences,
                sharing: config.prefix_caching,
            }),
            connector,
            worker_stats: vec![ConnectorStats::default(); ranks.len()],
            ranks,
            runtime: link.map(|link| link.runtime.clone()),
            vocab: config.model.vocab,
            broken: None,
            timeline,
        })
    }

    /// Takes a request: `wanted` tokens after `prompt`.
    pub fn submit(
        &mut self,
        id: impl Into<RequestId>,
        prompt: Vec<u32>,
        wanted: usize,
    ) -> Result<(), EngineError> {
        let id = id.into();
        if let Some(token) = prompt.iter().find(|token| **token >= self.vocab) {
            return Err(EngineError::BadRequest {
                request: id,
                detail: format!("token {token} is not below {}", self.vocab),
            });
        }
        self.scheduler.submit(id, prompt, wanted)
    }

    /// Gives a request up. `false`: there is none of this id.
    pub fn abort(&mut self, id: &RequestId) -> bool {
        self.scheduler.end(id, true, &mut link(&mut self.connector))
    }

    /// Takes a running request's blocks away: it starts over when there is room. `false`: it is not
    /// running.
    pub fn preempt(&mut self, id: &RequestId) -> bool {
        self.scheduler.preempt(id)
    }

    /// Requests that have not ended, and those whose saves are under way.
    pub fn open(&self) -> usize {
        self.scheduler.open() + self.scheduler.draining()
    }

    /// Blocks that no request uses.
    pub fn idle_blocks(&self) -> usize {
        self.scheduler.idle_blocks()
    }

    /// Requests that have ended since the last call.
    pub fn take_finished(&mut self) -> Vec<Completion> {
        let ended = self.scheduler.take_ended();
        ended.into_iter().map(Completion::from).collect()
    }

    /// What the first rank did since the last call, and what was moved for it beside; empty without
    /// [`EngineConfig::timeline`].
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.timeline
            .as_ref()
            .map(Timeline::take)
            .unwrap_or_default()
    }

    /// Counters of the connector's scheduler side, and of each rank's worker side after the last step.
    pub fn connector_stats(&self) -> Option<(ConnectorStats, &[ConnectorStats])> {
        let scheduler = self.connector.as_ref()?.stats();
        Some((scheduler, &self.worker_stats))
    }

    /// One step.
    pub fn step(&mut self) -> Result<Progress, EngineError> {
        if let Some(reason) = self.broken.clone() {
            return Err(EngineError::Ended { reason });
        }
        let result = self.try_step();
        if let Err(error) = &result {
            tracing::error!(%error, "a step failed: the engine ends all requests");
            self.broken = Some(error.to_string());
            for id in self.scheduler.open_ids() {
                self.abort(&id);
            }
        }
        result
    }

    fn try_step(&mut self) -> Result<Progress, EngineError> {
        let plan = self.scheduler.plan(link(&mut self.connector))?;
        if plan.is_empty() {
            if self.open() == 0 && !self.scheduler.holds() {
                return Ok(Progress::Idle);
            }
            // The workers wait where saves are under way.
            if self.scheduler.draining() == 0
                && let Some(connector) = &mut self.connector
            {
                connector.wait(IDLE);
            }
        }
        let batch = self.scheduler.batch(&plan);
        let metadata = match &mut self.connector {
            Some(connector) => Some(self.scheduler.metadata(&plan, connector)?),
            None => None,
        };
        let work = Arc::new(Work { batch, metadata });
        for rank in &self.ranks {
            rank.begin(&work)?;
        }
        // All are heard, so that the reason is told and not what followed from it.
        let outputs: Vec<_> = self.ranks.iter().map(Rank::end).collect();
        let mut logits = Vec::new();
        let mut results = Vec::new();
        let mut trouble = None;
        let (mut late, mut loading) = (false, false);
        for output in outputs {
            match output {
                Ok(output) => {
                    late |= output.late;
                    loading |= output.loading;
                    if output.rank == 0 {
                        logits = output.logits;
                    }
                    results.extend(output.results);
                    let place = self.worker_stats.get_mut(output.rank as usize);
                    if let (Some(place), Some(stats)) = (place, output.stats) {
                        *place = stats;
                    }
                }
                Err(error @ EngineError::RankLost { .. }) => {
                    trouble.get_or_insert(error);
                }
                Err(error) => trouble = Some(error),
            }
        }
        if let Some(error) = trouble {
            return Err(error);
        }
        if !loading {
            self.scheduler.let_go();
        }
        if let (true, Some(step)) = (late, &work.metadata) {
            self.scheduler.hold(step);
        }
        let absorbed = match &mut self.connector {
            Some(connector) => connector.absorb(&results),
            None => Absorbed::default(),
        };
        self.scheduler
            .apply(&plan, logits, &absorbed, link(&mut self.connector));
        if late {
            for (id, _) in &absorbed.recompute {
                self.preempt(id);
            }
        }
        Ok(if plan.is_empty() {
            Progress::Waited
        } else {
            Progress::Computed
        })
    }

    /// Steps until every request has ended and every save is over; gives the requests that ended.
    pub fn run(&mut self) -> Result<Vec<Completion>, EngineError> {
        while self.step()? != Progress::Idle {}
        Ok(self.take_finished())
    }

    /// Gives up what is open, saves what was handed over, and ends all threads and tasks. All ranks are closed,
    /// whatever fails; the first failure is returned.
    pub fn close(mut self, deadline: Duration) -> Result<(), EngineError> {
        let until = Instant::now() + deadline;
        for id in self.scheduler.open_ids() {
            self.abort(&id);
        }
        let mut closed = Ok(());
        while self.broken.is_none() && Instant::now() < until {
            match self.step() {
                Ok(Progress::Idle) => break,
                Ok(_) => {}
                // The engine is broken from here on.
                Err(error) => closed = Err(error),
            }
        }
        let runtime = self.runtime.take();
        for rank in std::mem::take(&mut self.ranks) {
            let rest = until.saturating_duration_since(Instant::now());
            closed = closed.and(rank.close(runtime.as_ref(), rest));
        }
        closed
    }
}

fn link(connector: &mut Option<StoreScheduler>) -> Link<'_> {
    connector
        .as_mut()
        .map(|connector| connector as &mut dyn SchedulerSide)
}

impl From<Ended> for Completion {
    fn from(ended: Ended) -> Self {
        let story = ended.story;
        let first = story.first_token;
        Self {
            id: ended.id,
            tokens: ended.tokens,
            logits: story.logits,
            failed: ended.failed,
            first_token: first.map(|at| at.duration_since(story.arrived)),
            local_tokens: story.local,
            loaded_tokens: story.loaded,
            preemptions: story.preemptions,
            cuts: story.cuts,
        }
    }
}
