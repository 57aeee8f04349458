//! Behind the command `mooncake_master`: a master with Mooncake's flags and HTTP interface.
//!
//! The command is a Python entry point that calls [`run`] and exits with what it returns. A runtime of
//! its own runs the master, the HTTP port and, where it is switched on, the metadata server; all end
//! together on SIGTERM or SIGINT. Nothing is written while nothing is wrong, but for one line that says where
//! the door is open. What flags mean is decided in `layercake_master::mooncake`.

mod http;
mod serve;

use layercake_master::mooncake::{self, Address, Invocation, Settings};
use pyo3::prelude::*;

use crate::logs;

/// Adds what the module shows.
pub(super) fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run, module)?)?;
    module.add_function(wrap_pyfunction!(run_metadata_server, module)?)?;
    module.add_function(wrap_pyfunction!(parse_size, module)?)
}

/// A number of bytes that a text stands for, such as ``"4GB"``, in powers of 1024; ``None``: none.
#[pyfunction]
fn parse_size(text: &str) -> Option<u64> {
    mooncake::parse_size(text)
}

/// Runs a metadata server alone, until it is told to stop.
///
/// Returns:
///     The exit code, and what is to be written to standard error.
#[pyfunction]
fn run_metadata_server(py: Python<'_>, host: String, port: u16) -> (u8, String) {
    py.detach(|| {
        logs::start();
        ended(serve::run_metadata(&Address { host, port }))
    })
}

fn ended(result: Result<(), serve::Failed>) -> (u8, String) {
    match result {
        Ok(()) => (0, String::new()),
        Err(error) => (1, error.to_string()),
    }
}

/// Runs the command with these arguments, the program's name left out, until it is told to stop.
///
/// Returns:
///     The exit code, and what is to be written: to standard output if the code is 0, else to standard error.
#[pyfunction]
fn run(py: Python<'_>, arguments: Vec<String>) -> (u8, String) {
    match Settings::from_args(&arguments) {
        Err(error) => (1, error.to_string()),
        Ok(Invocation::Help(text)) => (0, text),
        Ok(Invocation::Version) => (0, format!("layercake {}", env!("CARGO_PKG_VERSION"))),
        Ok(Invocation::Run(settings)) => py.detach(|| {
            logs::start();
            ended(serve::run(*settings))
        }),
    }
}
