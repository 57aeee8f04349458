//! The scheduler side on a store.
//!
//! [`Planner`] decides; this shell runs its questions as tasks on the engine's runtime and brings the
//! answers back through a channel that is emptied at every call. No call waits for the store. Tasks
//! belong to the scheduler and end with it, or with their request; each has a deadline.

mod entry;
mod pays;
mod planner;
mod reports;
mod seen;

pub use pays::Payoff;
pub use planner::{Planner, PlannerConfig, Question};

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{Presence, Recency};
use layercake_store::{Progress, StoreClient, StoreError};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinSet};

use crate::checks::{Checked, Deployment, Execution, Identity, check_client};
use crate::contract::{
    Absorbed, FreeBlocks, Matched, RequestId, RequestView, SchedulerSide, StepMetadata, StepPlan,
    WorkerResults,
};
use crate::error::ConnectorError;
use crate::keys::BlockKeys;
use crate::lookup::{Found, KeyState, Lookup};
use crate::options::Options;
use crate::request::{Limits, QuestionId};
use crate::stats::{ConnectorStats, Counters, MissReason};

/// The lease of a master that does not say how long its leases are.
const USUAL_LEASE: Duration = Duration::from_secs(10);

type Answer = (Question, Result<Found, MissReason>);

/// The scheduler side of the layerwise store connector.
#[derive(Debug)]
pub struct StoreScheduler {
    planner: Planner,
    keys: Arc<BlockKeys>,
    identity: Identity,
    execution: Execution,
    options: Options,
    store: StoreClient,
    runtime: Handle,
    lookups: JoinSet<()>,
    /// What is being asked for whom.
    asking: HashMap<RequestId, (QuestionId, AbortHandle)>,
    answer: Sender<Answer>,
    answers: Receiver<Answer>,
    start: Instant,
    counters: Arc<Counters>,
}

impl StoreScheduler {
    /// Checks the deployment and makes its scheduler side. Look-ups run on `runtime`.
    pub fn new(
        deployment: &Deployment,
        options: Options,
        store: StoreClient,
        runtime: Handle,
    ) -> Result<Self, ConnectorError> {
        let checked = deployment.check(&options)?;
        check_client(&options, &store)?;
        let keys = Arc::new(BlockKeys::new(deployment, &checked)?);
        let counters = Arc::new(Counters::default());
        let planner = Planner::new(
            planner_config(deployment, &checked, &options, answer_life(&store))?,
            Arc::clone(&counters),
        );
        let (answer, answers) = channel();
        Ok(Self {
            planner,
            keys,
            identity: checked.identity,
            execution: checked.execution,
            options,
            store,
            runtime,
            lookups: JoinSet::new(),
            asking: HashMap::new(),
            answer,
            answers,
            start: Instant::now(),
            counters,
        })
    }

    /// What this side must have in common with its workers, and engines with each other: compared by
    /// [`Identity::check_peer`] before the first request.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// How the forward pass has to run, so that the workers' hooks do.
    pub fn execution(&self) -> Execution {
        self.execution
    }

    /// Counters of this side.
    pub fn stats(&self) -> ConnectorStats {
        self.counters.snapshot()
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> usize {
        self.planner.len()
    }

    /// Look-ups that are under way.
    pub fn open_lookups(&mut self) -> usize {
        self.take_answers();
        self.lookups.len()
    }

    /// Waits until a look-up has been answered, but no longer than this: for an engine that has nothing
    /// to compute meanwhile.
    pub fn wait(&mut self, at_most: Duration) {
        if let Ok((question, answer)) = self.answers.recv_timeout(at_most) {
            self.answered(&question, answer);
        }
    }

    fn answered(&mut self, question: &Question, answer: Result<Found, MissReason>) {
        if let Some((id, _)) = self.asking.get(&question.request)
            && *id == question.id
        {
            self.asking.remove(&question.request);
        }
        self.planner.answered(question, answer, self.now());
    }

    /// Nobody asks any more what this request asked last.
    fn stop_asking(&mut self, request: &RequestId) {
        if let Some((_, task)) = self.asking.remove(request) {
            task.abort();
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn take_answers(&mut self) {
        while self.lookups.try_join_next().is_some() {}
        while let Ok((question, answer)) = self.answers.try_recv() {
            self.answered(&question, answer);
        }
    }

    fn ask(&mut self, question: Question) {
        let keys = match self.keys.block_major(&question.hashes) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::warn!(%error, request = %question.request, "no keys can be made of these block hashes");
                let answer = Err(MissReason::NeverStored);
                self.planner
                    .answered(&question, answer, self.start.elapsed());
                return;
            }
        };
        let lookup = Lookup::new(
            question.hashes.len(),
            self.keys.ranks(),
            self.options.lookup_window_blocks,
        );
        let (store, answer) = (self.store.clone(), self.answer.clone());
        // Not all of the answer's life is spent on waiting for it.
        let deadline = self.options.lookup_timeout.min(answer_life(&store) / 2);
        let early = self.options.per_layer_readiness;
        let (request, id) = (question.request.clone(), question.id);
        self.stop_asking(&request);
        let task = self.lookups.spawn_on(
            async move {
                let asked = tokio::time::timeout(deadline, run(&store, &keys, lookup, early)).await;
                let found = asked.unwrap_or(Err(MissReason::TimeOut));
                // Nobody is left to be told once the scheduler is gone.
                drop(answer.send((question, found)));
            },
            &self.runtime,
        );
        self.asking.insert(request, (id, task));
    }
}

/// Asks window after window. With `early`, what is being written by a writer that publishes it counts as readable.
async fn run(
    store: &StoreClient,
    keys: &[ObjectKey],
    mut lookup: Lookup,
    early: bool,
) -> Result<Found, MissReason> {
    while let Some(window) = lookup.next() {
        let mut asking = Window {
            store,
            first: window.start,
            keys: &keys[window],
            states: Vec::new(),
            epoch: lookup.epoch(),
            queried: 0,
        };
        asking.ask(early).await.map_err(|error| {
            tracing::debug!(%error, "a look-up counts as a miss");
            MissReason::Master
        })?;
        lookup.answer(&asking.states, asking.epoch, asking.queried);
    }
    Ok(lookup.found())
}

/// A window that is being asked for.
struct Window<'a> {
    store: &'a StoreClient,
    /// Place of the first key in the request's.
    first: usize,
    keys: &'a [ObjectKey],
    /// Of the keys so far.
    states: Vec<KeyState>,
    epoch: Epoch,
    queried: u64,
}

