//! What the planner keeps of a request.

use layercake_protocol::ids::Epoch;

use crate::contract::{BlockId, TableUpdate};
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
    /// Tokens that `matched_tokens` answered.
    pub(super) offered: u64,
    /// Whether the load that the last answer offers pays: judged once.
    pub(super) pays: Option<bool>,
    /// Blocks from the first on that are stored or were handed out to be saved.
    pub(super) settled: usize,
    /// A save span went out.
    pub(super) saves: bool,
    /// Its miss was counted.
    pub(super) missed: bool,
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
            pays: None,
            settled: 0,
            saves: false,
            missed: false,
        }
    }

    /// The next attempt begins with so many blocks that are still good.
    pub(super) fn start_over(&mut self, blocks: usize) {
        self.settled = self.settled.min(blocks);
        self.offered = 0;
        self.end = 0;
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

    pub(super) fn miss_once(&mut self, counters: &Counters, reason: MissReason, blocks: u64) {
        if !self.missed {
            self.missed = true;
            counters.miss(reason, blocks);
        }
    }
}
