//! What the planner keeps of a request.

use std::ops::Range;

use layercake_protocol::ids::Epoch;

use crate::contract::{BlockHash, BlockId, ScheduledRequest, TableUpdate};
use crate::error::ConnectorError;
use crate::request::{Limits, RequestMachine};
use crate::stats::{Counters, MissReason};

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) machine: RequestMachine,
    /// As the workers know it, and under which attempt.
    pub(super) table: Vec<BlockId>,
    pub(super) told: Option<u32>,
    /// Since which step the workers have this attempt.
    pub(super) since_step: u64,
    /// Tokens that are in the cache when the last planned step ends.
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
            since_step: 0,
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

    /// The next attempt begins with so many blocks that are still good.
    pub(super) fn start_over(&mut self, blocks: usize) {
        self.settled = self.settled.min(blocks);
        self.offered = 0;
        self.hit.clear();
        self.end = 0;
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

    /// What the workers need to know the table.
    pub(super) fn tell(&mut self, table: &[BlockId], attempt: u32) -> TableUpdate {
        let grown = self.told == Some(attempt) && table.starts_with(&self.table);
        let from = if grown { self.table.len() } else { 0 };
        let blocks = table[from..].to_vec();
        if !grown {
            self.table.clear();
        }
        self.table.extend_from_slice(&blocks);
        self.told = Some(attempt);
        TableUpdate {
            replace: !grown,
            blocks,
        }
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
