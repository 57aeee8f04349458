//! Who computes what in the next step.
//!
//! Running requests go first, each by as many tokens as the step has room for; then waiting ones, in the
//! order of their arrival. A request whose look-up is still running is passed over, not waited for. When
//! blocks run out, the request that came last loses its own, and starts over when there is room.
//!
//! Blocks become known to others only when the step that filled them is over and nothing of it was void.
//! The connector's scheduler side is called from here and from nowhere else; without one, nothing is
//! loaded.

mod pool;
mod sequence;

use std::collections::{HashMap, VecDeque};

use layercake_connector::contract::{
    Absorbed, BlockId, FreeBlocks, Matched, RequestId, RequestView, ScheduledRequest,
    SchedulerSide, Span, StepMetadata, StepPlan,
};

use self::pool::BlockPool;
pub(crate) use self::sequence::{Sequence, Story};
use crate::error::EngineError;
use crate::model::{BatchItem, Logits};

/// What a step may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) block_size: usize,
    pub(crate) blocks: u64,
    /// Tokens of a step.
    pub(crate) step_tokens: usize,
    /// Requests of a step.
    pub(crate) sequences: usize,
    pub(crate) sharing: bool,
}

/// The connector's side, if there is one.
pub(crate) type Link<'a> = Option<&'a mut dyn SchedulerSide>;

/// Who computes in a step, and how many tokens.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    parts: Vec<Part>,
    preempted: Vec<RequestId>,
}

#[derive(Debug)]
struct Part {
    id: RequestId,
    start: usize,
    count: usize,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: RequestId,
    pub(crate) tokens: Vec<u32>,
    pub(crate) failed: bool,
    pub(crate) story: Story,
}

/// All requests and blocks.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    waiting: VecDeque<Sequence>,
    /// In the order of their admission.
    running: Vec<Sequence>,
    /// Blocks of requests that have ended, which saves still read.
    draining: HashMap<RequestId, Vec<BlockId>>,
    preempted: Vec<RequestId>,
    ended: Vec<Ended>,
    /// Blocks that something may still be read into.
    held: Vec<BlockId>,
}

impl Plan {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

impl Scheduler {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            pool: BlockPool::new(limits.blocks, limits.sharing),
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            draining: HashMap::new(),
            preempted: Vec::new(),
            ended: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Takes a request.
    pub(crate) fn submit(
        &mut self,
        id: RequestId,
        prompt: Vec<u32>,
        wanted: usize,
    ) -> Result<(), EngineError> {
        let room = usize::try_from(self.limits.blocks).unwrap_or(usize::MAX);
        let room = room.saturating_mul(self.limits.block_size);
        let tokens = prompt.len().saturating_add(wanted);
        if tokens > room {
            return Err(EngineError::TooLong {
                request: id,
                tokens,
                room,
            });
        }
        let taken = self.sequences().any(|sequence| sequence.id == id)
            || self.draining.contains_key(&id)
            || self.ended.iter().any(|ended| ended.id == id);
        let detail = match (prompt.is_empty(), wanted, taken) {
            (true, ..) => "its prompt is empty",
            (_, 0, _) => "it wants no token",
            (.., true) => "its id is in use",
            _ => {
                let size = self.limits.block_size;
                self.waiting
                    .push_back(Sequence::new(id, prompt, wanted, size));
                return Ok(());
            }
        };
        Err(EngineError::BadRequest {
            request: id,
            detail: detail.to_owned(),
        })
    }

    fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.waiting.iter().chain(&self.running)
    }

