//! `layercake config show`: the effective settings of a program, and where each came from.

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::{Map, json};

use crate::config::programs::{Common, MasterSettings, NodeSettings, TransportSettings};
use crate::config::{Flags, Resolved, Setting, Settings as _, Sources};
use crate::output::{self, Table};

/// Options of `layercake config`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the effective settings of a program and where each value came from
    #[command(subcommand)]
    Show(Show),
}

#[derive(Debug, Subcommand)]
enum Show {
    /// Settings of `layercake master`; takes its flags
    Master {
        #[command(flatten)]
        common: Flags<Common>,
        #[command(flatten)]
        master: Flags<MasterSettings>,
        /// Print one JSON object instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Settings of `layercake node`; takes its flags
    Node {
        #[command(flatten)]
        common: Flags<Common>,
        #[command(flatten)]
        transport: Flags<TransportSettings>,
        #[command(flatten)]
        node: Flags<NodeSettings>,
        /// Print one JSON object instead of a table
        #[arg(long)]
        json: bool,
    },
}

/// Shows what the program would run with; refuses what the program would refuse.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let Command::Show(show) = &options.command;
    let (groups, flags, json): (&[&'static [Setting]], _, _) = match show {
        Show::Master {
            common,
            master,
            json,
        } => (
            &[Common::TABLE, MasterSettings::TABLE],
            [&common.given[..], &master.given].concat(),
            *json,
        ),
        Show::Node {
            common,
            transport,
            node,
            json,
        } => (
            &[Common::TABLE, TransportSettings::TABLE, NodeSettings::TABLE],
            [&common.given[..], &transport.given, &node.given].concat(),
            *json,
        ),
    };
    let resolved = sources.resolve(groups, &flags)?;
    if json {
        show_json(&resolved)
    } else {
        show_table(&resolved)
    }
}

/// What is shown of a value.
fn shown(setting: &Setting, text: &str) -> String {
    match text {
        "none" => text.to_owned(),
        _ if setting.secret => "set, not shown".to_owned(),
        _ => text.to_owned(),
    }
}

fn show_json(resolved: &Resolved) -> Result<()> {
    let entry = |entry: &crate::config::Entry| {
        let value = shown(entry.setting, &entry.text);
        (
            entry.setting.path(),
            json!({"value": value, "origin": entry.origin.to_string()}),
        )
    };
    output::print_json(&resolved.entries.iter().map(entry).collect::<Map<_, _>>())
}

fn show_table(resolved: &Resolved) -> Result<()> {
    let mut table = Table::new(&["setting", "value", "origin", "meaning"]);
    for entry in &resolved.entries {
        table.row([
            entry.setting.path(),
            shown(entry.setting, &entry.text),
            entry.origin.to_string(),
            entry.setting.help.to_owned(),
        ]);
    }
    output::print(table.to_string().trim_end())
}
