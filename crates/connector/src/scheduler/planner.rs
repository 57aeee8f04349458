//! The scheduler side without the store: what to ask, what to load, what to save. Pure.
//!
//! Time and the store's answers come in as values, questions go out as values. The planner keeps, per
//! request, the state machine of [`request`](crate::request), the table as it was last told to the
//! workers, and how far blocks are known to be stored or were handed out to be saved. The invariants:
//! a block is in a load span only if an answer to this request's question has it in its prefix; a block
//! that such an answer has is in no save span; no block is in two save spans of one attempt.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use super::entry::Entry;
use super::pays::{Payoff, prompt_tokens};
use super::reports::Reports;
use super::seen::Seen;
use crate::contract::{
    BlockHash, BlockId, FreeBlocks, METADATA_VERSION, Matched, RequestId, RequestStep, RequestView,
    ScheduledRequest, Span, StepMetadata, StepPlan,
};
use crate::error::ConnectorError;
use crate::lookup::{Found, KeyState};
use crate::options::{FailurePolicy, Role};
use crate::request::{Hit, Limits, Progress, QuestionId, Questions};
use crate::stats::{Counters, MissReason};

/// Steps whose number of tokens is remembered until their results come.
const STEPS_REMEMBERED: usize = 16;

/// Where blocks are not retained, a store that keeps nothing leaves no way to compute a prompt in chunks:
/// after so many attempts the request fails.
const MOST_ATTEMPTS: u32 = 8;

/// What a planner has to know.
#[derive(Clone, Debug)]
pub struct PlannerConfig {
    /// Tokens in a block.
    pub block_size: NonZeroU64,
    /// Workers that report.
    pub ranks: u32,
    /// Bytes of a block's object on one rank.
    pub object_len: u64,
    /// Who saves and loads.
    pub role: Role,
    /// What a failed load means.
    pub policy: FailurePolicy,
    /// Save blocks with generated tokens, too.
    pub save_decode_cache: bool,
    /// Committed blocks come back for later chunks.
    pub restore: bool,
    /// Decline loads that are slower than computing.
    pub decline_slow_loads: bool,
    /// Limits of waits.
    pub limits: Limits,
}

/// A question for the store.
#[derive(Clone, Debug)]
pub struct Question {
    /// Whose.
    pub request: RequestId,
    /// Which.
    pub id: QuestionId,
    /// The blocks.
    pub hashes: Vec<BlockHash>,
}

/// The state of all requests.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    requests: HashMap<RequestId, Entry>,
    questions: Questions,
    preempted: BTreeSet<RequestId>,
    finished: Vec<RequestId>,
    /// What the workers are told next of requests that computed from void blocks.
    void: BTreeSet<RequestId>,
    reports: Reports,
    seen: Seen,
    payoff: Payoff,
    steps: VecDeque<(u64, u64)>,
    step: u64,
    counters: Arc<Counters>,
}

impl Planner {
    /// A planner without requests.
    pub fn new(config: PlannerConfig, counters: Arc<Counters>) -> Self {
        Self {
            reports: Reports::new(config.ranks),
            config,
            requests: HashMap::new(),
            questions: Questions::default(),
            preempted: BTreeSet::new(),
            finished: Vec::new(),
            void: BTreeSet::new(),
            seen: Seen::default(),
            payoff: Payoff::default(),
            steps: VecDeque::new(),
            step: 0,
            counters,
        }
    }

    /// So long after its question a store's answer may be acted upon, for requests that come from now on.
    pub fn set_answer_life(&mut self, life: Duration) {
        self.config.limits.answer = life;
    }

    /// Requests that have not ended.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// What the store has of a request beyond what the engine has, and what to ask for that.
    pub fn matched(
        &mut self,
        view: &RequestView<'_>,
        now: Duration,
    ) -> (Matched, Option<Question>) {
        let nothing = (Matched::Tokens(0), None);
        let size = self.config.block_size.get();
        // One token is left to compute: a hit is of no use beyond the rest.
        let useful = view.tokens.saturating_sub(1);
        let entry = self
            .requests
            .entry(view.request.clone())
            .or_insert_with(|| Entry::new(self.config.limits));
        (entry.offered, entry.own) = (0, view.computed);
        let blocks = view.hashes.len().min(to_usize(view.tokens / size));
        if !self.config.role.loads() || useful <= view.computed || blocks == 0 {
            return nothing;
        }
        let hashes = &view.hashes[..blocks];
        let own = to_usize(view.computed / size);
        let questions = &mut self.questions;
        match entry.machine.look_up(view.tokens, blocks, now, questions) {
            Progress::Wait => (Matched::NotKnownYet, None),
            Progress::Ask(id) => {
                self.counters.lookups.add(1);
                let question = Question {
                    request: view.request.clone(),
                    id,
                    hashes: hashes.to_vec(),
                };
                (Matched::NotKnownYet, Some(question))
            }
            Progress::TooLate => {
                entry.miss(&self.counters, MissReason::TimeOut, own..blocks);
                nothing
            }
            Progress::Never => {
                if entry.machine.computes() {
                    entry.miss(&self.counters, MissReason::AfterFailure, own..blocks);
                }
                nothing
            }
            Progress::Known(hit) => {
                let end = (hit.blocks as u64).saturating_mul(size).min(useful);
                let tokens = end.saturating_sub(view.computed);
                let loads = own..to_usize(end.div_ceil(size)).max(own);
                let bytes = (loads.len() as u64).saturating_mul(self.config.object_len);
                let payoff = &mut self.payoff;
                let declines = tokens > 0
                    && self.config.decline_slow_loads
                    && !*entry.pays.get_or_insert_with(|| payoff.pays(bytes, tokens));
                if declines {
                    entry.miss(&self.counters, MissReason::DoesNotPay, loads);
                    return nothing;
                }
                entry.offered = tokens;
                (Matched::Tokens(tokens), None)
            }
        }
    }

