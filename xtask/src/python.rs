//! The tests of the Python packages: built, installed into an environment of their own, run by pytest.

use std::path::PathBuf;

use anyhow::Result;

use crate::run;
use crate::wheel::{self, Environment};

/// What the tests use besides the packages under test.
const TOOLS: [&str; 4] = [
    "pytest>=8",
    "pytest-timeout>=2",
    "pytest-xdist>=3",
    "numpy>=1.26",
];

/// A black-box suite of Mooncake's interface, run where it lies beside the repository.
const CONFORMANCE: &str = "../shared/conformance";

/// Builds the wheels unoptimised and runs the tests on them; says so where that can't be done.
pub(crate) fn test(filter: Option<&str>) -> Result<()> {
    if !wheel::is_possible() {
        eprintln!("not run: the Python tests need a python3 of 3.11 or later with venv on PATH");
        return Ok(());
    }
    let wheels = wheel::build_for_tests()?;
    let environment = Environment::make("python-tests", &TOOLS)?;
    run::run(
        environment
            .pip_install()
            .args(["--force-reinstall", "--no-deps"])
            .args(&wheels),
    )?;
    let mut pytest = environment.python();
    pytest
        // What was skipped is told, with the reason.
        .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"])
        .current_dir(folder());
    match filter {
        None => {
            run::run(&mut pytest)?;
            conformance(&environment)
        }
        // That no Python test has this name is no failure.
        Some(filter) => run::run_accepting(pytest.args(["-k", filter]), &[5]),
    }
}

/// Every case is an ordinary test for us, those that Mooncake fails included.
fn conformance(environment: &Environment) -> Result<()> {
    let suite = run::root().join(CONFORMANCE);
    if !suite.join("conftest.py").is_file() {
        eprintln!("not run: the conformance suite, which is not at {CONFORMANCE}");
        return Ok(());
    }
    run::run(
        environment
            .python()
            .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
            .args(["-n", "2", "--dist", "loadfile"])
            .env("KV_STRICT", "1")
            // The folder is not ours to write to.
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(suite),
    )
}

fn folder() -> PathBuf {
    run::root().join("crates/python")
}
