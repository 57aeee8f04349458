//! What the distribution `layercake-mooncake` shows as `mooncake`: the native half.
//!
//! Each submodule of `_native` here stands behind one Python module of that distribution, and keeps its rules:
//! integer codes by `protocol`'s table, `TypeError` for what is of a wrong type, and nothing that ends the
//! interpreter.
//!
//! | `_native` | Python | here |
//! |---|---|---|
//! | `mooncake_store` | `mooncake.store` | [`store`] |
//! | `mooncake_engine` | `mooncake.engine` | [`engine`] |
//! | `mooncake_master` | the command `mooncake_master` | [`master`] |
//!
//! [`member`] says what the arguments that they share mean.

mod engine;
mod master;
mod member;
mod store;

use pyo3::prelude::*;

use crate::logs;

type Fill = fn(&Bound<'_, PyModule>) -> PyResult<()>;

/// Adds the submodules to the native module.
pub(crate) fn add(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    // Callers get a bare code: why a setting was refused stands in the log, also before anything runs.
    logs::start();
    let fills: [(&str, Fill); 3] = [
        ("mooncake_store", store::fill),
        ("mooncake_engine", engine::fill),
        ("mooncake_master", master::fill),
    ];
    for (name, fill) in fills {
        let module = PyModule::new(parent.py(), name)?;
        fill(&module)?;
        parent.add_submodule(&module)?;
    }
    Ok(())
}
