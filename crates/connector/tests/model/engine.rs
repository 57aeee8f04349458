//! A paged engine with its own prefix cache, chunked prefill and preemption, driven by chance.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use layercake_connector::contract::{
    Absorbed, BlockHash, BlockId, FreeBlocks, Matched, RequestId, RequestView, ScheduledRequest,
    StepPlan,
};
use layercake_connector::lookup::{Found, KeyState, Lookup};
use layercake_connector::options::{FailurePolicy, Role};
use layercake_connector::request::Limits;
use layercake_connector::scheduler::{Planner, PlannerConfig, Question};
use layercake_connector::stats::{Counters, MissReason};
use layercake_protocol::ids::Epoch;

use crate::rank::Rank;
use crate::world::{Draw, Seen, World};

const SIZE: u64 = 4;
const RANKS: usize = 2;
const POOL: u64 = 24;

struct Request {
    id: RequestId,
    hashes: Vec<BlockHash>,
    tokens: u64,
    table: Vec<BlockId>,
    /// Tokens in the cache; those to be loaded count.
    computed: u64,
    running: bool,
    /// It has been part of a step since it has its blocks.
    begun: bool,
}

pub(crate) struct Engine {
    pub(crate) world: World,
    planner: Planner,
    counters: Arc<Counters>,
    ranks: Vec<Rank>,
    requests: Vec<Request>,
    /// Blocks in use and by how many.
    users: BTreeMap<BlockId, usize>,
    /// Ended requests whose blocks are not free yet.
    held: BTreeMap<RequestId, Vec<BlockId>>,
    preempted: Vec<RequestId>,
    questions: Vec<Question>,
    now: Duration,
    arrived: u64,
    ended: u64,
    seen: Seen,
    /// Blocks are kept, and shared by requests with one prefix.
    shares: bool,
}

impl Engine {
    pub(crate) fn new(policy: FailurePolicy, restore: bool) -> Self {
        let counters = Arc::new(Counters::default());
        let config = PlannerConfig {
            block_size: NonZeroU64::new(SIZE).expect("above 0"),
            ranks: u32::try_from(RANKS).expect("small"),
            object_len: 100,
            role: if restore { Role::Producer } else { Role::Both },
            policy,
            save_decode_cache: false,
            restore,
            decline_slow_loads: false,
            limits: Limits {
                lookup: Duration::from_secs(3),
                answer: Duration::from_secs(30),
                drain: Duration::from_secs(1),
            },
        };
        Self {
            world: World::default(),
            planner: Planner::new(config, Arc::clone(&counters)),
            counters,
            ranks: (0..RANKS).map(Rank::new).collect(),
            requests: Vec::new(),
            users: BTreeMap::new(),
            held: BTreeMap::new(),
            preempted: Vec::new(),
            questions: Vec::new(),
            now: Duration::ZERO,
            arrived: 0,
            ended: 0,
            seen: Seen::default(),
            shares: !restore,
        }
    }

    pub(crate) fn seen(&self) -> Seen {
        Seen {
            late_answers: self.counters.snapshot().late_answers,
            overdue: self.counters.snapshot().overdue_requests,
            hits: self.seen.hits,
            cut_back: self.seen.cut_back,
            delayed: self.seen.delayed,
            ..self.world.seen
        }
    }

    pub(crate) fn arrive(&mut self, draw: &mut Draw) {
        if self.requests.len() >= 4 {
            return;
        }
        let family = u8::try_from(draw.below(3)).expect("small");
        let blocks = u8::try_from(1 + draw.below(6)).expect("small");
        // Prompts of different families share their first two blocks.
        let hash = |index: u8| BlockHash::new(&[if index < 2 { 9 } else { family }, index]);
        self.requests.push(Request {
            id: format!("r{}", self.arrived).as_str().into(),
            hashes: (0..blocks).map(hash).collect(),
            tokens: u64::from(blocks) * SIZE + draw.below(SIZE),
            table: Vec::new(),
            computed: 0,
            running: false,
            begun: false,
        });
        self.arrived += 1;
    }

    pub(crate) fn preempt(&mut self, draw: &mut Draw) {
        let running: Vec<usize> = (0..self.requests.len())
            .filter(|at| self.requests[*at].running)
            .collect();
        if running.is_empty() {
            return;
        }
        let at = running[draw.index(running.len())];
        let request = &mut self.requests[at];
        request.running = false;
        request.begun = false;
        request.computed = 0;
        self.preempted.push(request.id.clone());
        let table = std::mem::take(&mut request.table);
        self.release(&table);
    }

    pub(crate) fn finish_one(&mut self, draw: &mut Draw) {
        if !self.requests.is_empty() {
            let at = draw.index(self.requests.len());
            self.finish(at);
        }
    }

