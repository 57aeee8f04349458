//! `cargo xtask bench --guard`: instructions of the pure hot paths beside those on record.
//!
//! The paths are those of the bench `guard`, each run in a process of its own under callgrind. Counts depend on the
//! compiler and the processor family, so a difference is an error only where the record was made with the
//! same ones; elsewhere it is shown. Fewer instructions are never an error, but worth a new record.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use cargo_metadata::{Message, TargetKind};
use serde::{Deserialize, Serialize};

use super::callgrind;
use crate::run;

/// Where the counts on record are.
const RECORD: &str = "benches/guard.toml";

/// The function whose inside is counted; its mangled name contains this.
const COUNTED: &str = "counted_by_guard";

/// How much more than on record is accepted, unless the record says otherwise.
const TOLERANCE_PERCENT: f64 = 5.0;

/// How many more requests for memory than on record are accepted in any case: tables grow a little earlier or
/// later, as their hashes fall.
const ALLOCATIONS_SLACK: u64 = 4;

/// The file of counts.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// What the counts were taken with, as `rustc --version` prints it.
    toolchain: String,
    /// The processor family and system.
    target: String,
    tolerance_percent: f64,
    paths: BTreeMap<String, Entry>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    instructions: u64,
    allocations: u64,
}

pub(crate) fn run(filter: Option<&str>, record: bool) -> Result<()> {
    if !run::available("valgrind", &["--version"]) {
        eprintln!(
            "not run: the guard of instruction counts, since valgrind is not installed (the system package `valgrind`)"
        );
        ensure!(!record, "there is nothing to put on record");
        return Ok(());
    }
    let program = build()?;
    let names = run::output(Command::new(&program).arg("--list"))?;
    let mut measured = BTreeMap::new();
    for name in names
        .lines()
        .filter(|name| filter.is_none_or(|part| name.contains(part)))
    {
        measured.insert(name.to_owned(), count(&program, name)?);
    }
    ensure!(!measured.is_empty(), "no path's name contains {filter:?}");
    if record {
        return write(measured);
    }
    let path = run::root().join(RECORD);
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {RECORD}"))?;
    let mut record: Record = toml::from_str(&text).with_context(|| format!("read {RECORD}"))?;
    record
        .paths
        .retain(|name, _| filter.is_none_or(|part| name.contains(part)));
    compare(&record, &measured)
}

/// Compiles the bench as it is released and returns where its program is.
fn build() -> Result<PathBuf> {
    let output = run::output(run::cargo().args([
        "bench",
        "--package",
        "layercake-benches",
        "--bench",
        "guard",
        "--no-run",
        "--message-format",
        "json-render-diagnostics",
    ]))?;
    Message::parse_stream(output.as_bytes())
        .find_map(|message| match message {
            Ok(Message::CompilerArtifact(artifact))
                if artifact.target.name == "guard"
                    && artifact.target.kind.contains(&TargetKind::Bench) =>
            {
                artifact.executable
            }
            _ => None,
        })
        .map(Into::into)
        .context("cargo names no program for the bench `guard`")
}

/// Runs a path under callgrind.
fn count(program: &Path, name: &str) -> Result<Entry> {
    let folder = program.parent().context("a program lies in a folder")?;
    let file = folder.join(format!("guard-{}.callgrind", std::process::id()));
    let output = Command::new("valgrind")
        .args([
            "--quiet",
            "--tool=callgrind",
            "--demangle=no",
            "--collect-atstart=no",
        ])
        .arg(format!("--toggle-collect=*{COUNTED}*"))
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(program)
        .args(["--path", name])
        .stdin(Stdio::null())
        .output()
        .context("start valgrind")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{name:?} under callgrind ended with {}: {said}",
            output.status
        );
    }
    let text =
        std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    std::fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
    let instructions = callgrind::instructions(&text, &program.to_string_lossy())?;
    ensure!(
        instructions > 0,
        "{name:?}: callgrind saw nothing of {COUNTED}"
    );
    let said = String::from_utf8_lossy(&output.stdout);
    Ok(Entry {
        instructions,
        allocations: said
            .trim()
            .parse()
            .with_context(|| format!("{name:?} printed {said:?} instead of a number"))?,
    })
}

