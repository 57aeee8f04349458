//! `cargo xtask e2e-vllm DIR`: the real vLLM, with a real small model, on the drop-in.
//!
//! The folder is for what is large and kept: an environment with vLLM (CPU build) and the model, both made by the
//! harness that lies beside the repository; without that harness there is nothing to run. Each scenario is a program
//! that prints one JSON line and fails if a token differs or a prefix is not found. With `--compare` the same
//! traffic runs on a real Mooncake first, whose failures are shown and not held against it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};

use crate::run;
use crate::side_by_side::SideBySide;
use crate::wheel::{self, Environment};

/// Where the experiments with killed processes lie.
const FAULTS: &str = "crates/python/vllm/faults.py";

#[derive(Args)]
pub(crate) struct Options {
    /// Where vLLM and the model are kept (about 6 GB; made at the first run)
    folder: PathBuf,
    /// The harness: a folder with `setup.sh`, `store_e2e.py` and `p2p_e2e.py`
    #[arg(long, default_value = "../shared/vllm-e2e")]
    harness: PathBuf,
    /// An interpreter that has a real Mooncake, to run the same on it, first
    #[arg(long, value_name = "PYTHON")]
    compare: Option<PathBuf>,
    /// Which scenarios (default: all)
    #[arg(long, value_enum)]
    only: Vec<Scenario>,
    /// How often each of the scenarios `store` and `p2p` runs
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// What is handed on to the programs of the scenarios `store` and `p2p`, such as `--dtype bfloat16`
    #[arg(last = true)]
    more: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Prefixes from the store: cold, warm, warm in another engine, emptied
    Store,
    /// One engine computes prompts, another answers them
    P2p,
    /// Masters and lenders of memory are killed between saving and loading, and during it
    Faults,
    /// The tests of the drop-in that need torch, which vLLM brings along
    Tensors,
}

/// A `mooncake` to run on.
struct Provider {
    name: &'static str,
    /// A folder with the package and nothing that vLLM has as well.
    modules: PathBuf,
    master: PathBuf,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let harness = run::root().join(&options.harness);
    let setup = harness.join("setup.sh");
    if !setup.is_file() {
        bail!(
            "there is no harness for vLLM in {}: name its folder with --harness",
            harness.display()
        );
    }
    std::fs::create_dir_all(&options.folder)
        .with_context(|| format!("make {}", options.folder.display()))?;
    let folder = std::path::absolute(&options.folder)?;
    run::run(
        Command::new(&setup)
            .arg(&folder)
            .args(["--provider", "none"])
            // Standard output is for results.
            .stdout(std::io::stderr()),
    )?;
    let ours = ours(&folder)?;
    let peer = match &options.compare {
        Some(python) => Some(mooncake(python, &folder)?),
        None => None,
    };
    let mut failed = Vec::new();
    let mut results = SideBySide::default();
    for scenario in [
        Scenario::Tensors,
        Scenario::Store,
        Scenario::P2p,
        Scenario::Faults,
    ] {
        if !options.only.is_empty() && !options.only.contains(&scenario) {
            continue;
        }
        let Some(program) = program(scenario, &harness) else {
            if let Err(error) = tensors(&ours, &folder) {
                eprintln!("{error:#}");
                failed.push("tensors".to_owned());
            }
            continue;
        };
        let rounds = if scenario == Scenario::Faults {
            1
        } else {
            options.rounds
        };
        for _ in 0..rounds {
            for provider in peer.iter().chain([&ours]) {
                let is_peer = provider.name != ours.name;
                let played = play(scenario, &program, provider, is_peer, &folder, options)?;
                for line in &played.lines {
                    results.add(provider.name, line);
                }
                if !played.held && !is_peer {
                    failed.push(format!("{scenario:?}").to_lowercase());
                }
            }
        }
    }
    if let Some(peer) = &peer {
        print!("{}", results.table([peer.name, ours.name]));
    }
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("did not hold: {}", failed.join(", "))
    }
}

/// The program that plays a scenario; `None`: it is a set of tests.
fn program(scenario: Scenario, harness: &Path) -> Option<PathBuf> {
    match scenario {
        Scenario::Store => Some(harness.join("store_e2e.py")),
        Scenario::P2p => Some(harness.join("p2p_e2e.py")),
        Scenario::Faults => Some(run::root().join(FAULTS)),
        Scenario::Tensors => None,
    }
}

/// What came of a scenario.
struct Played {
    held: bool,
    /// What it printed.
    lines: Vec<String>,
}

