//! `layercake workload`: a sample trace on standard output.

use std::io::{self, BufWriter, Write as _};

use anyhow::{Context as _, Result};
use clap::Args;

use super::replay::workload::Workload;

/// Options of `layercake workload`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The same seed makes the same trace
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 1000)]
    requests: u64,
    /// Number of different system prompts that conversations begin with
    #[arg(long, value_name = "N", default_value_t = 12)]
    system_prompts: u64,
}

/// Writes the trace.
pub(crate) fn execute(options: &Options) -> Result<()> {
    let workload = Workload {
        seed: options.seed,
        requests: options.requests,
        system_prompts: options.system_prompts,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let written = workload.write(&mut out).and_then(|()| Ok(out.flush()?));
    let reader_left = |error: &anyhow::Error| {
        error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    match written {
        Err(error) if reader_left(&error) => Ok(()),
        other => other.context("can't write the trace"),
    }
}
