//! A paged engine with its own prefix cache, chunked prefill and preemption, driven by chance.

mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use layercake_connector::contract::{
    BlockHash, BlockId, FreeBlocks, Matched, RequestId, RequestView, WorkerResults,
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
const POOL: u64 = 24;
/// Steps that are planned before the first of them is known on all ranks.
const AHEAD: usize = 3;

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
    /// Tokens that are known to be in the cache, and those after each step that is not known on all ranks.
    good: u64,
    steps: VecDeque<(u64, u64)>,
    /// The blocks that it had computed by each such step.
    had: BTreeMap<u64, Vec<BlockId>>,
    /// The last step that it was part of.
    last: u64,
}

impl Request {
    /// Cut back to so many tokens.
    fn cut(&mut self, tokens: u64) {
        self.computed = tokens;
        self.good = self.good.min(tokens);
        self.steps.clear();
        let blocks = usize::try_from(tokens.div_ceil(SIZE)).expect("small");
        for had in self.had.values_mut() {
            had.truncate(blocks);
        }
    }
}

/// What an engine is like.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) policy: FailurePolicy,
    /// Blocks are not kept between chunks.
    pub(crate) restore: bool,
    /// Steps overlap, ranks report apart, and some of their results are lost.
    pub(crate) apart: bool,
    pub(crate) ranks: usize,
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
    apart: bool,
    /// What each rank has to report.
    reports: Vec<VecDeque<WorkerResults>>,
    /// What steps load that are not known on all ranks.
    loading: BTreeMap<u64, Vec<BlockId>>,
    /// And what is void by them on any rank.
    void: BTreeMap<u64, BTreeSet<BlockId>>,
    /// Steps that are known on all ranks.
    confirmed: u64,
}

impl Engine {
    pub(crate) fn new(setup: Setup) -> Self {
        let Setup {
            policy,
            restore,
            apart,
            ranks,
        } = setup;
        let counters = Arc::new(Counters::default());
        let config = PlannerConfig {
            block_size: NonZeroU64::new(SIZE).expect("above 0"),
            ranks: u32::try_from(ranks).expect("small"),
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
            ranks: (0..ranks).map(|rank| Rank::new(rank, ranks > 1)).collect(),
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
            apart,
            reports: vec![VecDeque::new(); ranks],
            loading: BTreeMap::new(),
            void: BTreeMap::new(),
            confirmed: 0,
        }
    }

    pub(crate) fn seen(&self) -> Seen {
        Seen {
            late_answers: self.counters.snapshot().late_answers,
            overdue: self.counters.snapshot().overdue_requests,
            hits: self.seen.hits,
            cut_back: self.seen.cut_back,
            cut_ahead: self.seen.cut_ahead,
            completed: self.seen.completed,
            left: self.seen.left,
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
        // Names come again.
        let id = |name: String| RequestId::from(name.as_str());
        let mut name = id(format!("r{}", self.arrived % 7));
        if self.held.contains_key(&name) || self.requests.iter().any(|other| other.id == name) {
            name = id(format!("x{}", self.arrived));
        }
        self.requests.push(Request {
            id: name,
            hashes: (0..blocks).map(hash).collect(),
            tokens: u64::from(blocks) * SIZE + draw.below(SIZE),
            table: Vec::new(),
            computed: 0,
            running: false,
            begun: false,
            good: 0,
            steps: VecDeque::new(),
            had: BTreeMap::new(),
            last: 0,
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
        request.cut(0);
        request.had.clear();
        request.last = 0;
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
        self.seen.completed += u64::from(request.good == request.tokens);
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
        let mut lookup = Lookup::new(
            question.hashes.len(),
            self.ranks.len(),
            std::num::NonZeroUsize::MIN,
        );
        while let Some(keys) = lookup.next() {
            let state = |at: usize| {
                let key = (
                    at % self.ranks.len(),
                    question.hashes[at / self.ranks.len()].clone(),
                );
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
            if !self.shares && self.requests[at].last > self.confirmed {
                continue;
            }
            if !self.requests[at].running && !self.admit(at, &scheduled, draw) {
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
    fn admit(&mut self, at: usize, scheduled: &[(usize, u64)], draw: &mut Draw) -> bool {
        let shared = self.shared_prefix(at, scheduled);
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

    /// Whole blocks of another request that begin this one: of one in the same step, or up to one that is being loaded.
    fn shared_prefix(&self, at: usize, scheduled: &[(usize, u64)]) -> Vec<BlockId> {
        let hashes = &self.requests[at].hashes;
        let loading: Vec<BlockId> = self.loading.values().flatten().copied().collect();
        let others = self.requests.iter().enumerate();
        let prefixes = others.filter(|_| self.shares).map(|(index, other)| {
            let together = scheduled.iter().any(|(at, _)| *at == index);
            let whole = usize::try_from(other.computed / SIZE).expect("small");
            let whole = if together || other.begun { whole } else { 0 };
            let pairs = other.hashes.iter().zip(hashes).zip(&other.table);
            let equal = pairs.take(whole).take_while(|((a, b), block)| {
                a == b && (together && !other.begun || !loading.contains(block))
            });
            other.table[..equal.count()].to_vec()
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

    /// What holds at any time.
    pub(crate) fn check(&self) {
        self.world.check();
        for request in self.requests.iter().filter(|request| request.begun) {
            // In an engine that keeps nothing, a later step has taken what this one had.
            let known = self.shares || request.last <= self.confirmed;
            let good = if known { request.good } else { 0 };
            let whole = usize::try_from(good / SIZE).expect("small");
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
            self.report_all();
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
