//! `layercake node`: lends this machine's memory to the store.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_protocol::replica::GRANULE;
use layercake_store::link::{LinkCarrier, LinkConfig, LinkState, MasterLink};
use layercake_store::{Node, NodeConfig, StoreError};
use layercake_transport::Engine;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::master::Life;
use crate::config::programs::{Common, NodeSettings, TransportSettings};
use crate::config::{ByteSize, Flags, Settings as _, Sources};
use crate::connect::{self, Trust};
use crate::http::{Health, Http};
use crate::process::{self, StopRequest};
use crate::{metrics, output, security};

/// Options of `layercake node`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Flags<Common>,
    #[command(flatten)]
    transport: Flags<TransportSettings>,
    #[command(flatten)]
    settings: Flags<NodeSettings>,
    #[command(flatten)]
    life: Life,
}

/// The line that says that a node's memory is mounted.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    #[serde(rename = "ready")]
    role: String,
    name: String,
    /// Where peers reach its data plane over TCP.
    data: String,
    /// Where metrics and health are served, if they are.
    http: Option<SocketAddr>,
    /// Bytes mounted.
    pub(crate) capacity: u64,
    segments: Vec<String>,
    pid: u32,
}

/// Longest time for giving the memory back at a stop, and for leaving the master after that: together
/// less than a stop may take.
const UNMOUNT_WITHIN: Duration = Duration::from_millis(2500);
const LEAVE_WITHIN: Duration = Duration::from_millis(750);

/// Runs until told to stop.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let flags = [
        &options.common.given[..],
        &options.transport.given,
        &options.settings.given,
    ]
    .concat();
    let groups = [Common::TABLE, TransportSettings::TABLE, NodeSettings::TABLE];
    let resolved = sources.resolve(&groups, &flags)?;
    sources.check_mooncake_protocol()?;
    let common = Common::take(&resolved)?;
    let transport = TransportSettings::take(&resolved)?;
    let settings = NodeSettings::take(&resolved)?;
    let trust = Trust {
        token: security::token(&common)?.map(|token| token.shared),
        insecure: common.insecure,
    };
    let lending = lending(&settings)?;
    process::start_logging(&common)?;
    let runtime = process::runtime(connect::few_threads())?;
    let ran = runtime.block_on(run(&transport, &settings, &lending, &trust, options.life));
    runtime.shutdown_timeout(Duration::from_millis(500));
    ran
}

/// What is lent: the whole capacity, in as many segments as it takes.
fn lending(settings: &NodeSettings) -> Result<NodeConfig> {
    let ByteSize(capacity) = settings.capacity;
    if capacity < GRANULE {
        bail!(
            "setting `node.capacity`: {} is less than {}, the smallest piece that is lent",
            settings.capacity,
            ByteSize(GRANULE)
        );
    }
    Ok(NodeConfig::lending(capacity, settings.huge_pages))
}

/// How long a node waits for a master that was started along with it.
const MASTER_WITHIN: Duration = Duration::from_secs(3);
const MASTER_AGAIN: Duration = Duration::from_millis(100);

/// Connects to the master, which may be about to listen.
async fn reach_master(config: LinkConfig) -> Result<MasterLink> {
    let deadline = tokio::time::Instant::now() + MASTER_WITHIN;
    loop {
        match MasterLink::connect(config.clone()).await {
            Err(StoreError::MasterUnreachable { .. })
                if tokio::time::Instant::now() + MASTER_AGAIN < deadline =>
            {
                tokio::time::sleep(MASTER_AGAIN).await;
            }
            ended => return Ok(ended?),
        }
    }
}

/// A name that no other node of the cluster has.
fn own_name() -> String {
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    format!("{host}-{}", std::process::id())
}

