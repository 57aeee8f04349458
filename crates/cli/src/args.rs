//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::cmd::{admin, config, demo, doctor, master, node, replay, workload};

/// Layerwise KV-cache store and transfer for LLM inference.
#[derive(Debug, Parser)]
#[command(name = "layercake", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Configuration file in TOML, or in JSON if its name ends in .json
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = "Configuration"
    )]
    pub(crate) config: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the store's metadata service
    Master(master::Options),
    /// Lend this machine's memory to the store
    Node(node::Options),
    /// Replay a trace of requests against the store, and check every byte
    Replay(replay::Options),
    /// Compute prompts with a small model, save them, load them in another engine, and compare every bit
    Demo(demo::Options),
    /// Write a made-up sample trace to standard output
    Workload(workload::Options),
    /// List objects
    Ls(admin::Ls),
    /// Show one object
    Stat(admin::Stat),
    /// Remove objects
    Rm(admin::Rm),
    /// List the nodes' segments and how full they are
    Segments(admin::Plain),
    /// Show how the cluster is; fails when it can't take or serve an object
    Health(admin::Plain),
    /// Say what becomes of an existing Mooncake configuration; fails if something of it is refused
    Doctor(doctor::Options),
    /// Show the effective configuration
    Config(config::Options),
    /// One client process of a replay
    #[command(hide = true)]
    ReplayWorker(replay::worker::Options),
    /// One engine process of a demo
    #[command(hide = true)]
    DemoEngine(demo::worker::Options),
}

/// Reads the command line. An error is one line and the exit code; help goes to standard output.
pub(crate) fn parse() -> Result<Cli, (String, i32)> {
    Cli::try_parse().map_err(|error| {
        let text = error.render().to_string();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                print!("{text}");
                (String::new(), 0)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                eprint!("{text}");
                (String::new(), 2)
            }
            _ => (one_line(&text), 2),
        }
    })
}

/// The parser's message without its usage and its line breaks.
fn one_line(text: &str) -> String {
    let message = text.split("\n\nUsage:").next().unwrap_or(text);
    let message = message
        .split("\n\nFor more information")
        .next()
        .unwrap_or(message);
    let paragraphs = message.trim_start_matches("error: ").split("\n\n");
    let paragraphs: Vec<String> = paragraphs
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    paragraphs.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wrong_flag_is_one_line_with_the_nearest_right_one() {
        let error =
            Cli::try_parse_from(["layercake", "master", "--leese", "5s"]).expect_err("unknown");
        let line = one_line(&error.render().to_string());
        assert_eq!(
            line,
            "unexpected argument '--leese' found; tip: a similar argument exists: '--lease'"
        );
    }
}
