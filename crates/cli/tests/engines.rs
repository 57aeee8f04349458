//! The fault matrix: an engine at work while a real master or node, or another engine, is killed or
//! stopped, at each point of a step. Every run ends with the results of an engine without a store, or,
//! where the policy says so, with a reported failure.

mod common;

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Cluster, layercake};
use layercake_connector::options::{FailurePolicy, Options};
use layercake_connector::worker::{LayerTransfer, TransferObserver};
use layercake_engine::model::ModelConfig;
use layercake_engine::run::{Completion, Engine, EngineConfig, Progress, StoreLink};
use layercake_store::link::{LinkConfig, Timeouts};
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::{
    Deadlines, Engine as Transport, EngineConfig as TransportConfig, TransportKind, TransportSet,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Longest time for saves at the end, far above the deadlines below.
const END_WITHIN: Duration = Duration::from_mins(1);

/// When the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// Before the requests are looked up.
    LookUp,
    /// When they have been looked up, before anything is read.
    Start,
    /// When a layer of a block has been read.
    Load,
    /// When the first layer of a block has been written.
    Save,
    /// When the last one has, before blocks are committed.
    End,
}

const POINTS: [Point; 5] = [
    Point::LookUp,
    Point::Start,
    Point::Load,
    Point::Save,
    Point::End,
];

/// Sends a signal, once, when the point comes.
#[derive(Debug)]
struct Saboteur {
    point: Point,
    victim: Pid,
    signal: Signal,
    last_layer: u32,
    done: AtomicBool,
}

