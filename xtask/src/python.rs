//! The tests of the Python packages: built, installed into an environment of their own, run by pytest.

use std::path::PathBuf;

use anyhow::Result;

use crate::run;
use crate::wheel::{self, Environment};

/// What the tests use besides the packages under test.
const TOOLS: [&str; 3] = ["pytest>=8", "pytest-timeout>=2", "numpy>=1.26"];

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
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .current_dir(folder());
    match filter {
        None => run::run(&mut pytest),
        // That no Python test has this name is no failure.
        Some(filter) => run::run_accepting(pytest.args(["-k", filter]), &[5]),
    }
}

fn folder() -> PathBuf {
    run::root().join("crates/python")
}
