//! `cargo xtask large`: what is too heavy for CI, always in release mode.

use anyhow::Result;
use clap::Args;

use crate::run;

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds in which two writers race for values of more than 2 GiB
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    eprintln!("two writers of one key, values above 2 GiB, every byte compared");
    run::run(
        run::cargo()
            .args([
                "run",
                "--release",
                "--package",
                "layercake-store",
                "--example",
                "large_values",
            ])
            .arg("--")
            .arg(options.rounds.to_string()),
    )?;
    eprintln!("batches of 100,000 pieces of 64 bytes and of 3 pieces of 1 GiB on every transport");
    run::run(run::cargo().args([
        "run",
        "--release",
        "--package",
        "layercake-benches",
        "--bin",
        "large_batches",
    ]))
}
