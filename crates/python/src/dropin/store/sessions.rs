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
    /// Reserves objects, as ``config`` says, and opens a session on each.
    ///
    /// Args:
    ///     keys: *n* keys.
    ///     sizes: *n* sizes in bytes, each at least 1.
    ///
    /// Returns:
    ///     *n* codes: 0; -705: it exists, or is being written; -200: no room; -600: a bad argument, or this client has a session on it.
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

    /// Writes ranges of objects with a session, without the master. Rows may be of any lengths, and a key may be named again.
    ///
    /// Args:
    ///     keys: *n* keys.
    ///     all_buffer_ptrs: For each key a row of addresses.
    ///     all_sizes: For each key a row of as many sizes in bytes.
    ///     all_dst_offsets: For each key a row of as many places in the object, in bytes.
    ///
    /// Returns:
    ///     For each key the bytes written, or a code. Of a key with a range beyond its object nothing is written.
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

    /// Publishes the objects of *n* keys: *n* codes, 0 for each that can be read from now on. Bytes that nobody wrote are
    /// zeros; bytes whose write failed refuse the end (-800) until they are written again.
    fn batch_put_session_end(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_put_session_end", &keys, |core| {
            core.end_puts(&keys)
        })
    }

    /// Gives the reservations of *n* keys back: *n* codes, 0 for each that is free again.
    fn batch_put_session_revoke(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_put_session_revoke", &keys, |core| {
            core.revoke_puts(&keys)
        })
    }

    /// Opens sessions on the objects of *n* keys, and leases them for as long as the sessions are used: *n* codes, 0; -704: no
    /// such object; -703: it is not finished.
    fn batch_get_session_start(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        self.codes(py, "batch_get_session_start", &keys, |core| {
            core.start_gets(&keys)
        })
    }

    /// Reads ranges of objects with a session, without the master. Arguments as those of
    /// ``batch_put_from_multi_buffer_ranges``, with the places in the object that are read from.
    ///
    /// Returns:
    ///     For each key the bytes read, or a code; then its memory holds anything.
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

    /// Ends sessions, and gives 0; keys without one are passed over.
    fn batch_get_session_end(&self, py: Python<'_>, keys: Names) -> PyResult<i64> {
        self.answer(py, NOT_SET_UP, |core| {
            core.end_gets(&keys);
            0
        })
    }
}
