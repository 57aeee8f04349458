//! `cargo xtask test`: all tests that need no special machine.

use anyhow::Result;
use clap::Args;

use crate::{python, run};

#[derive(Args)]
pub(crate) struct Options {
    /// Only tests whose name contains this
    filter: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let filter = options.filter.as_deref();
    // What users build, without the features that only tests switch on.
    run::run(run::cargo().args(["check", "--workspace", "--lib", "--bins"]))?;

    let features = ["--workspace", "--all-features"];
    if run::available("cargo-nextest", &["nextest", "--version"]) {
        run::run(
            run::cargo()
                .args(["nextest", "run", "--no-fail-fast"])
                .args(features)
                .args(filter),
        )?;
        // nextest leaves the examples in the documentation out.
        run::run(
            run::cargo()
                .args(["test", "--doc"])
                .args(features)
                .args(filter),
        )?;
    } else {
        run::run(run::cargo().arg("test").args(features).args(filter))?;
    }
    python::test(filter)
}
