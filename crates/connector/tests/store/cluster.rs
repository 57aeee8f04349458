//! A master and a node on loopback, and an engine's description that is cheap to compute.

use std::net::SocketAddr;
use std::time::Duration;

use layercake_connector::checks::{Deployment, Execution};
use layercake_connector::contract::{BlockHash, CacheLayout};
use layercake_master::{Master, MasterConfig, Monitor};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::LayerSpec;
use layercake_store::link::{LinkConfig, MasterLink};
use layercake_store::node::{Node, NodeConfig, SegmentSpec};
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::mock::MockNetwork;
use layercake_transport::testing::poke;
use layercake_transport::{Engine, EngineConfig, RemoteSlice};
use prometheus_client::registry::Registry;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long a test waits for anything that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Cluster {
    pub(crate) master: SocketAddr,
    pub(crate) monitor: Monitor,
    registry: Registry,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
    node: (Engine, MasterLink, Node),
    /// Over which everybody's bytes go, if it is made up.
    network: Option<MockNetwork>,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        Self::with(16 << 20).await
    }

    /// One node with so much memory.
    pub(crate) async fn with(bytes: u64) -> Self {
        Self::configured(bytes, |_| {}).await
    }

    /// One node with so much memory, and a master that is set up otherwise.
    pub(crate) async fn configured(bytes: u64, change: impl FnOnce(&mut MasterConfig)) -> Self {
        Self::over(None, bytes, change).await
    }

    /// One node whose bytes move when the network's time passes.
    pub(crate) async fn on(network: &MockNetwork) -> Self {
        Self::over(Some(network.clone()), 1 << 20, |_| {}).await
    }

    async fn over(
        network: Option<MockNetwork>,
        bytes: u64,
        change: impl FnOnce(&mut MasterConfig),
    ) -> Self {
        let mut config = MasterConfig {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tick: Duration::from_millis(10),
            ..MasterConfig::default()
        };
        config.state.seed = 1;
        change(&mut config);
        let mut registry = Registry::default();
        let bound = Master::bind(config, &mut registry)
            .await
            .expect("loopback, any port");
        let (master, monitor) = (bound.local_addr(), bound.monitor());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            // Clients that are still connected are cut off at the end of a test.
            drop(bound.serve(async { drop(stopped.await) }).await);
        });
        let engine = engine(network.as_ref());
        let link = MasterLink::connect(link_config(master, "node", &engine))
            .await
            .expect("the master is up");
        let segments = vec![SegmentSpec {
            len: bytes,
            huge_pages: false,
        }];
        let node = Node::start(NodeConfig { segments }, engine.clone(), link.clone())
            .await
            .expect("a small segment");
        let cluster = Self {
            master,
            monitor,
            registry,
            stop: Some(stop),
            task,
            node: (engine, link, node),
            network,
        };
        eventually("the segment is mounted", || {
            cluster.monitor.status().segments == 1
        })
        .await;
        cluster
    }

    /// Requests that the master has answered, by method.
    pub(crate) fn requests(&self, method: &str) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a string");
        let label = format!("method=\"{method}\"");
        let lines = text.lines().filter(|line| {
            line.starts_with("layercake_master_requests_total{") && line.contains(&label)
        });
        let counts = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        counts.sum()
    }

    pub(crate) async fn client(&self) -> StoreClient {
        self.client_with(ClientConfig::default()).await
    }

    pub(crate) async fn client_with(&self, config: ClientConfig) -> StoreClient {
        let engine = engine(self.network.as_ref());
        let link = link_config(self.master, "client", &engine);
        StoreClient::connect(link, engine, config)
            .await
            .expect("the master is up")
    }

    /// A client that is a node, too, of this name.
    pub(crate) async fn member(&self, name: &str, bytes: u64) -> (StoreClient, Node) {
        let before = self.monitor.status().segments;
        let engine = engine(self.network.as_ref());
        let link = MasterLink::connect(link_config(self.master, name, &engine)).await;
        let link = link.expect("the master is up");
        let (len, huge_pages) = (bytes, false);
        let segments = vec![SegmentSpec { len, huge_pages }];
        let node = Node::start(NodeConfig { segments }, engine.clone(), link.clone()).await;
        eventually("the segment is mounted", || {
            self.monitor.status().segments > before
        })
        .await;
        let store = StoreClient::new(&link, engine, ClientConfig::default());
        (store.expect("on its own link"), node.expect("small"))
    }

    /// Damages a byte of a stored object, behind everybody's back.
    pub(crate) async fn damage(&self, store: &StoreClient, key: &ObjectKey, offset: u64) {
        let stat = store.stat(key).await.expect("it is stored");
        let place = stat.object.replicas[0].payload_offset() + offset;
        self.overwrite(place).await;
    }

    /// Damages a byte of its header.
    pub(crate) async fn damage_header(&self, store: &StoreClient, key: &ObjectKey) {
        let stat = store.stat(key).await.expect("it is stored");
        self.overwrite(stat.object.replicas[0].offset + 40).await;
    }

    /// Overwrites a byte of the node's segment.
    async fn overwrite(&self, offset: u64) {
        let segment = self.node.2.segments().remove(0);
        let engine = engine(self.network.as_ref());
        let place = RemoteSlice {
            region: segment.region,
            capability: segment.capability,
            offset,
            len: 1,
            generation: None,
        };
        let transfer = poke(&engine, segment.endpoint, place, vec![0xA5]);
        assert!(transfer.await.is_ok());
    }

    /// Stops the master; the node stays.
    pub(crate) async fn stop_master(&mut self) {
        drop(self.stop.take());
        (&mut self.task).await.expect("the master does not panic");
    }
}

fn engine(network: Option<&MockNetwork>) -> Engine {
    let config = EngineConfig::default();
    let started = match network {
        Some(network) => network.start(config),
        None => Engine::start(config),
    };
    started.expect("an engine starts on loopback")
}

fn link_config(master: SocketAddr, name: &str, engine: &Engine) -> LinkConfig {
    let mut config = LinkConfig::new(master.to_string(), name);
    config.endpoint = Some(engine.endpoint().clone());
    config
}

/// Waits until something is so; a test that waits in vain fails with what it waited for.
pub(crate) async fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let until = tokio::time::Instant::now() + PATIENCE;
    while !so() {
        assert!(tokio::time::Instant::now() < until, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A model of three uneven layers, blocks of 4 tokens.
pub(crate) fn deployment(tp_size: u32) -> Deployment {
    let layers = vec![
        LayerSpec::new(0, [("k", 512), ("v", 512)]),
        LayerSpec::new(1, [("latent", 24)]),
        LayerSpec::new(2, [("k", 96), ("scale", 8), ("v", 96)]),
    ];
    Deployment {
        tenant: "default".to_owned(),
        model: "model".to_owned(),
        revision: "1".to_owned(),
        kv_dtype: "f32".to_owned(),
        block_size: 4,
        tp_size,
        storing_ranks: tp_size,
        pp_size: 1,
        pcp_size: 1,
        dcp_size: 1,
        groups: vec![CacheLayout { layers }],
        compatible_keys: false,
        execution: Execution::Eager,
        retains_blocks: true,
    }
}

/// Hashes of a prompt's blocks.
pub(crate) fn hashes(prompt: u8, count: u8) -> Vec<BlockHash> {
    (0..count).map(|n| BlockHash::new(&[prompt, n])).collect()
}
