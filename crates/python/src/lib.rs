//! The native half of the Python package `layercake`.
//!
//! Python calls are synchronous; the store below is asynchronous. Between the two lie `runtime`
//! (the one tokio runtime of a process, and what a fork means), `args` and `memory` (what
//! Python hands over, checked once), `core` (a synchronous store client that answers with values or
//! with the integer codes of the Mooncake interface) and `errors` (the way back into exceptions).
//! The classes on top only translate:
//!
//! ```text
//! store, session, transfer, serve    the package's own interface
//! dropin                             what the distribution layercake-mooncake shows as `mooncake`
//!         core, peers                without Python
//!         args, memory, errors, runtime
//! layercake-store, layercake-master, layercake-transport
//! ```
//!
//! Rules that hold everywhere: the interpreter lock is released before bytes move or the network is
//! waited for; no thread of ours ever calls into Python; a call in a forked child on an object made
//! before the fork raises `ForkError`; nothing is printed, and nothing that a caller passes can end
//! the interpreter, short of an address that stops being memory while a call uses it.
// `cargo test NAME` builds the library as a test program even though it has no tests of its own, and
// that would need an interpreter to link to: then it is empty. Everything is tested from Python.
#![cfg(not(test))]
#![deny(unsafe_code)]
#![expect(
    clippy::needless_pass_by_value,
    reason = "the arguments of Python methods are made for the call"
)]
#![expect(clippy::doc_markdown, reason = "docstrings are written for Python")]

mod args;
mod config;
mod core;
mod dropin;
mod errors;
mod logs;
mod memory;
mod peers;
mod runtime;
mod serve;
mod session;
mod store;
mod transfer;

use mimalloc::MiMalloc;
use pyo3::prelude::*;

/// Of what is written in Rust; Python keeps its own. Why: `docs/decisions/0021-what-a-cold-call-costs.md`.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[pymodule]
mod _native {
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "it is a Python name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use super::config::PyReplicateConfig;
    #[pymodule_export]
    use super::serve::{PyCluster, serve};
    #[pymodule_export]
    use super::session::{PyGetSession, PyPutSession};
    #[pymodule_export]
    use super::store::PyStore;
    #[pymodule_export]
    use super::transfer::{PyTransfer, PyTransferEngine};
    use super::{Bound, PyModule, PyResult, dropin, runtime};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        dropin::add(module)?;
        runtime::close_at_exit(module.py())
    }
}
