//! Behind the command `mooncake_master`: a master with Mooncake's flags and HTTP interface.
//!
//! The command is a Python entry point that calls [`run`] and exits with what it returns. A runtime of
//! its own runs the master, the HTTP port and, where it is switched on, the metadata server; all end
//! together on SIGTERM or SIGINT. Nothing is written while nothing is wrong, but for one line that says where
//! the door is open. What flags mean is decided in `layercake_master::mooncake`.

mod http;
mod serve;

use layercake_master::mooncake::{Invocation, Settings};
use pyo3::prelude::*;

use crate::logs;

/// Adds what the module shows.
pub(super) fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run, module)?)
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
            match serve::run(*settings) {
                Ok(()) => (0, String::new()),
                Err(error) => (1, error.to_string()),
            }
        }),
    }
}
