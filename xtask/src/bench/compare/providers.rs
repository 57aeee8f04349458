//! Who is measured: environments with packages, and how their work is started.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::link::Link;
use super::results::Outcome;
use crate::run;
use crate::wheel::{self, Environment};

pub(crate) const OURS: &str = "Layercake";
pub(crate) const OURS_TCP: &str = "Layercake over TCP";
pub(crate) const MOONCAKE: &str = "Mooncake";
pub(crate) const NIXL: &str = "NIXL";

const PROGRAMS: &str = "benches/python";
const NUMPY: &str = "numpy>=1.26";
const MOONCAKE_PACKAGE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
const NIXL_PACKAGE: &str = "nixl-cu12==1.5.1";

/// An interpreter with the packages of one provider.
pub(crate) struct Provider {
    pub(crate) name: &'static str,
    python: PathBuf,
    /// The package whose version is told.
    package: &'static str,
    environment: Vec<(&'static str, &'static str)>,
    link: Option<Link>,
}

/// Layercake and its drop-in, released as this tree is.
pub(crate) fn ours(python: Option<&Path>) -> Result<Provider> {
    let python = interpreter(python, || {
        let wheels = wheel::build_for_this_machine()?;
        let environment = Environment::make("bench-ours", &[NUMPY])?;
        run::run(
            environment
                .pip_install()
                .args(["--force-reinstall", "--no-deps"])
                .args(&wheels),
        )?;
        Ok(environment)
    })?;
    check(&python, "mooncake.store, layercake, numpy", "")?;
    Ok(Provider {
        name: OURS,
        python,
        package: "layercake",
        environment: Vec::new(),
        link: None,
    })
}

/// The real one.
pub(crate) fn mooncake(python: Option<&Path>) -> Result<Provider> {
    let packages = [MOONCAKE_PACKAGE, NUMPY];
    let python = interpreter(python, || Environment::make("bench-mooncake", &packages))?;
    check(
        &python,
        "mooncake.store, mooncake.engine, numpy",
        "; Mooncake needs the system packages libibverbs1, librdmacm1 and libnuma1",
    )?;
    Ok(Provider {
        name: MOONCAKE,
        python,
        package: "mooncake-transfer-engine-non-cuda",
        environment: Vec::new(),
        link: None,
    })
}

/// A transfer engine only.
pub(crate) fn nixl(python: Option<&Path>) -> Result<Provider> {
    let python = interpreter(python, || {
        let environment = Environment::make("bench-nixl", &[NUMPY])?;
        // What it depends on is for GPUs.
        run::run(environment.pip_install().args(["--no-deps", NIXL_PACKAGE]))?;
        Ok(environment)
    })?;
    check(&python, "nixl_cu12._api, numpy", "")?;
    Ok(Provider {
        name: NIXL,
        python,
        package: "nixl-cu12",
        environment: Vec::new(),
        link: None,
    })
}

/// The one that was named, or that of the environment made for it.
fn interpreter(
    named: Option<&Path>,
    make: impl FnOnce() -> Result<Environment>,
) -> Result<PathBuf> {
    let python = named.map(std::path::absolute).transpose()?;
    python.map_or_else(|| Ok(make()?.path("python")), Ok)
}

/// That an interpreter has these modules.
fn check(python: &Path, modules: &str, hint: &str) -> Result<()> {
    let output = Command::new(python)
        .args(["-c", &format!("import {modules}")])
        .output()
        .with_context(|| format!("start {}", python.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} can't import {modules}{hint}:\n{said}", python.display());
    }
    Ok(())
}

impl Provider {
    /// The same, without shared memory and cross-memory attach.
    pub(crate) fn held_to_tcp(&self) -> Self {
        Self {
            name: OURS_TCP,
            python: self.python.clone(),
            package: self.package,
            environment: vec![("LAYERCAKE_TRANSPORTS", "tcp")],
            link: None,
        }
    }

    /// The same over a link, and by sockets alone: other ways would go past it.
    pub(crate) fn over(self, link: &Link) -> Self {
        let mut provider = match self.name {
            OURS => self.held_to_tcp(),
            _ => self,
        };
        if provider.name == NIXL {
            provider.environment.push(("UCX_TLS", "tcp,self"));
        }
        provider.link = Some(link.clone());
        provider
    }

    /// Whether the scenario is one for this provider.
    pub(crate) fn plays(&self, scenario: &str) -> bool {
        self.name != NIXL || scenario == "engine"
    }

    pub(crate) fn version(&self) -> Result<String> {
        let package = self.package;
        let code = format!("import importlib.metadata as m; print(m.version({package:?}))");
        let said = run::output(Command::new(&self.python).args(["-c", &code]))?;
        Ok(format!("{package} {}", said.trim()))
    }

    /// Runs a scenario once, in processes of its own.
    pub(crate) fn play(&self, scenario: &str, short: bool) -> Result<Outcome> {
        let mut program = self.program(if self.name == NIXL {
            "nixl.py"
        } else {
            "measure.py"
        });
        if self.name != NIXL {
            let master = self.python.with_file_name("mooncake_master");
            program.arg("--master").arg(format!(
                "{} --rpc_port {{port}} --metrics_port {{metrics_port}}",
                master.display()
            ));
            program.arg(scenario);
        }
        program.args(short.then_some("--short"));
        eprintln!("+ {scenario}: {}", self.name);
        let output = program.output().context("start a measurement")?;
        let said = String::from_utf8_lossy(&output.stdout);
        let figures = said.lines().rev().find(|line| line.starts_with('{'));
        match figures {
            Some(line) if output.status.success() => serde_json::from_str(line)
                .with_context(|| format!("{scenario} on {}: {line}", self.name)),
            // A peer that crashes is a result, not an error of the measurement.
            _ => Ok(Outcome::Failed {
                error: format!(
                    "{}: {}",
                    output.status,
                    String::from_utf8_lossy(&output.stderr)
                        .lines()
                        .last()
                        .unwrap_or_default()
                ),
            }),
        }
    }

    /// What the machine can do at best.
    pub(crate) fn limits(&self) -> Result<BTreeMap<String, f64>> {
        let said = run::output(&mut self.program("limits.py"))?;
        serde_json::from_str(&said).context("the machine's limits")
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(&self.python);
        command
            .arg(run::root().join(PROGRAMS).join(name))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .envs(self.environment.iter().copied());
        match &self.link {
            Some(link) => link.around(&command),
            None => command,
        }
    }
}
