//! A master and a node with threads of their own, and what a worker side is started with and told.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use layercake_connector::checks::{Deployment, Execution};
use layercake_connector::contract::{
    BlockHash, CacheLayout, CacheRegistration, EntryCache, HostEvent, LayerCache, METADATA_VERSION,
    RequestStep, Span, StepMetadata, TableUpdate, WorkerSide as _,
};
use layercake_connector::options::Options;
use layercake_connector::worker::StoreWorker;
use layercake_master::{Master, MasterConfig, Monitor};
use layercake_protocol::layout::{LayerSpec, ObjectLayout};
use layercake_store::link::{LinkConfig, MasterLink};
use layercake_store::node::{Node, NodeConfig, SegmentSpec};
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::{AllocateOptions, Engine, EngineConfig, Memory};
use prometheus_client::registry::Registry;
use tokio::runtime::Runtime;

/// How long a step's saves may take.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// The servers of a bench; they end with it.
pub(crate) struct Cluster {
    _runtime: Runtime,
    _node: (Engine, MasterLink, Node),
    master: SocketAddr,
    /// What the master counts.
    pub(crate) monitor: Monitor,
}

impl Cluster {
    /// One node with so much memory.
    pub(crate) fn start(bytes: u64) -> Result<Self> {
        let runtime = runtime(2)?;
        let (node, master, monitor) = runtime.block_on(servers(bytes))?;
        Ok(Self {
            _runtime: runtime,
            _node: node,
            master,
            monitor,
        })
    }

    pub(crate) fn client(&self, runtime: &Runtime) -> Result<StoreClient> {
        let engine = Engine::start(EngineConfig::default())?;
        let config = link(self.master, "bench", &engine);
        let connecting = StoreClient::connect(config, engine, ClientConfig::default());
        Ok(runtime.block_on(connecting)?)
    }
}

pub(crate) fn runtime(threads: usize) -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()?)
}

fn link(master: SocketAddr, name: &str, engine: &Engine) -> LinkConfig {
    let mut config = LinkConfig::new(master.to_string(), name);
    config.endpoint = Some(engine.endpoint().clone());
    config
}

async fn servers(bytes: u64) -> Result<((Engine, MasterLink, Node), SocketAddr, Monitor)> {
    let config = MasterConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        ..MasterConfig::default()
    };
    let bound = Master::bind(config, &mut Registry::default()).await?;
    let (address, monitor) = (bound.local_addr(), bound.monitor());
    // Serves until the bench ends, and its runtime with it.
    tokio::spawn(bound.serve(std::future::pending()));
    let engine = Engine::start(EngineConfig::default())?;
    let joined = MasterLink::connect(link(address, "node", &engine)).await?;
    let segments = vec![SegmentSpec {
        len: bytes,
        huge_pages: false,
    }];
    let node = Node::start(NodeConfig { segments }, engine.clone(), joined.clone()).await?;
    while monitor.status().segments == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(((engine, joined, node), address, monitor))
}

/// An engine's cache: entry after entry, block after block.
pub(crate) struct Cache {
    pub(crate) layout: ObjectLayout,
    pub(crate) memory: Memory,
    group: CacheLayout,
    blocks: u64,
}

impl Cache {
    /// Of `layers` layers with two entries of `entry` bytes each.
    pub(crate) fn new(store: &StoreClient, layers: u32, entry: u64, blocks: u64) -> Result<Self> {
        let specs = (0..layers).map(|layer| LayerSpec::new(layer, [("k", entry), ("v", entry)]));
        let group = CacheLayout {
            layers: specs.collect(),
        };
        let layout = group.object()?;
        let options = AllocateOptions {
            pretouch: true,
            ..AllocateOptions::default()
        };
        let memory = store
            .engine()
            .allocate(layout.object_len() * blocks, options)?;
        Ok(Self {
            layout,
            memory,
            group,
            blocks,
        })
    }

