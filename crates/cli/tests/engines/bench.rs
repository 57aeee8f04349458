//! What is asked, what is right, engines on real masters and nodes, and who strikes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use layercake_connector::options::{FailurePolicy, Options, Role};
use layercake_connector::worker::{LayerTransfer, TransferObserver};
use layercake_engine::model::ModelConfig;
use layercake_engine::run::{Completion, Engine, EngineConfig, Progress, StoreLink};
use layercake_store::link::{LinkConfig, Timeouts};
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::{
    Deadlines, Engine as Transport, EngineConfig as TransportConfig, TransportKind, TransportSet,
};
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::common::{eventually, stands_still};

/// Longest time for saves at the end, far above all deadlines.
pub(crate) const END_WITHIN: Duration = Duration::from_mins(1);

/// Patience of an engine that no fault is meant to reach.
pub(crate) const AMPLE: Duration = Duration::from_secs(30);

/// When the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Point {
    /// Before the requests are looked up.
    LookUp,
    /// When they are looked up, before anything is read.
    Start,
    /// When a layer of a block has been read.
    Load,
    /// When the last layer of one has, before leases are given back.
    Loaded,
    /// When the first layer of a block has been written.
    Save,
    /// When its second layer has.
    Saving,
    /// When the last one has, before blocks are committed.
    End,
}

/// Sends a signal, once, when the point comes.
#[derive(Debug)]
pub(crate) struct Saboteur {
    point: Point,
    victim: Pid,
    signal: Signal,
    last_layer: u32,
    done: AtomicBool,
}

impl Saboteur {
    pub(crate) fn new(bench: &Bench, point: Point, victim: Pid, signal: Signal) -> Arc<Self> {
        let last = bench.config.model.cached_layers() - 1;
        Arc::new(Self {
            point,
            victim,
            signal,
            last_layer: u32::try_from(last).expect("small"),
            done: AtomicBool::new(false),
        })
    }

    /// Whether the point came.
    pub(crate) fn has_struck(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    fn strike(&self) {
        if !self.done.swap(true, Ordering::SeqCst) {
            kill_process(self.victim, self.signal).expect("it runs");
            if self.victim != getpid() {
                let victim = self.victim.as_raw_pid().unsigned_abs();
                eventually("the signal is felt", || stands_still(victim));
            }
        }
    }

    fn strike_at(&self, point: Point) {
        if self.point == point {
            self.strike();
        }
    }
}

impl TransferObserver for Saboteur {
    fn transferred(&self, transfer: &LayerTransfer) {
        let is_last = transfer.layer == self.last_layer;
        let hit = match self.point {
            Point::LookUp | Point::Start => false,
            Point::Load => !transfer.save,
            Point::Loaded => !transfer.save && is_last,
            Point::Save => transfer.save,
            Point::Saving => transfer.save && transfer.layer == 1,
            Point::End => transfer.save && is_last,
        };
        if hit {
            self.strike();
        }
    }
}

pub(crate) type Ask = (&'static str, Vec<u32>);

pub(crate) struct Bench {
    pub(crate) runtime: Runtime,
    pub(crate) config: EngineConfig,
    /// What is asked: the first is stored, the second in part, the third not at all.
    pub(crate) asks: Vec<Ask>,
    expected: Vec<Completion>,
}

/// How an engine uses the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) role: Role,
    pub(crate) policy: FailurePolicy,
    /// How long it waits for the master or a node, about.
    pub(crate) patience: Duration,
}

impl Use {
    pub(crate) const PLAIN: Self = Self {
        role: Role::Both,
        policy: FailurePolicy::Recompute,
        patience: AMPLE,
    };
}

fn text(number: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|at| (at * at + number * 37 + at * 5) % 96)
        .collect()
}

impl Bench {
    pub(crate) fn new(ranks: u32) -> Self {
        let config = EngineConfig {
            ranks,
            block_size: 4,
            blocks: 64,
            step_tokens: 30,
            ..EngineConfig::new(ModelConfig::tiny(8))
        };
        let shared = text(1, 26);
        let asks = vec![
            ("stored", shared.clone()),
            ("partly", [&shared[..], &text(2, 15)].concat()),
            ("new", text(3, 21)),
        ];
        let transport = Transport::start(TransportConfig::default()).expect("loopback");
        let mut engine = Engine::local(&config, &transport).expect("a good configuration");
        let expected = run(&mut engine, &asks);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        Self {
            runtime,
            config,
            asks,
            expected,
        }
    }