    /// Requests that have not ended.
    pub(crate) fn open(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Requests that have ended while saves read their blocks.
    pub(crate) fn draining(&self) -> usize {
        self.draining.len()
    }

    /// Blocks that nobody uses.
    pub(crate) fn idle_blocks(&self) -> usize {
        self.pool.idle()
    }

    /// Requests that have ended since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Decides about the next step.
    pub(crate) fn plan(&mut self, mut link: Link<'_>) -> Result<Plan, EngineError> {
        let mut plan = Plan::default();
        let mut left = self.limits.step_tokens;
        let mut at = 0;
        while at < self.running.len() && left > 0 {
            let count = self.running[at].left().min(left);
            if !self.grow(at, count) {
                // It gave way itself.
                break;
            }
            let sequence = &self.running[at];
            plan.parts.push(Part {
                id: sequence.id.clone(),
                start: sequence.computed,
                count,
            });
            left -= count;
            at += 1;
        }
        if self.preempted.is_empty() {
            self.admit(&mut plan, left, &mut link)?;
        }
        plan.preempted = std::mem::take(&mut self.preempted);
        Ok(plan)
    }

    /// Blocks for `count` more tokens of a running request; those behind it give way. `false`: it gave
    /// way itself, as there was nobody behind it.
    fn grow(&mut self, at: usize, count: usize) -> bool {
        loop {
            let sequence = &mut self.running[at];
            let blocks = (sequence.computed + count).div_ceil(self.limits.block_size);
            let more = blocks.saturating_sub(sequence.table.len());
            if let Some(taken) = self.pool.take(more) {
                sequence.table.extend(taken);
                return true;
            }
            let last = self.running.len() - 1;
            self.preempt_running(last);
            if last == at {
                return false;
            }
        }
    }

    fn preempt_running(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        self.pool.release(&std::mem::take(&mut sequence.table));
        sequence.computed = 0;
        sequence.known = 0;
        sequence.story.preemptions += 1;
        self.preempted.push(sequence.id.clone());
        self.waiting.push_front(sequence);
    }

    /// Takes a running request's blocks away, as if they had run out. `false`: it is not running.
    pub(crate) fn preempt(&mut self, id: &RequestId) -> bool {
        let at = self.running.iter().position(|sequence| sequence.id == *id);
        if let Some(at) = at {
            self.preempt_running(at);
        }
        at.is_some()
    }

    fn admit(
        &mut self,
        plan: &mut Plan,
        mut left: usize,
        link: &mut Link<'_>,
    ) -> Result<(), EngineError> {
        let mut at = 0;
        while at < self.waiting.len() && left > 0 && self.running.len() < self.limits.sequences {
            let sequence = &self.waiting[at];
            let size = self.limits.block_size;
            let mut shared = self.pool.prefix(&sequence.hashes);
            // One token is computed in any case.
            shared.truncate((sequence.tokens.len() - 1) / size);
            let local = shared.len() * size;
            let view = RequestView {
                request: &sequence.id,
                tokens: sequence.tokens.len() as u64,
                hashes: &sequence.hashes,
                computed: local as u64,
            };
            let matched = link.as_mut().map(|link| link.matched_tokens(&view));
            let external = match matched {
                Some(Matched::NotKnownYet) => {
                    at += 1;
                    continue;
                }
                Some(Matched::Tokens(tokens)) => tokens,
                None => 0,
            };
            let loaded = usize::try_from(external).unwrap_or(0);
            let computed = local + loaded;
            let count = (sequence.tokens.len() - computed).min(left);
            let more = (computed + count).div_ceil(size) - shared.len();
            if self.pool.idle() - self.pool.idle_among(&shared) < more {
                break;
            }
            let Some(mut sequence) = self.waiting.remove(at) else {
                break;
            };
            self.pool.share(&shared);
            shared.extend(self.pool.take(more).unwrap_or_default());
            if let Some(link) = link {
                link.after_allocation(&sequence.id, external)?;
            }
            sequence.known = local / size;
            sequence.table = shared;
            sequence.computed = computed;
            if !sequence.story.admitted {
                sequence.story.admitted = true;
                sequence.story.local = local;
                sequence.story.loaded = loaded;
            }
            plan.parts.push(Part {
                id: sequence.id.clone(),
                start: computed,
                count,
            });
            left -= count;
            self.running.push(sequence);
        }
        Ok(())
    }

    fn running(&self, id: &RequestId) -> Option<&Sequence> {
        self.running.iter().find(|sequence| sequence.id == *id)
    }

    /// What the ranks compute.
    pub(crate) fn batch(&self, plan: &Plan) -> Vec<BatchItem> {
        let items = plan.parts.iter().filter_map(|part| {
            let sequence = self.running(&part.id)?;
            let end = part.start + part.count;
            Some(BatchItem {
                tokens: sequence.tokens[part.start..end].to_vec(),
                start: part.start,
                table: sequence.table.clone(),
                logits: end == sequence.tokens.len(),
            })
        });
        items.collect()
    }

    /// What the connector's workers are told.
    pub(crate) fn metadata(
        &self,
        plan: &Plan,
        link: &mut dyn SchedulerSide,
    ) -> Result<StepMetadata, EngineError> {
        let requests = plan.parts.iter().filter_map(|part| {
            let sequence = self.running(&part.id)?;
            Some(ScheduledRequest {
                request: &sequence.id,
                table: &sequence.table,
                hashes: &sequence.hashes,
                prompt: sequence.prompt as u64,
                computed: part.start as u64,
                scheduled: part.count as u64,
            })
        });
        let requests: Vec<_> = requests.collect();
        Ok(link.build_metadata(&StepPlan {
            requests: &requests,
            preempted: &plan.preempted,
        })?)
    }

    /// The step is over. `logits`: one for each item of its batch. `absorbed`: what the connector made of
    /// the workers' results.
    pub(crate) fn apply(
        &mut self,
        plan: &Plan,
        logits: Vec<Option<Logits>>,
        absorbed: &Absorbed,
        mut link: Link<'_>,
    ) {
        for request in &absorbed.free {
            if let Some(table) = self.draining.remove(request) {
                self.pool.release(&table);
            }
        }
        for (request, tokens) in &absorbed.recompute {
            if let Some(sequence) = self.cut(request, *tokens) {
                sequence.story.cuts += 1;
            }
        }
        for (request, tokens) in &absorbed.failed {
            self.cut(request, *tokens);
            self.end(request, true, &mut link);
        }
        for (part, logits) in plan.parts.iter().zip(logits) {
            let void = absorbed.recompute.iter().any(|(id, _)| *id == part.id);
            if void {
                continue;
            }
            let running = &mut self.running;
            let Some(sequence) = running.iter_mut().find(|s| s.id == part.id) else {
                continue;
            };
            sequence.computed = part.start + part.count;
            let whole = sequence.computed / self.limits.block_size;
            for index in sequence.known..whole {
                let (block, hash) = (sequence.table[index], &sequence.hashes[index]);
                self.pool.holds(block, hash);
            }
            sequence.known = whole;
            if let Some(logits) = logits {
                sequence.push(logits.best(), logits.digest(), self.limits.block_size);
                if sequence.is_done() {
                    self.end(&part.id, false, &mut link);
                }
            }
        }
    }

    /// Keeps the blocks from others that a step loads, until [`let_go`](Self::let_go).
    pub(crate) fn hold(&mut self, step: &StepMetadata) {
        let mut blocks = Vec::new();
        for request in &step.requests {
            let table = self.running(&request.request).map(|s| &s.table[..]);
            let loaded = request.load.iter().flat_map(Span::iter);
            let loaded = loaded.filter_map(|(index, _)| table?.get(index as usize));
            blocks.extend(loaded);
        }
        self.pool.share(&blocks);
        self.held.extend(&blocks);
    }

    /// Nothing is read into the blocks any more that were held.
    pub(crate) fn let_go(&mut self) {
        self.pool.release(&std::mem::take(&mut self.held));
    }

    /// Whether blocks are held.
    pub(crate) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Only the first `tokens` tokens of the request's cache are good.
    fn cut(&mut self, id: &RequestId, tokens: u64) -> Option<&mut Sequence> {
        let mut running = self.running.iter_mut();
        let sequence = running.find(|sequence| sequence.id == *id)?;
        let tokens = usize::try_from(tokens).unwrap_or(0);
        sequence.computed = sequence.computed.min(tokens);
        let good = sequence.computed / self.limits.block_size;
        for &block in sequence.table.iter().skip(good) {
            self.pool.forget(block);
        }
        sequence.known = sequence.known.min(good);
        Some(sequence)
    }

    /// Ends a request, wherever it is. `false`: there is none of this id.
    pub(crate) fn end(&mut self, id: &RequestId, failed: bool, link: &mut Link<'_>) -> bool {
        let sequence = match self.running.iter().position(|s| s.id == *id) {
            Some(at) => self.running.remove(at),
            None => match self.waiting.iter().position(|s| s.id == *id) {
                Some(at) => match self.waiting.remove(at) {
                    Some(sequence) => sequence,
                    None => return false,
                },
                None => return false,
            },
        };
        let free = link
            .as_mut()
            .map_or(FreeBlocks::Now, |link| link.request_finished(id));
        match free {
            FreeBlocks::Now => self.pool.release(&sequence.table),
            FreeBlocks::Delayed => {
                self.draining.insert(id.clone(), sequence.table);
            }
        }
        self.ended.push(Ended {
            id: sequence.id,
            tokens: sequence.tokens[sequence.prompt..].to_vec(),
            failed,
            story: sequence.story,
        });
        true
    }

    /// Requests that have not ended.
    pub(crate) fn open_ids(&self) -> Vec<RequestId> {
        self.sequences()
            .map(|sequence| sequence.id.clone())
            .collect()
    }
}
