//! `cargo xtask …`: what contributors and the public CI run.
//!
//! Every command is a plain sequence of cargo calls and checks that can be run by hand as well; each
//! prints what it is about to do, and ends with a non-zero code at the first thing that fails.

mod bench;
mod contracts;
mod demo;
mod e2e_vllm;
mod edges;
mod large;
mod lint;
mod python;
mod run;
mod side_by_side;
mod test;
mod tidy;
mod wheel;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Build, test and release commands of Layercake"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all tests: unit, integration, real processes, documentation examples
    Test(test::Options),
    /// Build and run the sample workload from end to end (under a minute once built)
    Demo(demo::Options),
    /// Formatting, clippy, documentation, dependency arrows, contracts and tidiness
    Lint,
    /// Run the criterion benches, beside memcpy and raw sockets measured in the same run
    Bench(bench::Options),
    /// Huge batches and values of several GiB, in release mode; too heavy for CI
    Large(large::Options),
    /// Build the Python wheels, the package's own and the drop-in's, into one folder
    Wheel(wheel::Options),
    /// Run the real vLLM on the drop-in; too heavy for CI
    E2eVllm(e2e_vllm::Options),
}

fn main() -> ExitCode {
    match execute(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Test(options) => test::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Lint => lint::run(),
        Command::Bench(options) => bench::run(&options),
        Command::Large(options) => large::run(&options),
        Command::Wheel(options) => wheel::run(&options),
        Command::E2eVllm(options) => e2e_vllm::run(&options),
    }
}
