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
    /// What is handed on to the programs of the scenarios, to each what it knows: `--dtype bfloat16`, `--pool embedded`
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
    /// The names of the drop-in's modules beside those of a real Mooncake (with `--compare`)
    Names,
}

/// The programs of the scenarios, in the order in which they are played.
const PLAYED: [Scenario; 3] = [Scenario::Store, Scenario::P2p, Scenario::Faults];

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
    if options.compare.is_none() && options.only.contains(&Scenario::Names) {
        bail!("names are compared with those of a Mooncake: name its interpreter with --compare");
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
    let is_wanted = |scenario| options.only.is_empty() || options.only.contains(&scenario);
    let programs = PLAYED.into_iter().filter(|scenario| is_wanted(*scenario));
    let programs = programs
        .map(|scenario| Ok((scenario, program(scenario, &harness, &folder)?)))
        .collect::<Result<Vec<_>>>()?;
    refuse_unknown(&options.more, &programs)?;

    let ours = ours(&folder)?;
    let peer = match &options.compare {
        Some(python) => Some(mooncake(python, &folder)?),
        None => None,
    };
    let mut failed = Vec::new();
    let mut held = |name: &str, done: Result<()>| {
        if let Err(error) = done {
            eprintln!("{error:#}");
            failed.push(name.to_owned());
        }
    };
    if let Some(python) = &options.compare
        && is_wanted(Scenario::Names)
    {
        held("names", names(python, &ours, &folder));
    }
    if is_wanted(Scenario::Tensors) {
        held("tensors", tensors(&ours, &folder));
    }
    let mut results = SideBySide::default();
    for (scenario, program) in &programs {
        let rounds = if *scenario == Scenario::Faults {
            1
        } else {
            options.rounds
        };
        for _ in 0..rounds {
            for provider in peer.iter().chain([&ours]) {
                let is_peer = provider.name != ours.name;
                let played = play(*scenario, program, provider, is_peer, &folder, options)?;
                for line in &played.lines {
                    results.add(provider.name, line);
                }
                if !played.held && !is_peer {
                    failed.push(format!("{scenario:?}").to_lowercase());
                }
            }
        }
    }
    if let Some(peer) = peer.filter(|_| !programs.is_empty()) {
        print!("{}", results.table([peer.name, ours.name]));
    }
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("did not hold: {}", failed.join(", "))
    }
}

/// What plays a scenario.
struct Program {
    path: PathBuf,
    /// What it says about its options.
    help: String,
}

impl Program {
    fn knows(&self, option: &str) -> bool {
        let mut words = self
            .help
            .split(|c: char| !(c.is_alphanumeric() || c == '-'));
        words.any(|word| word == option)
    }
}

/// The program that plays one of [`PLAYED`].
fn program(scenario: Scenario, harness: &Path, folder: &Path) -> Result<Program> {
    let path = match scenario {
        Scenario::Store => harness.join("store_e2e.py"),
        Scenario::P2p => harness.join("p2p_e2e.py"),
        _ => run::root().join(FAULTS),
    };
    let asked = Command::new(folder.join("venv/bin/python"))
        .arg(&path)
        .arg("--help")
        .output()
        .with_context(|| format!("start {}", path.display()))?;
    if !asked.status.success() {
        bail!(
            "{} --help: {}",
            path.display(),
            String::from_utf8_lossy(&asked.stderr)
        );
    }
    let help = String::from_utf8_lossy(&asked.stdout).into_owned();
    Ok(Program { path, help })
}

/// Options with what belongs to each.
fn with_values(more: &[String]) -> impl Iterator<Item = (&str, &[String])> {
    let options = more.chunk_by(|_, next| !next.starts_with("--"));
    options.map(|chunk| {
        let name = chunk[0]
            .split_once('=')
            .map_or(&*chunk[0], |(name, _)| name);
        (name, chunk)
    })
}

/// An option that no program knows would be left out without a word.
fn refuse_unknown(more: &[String], programs: &[(Scenario, Program)]) -> Result<()> {
    for (option, _) in with_values(more) {
        if !programs.iter().any(|(_, program)| program.knows(option)) {
            bail!("none of the scenarios that are played knows {option}");
        }
    }
    Ok(())
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
    program: &Program,
    provider: &Provider,
    observe: bool,
    folder: &Path,
    options: &Options,
) -> Result<Played> {
    let python = folder.join("venv/bin/python");
    let mut command = Command::new(&python);
    command
        .arg(&program.path)
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
    }
    for (option, chunk) in with_values(&options.more) {
        if program.knows(option) {
            command.args(chunk);
        }
    }
    let path = program.path.display();
    eprintln!("+ {path} on {}", provider.name);
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {path}"))?;
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

/// Runs the tests that are skipped where torch is missing.
fn tensors(ours: &Provider, folder: &Path) -> Result<()> {
    let tests = [
        "tests/test_dropin_tensors.py",
        "tests/test_dropin_sglang.py",
    ];
    run::run(pytest(ours, folder)?.args(tests))
}

/// Compares the names of our modules with those that this interpreter has.
fn names(python: &Path, ours: &Provider, folder: &Path) -> Result<()> {
    // It is started elsewhere.
    let python = std::path::absolute(python)?;
    run::run(
        pytest(ours, folder)?
            .arg("tests/test_dropin_names.py")
            .env("MOONCAKE_PYTHON", python),
    )
}

/// Runs tests on our modules, in vLLM's environment.
fn pytest(ours: &Provider, folder: &Path) -> Result<Command> {
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
    let mut pytest = Command::new(&python);
    pytest
        .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"])
        .env("PYTHONPATH", path)
        .env("PATH", path_with(&ours.master))
        .current_dir(run::root().join("crates/python"))
        // Standard output is for results.
        .stdout(std::io::stderr());
    Ok(pytest)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn program(help: &str) -> Program {
        Program {
            path: PathBuf::new(),
            help: help.to_owned(),
        }
    }

    #[test]
    fn each_program_is_given_what_it_knows() {
        let more: Vec<String> = [
            "--dtype",
            "bfloat16",
            "--pool=embedded",
            "--keep",
            "--rounds",
            "3",
        ]
        .map(str::to_owned)
        .to_vec();
        let given = |help: &str| {
            let program = program(help);
            let known = with_values(&more).filter(|(option, _)| program.knows(option));
            known
                .flat_map(|(_, chunk)| chunk)
                .cloned()
                .collect::<Vec<_>>()
        };
        let store =
            "[--dtype {bfloat16,float32}] [--pool {holder,embedded}]\n  --pool-mib POOL_MIB";
        assert_eq!(given(store), ["--dtype", "bfloat16", "--pool=embedded"]);
        assert_eq!(
            given("--pool-mib POOL_MIB [--rounds ROUNDS]"),
            ["--rounds", "3"]
        );
    }

    #[test]
    fn what_no_program_knows_is_refused() {
        let programs = [
            (Scenario::Store, program("--dtype DTYPE")),
            (Scenario::P2p, program("--rounds ROUNDS")),
        ];
        let ask = |more: &str| refuse_unknown(&[more.to_owned()], &programs);
        assert!(ask("--dtype=float32").is_ok() && ask("--rounds").is_ok());
        for unknown in ["--pool", "--round", "bfloat16"] {
            let error = ask(unknown).expect_err(unknown).to_string();
            assert!(error.contains(unknown), "{error}");
        }
    }
}