    /// The store's answer to a question. Where it failed, what it came to before counts, and the rest is missed.
    pub fn answered(&mut self, question: Question, found: Found, now: Duration) {
        self.counters.keys_queried.add(found.keys_queried);
        let hit = Hit {
            blocks: found.blocks.min(question.hashes.len()),
            epoch: found.epoch,
        };
        let asked = self.requests.get_mut(&question.request);
        let Some(entry) = asked.filter(|entry| {
            // A late answer changes nothing, whoever it was for.
            !entry.machine.is_over()
        }) else {
            self.counters.late_answers.add(1);
            return;
        };
        if !entry.machine.answer(question.id, hit, now) {
            self.counters.late_answers.add(1);
            return;
        }
        entry.pays = None;
        entry.epoch = hit.epoch;
        entry.settled = hit.blocks;
        self.counters.hit_blocks.add(hit.blocks as u64);
        let mut hashes = question.hashes;
        let blocks = hashes.len();
        let reason = match (found.failure, found.missing, hashes.get(hit.blocks)) {
            (_, _, None) => None,
            (Some(reason), ..) => Some(reason),
            (_, Some(KeyState::Reserved), _) => Some(MissReason::InProgress),
            (_, _, Some(first)) if self.seen.contains(first) => Some(MissReason::Evicted),
            _ => Some(MissReason::NeverStored),
        };
        if let Some(reason) = reason {
            let own = to_usize(entry.own / self.config.block_size);
            entry.miss(&self.counters, reason, hit.blocks.max(own)..blocks);
        }
        // It is kept until it is loaded: not with the room of all that was asked for.
        hashes.truncate(hit.blocks);
        hashes.shrink_to_fit();
        self.seen.note(&hashes);
        entry.hit = hashes;
    }

    /// The engine loads `external` of the tokens it was offered.
    pub fn allocated(&mut self, request: &RequestId, external: u64) -> Result<(), ConnectorError> {
        let entry =
            self.requests
                .get_mut(request)
                .ok_or_else(|| ConnectorError::UnknownRequest {
                    request: request.clone(),
                })?;
        if entry.machine.allocate(external, entry.offered) {
            return Ok(());
        }
        Err(ConnectorError::OutOfOrder {
            call: "after_allocation",
            detail: "no more tokens can be loaded than matched_tokens has just offered",
        })
    }

    /// The instructions for a step.
    pub fn plan(&mut self, plan: &StepPlan<'_>) -> Result<StepMetadata, ConnectorError> {
        for request in plan.preempted {
            self.preempt(request);
        }
        for scheduled in plan.requests {
            self.check(scheduled)?;
        }
        self.step += 1;
        let requests = plan.requests.iter();
        let requests: Vec<RequestStep> = requests
            .map(|scheduled| self.plan_request(scheduled))
            .collect();
        let loads = plan.requests.iter().zip(&requests);
        let loads = loads.flat_map(|(scheduled, part)| part.loaded(scheduled.table));
        let size = self.config.block_size.get();
        let computed = plan.requests.iter().flat_map(|part| begun(part, size));
        self.reports
            .planned(self.step, loads.collect(), computed.copied().collect());
        self.steps.push_back((self.step, prompt_tokens(plan)));
        if self.steps.len() > STEPS_REMEMBERED {
            self.steps.pop_front();
        }
        let finished = std::mem::take(&mut self.finished);
        for request in &finished {
            let entry = self.requests.get_mut(request);
            // Of this name may be a later one, too.
            if let Some(entry) = entry.filter(|entry| entry.machine.is_over()) {
                entry.end_told = Some(self.step);
            }
        }
        Ok(StepMetadata {
            version: METADATA_VERSION,
            step: self.step,
            requests,
            preempted: std::mem::take(&mut self.preempted).into_iter().collect(),
            finished,
            void: std::mem::take(&mut self.void).into_iter().collect(),
            confirmed: self.reports.confirmed(),
        })
    }

    fn preempt(&mut self, request: &RequestId) {
        let Some(entry) = self.requests.get_mut(request) else {
            return;
        };
        // One that has ended since is fenced all the same: its blocks are given to others already.
        self.preempted.insert(request.clone());
        if entry.machine.preempt() {
            entry.start_over(0, self.config.block_size.get());
            entry.saves = false;
        }
    }

