//! A network of engines in one process whose time, failures and order are made up, and the same again
//! for the same seed.
//!
//! Feature `mock`. Engines started by [`MockNetwork::start`] reach each other by the mock transport
//! alone; memory, checks, tags and counters are the real ones. A piece is applied in parts, each at a
//! moment of its own: pieces overtake each other, and a large piece may be half there. Time is virtual
//! and stands still until it is advanced, or passes whenever something waits for it ([`Pace`]). Peers
//! can be stopped, killed and cut off; deadlines run in virtual time.
//!
//! Deterministic as long as one thread submits and advances. Results are given with no lock held, so
//! that wakers may submit again.

mod backend;
mod schedule;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};
use std::time::Duration;

use layercake_protocol::ids::EngineId;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

pub(crate) use self::backend::MockBackend;
use self::backend::PartOfPiece;
use self::schedule::Schedule;
use crate::backend::Context;
use crate::config::{EngineConfig, TransportKind, TransportSet};
use crate::engine::Engine;
use crate::error::{Error, PieceError};
use crate::job::Job;

/// How virtual time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Only by [`MockNetwork::advance`] and [`MockNetwork::run_until_idle`].
    Manual,
    /// By itself: a submitted batch has run its course, deadlines included, when `submit` returns.
    Immediate,
}

/// What the network does to transfers that are submitted from now on.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// From submission to the moment a part is applied; drawn for each part.
    pub latency: RangeInclusive<Duration>,
    /// The share of pieces that fail, between 0 and 1.
    pub failures: f64,
    /// What they fail with.
    pub error: PieceError,
    /// Pieces are applied in parts of at most so many bytes.
    pub part_bytes: u64,
}

impl Default for Conditions {
    /// Small delays, no failures, parts of 64 KiB.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(20)..=Duration::from_micros(200),
            failures: 0.0,
            error: PieceError::PeerGone,
            part_bytes: 64 << 10,
        }
    }
}

/// A network of engines. Clones are the same network.
#[derive(Clone)]
pub struct MockNetwork {
    network: Arc<Network>,
}

pub(crate) struct Network {
    pace: Pace,
    state: Mutex<State>,
    /// Held by the thread that carries events out.
    driver: Mutex<()>,
}

struct State {
    random: SmallRng,
    conditions: Conditions,
    schedule: Schedule<Event>,
    engines: HashMap<EngineId, Weak<Context>>,
    stopped: HashSet<EngineId>,
    cut: HashSet<(EngineId, EngineId)>,
    /// Parts that wait for their peer to go on.
    held: Vec<PartOfPiece>,
    fail_next: Vec<PieceError>,
}

enum Event {
    Apply(PartOfPiece),
    /// The job's time is up.
    Deadline(Weak<Job>),
    /// The peer of this job has stood still for the progress deadline since a part was held.
    GiveUp(PartOfPiece),
}

impl MockNetwork {
    /// A network whose draws come from `seed`.
    pub fn new(seed: u64, pace: Pace) -> Self {
        let state = State {
            random: SmallRng::seed_from_u64(seed),
            conditions: Conditions::default(),
            schedule: Schedule::default(),
            engines: HashMap::new(),
            stopped: HashSet::new(),
            cut: HashSet::new(),
            held: Vec::new(),
            fail_next: Vec::new(),
        };
        let network = Network {
            pace,
            state: Mutex::new(state),
            driver: Mutex::new(()),
        };
        Self {
            network: Arc::new(network),
        }
    }

    /// Starts an engine on this network. It has no other transport, whatever `config` says.
    pub fn start(&self, config: EngineConfig) -> Result<Engine, Error> {
        let transports = TransportSet::only(TransportKind::Mock);
        Engine::start_on(
            EngineConfig {
                transports,
                ..config
            },
            Arc::clone(&self.network),
        )
    }

    /// Sets what happens to transfers that are submitted from now on.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.network.state.lock().conditions = conditions;
    }

    /// The next pieces that are submitted fail with these errors, one each, in order.
    pub fn fail_next(&self, errors: impl IntoIterator<Item = PieceError>) {
        self.network.state.lock().fail_next.extend(errors);
    }

    /// Virtual time since the network was made.
    pub fn now(&self) -> Duration {
        self.network.state.lock().schedule.now()
    }

    /// Lets time pass: everything that is due by then happens, in order.
    pub fn advance(&self, by: Duration) {
        let until = self.now().saturating_add(by);
        self.network.drive(Some(until));
    }

    /// Lets time pass until nothing is left to happen.
    pub fn run_until_idle(&self) {
        self.network.drive(None);
    }

    /// Whether something is left to happen.
    pub fn is_idle(&self) -> bool {
        self.network.state.lock().schedule.is_empty()
    }

    /// The engine stands still: what arrives there waits.
    pub fn stop(&self, engine: EngineId) {
        self.network.state.lock().stopped.insert(engine);
    }

    /// The engine goes on: what waited arrives.
    pub fn resume(&self, engine: EngineId) {
        {
            let mut state = self.network.state.lock();
            state.stopped.remove(&engine);
            let (here, held) = std::mem::take(&mut state.held)
                .into_iter()
                .partition(|part: &PartOfPiece| part.to() == engine);
            state.held = held;
            let now = state.schedule.now();
            let here: Vec<PartOfPiece> = here;
            for part in here {
                state.schedule.push(now, Event::Apply(part));
            }
        }
        self.network.submitted();
    }

    /// The engine is gone, as if its process had been killed: what was on the way fails, and so does
    /// what follows.
    pub fn kill(&self, engine: EngineId) {
        self.network.remove(engine, PieceError::PeerGone);
    }

    /// Nothing gets through between the two any more, in either direction; peers look unreachable.
    pub fn cut(&self, a: EngineId, b: EngineId) {
        self.network.state.lock().cut.extend([(a, b), (b, a)]);
    }

    /// Undoes [`MockNetwork::cut`].
    pub fn heal(&self, a: EngineId, b: EngineId) {
        self.network
            .state
            .lock()
            .cut
            .retain(|pair| *pair != (a, b) && *pair != (b, a));
    }
}

