//! The `layercake` command: the store's master and nodes, the replay of request traces, and the tools
//! of an operator.
//!
//! Configuration is read here and nowhere below: defaults, a file, the environment, flags (`config`).
//! Results go to standard output, everything else to standard error; an error is one line that names
//! the thing and what is accepted, and a non-zero exit code.
#![forbid(unsafe_code)]

mod args;
mod cmd;
mod config;
mod connect;
mod http;
mod metrics;
mod output;
mod process;
mod security;

use std::process::ExitCode;

use anyhow::Result;
use mimalloc::MiMalloc;

use args::{Cli, Command};
use config::Sources;

/// Why: `docs/decisions/0021-what-a-cold-call-costs.md`.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    let cli = match args::parse() {
        Ok(cli) => cli,
        Err((message, code)) => {
            if !message.is_empty() {
                eprintln!("layercake: {message}");
            }
            return u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("layercake: {}", output::one_line(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let sources = Sources::load(cli.config.as_deref())?;
    match &cli.command {
        Command::Master(options) => cmd::master::execute(options, &sources),
        Command::Node(options) => cmd::node::execute(options, &sources),
        Command::Replay(options) => cmd::replay::execute(options, &sources),
        Command::Demo(options) => cmd::demo::execute(options, &sources),
        Command::Workload(options) => cmd::workload::execute(options),
        Command::Ls(options) => cmd::admin::ls(options, &sources),
        Command::Stat(options) => cmd::admin::stat(options, &sources),
        Command::Rm(options) => cmd::admin::rm(options, &sources),
        Command::Segments(options) => cmd::admin::segments(options, &sources),
        Command::Health(options) => cmd::admin::health(options, &sources),
        Command::Doctor(options) => cmd::doctor::execute(options),
        Command::Config(options) => cmd::config::execute(options, &sources),
        Command::ReplayWorker(options) => cmd::replay::worker::execute(options, &sources),
        Command::DemoEngine(options) => cmd::demo::worker::execute(options, &sources),
    }
}
