//! `cargo xtask bench`: the benches, and the guard of what they measure.

mod callgrind;
mod guard;

use anyhow::Result;
use clap::Args;

use crate::run;

#[derive(Args)]
pub(crate) struct Options {
    /// Only benches, or paths of the guard, whose name contains this
    filter: Option<String>,
    /// Count the instructions of the pure hot paths and compare them with those on record
    #[arg(long)]
    guard: bool,
    /// Put the counts on record instead of comparing them
    #[arg(long, requires = "guard", conflicts_with = "filter")]
    record: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.guard {
        return guard::run(options.filter.as_deref(), options.record);
    }
    run::run(
        run::cargo()
            .args(["bench", "--package", "layercake-benches"])
            .args(options.filter.as_ref().map(|_| "--"))
            .args(&options.filter),
    )
}