/// Runs a scenario, passing on the lines that it prints with the provider's name before them.
fn play(
    scenario: Scenario,
    program: &Path,
    provider: &Provider,
    observe: bool,
    folder: &Path,
    options: &Options,
) -> Result<Played> {
    let python = folder.join("venv/bin/python");
    let mut command = Command::new(&python);
    command
        .arg(program)
        .arg("--model")
        .arg(folder.join("model"))
        .arg("--python")
        .arg(&python)
        .arg("--pythonpath")
        .arg(&provider.modules);
    if scenario != Scenario::P2p {
        let master = provider.master.display();
        command.arg("--master-cmd").arg(format!(
            "{master} --rpc_address {{host}} --rpc_port {{port}} --metrics_port {{metrics_port}}"
        ));
    }
    if scenario == Scenario::Faults {
        command.args(observe.then_some("--observe"));
    } else {
        command.args(&options.more);
    }
    eprintln!("+ {} on {}", program.display(), provider.name);
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    let output = child.wait_with_output()?;
    let mut out = std::io::stdout().lock();
    let lines = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = lines.lines().map(str::to_owned).collect();
    for line in &lines {
        writeln!(out, "{} {line}", provider.name)?;
    }
    out.flush()?;
    Ok(Played {
        held: output.status.success(),
        lines,
    })
}

/// Runs the tests that are skipped where torch is missing, in vLLM's environment.
fn tensors(ours: &Provider, folder: &Path) -> Result<()> {
    let tools = folder.join("pytest");
    let python = folder.join("venv/bin/python");
    if !tools.exists() {
        run::run(
            Command::new(&python)
                .args(["-m", "pip", "install", "--quiet", "--target"])
                .arg(&tools)
                .args(["pytest>=8", "pytest-timeout>=2"]),
        )?;
    }
    let path = std::env::join_paths([&ours.modules, &tools])?;
    let test = "tests/test_dropin_tensors.py";
    let sglang = "tests/test_dropin_sglang.py";
    run::run(
        Command::new(&python)
            .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"])
            .args([test, sglang])
            .env("PYTHONPATH", path)
            .env("PATH", path_with(&ours.master))
            .current_dir(run::root().join("crates/python"))
            // Standard output is for results.
            .stdout(std::io::stderr()),
    )
}

/// The search path with the folder of a program before all others.
fn path_with(program: &Path) -> std::ffi::OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let first = program.parent().map(Path::to_path_buf);
    let paths = first.into_iter().chain(std::env::split_paths(&path));
    std::env::join_paths(paths).unwrap_or(path)
}

/// Our wheels: the modules alone for vLLM's interpreter, and an environment of their own for the master.
fn ours(folder: &Path) -> Result<Provider> {
    let wheels = wheel::build_for_this_machine()?;
    let modules = folder.join("layercake");
    if modules.exists() {
        std::fs::remove_dir_all(&modules)
            .with_context(|| format!("empty {}", modules.display()))?;
    }
    let environment = Environment::make("vllm-master", &[])?;
    run::run(
        environment
            .pip_install()
            .args(["--force-reinstall", "--no-deps"])
            .args(&wheels),
    )?;
    run::run(
        environment
            .pip_install()
            .args(["--no-deps", "--target"])
            .arg(&modules)
            .args(&wheels),
    )?;
    Ok(Provider {
        name: "layercake",
        modules,
        master: environment.path("mooncake_master"),
    })
}

/// A real Mooncake: its package, without the other packages of its environment.
fn mooncake(python: &Path, folder: &Path) -> Result<Provider> {
    let asked = Command::new(python)
        .args([
            "-c",
            "import mooncake; print(next(iter(mooncake.__path__)))",
        ])
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("start {}", python.display()))?;
    let package = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
    let packages = match package.parent() {
        Some(parent) if asked.status.success() => parent,
        _ => bail!("{} has no package `mooncake`", python.display()),
    };
    let modules = folder.join("mooncake");
    std::fs::create_dir_all(&modules).with_context(|| format!("make {}", modules.display()))?;
    for entry in std::fs::read_dir(packages)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("mooncake") {
            let link = modules.join(entry.file_name());
            if link.symlink_metadata().is_ok() {
                std::fs::remove_file(&link)?;
            }
            std::os::unix::fs::symlink(entry.path(), &link)
                .with_context(|| format!("link {}", link.display()))?;
        }
    }
    Ok(Provider {
        name: "mooncake",
        modules,
        master: python.with_file_name("mooncake_master"),
    })
}
