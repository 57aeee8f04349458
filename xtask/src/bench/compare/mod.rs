//! `cargo xtask bench --compare`: the same work on Layercake and its peers, in turns, on this machine.
//!
//! The work is that of `benches/python/measure.py`, which knows nothing of whom it measures: each provider is an
//! environment with its packages. Every scenario runs on all providers before the next one, so that what
//! the machine does meanwhile meets all; who begins changes from round to round.

pub(crate) mod figures;
mod link;
mod providers;
mod results;
mod table;

pub(crate) use providers::{MOONCAKE, OURS, OURS_TCP};
pub(crate) use results::{Place, Results};

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use self::link::Link;
use self::providers::Provider;
use self::results::{Outcome, Run};
use crate::run;

/// The scenarios of `measure.py`, in the order in which they are shown.
const SCENARIOS: [&str; 9] = [
    "ranges",
    "embedded",
    "multi buffers",
    "engine",
    "small",
    "batches",
    "lanes",
    "exist",
    "connections",
];

/// Where the published figures are.
pub(crate) const PUBLISHED: &str = "docs/performance/results.json";
/// The same over a link, if there are such figures.
pub(crate) const PUBLISHED_LINK: &str = "docs/performance/link.json";

#[derive(Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a switch of the command line"
)]
pub(crate) struct Comparison {
    /// Run the same work on Layercake and on Mooncake, in turns, and show both
    #[arg(long, conflicts_with = "guard")]
    compare: bool,
    /// An interpreter that has Mooncake and numpy (default: one is made, from the Python package index)
    #[arg(long, value_name = "PYTHON", requires = "compare")]
    peer: Option<PathBuf>,
    /// An interpreter that has Layercake, its drop-in and numpy (default: one is made of this tree)
    #[arg(long, value_name = "PYTHON", requires = "compare")]
    ours: Option<PathBuf>,
    /// Layercake once more, held to TCP
    #[arg(long, requires = "compare", conflicts_with = "Link")]
    tcp: bool,
    /// The scenario `engine` on NIXL as well
    #[arg(long, requires = "compare")]
    nixl: bool,
    /// An interpreter that has NIXL and numpy (default: one is made)
    #[arg(long, value_name = "PYTHON", requires = "nixl")]
    nixl_python: Option<PathBuf>,
    /// How often each scenario runs on each
    #[arg(long, default_value_t = 3, requires = "compare")]
    rounds: u32,
    /// Only these scenarios
    #[arg(long, value_parser = SCENARIOS, requires = "compare")]
    scenario: Vec<String>,
    /// Small sizes, to see that it works; figures of such a run say little
    #[arg(long, requires = "compare")]
    short: bool,
    #[command(flatten)]
    link: Link,
    /// Where the figures go
    #[arg(long, value_name = "FILE", default_value = "target/compare.json")]
    out: PathBuf,
}

impl Comparison {
    pub(crate) fn wanted(&self) -> bool {
        self.compare
    }
}

pub(crate) fn run(options: &Comparison) -> Result<()> {
    let mut providers = vec![providers::ours(options.ours.as_deref())?];
    if options.tcp {
        providers.push(providers[0].held_to_tcp());
    }
    providers.push(providers::mooncake(options.peer.as_deref())?);
    if options.nixl {
        providers.push(providers::nixl(options.nixl_python.as_deref())?);
    }
    if options.link.is_emulated() {
        options.link.check()?;
        let over = |provider: Provider| provider.over(&options.link);
        providers = providers.into_iter().map(over).collect();
    }
    let mut results = Results::new(conditions(&providers, options)?);
    let scenarios = SCENARIOS.into_iter().filter(|name| {
        options.scenario.is_empty() || options.scenario.iter().any(|wanted| wanted == name)
    });
    for scenario in scenarios {
        for round in 0..options.rounds {
            let mut turn: Vec<&Provider> = providers.iter().collect();
            if round % 2 == 1 {
                turn.reverse();
            }
            for provider in turn.into_iter().filter(|each| each.plays(scenario)) {
                results.runs.push(Run {
                    provider: provider.name.to_owned(),
                    scenario: scenario.to_owned(),
                    round,
                    outcome: provider.play(scenario, options.short)?,
                });
            }
        }
    }
    results.machine = providers[0].limits()?;
    print!("{}", table::render(&results));
    let out = run::root().join(&options.out);
    if let Some(folder) = out.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    std::fs::write(&out, results.to_json()?).with_context(|| format!("write {}", out.display()))?;
    println!("all figures: {}", options.out.display());
    let failed: Vec<String> = results
        .runs
        .iter()
        .filter_map(|run| match &run.outcome {
            Outcome::Failed { error } if [OURS, OURS_TCP].contains(&run.provider.as_str()) => {
                Some(format!("{}: {error}", run.scenario))
            }
            _ => None,
        })
        .collect();
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("Layercake failed:\n  {}", failed.join("\n  "))
    }
}

/// What the figures hold for.
fn conditions(providers: &[Provider], options: &Comparison) -> Result<Vec<(String, String)>> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_once(':'));
        value.map_or_else(
            || "unknown".to_owned(),
            |(_, value)| value.trim().to_owned(),
        )
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or_default();
    let git = |arguments: &[&str]| {
        let mut git = std::process::Command::new("git");
        run::output(git.current_dir(run::root()).args(arguments))
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    let mut conditions = vec![
        ("processor", field(&read("/proc/cpuinfo"), "model name")),
        (
            "processors",
            std::thread::available_parallelism()?.to_string(),
        ),
        ("memory", format!("{} GiB", (kib + (1 << 19)) >> 20)),
        (
            "kernel",
            read("/proc/sys/kernel/osrelease")
                .trim()
                .split('-')
                .next()
                .unwrap_or_default()
                .to_owned(),
        ),
        (
            "congestion control",
            read("/proc/sys/net/ipv4/tcp_congestion_control")
                .trim()
                .to_owned(),
        ),
        (
            "commit",
            match (&options.ours, changed.is_empty()) {
                (Some(_), _) => "unknown: packages were given".to_owned(),
                (None, true) => commit,
                (None, false) => format!("{commit} with changes"),
            },
        ),
        // What else the machine had to do.
        (
            "load at the start",
            read("/proc/loadavg")
                .split(' ')
                .next()
                .unwrap_or_default()
                .to_owned(),
        ),
        ("rounds", options.rounds.to_string()),
        (
            "sizes",
            if options.short { "short" } else { "full" }.to_owned(),
        ),
    ];
    if options.link.is_emulated() {
        conditions.push(("link", options.link.describe()));
    }
    for provider in providers {
        conditions.push((provider.name, provider.version()?));
    }
    let owned = conditions.into_iter();
    Ok(owned
        .map(|(name, value)| (name.to_owned(), value))
        .collect())
}