async fn run(
    transport: &TransportSettings,
    settings: &NodeSettings,
    lending: &NodeConfig,
    trust: &Trust,
    life: Life,
) -> Result<()> {
    let mut stop = StopRequest::listen(life.exit_with_stdin)?;
    let name = settings.name.clone().unwrap_or_else(own_name);
    let engine = Engine::start(connect::engine_config(
        transport,
        trust,
        Some(settings.listen),
        settings.advertise,
    ))?;
    let mut link_config = connect::link_config(&settings.master.0, &name, trust);
    link_config.endpoint = Some(engine.endpoint().clone());
    let link = tokio::select! {
        link = reach_master(link_config) => link?,
        () = stop.wait() => return Ok(()),
    };
    let begun = Node::begin(lending, engine.clone(), link.clone());
    let node = Arc::new(begun.map_err(|error| about_capacity(error, settings))?);
    let http = match settings.http {
        None => None,
        Some(address) => Some(serve_http(address, &name, &engine, &node, &link).await?),
    };
    tokio::select! {
        ready = node.ready() => ready.map_err(|error| about_capacity(error, settings))?,
        // Touching a large memory takes its time; a stop does not wait for it.
        () = stop.wait() => return leave(node, http, &engine, &link).await,
    }
    let mounted = node.segments();
    let ready = Ready {
        role: "node".to_owned(),
        name,
        data: engine.endpoint().tcp.clone(),
        http: http.as_ref().map(|http| http.address),
        capacity: mounted.iter().map(|segment| segment.len).sum(),
        segments: mounted
            .iter()
            .map(|segment| segment.id.to_string())
            .collect(),
        pid: std::process::id(),
    };
    tracing::info!(
        name = ready.name,
        capacity = ready.capacity,
        "node is ready"
    );
    if life.print_ready {
        output::print_json(&ready)?;
    }
    stop.wait().await;
    leave(node, http, &engine, &link).await
}

/// Names the setting, where the memory that it asks for can't be had.
fn about_capacity(error: StoreError, settings: &NodeSettings) -> anyhow::Error {
    let asked = settings.capacity;
    let about = matches!(error, StoreError::SegmentTooLarge { .. });
    let error = anyhow::Error::from(error);
    if about {
        error.context(format!("setting `node.capacity` (--capacity): {asked}"))
    } else {
        error
    }
}

/// Gives the memory back and leaves, within the time that a stop has.
async fn leave(
    node: Arc<Node>,
    http: Option<Http>,
    engine: &Engine,
    link: &MasterLink,
) -> Result<()> {
    process::bound_stop();
    tracing::info!("node stops");
    if let Some(http) = http {
        http.stop();
    }
    // A scrape under way holds the node for a moment longer: then its drop ends it.
    let unmounted = match Arc::into_inner(node) {
        Some(node) => node.shutdown(UNMOUNT_WITHIN).await,
        None => Ok(()),
    };
    let reachable = matches!(link.state(), LinkState::Up { .. });
    let left = link.close(LEAVE_WITHIN).await;
    engine.shutdown(LEAVE_WITHIN);
    match unmounted.and(left) {
        // A master that is gone can't be told, and needs not be.
        // Nor does it matter that memory takes its time to be freed: it is with the process.
        Err(error) if reachable => tracing::info!(%error, "the node did not leave in order"),
        _ => {}
    }
    Ok(())
}

async fn serve_http(
    address: SocketAddr,
    name: &str,
    engine: &Engine,
    node: &Arc<Node>,
    link: &MasterLink,
) -> Result<Http> {
    let mut registry = Registry::default();
    metrics::register_engine(&mut registry, engine);
    metrics::register_node(&mut registry, node);
    let (name, link, node) = (name.to_owned(), link.clone(), Arc::downgrade(node));
    let health = move || {
        let (up, state) = match link.state() {
            LinkState::Up { .. } => (true, "connected".to_owned()),
            LinkState::Connecting => (false, "connecting".to_owned()),
            LinkState::Down(error) => (false, error.to_string()),
            _ => (false, "closed".to_owned()),
        };
        let numbers = node.upgrade().map(|node| node.stats()).unwrap_or_default();
        let ok = up && numbers.mounted_bytes > 0;
        let detail = json!({
            "role": "node",
            "name": name,
            "serving": ok,
            "master": state,
            "master_over": link.carrier().map(LinkCarrier::name),
            "capacity_bytes": numbers.capacity_bytes,
            "mounted_bytes": numbers.mounted_bytes,
        });
        Health { ok, detail }
    };
    Http::start(address, registry, health)
        .await
        .context("node.http")
}
