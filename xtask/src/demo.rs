//! `cargo xtask demo`: the main job on a sample workload.

use anyhow::Result;
use clap::Args;

use crate::run;

#[derive(Args)]
pub(crate) struct Options {
    /// Passed on to `layercake demo`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    run::run(
        run::cargo()
            .args([
                "run",
                "--release",
                "--package",
                "layercake-cli",
                "--",
                "demo",
            ])
            .args(&options.arguments),
    )
}
