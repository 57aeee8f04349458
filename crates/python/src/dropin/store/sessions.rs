//! Range sessions.

use pyo3::prelude::*;

use super::PyMooncakeStore;
use super::config::{Plan, PyConfig};
use super::report::Entries as _;
use crate::args::{Ints, Keys, Names, Ragged};

/// What ending get sessions is answered with where there is no client.
const NOT_SET_UP: i64 = -1;

#[pymethods]
impl PyMooncakeStore {
    /// Reserves objects, as ``config`` says, and opens a session on each: 0 or a code for each key.
    #[pyo3(signature = (keys, sizes, config = None))]
    fn batch_put_session_start(
        &self,
        py: Python<'_>,
        keys: Keys,
        sizes: Ints,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<Vec<i64>> {
        let Plan { config, groups } = match Plan::new(config, keys.len()) {
            Ok(plan) => plan,
            Err(code) => return Ok(keys.refused("batch_put_session_start", code)),
        };
        self.codes(py, "batch_put_session_start", &keys, |core| {
            core.start_puts(&keys, &sizes.0, &groups, &config)
        })
    }

    /// Writes ranges, without the master: bytes or a code for each key.
    fn batch_put_from_multi_buffer_ranges(
        &self,
        py: Python<'_>,
        keys: Names,
        all_buffer_ptrs: Ragged,
        all_sizes: Ragged,
        all_dst_offsets: Ragged,
    ) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_put_from_multi_buffer_ranges", &keys, |core| {
            core.write_ranges(&keys, &all_buffer_ptrs, &all_sizes, &all_dst_offsets)
        })
    }

    /// Publishes the objects: 0 or a code for each key. Bytes that nobody wrote are zeros.
    fn batch_put_session_end(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_put_session_end", &keys, |core| {
            core.end_puts(&keys)
        })
    }

    /// Gives the reservations back: 0 or a code for each key.
    fn batch_put_session_revoke(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_put_session_revoke", &keys, |core| {
            core.revoke_puts(&keys)
        })
    }

    /// Opens sessions on objects, and leases them for as long as the sessions are used: 0 or a code for each key.
    fn batch_get_session_start(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_get_session_start", &keys, |core| {
            core.start_gets(&keys)
        })
    }

    /// Reads ranges, without the master: bytes or a code for each key.
    fn batch_get_into_multi_buffer_ranges(
        &self,
        py: Python<'_>,
        keys: Names,
        all_buffer_ptrs: Ragged,
        all_sizes: Ragged,
        all_src_offsets: Ragged,
    ) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_get_into_multi_buffer_ranges", &keys, |core| {
            core.read_ranges(&keys, &all_buffer_ptrs, &all_sizes, &all_src_offsets)
        })
    }

    /// Ends sessions; keys without one are passed over.
    fn batch_get_session_end(&self, py: Python<'_>, keys: Names) -> PyResult<i64> {
        self.answer(py, NOT_SET_UP, |core| {
            core.end_gets(&keys);
            0
        })
    }
}
