//! Behind `mooncake_engine`.

use pyo3::prelude::*;

/// Adds what the module shows.
#[expect(clippy::unnecessary_wraps, reason = "adding a class may fail")]
pub(super) fn fill(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
