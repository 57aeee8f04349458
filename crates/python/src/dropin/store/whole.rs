//! Whole objects from and to memory by address, one at a time.

use pyo3::prelude::*;

use super::PyMooncakeStore;
use super::batches::{Rows, put_rows};
use super::config::PyConfig;
use crate::args::{Int, OneKey};
use crate::core::code::INVALID;

/// The first code that is not a success; else 0.
pub(super) fn first_bad(codes: &[i64]) -> i64 {
    codes.iter().copied().find(|code| *code < 0).unwrap_or(0)
}

impl PyMooncakeStore {
    fn put_pieces(
        &self,
        py: Python<'_>,
        name: &'static str,
        key: &OneKey,
        (addrs, lens): (&[u64], &[u64]),
        config: Option<&Bound<'_, PyConfig>>,
        replace: bool,
    ) -> PyResult<i64> {
        let codes = put_rows(
            self,
            py,
            name,
            &key.0,
            Rows::One(addrs, lens),
            config,
            replace,
        )?;
        Ok(codes.first().copied().unwrap_or(INVALID))
    }
}

#[pymethods]
impl PyMooncakeStore {
    /// Stores ``size`` bytes at ``buffer_ptr`` if the key is free; 0 also if it is not.
    #[pyo3(signature = (key, buffer_ptr, size, config = None))]
    fn put_from(
        &self,
        py: Python<'_>,
        key: OneKey,
        buffer_ptr: Int,
        size: Int,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        let piece: (&[u64], &[u64]) = (&[buffer_ptr.0], &[size.0]);
        self.put_pieces(py, "put_from", &key, piece, config, false)
    }

    /// Stores ``size`` bytes at ``buffer_ptr``, and replaces what is there.
    #[pyo3(signature = (key, buffer_ptr, size, config = None))]
    fn upsert_from(
        &self,
        py: Python<'_>,
        key: OneKey,
        buffer_ptr: Int,
        size: Int,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        let piece: (&[u64], &[u64]) = (&[buffer_ptr.0], &[size.0]);
        self.put_pieces(py, "upsert_from", &key, piece, config, true)
    }

    /// Stores metadata followed by data, as one object.
    #[pyo3(signature = (key, buffer_ptr, metadata_buffer_ptr, size, metadata_size, config = None))]
    #[expect(clippy::too_many_arguments, reason = "they are positional in Mooncake")]
    fn put_from_with_metadata(
        &self,
        py: Python<'_>,
        key: OneKey,
        buffer_ptr: Int,
        metadata_buffer_ptr: Int,
        size: Int,
        metadata_size: Int,
        config: Option<&Bound<'_, PyConfig>>,
    ) -> PyResult<i64> {
        const NAME: &str = "put_from_with_metadata";
        let addrs = [metadata_buffer_ptr.0, buffer_ptr.0];
        let lens = [metadata_size.0, size.0];
        self.put_pieces(py, NAME, &key, (&addrs, &lens), config, false)
    }

    /// Reads a whole object to ``buffer_ptr``, where ``size`` bytes are free. Gives its size.
    fn get_into(&self, py: Python<'_>, key: OneKey, buffer_ptr: Int, size: Int) -> PyResult<i64> {
        let (addrs, lens) = ([buffer_ptr.0], [size.0]);
        self.code(py, "get_into", &key, |core| {
            core.get_into_rows(&key.0, |_| (&addrs, &lens), true)
        })
    }
}
