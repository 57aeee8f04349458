//! A whole cluster in one process: a master on loopback, nodes and clients with engines of their own.
//!
//! Everything is real: gRPC to the master, the transfer engine between nodes and clients. Transports
//! are forced by the engines' configuration; `Via::Local` puts client and node on one engine.
//! `helper` adds processes that can be killed, `proxy` connections that can be cut at a chosen moment;
//! `port` keeps a master's port while it is away.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod helper;
mod one_key;
pub(crate) mod port;
pub(crate) mod proxy;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_master::{Master, MasterConfig, Monitor};
use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::link::{LinkConfig, MasterLink};
use layercake_store::node::{Node, NodeConfig, SegmentSpec};
use layercake_store::{ClientConfig, StoreClient, StoreError};
use layercake_transport::{
    Access, Batch, Direction, Engine, EngineConfig, LocalSlice, Memory, Piece, RemoteSlice,
    TransportKind, TransportSet,
};
use prometheus_client::registry::Registry;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) use one_key::OneKey;
use port::Port;

/// How long a test waits for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// How bytes travel between client and node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// They share an engine.
    Local,
    Shm,
    Tcp,
}

impl Via {
    pub(crate) const ALL: [Self; 3] = [Self::Local, Self::Shm, Self::Tcp];

    pub(crate) fn kind(self) -> TransportKind {
        match self {
            Self::Local => TransportKind::Local,
            Self::Shm => TransportKind::Shm,
            Self::Tcp => TransportKind::Tcp,
        }
    }

    /// The one whose transport has this name.
    pub(crate) fn named(name: &str) -> Self {
        let via = Self::ALL.into_iter().find(|via| via.kind().name() == name);
        via.unwrap_or_else(|| panic!("{name:?} is no transport"))
    }

    /// An engine that can do no other.
    pub(crate) fn engine(self) -> Engine {
        let config = EngineConfig {
            transports: TransportSet::only(self.kind()),
            ..EngineConfig::default()
        };
        Engine::start(config).expect("an engine starts on loopback")
    }
}

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) via: Via,
    /// One segment of so many bytes for each node.
    pub(crate) nodes: Vec<u64>,
    pub(crate) master: MasterConfig,
}

impl Spec {
    pub(crate) fn new(via: Via) -> Self {
        let mut master = MasterConfig {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tick: Duration::from_millis(10),
            ..MasterConfig::default()
        };
        master.state.seed = 1;
        Self {
            via,
            nodes: vec![32 * MIB],
            master,
        }
    }

    pub(crate) fn nodes(mut self, nodes: &[u64]) -> Self {
        self.nodes = nodes.to_vec();
        self
    }

    pub(crate) fn lease(mut self, lease: Duration) -> Self {
        self.master.state.lease = lease;
        self
    }

    pub(crate) fn ttl(mut self, ttl: Duration) -> Self {
        self.master.state.client_ttl = ttl;
        self
    }

    pub(crate) fn discard_after(mut self, time: Duration) -> Self {
        self.master.state.discard_after = time;
        self
    }

    pub(crate) async fn start(self) -> Cluster {
        Cluster::start(self).await
    }
}