    /// Refuses what can't be planned, before anything is.
    fn check(&self, scheduled: &ScheduledRequest<'_>) -> Result<(), ConnectorError> {
        let size = self.config.block_size.get();
        if let Some(entry) = self.requests.get(scheduled.request) {
            if entry.machine.is_over() {
                return Err(ConnectorError::OutOfOrder {
                    call: "build_metadata",
                    detail: "a request is scheduled that has ended",
                });
            }
            entry.check_load(scheduled, size)?;
            if self.config.restore {
                entry.check_order(scheduled, self.reports.confirmed())?;
            } else {
                entry.check_table(scheduled, size)?;
            }
        }
        if self.config.restore && !scheduled.computed.is_multiple_of(size) {
            return Err(ConnectorError::Metadata {
                detail: format!(
                    "request {:?} has computed {} tokens: without retained blocks, chunks end with whole blocks of {size}",
                    scheduled.request, scheduled.computed
                ),
            });
        }
        let end = scheduled.computed.saturating_add(scheduled.scheduled);
        let blocks = scheduled.table.len();
        if to_usize(end.div_ceil(size)) > blocks {
            return Err(ConnectorError::Metadata {
                detail: format!(
                    "request {:?} has {blocks} blocks for {end} tokens",
                    scheduled.request
                ),
            });
        }
        Ok(())
    }

    fn plan_request(&mut self, scheduled: &ScheduledRequest<'_>) -> RequestStep {
        let size = self.config.block_size.get();
        let entry = self
            .requests
            .entry(scheduled.request.clone())
            .or_insert_with(|| Entry::new(self.config.limits));
        let external = entry.machine.allocated().unwrap_or(0);
        let hit = std::mem::take(&mut entry.hit);
        entry.machine.schedule();
        let end = scheduled.computed.saturating_add(scheduled.scheduled);
        let attempt = entry.machine.attempt();
        let load = (external > 0).then(|| {
            let first = to_usize(scheduled.computed.saturating_sub(external) / size);
            // Checked: the hit goes so far.
            taken(hit, first, to_usize(scheduled.computed.div_ceil(size)))
        });
        let mut whole = to_usize(end / size).min(scheduled.hashes.len());
        if !self.config.save_decode_cache {
            whole = whole.min(to_usize(scheduled.prompt / size));
        }
        let save = (self.config.role.saves() && whole > entry.settled).then(|| {
            let save = span(scheduled.hashes, entry.settled, whole);
            entry.settled = whole;
            entry.saves = true;
            save
        });
        // After a cut-back, too, nothing of what was computed before is left.
        let lost = self.config.restore && external == 0;
        let restore = if lost { scheduled.computed / size } else { 0 };
        let restore = u32::try_from(restore).unwrap_or(u32::MAX);
        let table = entry.tell(scheduled.table, attempt, self.step);
        entry.end = end;
        RequestStep {
            request: scheduled.request.clone(),
            attempt,
            epoch: entry.epoch.0,
            table,
            load: load.flatten(),
            save: save.flatten(),
            restore,
        }
    }

    /// The engine has ended a request.
    pub fn finished(&mut self, request: &RequestId, now: Duration) -> FreeBlocks {
        let Some(entry) = self.requests.get_mut(request) else {
            return FreeBlocks::Now;
        };
        let ranks = if entry.saves { self.config.ranks } else { 0 };
        // The workers forget it, too, if they know it.
        let known = entry.told.is_some();
        let ended = entry.machine.finish(ranks, now);
        if ended.is_some() && known {
            self.finished.push(request.clone());
        }
        match ended {
            Some(true) => {
                self.requests.remove(request);
                FreeBlocks::Now
            }
            Some(false) | None => FreeBlocks::Delayed,
        }
    }
}

/// The blocks that a step computes from their first token on.
fn begun<'a>(scheduled: &ScheduledRequest<'a>, size: u64) -> &'a [BlockId] {
    let end = scheduled.computed.saturating_add(scheduled.scheduled);
    let first = to_usize(scheduled.computed.div_ceil(size));
    let end = to_usize(end.div_ceil(size)).min(scheduled.table.len());
    scheduled.table.get(first..end).unwrap_or_default()
}

/// The blocks from `first` up to `end`; `None` if there are none.
fn span(hashes: &[BlockHash], first: usize, end: usize) -> Option<Span> {
    let hashes = hashes.get(first..end)?;
    (!hashes.is_empty()).then(|| Span {
        first: u32::try_from(first).unwrap_or(u32::MAX),
        hashes: hashes.to_vec(),
    })
}

/// The same of hashes that nobody needs any more.
fn taken(mut hashes: Vec<BlockHash>, first: usize, end: usize) -> Option<Span> {
    if first >= end || end > hashes.len() {
        return None;
    }
    hashes.truncate(end);
    hashes.drain(..first);
    Some(Span {
        first: u32::try_from(first).unwrap_or(u32::MAX),
        hashes,
    })
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

mod absorb;
#[cfg(test)]
mod tests;