impl Saboteur {
    fn strike(&self) {
        if !self.done.swap(true, Ordering::SeqCst) {
            kill_process(self.victim, self.signal).expect("it runs");
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
        let hit = match self.point {
            Point::LookUp | Point::Start => false,
            Point::Load => !transfer.save,
            Point::Save => transfer.save,
            Point::End => transfer.save && transfer.layer == self.last_layer,
        };
        if hit {
            self.strike();
        }
    }
}

struct Bench {
    runtime: Runtime,
    config: EngineConfig,
    /// What is asked: the first is stored, the second in part, the third not at all.
    asks: Vec<(&'static str, Vec<u32>)>,
    expected: Vec<Completion>,
}

fn text(number: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|at| (at * at + number * 37 + at * 5) % 96)
        .collect()
}

impl Bench {
    fn new(ranks: u32) -> Self {
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

    /// A client that does not wait long. Over TCP a node that is stopped is noticed.
    fn link(&self, cluster: &Cluster, policy: FailurePolicy) -> StoreLink {
        let transport = Transport::start(TransportConfig {
            transports: TransportSet::only(TransportKind::Tcp),
            deadlines: Deadlines {
                progress: Duration::from_millis(300),
                connect: Duration::from_millis(500),
                ..Deadlines::default()
            },
            ..TransportConfig::default()
        })
        .expect("loopback");
        let mut config = LinkConfig::new(cluster.address.clone(), "engine");
        config.endpoint = Some(transport.endpoint().clone());
        config.timeouts = Timeouts {
            connect: Duration::from_millis(500),
            call: Duration::from_millis(500),
            ..Timeouts::default()
        };
        let connecting = StoreClient::connect(config, transport, ClientConfig::default());
        let store = self.runtime.block_on(connecting).expect("the master is up");
        StoreLink {
            store,
            options: Options {
                failure_policy: policy,
                decline_slow_loads: false,
                lookup_timeout: Duration::from_secs(1),
                ..Options::default()
            },
            tenant: "default".to_owned(),
            runtime: self.runtime.handle().clone(),
            observer: None,
        }
    }

    /// Fills the pool with the first request.
    fn fill(&self, cluster: &Cluster) {
        let link = self.link(cluster, FailurePolicy::Recompute);
        let mut engine = Engine::with_store(&self.config, &link).expect("good");
        let done = run(&mut engine, &self.asks[..1]);
        self.same(&done, "the pool is filled");
        engine.close(END_WITHIN).expect("everything ends");
    }

    #[track_caller]
    fn same(&self, found: &[Completion], what: &str) {
        for found in found.iter().filter(|found| !found.failed) {
            let expected = self.expected.iter().find(|one| one.id == found.id);
            let expected = expected.expect("it was asked");
            assert_eq!(found.tokens, expected.tokens, "{what}: {}", found.id);
            assert_eq!(found.logits, expected.logits, "{what}: {}", found.id);
        }
    }

    /// One cell of the matrix.
    fn cell(&self, node: bool, signal: Signal, point: Point, policy: FailurePolicy) {
        let what = format!("{point:?}, {signal:?}, node {node}, {policy:?}");
        let cluster = Cluster::start(1, "16MiB", "");
        self.fill(&cluster);
        let victim = if node {
            &cluster.nodes[0]
        } else {
            &cluster.master
        };
        let last = self.config.model.cached_layers() - 1;
        let saboteur = Arc::new(Saboteur {
            point,
            victim: victim.pid(),
            signal,
            last_layer: u32::try_from(last).expect("small"),
            done: AtomicBool::new(false),
        });
        let mut link = self.link(&cluster, policy);
        link.observer = Some(Arc::clone(&saboteur) as Arc<dyn TransferObserver>);
        let mut engine = Engine::with_store(&self.config, &link).expect("good");
        submit(&mut engine, &self.asks);
        saboteur.strike_at(Point::LookUp);
        // The first step asks, and computes nothing.
        assert_ne!(engine.step().expect("no rank is lost"), Progress::Idle);
        saboteur.strike_at(Point::Start);
        let found = engine.run().expect("no rank is lost");
        assert_eq!(
            found.len(),
            self.asks.len(),
            "{what}: every request ends, once"
        );
        self.same(&found, &what);
        for one in &found {
            let may_fail = policy == FailurePolicy::Fail && one.loaded_tokens > 0;
            assert!(!one.failed || may_fail, "{what}: {} failed", one.id);
        }
        assert_eq!(engine.idle_blocks() as u64, self.config.blocks, "{what}");
        // On a machine so slow that the point did not come.
        saboteur.strike();
        engine.close(END_WITHIN).expect("everything ends");
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

#[test]
fn a_node_that_is_killed_at_any_point() {
    let bench = Bench::new(2);
    for point in POINTS {
        bench.cell(true, Signal::KILL, point, FailurePolicy::Recompute);
    }
    for point in [Point::Start, Point::Load] {
        bench.cell(true, Signal::KILL, point, FailurePolicy::Fail);
    }
}

#[test]
fn a_node_that_is_stopped_at_any_point() {
    let bench = Bench::new(1);
    for point in POINTS {
        bench.cell(true, Signal::STOP, point, FailurePolicy::Recompute);
    }
    bench.cell(true, Signal::STOP, Point::Start, FailurePolicy::Fail);
}

#[test]
fn a_master_that_is_killed_at_any_point() {
    let bench = Bench::new(1);
    for point in POINTS {
        bench.cell(false, Signal::KILL, point, FailurePolicy::Recompute);
    }
    bench.cell(false, Signal::KILL, Point::Start, FailurePolicy::Fail);
}

#[test]
fn a_master_that_is_stopped_at_any_point() {
    let bench = Bench::new(2);
    for point in POINTS {
        bench.cell(false, Signal::STOP, point, FailurePolicy::Recompute);
    }
    bench.cell(false, Signal::STOP, Point::Load, FailurePolicy::Fail);
}

/// An engine process of the demo's, with these messages as its input.
fn engine_process(cluster: &Cluster, part: &str, folder: &Path) -> Command {
    let setup = json!({"setup": {
        "part": part, "master": cluster.address, "seed": 1, "ranks": 1,
        "step_tokens": 40, "layer_micros": 300, "layerwise": true,
    }});
    let prompt: Vec<u32> = (0..300).map(|n| n * 7 % 512).collect();
    let request = json!({"request": {"index": 0, "prompt": prompt, "wanted": 2}});
    let file = folder.join(part);
    let text = format!("{setup}\n{request}\n\"finish\"\n");
    std::fs::write(&file, text).expect("written");
    let mut command = layercake("demo-engine");
    command.stdin(File::open(file).expect("just written"));
    command
}

/// A process that is killed in the end.
struct Victim(Child);

impl Victim {
    /// Waits until the process says that it is ready: then it works, and may be anywhere in it.
    fn strike(mut command: Command, signal: Signal) -> Self {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut victim = Self(command.spawn().expect("the binary starts"));
        let out = victim.0.stdout.take().expect("piped");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("text");
        assert!(line.contains("ready"), "{line}");
        kill_process(Pid::from_child(&victim.0), signal).expect("ours until it is waited for");
        victim
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What an engine process generates.
fn ask(cluster: &Cluster, part: &str, folder: &Path) -> (Value, Value) {
    let said = common::finish(engine_process(cluster, part, folder)).ok();
    let line = said.out.lines().nth(1).expect("ready, done, finished");
    let done: Value = serde_json::from_str(line).expect("JSON");
    let done = &done["done"];
    assert_eq!(done["failed"], false, "{part}: {done}");
    (done["tokens"].clone(), done["logits"].clone())
}

/// A prefill engine dies, or stands still, in the middle of its saves; a decode engine in the middle of its
/// loads. Others get what is right.
#[test]
fn engines_that_are_killed_or_stopped_harm_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    for signal in [Signal::KILL, Signal::STOP] {
        let cluster = Cluster::start(1, "64MiB", "");
        let alone = ask(&cluster, "alone", folder.path());
        let command = engine_process(&cluster, "prefill", folder.path());
        let _saving = Victim::strike(command, signal);
        for part in ["decode", "prefill", "decode"] {
            let found = ask(&cluster, part, folder.path());
            assert_eq!(found, alone, "{signal:?}, {part}");
        }
        let command = engine_process(&cluster, "decode", folder.path());
        let _loading = Victim::strike(command, signal);
        let found = ask(&cluster, "decode", folder.path());
        assert_eq!(found, alone, "{signal:?}");
    }
}
