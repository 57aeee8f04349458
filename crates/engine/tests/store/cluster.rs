//! A master and nodes on loopback, over the real transports or the made-up network.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use layercake_connector::options::Options;
use layercake_engine::run::{EngineConfig, StoreLink};
use layercake_master::{Master, MasterConfig, Monitor};
use layercake_store::link::{LinkConfig, MasterLink, Timeouts};
use layercake_store::node::{Node, NodeConfig, SegmentSpec};
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::mock::MockNetwork;
use layercake_transport::{Engine as Transport, EngineConfig as TransportConfig};
use prometheus_client::registry::Registry;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long a test waits for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Cluster {
    pub(crate) runtime: Runtime,
    pub(crate) address: SocketAddr,
    pub(crate) monitor: Monitor,
    pub(crate) network: Option<MockNetwork>,
    pub(crate) nodes: Vec<(Transport, MasterLink, Node)>,
    stop: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
}

fn start_master(
    runtime: &Runtime,
    listen: SocketAddr,
) -> (SocketAddr, Monitor, oneshot::Sender<()>, JoinHandle<()>) {
    runtime.block_on(async {
        let mut config = MasterConfig {
            listen,
            tick: Duration::from_millis(10),
            ..MasterConfig::default()
        };
        config.state.seed = 1;
        let bound = Master::bind(config, &mut Registry::default())
            .await
            .expect("loopback");
        let (address, monitor) = (bound.local_addr(), bound.monitor());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            // Clients that are still connected are cut off.
            drop(bound.serve(async { drop(stopped.await) }).await);
        });
        (address, monitor, stop, task)
    })
}

impl Cluster {
    /// One node with so much memory.
    pub(crate) fn start(bytes: u64) -> Self {
        Self::with(&[bytes], None)
    }

    pub(crate) fn with(nodes: &[u64], network: Option<MockNetwork>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, monitor, stop, task) = start_master(&runtime, any);
        let mut cluster = Self {
            runtime,
            address,
            monitor,
            network,
            nodes: Vec::new(),
            stop: Some(stop),
            task: Some(task),
        };
        for bytes in nodes {
            cluster.add_node(*bytes);
        }
        cluster
    }

    fn transport(&self) -> Transport {
        let config = TransportConfig::default();
        let started = match &self.network {
            Some(network) => network.start(config),
            None => Transport::start(config),
        };
        started.expect("an engine starts on loopback")
    }

    pub(crate) fn add_node(&mut self, bytes: u64) {
        let transport = self.transport();
        let name = format!("node-{}", self.nodes.len());
        let config = link(self.address, &name, &transport);
        let node = self.runtime.block_on(async {
            let link = MasterLink::connect(config).await.expect("it is up");
            let segments = vec![SegmentSpec {
                len: bytes,
                huge_pages: false,
            }];
            let node = Node::start(NodeConfig { segments }, transport.clone(), link.clone());
            (transport, link, node.await.expect("a small segment"))
        });
        self.nodes.push(node);
        let count = self.nodes.len() as u64;
        self.eventually("the segment is mounted", |cluster| {
            cluster.monitor.status().segments == count
        });
    }

    /// Waits until something is so; a test that waits in vain fails with what it waited for.
    pub(crate) fn eventually(&self, what: &str, mut so: impl FnMut(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !so(self) {
            assert!(Instant::now() < until, "in vain: {what}");
            let pause = async { tokio::time::sleep(Duration::from_millis(2)).await };
            self.runtime.block_on(pause);
        }
    }

    pub(crate) fn client(&self) -> StoreClient {
        self.client_by(self.address, Timeouts::default())
    }

    /// A client that finds the master at this address.
    pub(crate) fn client_by(&self, master: SocketAddr, timeouts: Timeouts) -> StoreClient {
        let transport = self.transport();
        let mut config = link(master, "engine", &transport);
        config.timeouts = timeouts;
        let connecting = StoreClient::connect(config, transport, ClientConfig::default());
        self.runtime.block_on(connecting).expect("the master is up")
    }

    pub(crate) fn link(&self, options: &Value) -> StoreLink {
        self.link_of(self.client(), options)
    }

    pub(crate) fn link_of(&self, store: StoreClient, options: &Value) -> StoreLink {
        StoreLink {
            store,
            options: self::options(options),
            observer: None,
            tenant: "default".to_owned(),
            runtime: self.runtime.handle().clone(),
        }
    }

    pub(crate) fn stop_master(&mut self) {
        drop(self.stop.take());
        if let Some(task) = self.task.take() {
            self.runtime
                .block_on(task)
                .expect("the master does not panic");
        }
    }

    /// Starts a master that knows nothing at the same address.
    pub(crate) fn start_master(&mut self) {
        let (_, monitor, stop, task) = start_master(&self.runtime, self.address);
        (self.monitor, self.stop, self.task) = (monitor, Some(stop), Some(task));
    }
}

fn link(master: SocketAddr, name: &str, transport: &Transport) -> LinkConfig {
    let mut config = LinkConfig::new(master.to_string(), name);
    config.endpoint = Some(transport.endpoint().clone());
    config
}

pub(crate) fn options(value: &Value) -> Options {
    let mut map = value.as_object().expect("a map").clone();
    map.entry("decline_slow_loads").or_insert(false.into());
    map.entry("lookup_timeout_ms").or_insert(60_000.into());
    Options::from_json(&map).expect("good options")
}

/// An engine that is small and cuts everything up.
pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        blocks: 96,
        step_tokens: 1000,
        ..EngineConfig::new(layercake_engine::model::ModelConfig::tiny(5))
    }
}