impl Window<'_> {
    /// Each key is asked for once; with `early` up to three times: those from the first that is being written on once
    /// more, and those among them that are complete once again, as what is loaded must be touched.
    async fn ask(&mut self, early: bool) -> Result<(), StoreError> {
        self.probe(self.keys.len()).await?;
        if !early || self.states.last() != Some(&KeyState::Reserved) {
            return Ok(());
        }
        self.states.pop();
        let rest = &self.keys[self.states.len()..];
        self.queried += rest.len() as u64;
        let progress = self.store.progress(rest).await?;
        for run in progress.chunk_by(|a, b| a == b) {
            let end = self.states.len() + run.len();
            match run[0] {
                Progress::Publishing => self.states.resize(end, KeyState::Readable),
                Progress::Complete => self.probe(run.len()).await?,
                Progress::Unreadable => self.states.push(KeyState::Reserved),
                Progress::Absent => self.states.push(KeyState::Absent),
            }
            if self.states.len() < end || self.states.last() != Some(&KeyState::Readable) {
                break;
            }
        }
        Ok(())
    }

    /// Looks the next keys up. Their states end with the first that is not readable.
    async fn probe(&mut self, keys: usize) -> Result<(), StoreError> {
        let from = self.states.len();
        let recency = Recency {
            epoch: self.epoch,
            first_index: u32::try_from(self.first + from).unwrap_or(u32::MAX),
        };
        let asked = &self.keys[from..from + keys];
        let answer = self.store.probe_prefix(asked, recency).await?;
        self.epoch = answer.epoch;
        self.queried += answer.keys_queried;
        let states = answer.states.iter().map(|state| state_of(*state));
        let first_miss = states.clone().position(|it| it != KeyState::Readable);
        let known = first_miss.map_or(keys, |at| at + 1);
        self.states.extend(states.take(known));
        Ok(())
    }
}

/// How long an answer may be acted upon: for half of the lease that the look-up was granted; the other half is for the
/// load to begin in.
fn answer_life(store: &StoreClient) -> Duration {
    store.link().lease().unwrap_or(USUAL_LEASE) / 2
}

fn state_of(presence: Presence) -> KeyState {
    match presence {
        Presence::Complete => KeyState::Readable,
        Presence::Reserved => KeyState::Reserved,
        Presence::Absent => KeyState::Absent,
    }
}

fn planner_config(
    deployment: &Deployment,
    checked: &Checked,
    options: &Options,
    answer: Duration,
) -> Result<PlannerConfig, ConnectorError> {
    let block_size = NonZeroU64::new(deployment.block_size.into());
    Ok(PlannerConfig {
        block_size: block_size.ok_or(ConnectorError::Unsupported {
            setting: "block_size",
            value: "0".to_owned(),
            accepted: "at least 1 token is needed",
        })?,
        ranks: deployment.tp_size,
        object_len: checked.layout.object_len(),
        role: options.role,
        policy: options.failure_policy,
        save_decode_cache: options.save_decode_cache,
        restore: !deployment.retains_blocks,
        decline_slow_loads: options.decline_slow_loads,
        limits: Limits {
            lookup: options.lookup_timeout,
            answer,
            drain: options.layer_timeout.saturating_mul(2),
        },
    })
}

impl SchedulerSide for StoreScheduler {
    fn matched_tokens(&mut self, request: &RequestView<'_>) -> Matched {
        self.take_answers();
        // A master that came back may grant other leases.
        self.planner.set_answer_life(answer_life(&self.store));
        let (matched, question) = self.planner.matched(request, self.now());
        if let Some(question) = question {
            self.ask(question);
        }
        matched
    }

    fn after_allocation(
        &mut self,
        request: &RequestId,
        external: u64,
    ) -> Result<(), ConnectorError> {
        self.planner.allocated(request, external)
    }

    fn build_metadata(&mut self, plan: &StepPlan<'_>) -> Result<StepMetadata, ConnectorError> {
        self.planner.plan(plan)
    }

    fn request_finished(&mut self, request: &RequestId) -> FreeBlocks {
        self.stop_asking(request);
        let now = self.now();
        self.planner.finished(request, now)
    }

    fn absorb(&mut self, results: &[WorkerResults]) -> Absorbed {
        let now = self.now();
        self.planner.absorb(results, now)
    }
}