    fn finish(&mut self, at: usize) {
        let request = self.requests.remove(at);
        match self.planner.finished(&request.id, self.now) {
            FreeBlocks::Now => {
                self.release(&request.table);
                self.ended += 1;
            }
            FreeBlocks::Delayed => {
                self.seen.delayed += 1;
                let before = self.held.insert(request.id, request.table);
                assert_eq!(before, None);
            }
        }
    }

    fn release(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            let users = self.users.get_mut(block).expect("in use");
            *users -= 1;
            if *users == 0 {
                self.users.remove(block);
                // Whoever gets it next may write anything.
            }
        }
    }

    pub(crate) fn progress(&mut self, draw: &mut Draw) {
        for rank in &mut self.ranks {
            rank.progress(&mut self.world, draw);
        }
    }

    pub(crate) fn answer_late(&mut self, draw: &mut Draw) {
        self.now += Duration::from_secs(draw.below(3));
        for question in std::mem::take(&mut self.questions) {
            self.answer(question, draw);
        }
    }

    fn answer(&mut self, question: Question, draw: &mut Draw) {
        if draw.one_in(20) {
            self.planner
                .answered(question, Found::failed(MissReason::Master), self.now);
            return;
        }
        let mut lookup = Lookup::new(question.hashes.len(), RANKS, std::num::NonZeroUsize::MIN);
        while let Some(keys) = lookup.next() {
            let state = |at: usize| {
                let key = (at % RANKS, question.hashes[at / RANKS].clone());
                if self.world.readable(&key) {
                    KeyState::Readable
                } else {
                    KeyState::Absent
                }
            };
            let states: Vec<KeyState> = keys.map(state).collect();
            lookup.answer(&states, Epoch(1), states.len() as u64);
        }
        let found: Found = lookup.found();
        self.planner.answered(question, found, self.now);
    }

    /// Plans and runs a step of some requests.
    pub(crate) fn step(&mut self, draw: &mut Draw) {
        let mut scheduled: Vec<(usize, u64)> = Vec::new();
        for at in 0..self.requests.len() {
            if draw.one_in(4) {
                continue;
            }
            if !self.requests[at].running && !self.admit(at, draw) {
                continue;
            }
            let rest = self.requests[at].tokens - self.requests[at].computed;
            let chunk = if self.shares {
                1 + draw.below(rest.min(9))
            } else {
                rest.min(SIZE * (1 + draw.below(2)))
            };
            if rest == 0 || !self.grow(at, chunk) {
                continue;
            }
            scheduled.push((at, chunk));
        }
        self.run(&scheduled, draw);
    }

    /// Finds out what the store and the own cache have of a waiting request.
    fn admit(&mut self, at: usize, draw: &mut Draw) -> bool {
        let shared = self.shared_prefix(at);
        let request = &self.requests[at];
        let local = (shared.len() as u64 * SIZE).min(request.tokens - 1) / SIZE * SIZE;
        let view = RequestView {
            request: &request.id,
            tokens: request.tokens,
            hashes: &request.hashes,
            computed: local,
        };
        let (matched, question) = self.planner.matched(&view, self.now);
        if let Some(question) = question {
            if draw.one_in(3) {
                self.questions.push(question);
            } else {
                self.answer(question, draw);
            }
        }
        let Matched::Tokens(offered) = matched else {
            return false;
        };
        assert!(
            local + offered < self.requests[at].tokens,
            "a token is left"
        );
        let external = if draw.one_in(5) { offered / 2 } else { offered };
        let blocks = usize::try_from((local + external).div_ceil(SIZE)).expect("small");
        let own = usize::try_from(local / SIZE).expect("small");
        if self.free().len() < blocks - own {
            return false;
        }
        let id = self.requests[at].id.clone();
        self.planner.allocated(&id, external).expect("offered");
        self.seen.hits += u64::from(external > 0);
        for block in &shared[..own] {
            *self.users.get_mut(block).expect("in use") += 1;
        }
        let request = &mut self.requests[at];
        request.table = shared[..own].to_vec();
        request.computed = local + external;
        request.running = true;
        self.grow(at, 0)
    }

    /// Whole blocks of another request that begin this one.
    fn shared_prefix(&self, at: usize) -> Vec<BlockId> {
        let hashes = &self.requests[at].hashes;
        let others = self
            .requests
            .iter()
            .filter(|other| self.shares && other.begun);
        let prefixes = others.map(|other| {
            let whole = usize::try_from(other.computed / SIZE).expect("small");
            let pairs = other.hashes[..whole.min(other.hashes.len())]
                .iter()
                .zip(hashes);
            let equal = pairs.take_while(|(a, b)| a == b).count();
            other.table[..equal].to_vec()
        });
        prefixes.max_by_key(Vec::len).unwrap_or_default()
    }

    fn free(&self) -> Vec<BlockId> {
        (0..POOL)
            .filter(|block| !self.users.contains_key(block))
            .collect()
    }

    /// Allocates blocks for `chunk` further tokens.
    fn grow(&mut self, at: usize, chunk: u64) -> bool {
        let request = &self.requests[at];
        let wanted = usize::try_from((request.computed + chunk).div_ceil(SIZE)).expect("small");
        let missing = wanted.saturating_sub(request.table.len());
        let free = self.free();
        if free.len() < missing {
            return false;
        }
        for block in &free[..missing] {
            self.users.insert(*block, 1);
        }
        self.requests[at].table.extend(&free[..missing]);
        true
    }

    fn run(&mut self, scheduled: &[(usize, u64)], draw: &mut Draw) {
        let parts: Vec<ScheduledRequest<'_>> = scheduled
            .iter()
            .map(|&(at, chunk)| {
                let request = &self.requests[at];
                ScheduledRequest {
                    request: &request.id,
                    table: &request.table,
                    hashes: &request.hashes,
                    prompt: request.tokens,
                    computed: request.computed,
                    scheduled: chunk,
                }
            })
            .collect();
        let preempted = std::mem::take(&mut self.preempted);
        let plan = StepPlan {
            requests: &parts,
            preempted: &preempted,
        };
        let metadata = self.planner.plan(&plan).expect("a plan");
        let world = &mut self.world;
        let whole = |part: &ScheduledRequest<'_>| usize::try_from(part.computed / SIZE);
        let before = parts
            .iter()
            .flat_map(|part| &part.table[..whole(part).expect("small")]);
        let gone: Vec<BlockId> = before.copied().filter(|_| !self.shares).collect();
        let ranks = self.ranks.iter_mut();
        let void: Vec<_> = ranks
            .map(|rank| rank.start(&metadata, &gone, world, draw))
            .collect();
        for part in &parts {
            compute(&mut self.ranks, part);
        }
        let ranks = self.ranks.iter_mut().zip(void);
        let results: Vec<_> = ranks
            .map(|(rank, void)| rank.end(&metadata, void, &mut self.world, draw))
            .collect();
        for &(at, chunk) in scheduled {
            self.requests[at].computed += chunk;
            self.requests[at].begun = true;
        }
        let absorbed = self.planner.absorb(&results, self.now);
        self.absorb(&absorbed);
        // Told twice: nothing more comes of it.
        let again = self.planner.absorb(&results, self.now);
        assert_eq!(again, Absorbed::default());
    }

    fn absorb(&mut self, absorbed: &Absorbed) {
        for request in &absorbed.free {
            let blocks = self.held.remove(request).expect("freed once");
            self.release(&blocks);
            self.ended += 1;
        }
        for (id, tokens) in &absorbed.recompute {
            let request = self.requests.iter_mut().find(|request| request.id == *id);
            request.expect("it runs").computed = *tokens;
            self.seen.cut_back += 1;
        }
        for (id, _) in &absorbed.failed {
            let at = self.requests.iter().position(|request| request.id == *id);
            self.finish(at.expect("it runs"));
        }
    }

    /// What holds at any time.
    pub(crate) fn check(&self) {
        self.world.check();
        for request in self.requests.iter().filter(|request| request.begun) {
            let whole = usize::try_from(request.computed / SIZE).expect("small");
            for (block, hash) in request.table.iter().zip(&request.hashes).take(whole) {
                for rank in &self.ranks {
                    assert!(
                        rank.holds(*block, hash),
                        "{} counts a block that is void",
                        request.id
                    );
                }
            }
        }
    }

    /// Everything ends.
    pub(crate) fn wind_up(&mut self, draw: &mut Draw) {
        self.answer_late(draw);
        while !self.requests.is_empty() {
            self.finish(0);
        }
        for _ in 0..200 {
            if self.held.is_empty() && self.ranks.iter().all(|rank| rank.tracker.is_empty()) {
                break;
            }
            self.run(&[], draw);
            self.progress(draw);
        }
        self.check();
        assert!(self.held.is_empty(), "blocks are held");
        assert!(self.users.is_empty(), "blocks leak");
        assert!(self.planner.is_empty(), "requests leak");
        assert_eq!(self.ended, self.arrived, "every request ends once");
        assert!(
            self.ranks.iter().all(|rank| rank.tracker.is_empty()),
            "sessions leak"
        );
        let reserved = |object: &crate::world::Object| *object == crate::world::Object::Reserved;
        assert!(
            !self.world.objects.values().any(reserved),
            "reservations leak"
        );
    }
}

/// A block is right on every rank if all before it are on all ranks.
fn compute(ranks: &mut [Rank], part: &ScheduledRequest<'_>) {
    let first = usize::try_from(part.computed / SIZE).expect("small");
    let end = usize::try_from((part.computed + part.scheduled) / SIZE).expect("small");
    for index in first..end {
        let mut before = part.table[..index].iter().zip(part.hashes);
        let good = before.all(|(block, hash)| ranks.iter().all(|rank| rank.holds(*block, hash)));
        for rank in &mut *ranks {
            let content = good.then(|| part.hashes[index].clone());
            rank.fill(part.table[index], content);
        }
    }
}
