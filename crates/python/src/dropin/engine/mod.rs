//! Behind `mooncake.engine`: Mooncake's transfer engine, on peers that are found by address.
//!
//! | module | what it does |
//! |---|---|
//! | `class`, `calls` | the Python classes: convert arguments, answer with codes |
//! | `live` | an engine that was initialized |
//! | `names`, `directory` | where peers are, by their addresses or at an HTTP metadata server |
//! | `under_way` | transfers that somebody asks about later, by number |
//! | `notify` | messages between the programs at both ends |
//!
//! Before `initialize` every call answers that it failed. One more `initialize` starts anew, with nothing
//! registered. Nothing raises but wrong types and the use in a forked child; reasons are logged.

mod calls;
mod class;
mod directory;
mod live;
mod names;
mod notify;
mod under_way;

use pyo3::prelude::*;

pub(crate) use calls::PyInnerTransferEngine;

/// Adds what the module shows.
pub(super) fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<calls::PyMooncakeEngine>()?;
    module.add_class::<PyInnerTransferEngine>()?;
    module.add_class::<notify::PyTransferNotify>()
}