    /// The worker side of an engine with one rank.
    pub(crate) fn worker(
        &self,
        store: &StoreClient,
        runtime: &Runtime,
        options: Options,
    ) -> Result<StoreWorker> {
        self.worker_of((0, 1), store, runtime, options)
    }

    /// The worker side of one of several ranks.
    pub(crate) fn worker_of(
        &self,
        (rank, ranks): (u32, u32),
        store: &StoreClient,
        runtime: &Runtime,
        options: Options,
    ) -> Result<StoreWorker> {
        let deployment = deployment(self.group.clone(), ranks);
        let handle = runtime.handle();
        let mut worker = StoreWorker::new(&deployment, rank, options, store.clone(), handle)?;
        worker.register_caches(&self.registration()?)?;
        Ok(worker)
    }

    /// Where an entry of a layer lies for a block, and how long it is.
    pub(crate) fn place(&self, layer: usize, entry: usize, block: u64) -> Result<(u64, u64)> {
        let range = self
            .layout
            .entry_range(layer, entry)
            .context("it has two")?;
        Ok((
            range.start() * self.blocks + block * range.len(),
            range.len(),
        ))
    }

    fn registration(&self) -> Result<CacheRegistration> {
        let blocks = self.blocks;
        let layers = (0..self.layout.layer_count()).zip(0..);
        let layers = layers.map(|(layer, physical)| {
            let entries = self.layout.layer_entries(layer).map(|place| {
                let (start, len) = (place.range.start(), place.range.len());
                Ok(EntryCache {
                    name: place.name.to_owned(),
                    memory: self.memory.slice(start * blocks, len * blocks)?,
                    stride: len,
                    len,
                })
            });
            let entries = entries.collect::<Result<_>>()?;
            Ok(LayerCache { physical, entries })
        });
        Ok(CacheRegistration {
            layers: layers.collect::<Result<_>>()?,
            blocks,
        })
    }
}

fn deployment(group: CacheLayout, ranks: u32) -> Deployment {
    Deployment {
        tenant: "default".to_owned(),
        model: "bench".to_owned(),
        revision: "1".to_owned(),
        kv_dtype: "f32".to_owned(),
        block_size: 16,
        tp_size: ranks,
        storing_ranks: ranks,
        pp_size: 1,
        pcp_size: 1,
        dcp_size: 1,
        groups: vec![group],
        compatible_keys: false,
        execution: Execution::Eager,
        retains_blocks: true,
    }
}

/// A step that loads or saves a prompt of so many blocks, and the next one, in which its request ends.
pub(crate) fn steps(number: u64, blocks: u64, load: bool) -> [StepMetadata; 2] {
    let hashes = (0..blocks).map(|block| BlockHash::new(&block.to_be_bytes()));
    let span = Span {
        first: 0,
        hashes: hashes.collect(),
    };
    let name = format!("r{number}");
    let request = RequestStep {
        request: name.as_str().into(),
        attempt: 0,
        epoch: 0,
        table: TableUpdate {
            begins: true,
            replace: true,
            blocks: (0..blocks).collect(),
        },
        load: load.then(|| span.clone()),
        save: (!load).then_some(span),
        restore: 0,
    };
    let now = StepMetadata {
        version: METADATA_VERSION,
        step: number,
        requests: vec![request],
        ..StepMetadata::default()
    };
    let ending = StepMetadata {
        step: number + 1,
        requests: Vec::new(),
        finished: vec![name.as_str().into()],
        ..now.clone()
    };
    [now, ending]
}

/// Waits until everything of the step before is saved and its request has ended.
pub(crate) fn end(worker: &mut StoreWorker, ending: &StepMetadata) -> Result<()> {
    worker.take_results();
    worker.clear_metadata();
    worker.start_load(ending, HostEvent::done())?;
    worker.wait_for_ends(PATIENCE);
    worker.wait_for_save(HostEvent::done())?;
    ensure!(worker.take_results().finished.len() == 1, "the saves end");
    worker.clear_metadata();
    Ok(())
}