fn toolchain() -> Result<(String, String)> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = run::output(Command::new(rustc).arg("-vV").current_dir(run::root()))?;
    let version = said.lines().next().context("rustc tells no version")?;
    let target = said.lines().find_map(|line| line.strip_prefix("host: "));
    let target = target.context("rustc tells no host")?;
    Ok((version.to_owned(), target.to_owned()))
}

fn write(paths: BTreeMap<String, Entry>) -> Result<()> {
    let (toolchain, target) = toolchain()?;
    let record = Record {
        toolchain,
        target,
        tolerance_percent: TOLERANCE_PERCENT,
        paths,
    };
    let head = "# What the pure hot paths cost: the program's own instructions, and its requests for memory.\n\
                # Written by `cargo xtask bench --guard --record`; compared by `cargo xtask bench --guard`.\n\n";
    let text = format!("{head}{}", toml::to_string(&record)?);
    std::fs::write(run::root().join(RECORD), text).with_context(|| format!("write {RECORD}"))?;
    for (
        name,
        Entry {
            instructions,
            allocations,
        },
    ) in &record.paths
    {
        println!("{name:<52} {instructions:>9} instructions {allocations:>6} allocations");
    }
    println!("on record in {RECORD}");
    Ok(())
}

fn compare(record: &Record, measured: &BTreeMap<String, Entry>) -> Result<()> {
    let mut wrong = Vec::new();
    let mut better = false;
    println!(
        "{:<52} {:>12} {:>9} {:>12} {:>9}",
        "", "instructions", "on record", "allocations", "on record"
    );
    for (name, now) in measured {
        let Some(then) = record.paths.get(name) else {
            wrong.push(format!("{name}: not on record"));
            continue;
        };
        let change = percent(now.instructions, then.instructions);
        println!(
            "{name:<52} {:>12} {:>+8.1}% {:>12} {:>9}",
            now.instructions, change, now.allocations, then.allocations
        );
        let tolerance = record.tolerance_percent;
        if change > tolerance {
            let (now, then) = (now.instructions, then.instructions);
            wrong.push(format!("{name}: {now} instructions instead of {then}"));
        }
        better |= change < -tolerance;
        let (now, then) = (now.allocations, then.allocations);
        if now > then + ALLOCATIONS_SLACK && percent(now, then) > tolerance {
            wrong.push(format!("{name}: {now} allocations instead of {then}"));
        }
        better |= now + ALLOCATIONS_SLACK < then && percent(now, then) < -tolerance;
    }
    let gone = record
        .paths
        .keys()
        .filter(|name| !measured.contains_key(*name));
    wrong.extend(gone.map(|name| format!("{name}: on record, but there is no such path")));
    if better {
        println!(
            "some cost less than on record: put that on record with `cargo xtask bench --guard --record`"
        );
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let list = wrong.join("\n  ");
    let (toolchain, target) = toolchain()?;
    if (&toolchain, &target) != (&record.toolchain, &record.target) {
        eprintln!(
            "not judged: the counts on record are of {} for {}, these of {toolchain} for {target}\n  {list}",
            record.toolchain, record.target
        );
        return Ok(());
    }
    bail!(
        "more than {} % beyond the record (`cargo xtask bench --guard --record` makes a new one, if that is meant):\n  {list}",
        record.tolerance_percent
    )
}

/// By how much `now` is beyond `then`, in percent.
fn percent(now: u64, then: u64) -> f64 {
    if now == then {
        return 0.0;
    }
    let ratio = now as f64 / then as f64;
    (ratio - 1.0) * 100.0
}
