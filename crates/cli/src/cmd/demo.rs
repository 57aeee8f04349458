//! `layercake demo`: the main job on a sample workload, in less than a minute.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::num::NonZeroU64;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;

use super::replay::workload::Workload;
use super::replay::{self, RunOptions};
use crate::config::programs::{Common, TransportSettings};
use crate::config::{Flags, Sources};

/// Options of `layercake demo`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Folder that the trace and the plot are written to; default: the system's folder for temporary
    /// files
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 2000)]
    requests: u64,
    /// The same seed makes the same workload
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: Flags<Common>,
    #[command(flatten)]
    transport: Flags<TransportSettings>,
}

/// Layers and entries of the demo's model: small enough for a laptop, uneven on purpose.
const GEOMETRY: &str = "0-14:4096,4096;15:2048,8192";

/// Runs the demo.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let out = options.out.clone().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&out)
        .with_context(|| format!("can't make the folder {}", out.display()))?;
    let trace = out.join("layercake-demo.jsonl");
    let workload = Workload {
        seed: options.seed,
        requests: options.requests,
        ..Workload::default()
    };
    let file = File::create(&trace).with_context(|| format!("can't write {}", trace.display()))?;
    let mut file = BufWriter::new(file);
    workload
        .write(&mut file)
        .and_then(|()| Ok(file.flush()?))
        .with_context(|| format!("can't write {}", trace.display()))?;
    let two = NonZeroU64::MIN.saturating_add(1);
    eprintln!(
        "replaying {} requests of a made-up chat service ({}) on one master, two nodes and two clients",
        options.requests,
        trace.display()
    );
    let run = RunOptions {
        layers: None,
        entry_bytes: None,
        layer_entries: Some(GEOMETRY.to_owned()),
        speed: 0.0,
        workers: two,
        nodes: Some(two),
        capacity: None,
        lease: None,
        kill_node_after: None,
        master: None,
        tenant: "default".to_owned(),
        run_name: None,
        strict: true,
        plot: Some(out.join("layercake-demo.svg")),
        json: options.json,
        common: options.common.clone(),
        transport: options.transport.clone(),
    };
    replay::replay(&trace, &run, sources)
}
