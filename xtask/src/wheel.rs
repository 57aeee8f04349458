//! `cargo xtask wheel`: the two Python distributions, built into one folder.
//!
//! The tools (maturin, which drives cargo; zig as a linker for the glibc floor; flit for the pure
//! Python wheel) come from the Python package index into a virtual environment under the target
//! folder. The only thing that has to be there beforehand is a `python3` with `venv`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use cargo_metadata::MetadataCommand;
use clap::Args;

use crate::run;

/// How what others install is compiled: it takes twice as long as a release build, and is a little quicker in every call.
const PROFILE: &str = "wheel";

/// The glibc that released wheels ask for: that of Debian 10, RHEL 8, Ubuntu 20.04 and later.
const FLOOR: &str = "manylinux_2_28";

/// Tools of the build, in the environment that builds wheels.
const TOOLS: [&str; 3] = ["maturin[zig]>=1.9,<2", "flit_core>=3.11,<4", "pip>=24"];

/// Folders of the two distributions, relative to the root.
const NATIVE: &str = "crates/python";
const DROPIN: &str = "crates/python/mooncake-dropin";

#[derive(Args)]
pub(crate) struct Options {
    /// Where the wheels go
    #[arg(long, default_value = "target/wheels")]
    out: PathBuf,
    /// Link against this machine's glibc, without zig: quicker to set up, and not for other machines
    #[arg(long)]
    native: bool,
    /// Unoptimised, and native: for tests
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    for wheel in build(options)? {
        println!("{}", wheel.display());
    }
    Ok(())
}

/// Builds both wheels, for the tests. Returns their paths.
pub(crate) fn build_for_tests() -> Result<Vec<PathBuf>> {
    build(&Options {
        out: target_dir()?.join("wheels-debug"),
        native: true,
        debug: true,
    })
}

/// Builds both wheels optimised, for use on this machine alone. Returns their paths.
pub(crate) fn build_for_this_machine() -> Result<Vec<PathBuf>> {
    build(&Options {
        out: target_dir()?.join("wheels-native"),
        native: true,
        debug: false,
    })
}

fn build(options: &Options) -> Result<Vec<PathBuf>> {
    check_versions()?;
    let out = run::root().join(&options.out);
    std::fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    let environment = Environment::make("python-build", &TOOLS)?;
    let before = wheels(&out)?;
    for old in before.iter().filter(|path| is_ours(path)) {
        std::fs::remove_file(old).with_context(|| format!("remove {}", old.display()))?;
    }

    let mut maturin = environment.program("maturin");
    maturin
        .current_dir(run::root().join(NATIVE))
        .arg("build")
        .args(["--locked", "--out"])
        .arg(&out);
    if !options.debug {
        maturin.args(["--profile", PROFILE]);
    }
    if options.native || options.debug {
        maturin.args(["--compatibility", "linux"]);
    } else {
        maturin.args(["--zig", "--compatibility", FLOOR]);
    }
    run::run(&mut maturin)?;

    run::run(
        environment
            .python()
            .args(["-m", "pip", "wheel", "--quiet", "--no-deps"])
            .args(["--no-build-isolation", "--wheel-dir"])
            .arg(&out)
            .arg(run::root().join(DROPIN)),
    )?;
    let built: Vec<PathBuf> = wheels(&out)?
        .into_iter()
        .filter(|path| is_ours(path))
        .collect();
    if built.len() != 2 {
        bail!(
            "2 wheels should be in {}, not {}",
            out.display(),
            built.len()
        );
    }
    Ok(built)
}

/// The drop-in names the version of the package it stands on, and its own; both are the crates'.
pub(crate) fn check_versions() -> Result<()> {
    let metadata = MetadataCommand::new()
        .current_dir(run::root())
        .no_deps()
        .exec()?;
    let version = metadata
        .packages
        .iter()
        .find(|package| package.name.as_str() == "layercake-python")
        .map(|package| package.version.to_string())
        .context("the workspace has a package layercake-python")?;
    let path = run::root().join(DROPIN).join("pyproject.toml");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    for line in [
        format!("version = \"{version}\""),
        format!("dependencies = [\"layercake == {version}\"]"),
    ] {
        if !text.lines().any(|have| have.trim() == line) {
            bail!(
                "{} is out of step with the crates: it needs the line `{line}`",
                path.display()
            );
        }
    }
    Ok(())
}

/// A virtual environment under the target folder.
pub(crate) struct Environment {
    root: PathBuf,
}

impl Environment {
    /// Makes the environment if it is not there, and brings its packages up to what is asked for.
    pub(crate) fn make(name: &str, packages: &[&str]) -> Result<Self> {
        let root = target_dir()?.join(name);
        let environment = Self { root };
        if !run::available(
            &environment.path("python").to_string_lossy(),
            &["--version"],
        ) {
            run::run(
                Command::new(interpreter()?)
                    .args(["-m", "venv", "--clear"])
                    .arg(&environment.root),
            )?;
        }
        // Without asking the index, if all is there.
        let marker = environment.root.join("packages");
        let wanted = packages.join("\n");
        let there = std::fs::read_to_string(&marker).unwrap_or_default();
        if there != wanted {
            run::run(environment.pip_install().args(packages))?;
            std::fs::write(&marker, wanted)
                .with_context(|| format!("write {}", marker.display()))?;
        }
        Ok(environment)
    }

    pub(crate) fn python(&self) -> Command {
        self.program("python")
    }

    pub(crate) fn pip_install(&self) -> Command {
        let mut command = self.python();
        command.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]);
        command
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.path(name));
        let bin = self.root.join("bin");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(bin).chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(paths) {
            command.env("PATH", path);
        }
        command.env("VIRTUAL_ENV", &self.root);
        command
    }

    /// Where a program of the environment lies.
    pub(crate) fn path(&self, program: &str) -> PathBuf {
        self.root.join("bin").join(program)
    }
}

/// Whether wheels can be built here: a `python3` of 3.11 or later that has `venv`.
pub(crate) fn is_possible() -> bool {
    let check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";
    interpreter().is_ok_and(|python| run::available(&python, &["-c", check]))
}

fn interpreter() -> Result<String> {
    ["python3", "python"]
        .into_iter()
        .find(|name| run::available(name, &["--version"]))
        .map(str::to_owned)
        .context("no python3 is on PATH")
}

fn target_dir() -> Result<PathBuf> {
    let metadata = MetadataCommand::new()
        .current_dir(run::root())
        .no_deps()
        .exec()?;
    Ok(metadata.target_directory.into_std_path_buf())
}

fn wheels(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .with_context(|| format!("read {}", folder.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .collect();
    found.sort();
    Ok(found)
}

fn is_ours(wheel: &Path) -> bool {
    wheel
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("layercake"))
}
