//! `cargo xtask bench`: the criterion benches.

use anyhow::Result;
use clap::Args;

use crate::run;

#[derive(Args)]
pub(crate) struct Options {
    /// Only benches whose name contains this
    filter: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    run::run(
        run::cargo()
            .args(["bench", "--package", "layercake-benches"])
            .args(options.filter.as_ref().map(|_| "--"))
            .args(&options.filter),
    )
}