/// A running master.
pub(crate) struct RunningMaster {
    pub(crate) address: SocketAddr,
    pub(crate) monitor: Monitor,
    port: Port,
    registry: Registry,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl RunningMaster {
    pub(crate) async fn start(config: MasterConfig) -> Self {
        Self::start_at(Port::reserve(), config).await
    }

    /// On a port that another may have had before.
    pub(crate) async fn start_at(port: Port, mut config: MasterConfig) -> Self {
        config.listen = port.address();
        let mut registry = Registry::default();
        let bound = Master::bind(config, &mut registry)
            .await
            .expect("nobody else has the port");
        let (address, monitor) = (bound.local_addr(), bound.monitor());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let served = bound.serve(async { drop(stopped.await) }).await;
            // Clients that are still connected are cut off at the end of a test.
            drop(served);
        });
        Self {
            address,
            monitor,
            port,
            registry,
            stop: Some(stop),
            task,
        }
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a string");
        text
    }

    /// Framed lanes that are open, over this.
    pub(crate) fn lanes(&self, over: &str) -> u64 {
        let gauge = format!("layercake_master_lanes{{over=\"{over}\"}} ");
        let text = self.metrics();
        let value = text.lines().find_map(|line| line.strip_prefix(&gauge));
        value
            .and_then(|value| value.parse().ok())
            .expect("it is counted")
    }

    /// Requests that the master has answered, by method.
    pub(crate) fn requests(&self, method: &str) -> u64 {
        let label = format!("method=\"{method}\"");
        self.metrics()
            .lines()
            .filter(|line| {
                line.starts_with("layercake_master_requests_total{") && line.contains(&label)
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    /// Requests about objects, of all methods.
    pub(crate) fn object_requests(&self) -> u64 {
        [
            "exists",
            "get_start",
            "renew",
            "get_end",
            "put_start",
            "upsert_start",
            "put_end",
            "put_revoke",
            "wait_complete",
            "remove",
        ]
        .iter()
        .map(|method| self.requests(method))
        .sum()
    }

    /// Nobody else gets its port while what this returns is there.
    pub(crate) async fn stop(mut self) -> Port {
        drop(self.stop.take());
        self.task.await.expect("the master does not panic");
        self.port
    }
}

/// A node of the cluster.
pub(crate) struct TestNode {
    pub(crate) engine: Engine,
    pub(crate) link: MasterLink,
    pub(crate) node: Node,
    via: Via,
}

impl TestNode {
    /// Bytes of its segment as they are, whatever lies there.
    pub(crate) async fn peek(&self, offset: u64, len: u64) -> Vec<u8> {
        let engine = self.neighbour();
        let memory = buffer(&engine, vec![0; usize::try_from(len).expect("small")]);
        self.touch(&engine, Direction::Read, offset, &memory).await;
        contents(&memory)
    }

    /// Damages its segment, behind everybody's back.
    pub(crate) async fn poke(&self, offset: u64, bytes: &[u8]) {
        let engine = self.neighbour();
        let memory = buffer(&engine, bytes.to_vec());
        self.touch(&engine, Direction::Write, offset, &memory).await;
    }

    async fn touch(&self, engine: &Engine, direction: Direction, offset: u64, memory: &Memory) {
        let segment = self.node.segments().remove(0);
        let remote = RemoteSlice {
            region: segment.region,
            capability: segment.capability,
            offset,
            len: memory.len(),
            generation: None,
        };
        let transfer = engine.submit(Batch {
            peer: Arc::new(segment.endpoint),
            direction,
            pieces: vec![Piece {
                local: whole(memory),
                remote,
            }],
            checksum: false,
            deadline: None,
        });
        let outcome = transfer.await;
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    fn neighbour(&self) -> Engine {
        match self.via {
            Via::Local => self.engine.clone(),
            via => via.engine(),
        }
    }
}

pub(crate) struct Cluster {
    pub(crate) spec: Spec,
    pub(crate) master: RunningMaster,
    pub(crate) nodes: Vec<TestNode>,
}

impl Cluster {
    async fn start(spec: Spec) -> Self {
        let master = RunningMaster::start(spec.master.clone()).await;
        let mut cluster = Self {
            master,
            nodes: Vec::new(),
            spec,
        };
        for (index, len) in cluster.spec.nodes.clone().into_iter().enumerate() {
            let node = cluster.node(&format!("node-{index}"), len).await;
            cluster.nodes.push(node);
        }
        let nodes = cluster.nodes.len() as u64;
        eventually("all segments are mounted", || {
            cluster.master.monitor.status().segments == nodes
        })
        .await;
        cluster
    }

    pub(crate) fn link_config(&self, name: &str, engine: &Engine) -> LinkConfig {
        link_config(self.master.address, name, engine)
    }

    pub(crate) async fn node(&self, name: &str, len: u64) -> TestNode {
        let engine = self.spec.via.engine();
        let link = MasterLink::connect(self.link_config(name, &engine))
            .await
            .expect("the master is up");
        let config = NodeConfig {
            segments: vec![SegmentSpec {
                len,
                huge_pages: false,
            }],
        };
        let node = Node::start(config, engine.clone(), link.clone())
            .await
            .expect("a small segment");
        TestNode {
            engine,
            link,
            node,
            via: self.spec.via,
        }
    }

    /// A client with an engine of its own, or on the first node's for [`Via::Local`].
    pub(crate) async fn client(&self) -> StoreClient {
        self.client_with(ClientConfig::default()).await
    }

    pub(crate) async fn client_with(&self, config: ClientConfig) -> StoreClient {
        let engine = match self.spec.via {
            Via::Local => self.nodes[0].engine.clone(),
            via => via.engine(),
        };
        client(self.master.address, engine, config).await
    }
}

pub(crate) fn link_config(master: SocketAddr, name: &str, engine: &Engine) -> LinkConfig {
    let mut config = LinkConfig::new(master.to_string(), name);
    config.endpoint = Some(engine.endpoint().clone());
    config
}

pub(crate) async fn client(
    master: SocketAddr,
    engine: Engine,
    config: ClientConfig,
) -> StoreClient {
    let link = link_config(master, "client", &engine);
    let client = StoreClient::connect(link, engine, config).await;
    client.expect("the master is up")
}

/// Waits until something is so; a test that waits in vain fails with what it waited for.
pub(crate) async fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while !so() {
        assert!(tokio::time::Instant::now() < until, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The same with a question that takes a call.
pub(crate) async fn eventually_async(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while !so().await {
        assert!(tokio::time::Instant::now() < until, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn key(name: impl AsRef<str>) -> ObjectKey {
    ObjectKey::new(name.as_ref()).expect("a short name")
}

/// A key that no other test has.
pub(crate) fn fresh_key() -> ObjectKey {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    key(format!("key-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Bytes that follow from a seed and look like nothing else.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).expect("fits memory")];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Registered local memory with these bytes.
pub(crate) fn buffer(engine: &Engine, bytes: Vec<u8>) -> Memory {
    engine
        .register(bytes.into(), Access::LocalOnly)
        .expect("memory of its own")
}

pub(crate) fn whole(memory: &Memory) -> LocalSlice {
    memory.slice(0, memory.len()).expect("inside")
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("mapped")];
    memory.copy_out(0, &mut bytes).expect("inside");
    bytes
}

pub(crate) fn one_replica() -> ReplicateConfig {
    ReplicateConfig::default()
}

pub(crate) fn replicas(count: u32) -> ReplicateConfig {
    ReplicateConfig {
        replicas: count,
        ..ReplicateConfig::default()
    }
}

/// The answer of a batch of one.
pub(crate) fn one<T>(mut answers: Vec<T>) -> T {
    assert_eq!(answers.len(), 1, "one answer for one entry");
    answers.remove(0)
}

/// The refusal that an error stands for.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T, StoreError>) -> Refusal {
    match result {
        Err(StoreError::Refused(refusal)) => refusal,
        other => panic!("a refusal was expected, not {other:?}"),
    }
}
