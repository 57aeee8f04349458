//! The scheduler side's share of an engine step.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use layercake_connector::contract::{
    BlockHash, BlockId, Matched, RequestId, RequestView, ScheduledRequest, StepMetadata, StepPlan,
    WorkerResults,
};
use layercake_connector::lookup::Found;
use layercake_connector::options::{FailurePolicy, Role};
use layercake_connector::request::Limits;
use layercake_connector::scheduler::{Planner, PlannerConfig};
use layercake_connector::stats::Counters;
use layercake_protocol::ids::Epoch;

use crate::{Path, count};

pub(crate) const PATHS: &[Path] = &[
    ("connector: a step of 64 requests that decode", decode),
    ("connector: 16 requests of 256 blocks come in", arrive),
    ("connector: metadata of 16 new requests, encoded", encode),
    ("connector: metadata of 16 new requests, decoded", parse),
];

const BLOCK: u64 = 16;
const BLOCKS: u64 = 256;
const TOKENS: u64 = BLOCK * BLOCKS;
/// What the store has of every request.
const STORED: u64 = 192;
const NOW: Duration = Duration::from_secs(1);

/// Requests of 256 blocks, and the planner that hears of them.
struct Engine {
    planner: Planner,
    requests: Vec<Request>,
}

struct Request {
    id: RequestId,
    table: Vec<BlockId>,
    hashes: Vec<BlockHash>,
}

impl Engine {
    fn new(requests: u64) -> Result<Self> {
        let config = PlannerConfig {
            block_size: NonZeroU64::new(BLOCK).context("above 0")?,
            ranks: 8,
            object_len: 4 << 20,
            role: Role::Both,
            policy: FailurePolicy::Recompute,
            save_decode_cache: true,
            restore: false,
            decline_slow_loads: false,
            limits: Limits {
                lookup: NOW,
                answer: NOW,
                drain: NOW,
            },
        };
        let requests = (0..requests).map(|request| Request {
            id: format!("cmpl-{request:032x}-0").as_str().into(),
            // One more block than the prompt fills, for what is generated.
            table: (0..=BLOCKS).map(|block| request * 300 + block).collect(),
            hashes: (0..BLOCKS).map(|block| hash(request, block)).collect(),
        });
        Ok(Self {
            planner: Planner::new(config, Arc::new(Counters::default())),
            requests: requests.collect(),
        })
    }

    /// Looks every request up, and takes what the store has of it.
    fn match_all(&mut self) -> Result<()> {
        for request in &self.requests {
            let view = RequestView {
                request: &request.id,
                tokens: TOKENS,
                hashes: &request.hashes,
                computed: 0,
            };
            let (_, question) = self.planner.matched(&view, NOW);
            let found = Found {
                blocks: usize::try_from(STORED)?,
                missing: None,
                epoch: Epoch(9),
                keys_queried: BLOCKS * 8,
                failure: None,
            };
            let question = question.context("the planner asks")?;
            self.planner.answered(question, found, NOW);
            let (matched, _) = self.planner.matched(&view, NOW);
            ensure!(matched == Matched::Tokens(STORED * BLOCK), "{matched:?}");
            self.planner.allocated(&request.id, STORED * BLOCK)?;
        }
        Ok(())
    }

    /// Plans a step in which every request is given so many tokens behind those computed.
    fn plan(&mut self, computed: u64, scheduled: u64) -> Result<StepMetadata> {
        let requests = self.requests.iter();
        let requests: Vec<_> = requests
            .map(|request| ScheduledRequest {
                request: &request.id,
                table: &request.table,
                hashes: &request.hashes,
                prompt: TOKENS,
                computed,
                scheduled,
            })
            .collect();
        let plan = StepPlan {
            requests: &requests,
            preempted: &[],
        };
        Ok(self.planner.plan(&plan)?)
    }
}

fn hash(request: u64, block: u64) -> BlockHash {
    let mut bytes = [0; 32];
    for (word, place) in bytes.chunks_exact_mut(8).zip(1..) {
        let number = (request << 32 | block).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ place);
        word.copy_from_slice(&number.to_le_bytes());
    }
    BlockHash::new(&bytes)
}

fn results(step: u64) -> Vec<WorkerResults> {
    let results = (0..8).map(|rank| WorkerResults {
        rank,
        step,
        finished: Vec::new(),
        invalid_blocks: Vec::new(),
        loaded_bytes: 0,
        load_micros: 0,
        compute_micros: 20_000,
    });
    results.collect()
}

fn decode() -> Result<()> {
    let mut engine = Engine::new(64)?;
    engine.match_all()?;
    engine.plan(STORED * BLOCK, TOKENS - STORED * BLOCK)?;
    engine.planner.absorb(&results(1), NOW);
    let results = results(2);
    let step = count(|| {
        let step = engine.plan(TOKENS, 1);
        engine.planner.absorb(&results, NOW);
        step
    })??;
    ensure!(step.step == 2, "two steps were planned");
    Ok(())
}

fn first_step(engine: &mut Engine) -> Result<StepMetadata> {
    engine.match_all()?;
    engine.plan(STORED * BLOCK, TOKENS - STORED * BLOCK)
}

fn arrive() -> Result<()> {
    let mut engine = Engine::new(16)?;
    let step = count(|| first_step(&mut engine))??;
    ensure!(
        step.requests.iter().all(|request| request.load.is_some()),
        "every request loads"
    );
    Ok(())
}

fn encode() -> Result<()> {
    let step = first_step(&mut Engine::new(16)?)?;
    let bytes = count(|| step.encode())??;
    ensure!(StepMetadata::decode(&bytes)? == step, "it changed");
    Ok(())
}

fn parse() -> Result<()> {
    let step = first_step(&mut Engine::new(16)?)?;
    let bytes = step.encode()?;
    let decoded = count(|| StepMetadata::decode(&bytes))??;
    ensure!(decoded == step, "it changed");
    Ok(())
}
