//! What the planner keeps of a request.

use std::ops::Range;

use layercake_protocol::ids::Epoch;

use super::reports::Void;
use crate::contract::{BlockHash, BlockId, ScheduledRequest, TableUpdate};
use crate::error::ConnectorError;
use crate::request::{Limits, RequestMachine};
use crate::stats::{Counters, MissReason};

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) machine: RequestMachine,
    /// As the workers know it, and under which attempt; what is left of it for the next attempt, if that has not begun.
    pub(super) table: Vec<BlockId>,
    pub(super) told: Option<u32>,
    /// Since which step it has each of these blocks, and since which the workers know this attempt.
    since: Vec<u64>,
    attempt_since: u64,
    /// The last step that it was part of.
    last_step: u64,
    /// How often a load that failed has cut it back.
    pub(super) cuts: u32,
    /// In which step the workers were told that it has ended.
    pub(super) end_told: Option<u64>,
    /// Tokens that are in the cache when the last planned step ends, or that the next attempt begins with.
    pub(super) end: u64,
    pub(super) epoch: Epoch,
    /// Tokens that `matched_tokens` answered, and those that the engine had itself then.
    pub(super) offered: u64,
    pub(super) own: u64,
    /// The blocks that the store has, until they are loaded.
    pub(super) hit: Vec<BlockHash>,
    /// Whether the load that the last answer offers pays: judged once.
    pub(super) pays: Option<bool>,
    /// Blocks from the first on that are stored or were handed out to be saved.
    pub(super) settled: usize,
    /// A save span went out.
    pub(super) saves: bool,
    /// Blocks that were counted as missed.
    counted: Range<usize>,
}

impl Entry {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            machine: RequestMachine::new(limits),
            table: Vec::new(),
            told: None,
            since: Vec::new(),
            attempt_since: 0,
            last_step: 0,
            cuts: 0,
            end_told: None,
            end: 0,
            epoch: Epoch::UNSET,
            offered: 0,
            own: 0,
            hit: Vec::new(),
            pays: None,
            settled: 0,
            saves: false,
            counted: 0..0,
        }
    }

    /// The next attempt begins with so many blocks of `size` tokens that are still good.
    pub(super) fn start_over(&mut self, blocks: usize, size: u64) {
        self.settled = self.settled.min(blocks);
        self.offered = 0;
        self.hit.clear();
        self.table.truncate(blocks);
        self.since.truncate(blocks);
        self.end = blocks as u64 * size;
        if blocks == 0 {
            // There is nothing left that it could wait for.
            self.last_step = 0;
        }
    }

    /// Refuses a step that counts tokens as cached which no load would bring.
    pub(super) fn check_load(
        &self,
        scheduled: &ScheduledRequest<'_>,
        size: u64,
    ) -> Result<(), ConnectorError> {
        let external = self.machine.allocated().unwrap_or(0);
        if external == 0 {
            return Ok(());
        }
        let refused = |detail: String| {
            let detail = format!("request {:?} {detail}", scheduled.request);
            Err(ConnectorError::Metadata { detail })
        };
        let (own, computed) = (self.own, scheduled.computed);
        if computed != own.saturating_add(external) {
            return refused(format!(
                "has computed {computed} tokens: it had {own} when it was offered more, and loads {external}"
            ));
        }
        let blocks = usize::try_from(computed.div_ceil(size)).unwrap_or(usize::MAX);
        // Those that are loaded: what the engine had itself is its own matter.
        let first = usize::try_from(own / size).unwrap_or(usize::MAX);
        let (Some(found), Some(given)) = (
            self.hit.get(first..blocks),
            scheduled.hashes.get(first..blocks),
        ) else {
            return refused(format!(
                "loads up to block {blocks}, with the hashes of {}; the store has {}",
                scheduled.hashes.len(),
                self.hit.len()
            ));
        };
        match found.iter().zip(given).position(|(a, b)| a != b) {
            Some(block) => refused(format!(
                "has another hash of block {} than was looked up: {} instead of {}",
                first + block,
                given[block],
                found[block]
            )),
            None => Ok(()),
        }
    }

    /// What the workers need to know the table, from this step on.
    pub(super) fn tell(&mut self, table: &[BlockId], attempt: u32, step: u64) -> TableUpdate {
        // Mostly all of it, which is compared at once.
        let same = if table.starts_with(&self.table) {
            self.table.len()
        } else {
            let pairs = self.table.iter().zip(table);
            pairs.take_while(|(a, b)| a == b).count()
        };
        let grown = self.told == Some(attempt) && same == self.table.len();
        let from = if grown { same } else { 0 };
        self.table.truncate(same);
        self.table.extend_from_slice(&table[same..]);
        self.since.truncate(same);
        self.since.resize(table.len(), step);
        let begins = self.told != Some(attempt);
        if begins {
            self.attempt_since = step;
        }
        self.told = Some(attempt);
        self.last_step = step;
        TableUpdate {
            begins,
            replace: !grown,
            blocks: table[from..].to_vec(),
        }
    }

    /// Whether the workers know its attempt since this step or before.
    pub(super) fn began_by(&self, step: u64) -> bool {
        self.told.is_some() && self.attempt_since <= step
    }

    /// Refuses a step that loads what an earlier one computes, before it is known on all ranks what that came to.
    pub(super) fn check_order(
        &self,
        scheduled: &ScheduledRequest<'_>,
        confirmed: u64,
    ) -> Result<(), ConnectorError> {
        if self.last_step <= confirmed {
            return Ok(());
        }
        Err(ConnectorError::Metadata {
            detail: format!(
                "request {:?} is part of step {}, and steps are known on all ranks up to {confirmed}: without retained blocks, its next chunk waits for that",
                scheduled.request, self.last_step
            ),
        })
    }

    /// Refuses a step in which a running request has lost blocks that it has computed: they can't be told apart from others'
    /// any more.
    pub(super) fn check_table(
        &self,
        scheduled: &ScheduledRequest<'_>,
        size: u64,
    ) -> Result<(), ConnectorError> {
        let used = &self.table[..self.used(size)];
        if self.told != Some(self.machine.attempt()) || scheduled.table.starts_with(used) {
            return Ok(());
        }
        Err(ConnectorError::Metadata {
            detail: format!(
                "request {:?} has not kept the {} blocks that it has computed, and was not named as preempted",
                scheduled.request,
                used.len()
            ),
        })
    }

    /// Blocks of `size` tokens that it has computed, or waits to go on from.
    fn used(&self, size: u64) -> usize {
        let used = usize::try_from(self.end.div_ceil(size)).unwrap_or(usize::MAX);
        used.min(self.table.len())
    }

    /// The first of its used blocks that has been void while it had it.
    pub(super) fn first_void(&self, void: &Void, size: u64) -> Option<usize> {
        let blocks = self.table.iter().zip(&self.since).take(self.used(size));
        let mut blocks = blocks.map(|(block, since)| void.get(block).is_some_and(|at| since <= at));
        blocks.position(|void| void)
    }

    /// Counts blocks that are not loaded: each once in the request's life, under the first reason. All that was
    /// counted is one range: an answer misses all from its hit to the last block, and what is declined ends at the hit.
    pub(super) fn miss(&mut self, counters: &Counters, reason: MissReason, blocks: Range<usize>) {
        if blocks.is_empty() {
            return;
        }
        let before = &self.counted;
        let again = before.start.max(blocks.start)..before.end.min(blocks.end);
        counters.miss(reason, (blocks.len() - again.len()) as u64);
        self.counted = if before.is_empty() {
            blocks
        } else {
            before.start.min(blocks.start)..before.end.max(blocks.end)
        };
    }
}
