//! The options of `layercake replay`, and what they may not say together.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_protocol::layout::ModelGeometry;

use crate::config::programs::{Common, TransportSettings};
use crate::config::{ByteSize, Flags, MasterAddress, Value as _};

/// Lease of a pool whose size was chosen, and may be small: an object that was just looked for is not
/// evicted, so with the master's default a fast replay would find the whole pool under leases.
const SHORT_LEASE: Duration = Duration::from_secs(1);

fn parse_duration(text: &str) -> Result<Duration, String> {
    Duration::read(text)
}

/// A small model: 16 KiB a block.
const DEFAULT_GEOMETRY: &str = "0-7:1024,1024";

/// Options of `layercake replay`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Trace of requests, one JSON object a line; `-` reads standard input
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunOptions,
}

/// What a replay does.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunOptions {
    /// Layers of the model, each with the entries of --entry-bytes; default: 8 layers of 1024,1024
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<NonZeroU32>,
    /// Bytes of each cache entry of a layer, such as 1024,1024
    #[arg(long, value_name = "A,B")]
    pub(crate) entry_bytes: Option<String>,
    /// Layers with entries of their own, such as 0-7:1024,1024;8:512,2048
    #[arg(long, value_name = "LAYERS")]
    pub(crate) layer_entries: Option<String>,
    /// 0: as fast as possible; 1: at the trace's own times; 2: twice as fast
    #[arg(long, value_name = "FACTOR", default_value_t = 0.0)]
    pub(crate) speed: f64,
    /// Client processes; requests go to them round robin
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) workers: NonZeroU64,
    /// Segment hosts of the embedded cluster; default: 1
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<NonZeroU64>,
    /// Memory of the embedded cluster, split evenly over the nodes, such as 16GiB; default: room for
    /// all blocks of the trace
    #[arg(long, value_name = "SIZE")]
    pub(crate) capacity: Option<ByteSize>,
    /// Time for which the embedded cluster's readers may rely on a block, such as 500ms; default: the
    /// master's own, or 1s with --capacity, since a replay squeezes hours into seconds
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) lease: Option<Duration>,
    /// Send SIGKILL to the last node when this many requests have finished
    #[arg(long, value_name = "REQUESTS")]
    pub(crate) kill_node_after: Option<NonZeroU64>,
    /// Use the running cluster of this master, HOST:PORT, instead of an embedded one
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) master: Option<MasterAddress>,
    /// Namespace of the keys
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) tenant: String,
    /// Part of all keys: a run on the same cluster with the same name finds what an earlier one stored;
    /// default: a new name each time
    #[arg(long, value_name = "NAME")]
    pub(crate) run_name: Option<String>,
    /// Go through the connector, as an engine does, instead of using the store's sessions directly
    #[arg(long)]
    pub(crate) connector: bool,
    /// Refuse a malformed line of the trace instead of skipping it
    #[arg(long)]
    pub(crate) strict: bool,
    /// Draw hit ratio and throughput over the trace's time
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) common: Flags<Common>,
    #[command(flatten)]
    pub(crate) transport: Flags<TransportSettings>,
}

impl RunOptions {
    /// Refuses options that contradict each other.
    pub(crate) fn check(&self) -> Result<()> {
        if self.master.is_some() {
            for (given, flag) in [
                (self.nodes.is_some(), "--nodes"),
                (self.capacity.is_some(), "--capacity"),
                (self.lease.is_some(), "--lease"),
                (self.kill_node_after.is_some(), "--kill-node-after"),
            ] {
                if given {
                    bail!("{flag} is about the embedded cluster and contradicts --master");
                }
            }
        }
        if !(0.0..=1e6).contains(&self.speed) {
            bail!(
                "--speed {} is neither 0 nor a positive factor up to 1000000",
                self.speed
            );
        }
        Ok(())
    }

    /// The lease of the embedded cluster; `None`: the master's own default.
    pub(crate) fn lease(&self) -> Option<Duration> {
        self.lease.or(self.capacity.map(|_| SHORT_LEASE))
    }

    /// The model's layers.
    pub(crate) fn geometry(&self) -> Result<ModelGeometry> {
        match (self.layers, &self.entry_bytes, &self.layer_entries) {
            (None, None, Some(layers)) => {
                ModelGeometry::parse_layer_entries(layers).context("--layer-entries")
            }
            (Some(layers), Some(bytes), None) => {
                ModelGeometry::parse_uniform(layers, bytes).context("--layers and --entry-bytes")
            }
            (None, None, None) => {
                ModelGeometry::parse_layer_entries(DEFAULT_GEOMETRY).context("the default geometry")
            }
            (Some(_), None, None) => bail!("--layers needs --entry-bytes"),
            (None, Some(_), None) => bail!("--entry-bytes needs --layers"),
            (_, _, Some(_)) => bail!("--layer-entries contradicts --layers and --entry-bytes"),
        }
    }
}
