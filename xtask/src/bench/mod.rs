//! `cargo xtask bench`: the benches, the guard of what they measure, and the peers beside us.

mod callgrind;
mod chart;
mod compare;
mod guard;
mod page;

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
    /// Make the plots and tables of the page of results anew, from the published figures
    #[arg(long, conflicts_with_all = ["guard", "compare"])]
    page: bool,
    #[command(flatten)]
    compare: compare::Comparison,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.guard {
        return guard::run(options.filter.as_deref(), options.record);
    }
    if options.compare.wanted() {
        return compare::run(&options.compare);
    }
    if options.page {
        return page::write();
    }
    run::run(
        run::cargo()
            .args(["bench", "--package", "layercake-benches"])
            .args(options.filter.as_ref().map(|_| "--"))
            .args(&options.filter),
    )
}