impl fmt::Debug for MockNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.network.state.lock();
        f.debug_struct("MockNetwork")
            .field("now", &state.schedule.now())
            .field("engines", &state.engines.len())
            .finish_non_exhaustive()
    }
}

impl Network {
    fn join(&self, context: &Arc<Context>) {
        self.state
            .lock()
            .engines
            .insert(context.engine, Arc::downgrade(context));
    }

    /// Takes an engine off the network: parts to it fail with this error, parts from it as shut down.
    fn remove(&self, engine: EngineId, error: PieceError) {
        let failed: Vec<(PartOfPiece, PieceError)> = {
            let mut state = self.state.lock();
            state.engines.remove(&engine);
            let held = std::mem::take(&mut state.held);
            let mut failed = Vec::new();
            let mut sort = |part: PartOfPiece| {
                if part.from() == engine {
                    failed.push((part, PieceError::ShutDown));
                } else if part.to() == engine {
                    failed.push((part, error));
                } else {
                    return Some(part);
                }
                None
            };
            state.held = held.into_iter().filter_map(&mut sort).collect();
            state.schedule.retain(|event| match event {
                Event::Apply(part) => sort(part).map(Event::Apply),
                // Its part was held, and is sorted out above.
                other @ (Event::GiveUp(_) | Event::Deadline(_)) => Some(other),
            });
            failed
        };
        for (part, error) in failed {
            part.fail(error);
        }
    }

    /// Plans a job's pieces.
    fn plan(&self, context: &Context, job: &Arc<Job>, pieces: &[usize]) {
        let mut failed = Vec::new();
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            let now = state.schedule.now();
            let deadline = now.saturating_add(job.allowed());
            state
                .schedule
                .push(deadline, Event::Deadline(Arc::downgrade(job)));
            for piece in pieces {
                let scripted = (!state.fail_next.is_empty()).then(|| state.fail_next.remove(0));
                let drawn = state.conditions.failures > 0.0
                    && state
                        .random
                        .random_bool(state.conditions.failures.clamp(0.0, 1.0));
                if let Some(error) = scripted.or(drawn.then_some(state.conditions.error)) {
                    failed.push((*piece, error));
                    continue;
                }
                for part in
                    PartOfPiece::cut(context.engine, job, *piece, state.conditions.part_bytes)
                {
                    let latency = state.random.random_range(state.conditions.latency.clone());
                    state
                        .schedule
                        .push(now.saturating_add(latency), Event::Apply(part));
                }
            }
        }
        for (piece, error) in failed {
            job.finish(piece, Err(error));
        }
        self.submitted();
    }

    fn submitted(&self) {
        if self.pace == Pace::Immediate {
            self.drive(None);
        }
    }

    /// Carries out what is due by `until`, or everything.
    fn drive(&self, until: Option<Duration>) {
        loop {
            // A thread that is already at it, perhaps this one, takes over what was added.
            let Some(driver) = self.driver.try_lock() else {
                return;
            };
            loop {
                let next = self.state.lock().schedule.pop(until);
                let Some(event) = next else { break };
                self.carry_out(event);
            }
            drop(driver);
            if !self.state.lock().schedule.is_due(until) {
                return;
            }
        }
    }

    fn carry_out(&self, event: Event) {
        match event {
            Event::Apply(part) => {
                let target = {
                    let mut state = self.state.lock();
                    if state.stopped.contains(&part.to()) {
                        let progress = state.progress_of(part.from());
                        let at = state.schedule.now().saturating_add(progress);
                        state.schedule.push(at, Event::GiveUp(part.clone()));
                        state.held.push(part);
                        return;
                    }
                    state.target(&part)
                };
                match target {
                    Ok(target) => part.apply(&target),
                    Err(error) => part.fail(error),
                }
            }
            Event::GiveUp(part) => {
                let held = {
                    let mut state = self.state.lock();
                    let before = state.held.len();
                    state.held.retain(|other| !other.same(&part));
                    state.held.len() < before
                };
                if held {
                    part.fail(PieceError::Stalled);
                }
            }
            Event::Deadline(job) => {
                if let Some(job) = job.upgrade() {
                    job.fail(&crate::job::PieceSet::All, PieceError::Timeout);
                }
            }
        }
    }
}

impl State {
    fn target(&self, part: &PartOfPiece) -> Result<Arc<Context>, PieceError> {
        if self.cut.contains(&(part.from(), part.to())) {
            return Err(PieceError::Unreachable);
        }
        let target = self.engines.get(&part.to()).and_then(Weak::upgrade);
        target.ok_or(PieceError::PeerGone)
    }

    fn progress_of(&self, engine: EngineId) -> Duration {
        let context = self.engines.get(&engine).and_then(Weak::upgrade);
        context.map_or(Duration::ZERO, |context| context.config.deadlines.progress)
    }
}
