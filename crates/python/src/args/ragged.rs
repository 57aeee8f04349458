//! Lists of lists of integers: the pieces of each key, key-major.

use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::ints::{IntArray, append};
use super::{export, sequence};

const ACCEPTED: &str =
    "a list or tuple of lists of integers, or a two-dimensional array of 4 or 8 byte integers";

/// Rows of unsigned 64-bit integers, each of its own length, in one vector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ragged {
    values: Vec<u64>,
    /// Where each row ends.
    ends: Vec<usize>,
}

impl Ragged {
    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// One row; empty beyond the last.
    pub(crate) fn row(&self, index: usize) -> &[u64] {
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[start..end]
    }

    fn push_row(&mut self, row: &Bound<'_, PyAny>) -> PyResult<()> {
        append(row, &mut self.values)?;
        self.ends.push(self.values.len());
        Ok(())
    }
}

/// The rows of a sequence without a buffer of its own.
fn rows_of<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if export(obj).is_some() {
        return Ok(None);
    }
    sequence(obj)
}

impl<'py> FromPyObject<'_, 'py> for Ragged {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut ragged = Self::default();
        if let Ok(list) = obj.cast::<PyList>() {
            for row in list.iter() {
                ragged.push_row(&row)?;
            }
        } else if let Ok(tuple) = obj.cast::<PyTuple>() {
            for row in tuple.iter_borrowed() {
                ragged.push_row(&row)?;
            }
        } else if let Some(rows) = rows_of(&obj)? {
            for row in &rows {
                ragged.push_row(row)?;
            }
        } else {
            let array = IntArray::of(&obj, ACCEPTED)?;
            let [rows, columns] = array.shape[..] else {
                return Err(PyTypeError::new_err(format!(
                    "{ACCEPTED} is needed, not an array of {} dimensions",
                    array.shape.len()
                )));
            };
            ragged.ends = (1..=rows).map(|row| row * columns).collect();
            ragged.values = array.values;
        }
        Ok(ragged)
    }
}
