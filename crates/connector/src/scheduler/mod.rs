//! The scheduler side on a store.
//!
//! [`Planner`] decides; this shell runs its questions as tasks on the engine's runtime and brings the
//! answers back through a channel that is emptied at every call. No call waits for the store. Tasks
//! belong to the scheduler and end with it, or with their request; each has a deadline.

mod asking;
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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use layercake_store::StoreClient;
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinSet};

use crate::checks::{Checked, Deployment, Execution, Identity, check_client};
use crate::contract::{
    Absorbed, FreeBlocks, Matched, RequestId, RequestView, SchedulerSide, StepMetadata, StepPlan,
    WorkerResults,
};
use crate::error::ConnectorError;
use crate::keys::BlockKeys;
use crate::lookup::{Found, Lookup};
use crate::options::Options;
use crate::request::{Limits, QuestionId};
use crate::sharing;
use crate::stats::{ConnectorStats, Counters, MissReason};

/// The lease of a master that does not say how long its leases are.
const USUAL_LEASE: Duration = Duration::from_secs(10);

/// How long the store may take to say what the sharing group is. More than a master that is not set up otherwise keeps the
/// reservation of an engine that was lost while it recorded that.
const AGREEMENT: Duration = Duration::from_secs(45);

type Answer = (Question, Found);

/// The scheduler side of the layerwise store connector.
#[derive(Debug)]
pub struct StoreScheduler {
    planner: Planner,
    keys: Arc<BlockKeys>,
    identity: Identity,
    /// It is known to be that of its sharing group, if it is in one.
    agreed: Arc<AtomicBool>,
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
            agreed: Arc::new(options.sharing_group.is_none().into()),
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

    /// Compares this side with all engines of the same `sharing_group`, through the pool: for the engine to await before its
    /// first request, which is refused before. Refuses by name what differs, and a store that can't say. Without the option
    /// there is nothing to compare. A group lives within the tenant of the store's client.
    pub fn agree(&self) -> impl Future<Output = Result<(), ConnectorError>> + Send + use<> {
        let (store, identity) = (self.store.clone(), self.identity.clone());
        let (group, agreed) = (self.options.sharing_group.clone(), Arc::clone(&self.agreed));
        async move {
            if let Some(group) = &group {
                sharing::agree(&store, group, &identity, AGREEMENT).await?;
                agreed.store(true, Ordering::Release);
            }
            Ok(())
        }
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
        if let Ok((question, found)) = self.answers.recv_timeout(at_most) {
            self.answered(question, found);
        }
    }

    fn answered(&mut self, question: Question, found: Found) {
        if let Some((id, _)) = self.asking.get(&question.request)
            && *id == question.id
        {
            self.asking.remove(&question.request);
        }
        self.planner.answered(question, found, self.now());
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
        while let Ok((question, found)) = self.answers.try_recv() {
            self.answered(question, found);
        }
    }

    fn ask(&mut self, question: Question) {
        let keys = match self.keys.block_major(&question.hashes) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::warn!(%error, request = %question.request, "no keys can be made of these block hashes");
                let found = Found::failed(MissReason::NeverStored);
                self.planner.answered(question, found, self.start.elapsed());
                return;
            }
        };
        let lookup = Lookup::new(
            question.hashes.len(),
            self.keys.ranks(),
            // Questions are batched as starts and ends of sessions are.
            self.options
                .lookup_window_blocks
                .min(self.options.max_transfer_blocks),
        );
        let (store, answer) = (self.store.clone(), self.answer.clone());
        // Not all of the answer's life is spent on waiting for it.
        let within = self.options.lookup_timeout.min(answer_life(&store) / 2);
        let deadline = tokio::time::Instant::now() + within;
        let early = self.options.per_layer_readiness;
        let (request, id) = (question.request.clone(), question.id);
        self.stop_asking(&request);
        let task = self.lookups.spawn_on(
            async move {
                let found = asking::ask(&store, &keys, lookup, early, deadline).await;
                // Nobody is left to be told once the scheduler is gone.
                drop(answer.send((question, found)));
            },
            &self.runtime,
        );
        self.asking.insert(request, (id, task));
    }
}

/// How long an answer may be acted upon: for half of the lease that the look-up was granted; the other half is for the
/// load to begin in.
fn answer_life(store: &StoreClient) -> Duration {
    store.link().lease().unwrap_or(USUAL_LEASE) / 2
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
            // Look-ups end by themselves before, with what they have come to.
            lookup: options.lookup_timeout + options.lookup_timeout / 4,
            answer,
            drain: options.layer_timeout.saturating_mul(2),
        },
    })
}

impl SchedulerSide for StoreScheduler {
    fn matched_tokens(&mut self, request: &RequestView<'_>) -> Matched {
        // A master that came back may grant other leases.
        self.planner.set_answer_life(answer_life(&self.store));
        if !self.agreed.load(Ordering::Acquire) {
            // Nothing of others' is used; a step is refused by name. The request is known from here on, as any that was asked
            // about.
            let nothing = RequestView {
                tokens: 0,
                hashes: &[],
                ..*request
            };
            return self.planner.matched(&nothing, self.now()).0;
        }
        self.take_answers();
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
        if !self.agreed.load(Ordering::Acquire) {
            return Err(ConnectorError::OutOfOrder {
                call: "build_metadata",
                detail: "an engine with a sharing_group awaits agree first",
            });
        }
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