    /// An engine's way to the store. Over TCP a node that is stopped is noticed.
    pub(crate) fn link(&self, master: &str, how: Use) -> StoreLink {
        let transport = Transport::start(TransportConfig {
            transports: TransportSet::only(TransportKind::Tcp),
            deadlines: Deadlines {
                progress: how.patience,
                connect: how.patience,
                ..Deadlines::default()
            },
            ..TransportConfig::default()
        })
        .expect("loopback");
        let mut config = LinkConfig::new(master.to_owned(), "engine");
        config.endpoint = Some(transport.endpoint().clone());
        config.timeouts = Timeouts {
            connect: how.patience,
            call: how.patience,
            ..Timeouts::default()
        };
        let connecting = StoreClient::connect(config, transport, ClientConfig::default());
        let store = self.runtime.block_on(connecting).expect("the master is up");
        StoreLink {
            store,
            options: Options {
                role: how.role,
                failure_policy: how.policy,
                decline_slow_loads: false,
                // Calls end before.
                lookup_timeout: how.patience * 3,
                ..Options::default()
            },
            tenant: "default".to_owned(),
            runtime: self.runtime.handle().clone(),
            observer: None,
        }
    }

    /// A new engine on the store runs these requests; tokens that were loaded.
    pub(crate) fn read(&self, master: &str, asks: &[Ask], what: &str) -> usize {
        let link = self.link(master, Use::PLAIN);
        let mut engine = Engine::with_store(&self.config, &link).expect("good");
        let found = run(&mut engine, asks);
        assert_eq!(found.len(), asks.len(), "{what}");
        assert!(found.iter().all(|found| !found.failed), "{what}");
        self.same(&found, what);
        engine.close(END_WITHIN).expect("everything ends");
        found.iter().map(|found| found.loaded_tokens).sum()
    }

    /// Fills the pool with the first request.
    pub(crate) fn fill(&self, master: &str) {
        self.read(master, &self.asks[..1], "the pool is filled");
    }

    /// Runs these requests with a saboteur; every request ends, once, and every block comes back. The
    /// engine is still to be closed.
    pub(crate) fn sabotaged(
        &self,
        mut link: StoreLink,
        saboteur: &Arc<Saboteur>,
        asks: &[Ask],
        what: &str,
    ) -> (Engine, Vec<Completion>) {
        link.observer = Some(Arc::clone(saboteur) as Arc<dyn TransferObserver>);
        let mut engine = Engine::with_store(&self.config, &link).expect("good");
        submit(&mut engine, asks);
        saboteur.strike_at(Point::LookUp);
        // The first step asks, and computes nothing.
        assert_ne!(engine.step().expect("no rank is lost"), Progress::Idle);
        saboteur.strike_at(Point::Start);
        let found = engine.run().expect("no rank is lost");
        assert_eq!(found.len(), asks.len(), "{what}: every request ends, once");
        self.same(&found, what);
        assert_eq!(engine.idle_blocks() as u64, self.config.blocks, "{what}");
        (engine, found)
    }

    #[track_caller]
    pub(crate) fn same(&self, found: &[Completion], what: &str) {
        for found in found.iter().filter(|found| !found.failed) {
            let expected = self.expected.iter().find(|one| one.id == found.id);
            let expected = expected.expect("it was asked");
            assert_eq!(found.tokens, expected.tokens, "{what}: {}", found.id);
            assert_eq!(found.logits, expected.logits, "{what}: {}", found.id);
        }
    }
}

fn submit(engine: &mut Engine, asks: &[(&str, Vec<u32>)]) {
    for (id, prompt) in asks {
        engine.submit(*id, prompt.clone(), 3).expect("it fits");
    }
}

fn run(engine: &mut Engine, asks: &[(&str, Vec<u32>)]) -> Vec<Completion> {
    submit(engine, asks);
    engine.run().expect("no rank is lost")
}
