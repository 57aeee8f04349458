//! What Python hands over, turned into plain Rust values before the interpreter lock is released.
//!
//! Types are checked strictly: a wrong one is a `TypeError` that names the argument and what is
//! accepted. A `bool` is no integer here, and neither is a negative one or one beyond 64 bits: where
//! an address or a size is meant, each of them is a slip. Wrong *values* of a right type (an empty
//! key, lists of different lengths) are the business of the calls, since the drop-in answers them with
//! codes.
//!
//! | type | accepts |
//! |---|---|
//! | [`Int`] | `int`, and objects with `__index__` such as numpy's integers |
//! | [`Ints`] | a list, tuple or other sequence of those; a one-dimensional buffer of 4 or 8 byte integers (numpy, `array`) |
//! | [`Flag`] | `bool`, or an `int` or `None` that stands for one |
//! | [`Ragged`] | a list, tuple or other sequence of what `Ints` takes; a two-dimensional such buffer |
//! | [`Key`], [`OneKey`], [`Keys`], [`Names`] | `str`, or `bytes` that are UTF-8; a list, tuple or other sequence of those |
//! | [`Size`], [`Seconds`] | `int` or a text with a unit; `float` or `int` |
//! | [`Bytes`] | an object with the buffer protocol, a torch tensor in host memory, or an address and a length |
//! | [`Value`] | an object with the buffer protocol; copied if its items lie apart |
//!
//! Buffers are read in one go, without a Python object per element.

mod bytes;
mod ints;
mod keys;
mod ragged;
mod size;

pub(crate) use bytes::{Bytes, BytesMut, Value};
pub(crate) use ints::{Flag, Int, Ints};
pub(crate) use keys::{Key, Keys, Names, OneKey};
pub(crate) use ragged::Ragged;
pub(crate) use size::{Seconds, Size};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMapping, PyMemoryView, PyString};

/// A `TypeError` that says what is accepted and what was given.
fn wrong_type(given: &Bound<'_, PyAny>, accepted: &str) -> PyErr {
    let name = given.get_type().name().map_or_else(
        |_| "an unnamed type".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    );
    PyTypeError::new_err(format!("{accepted} is needed, not {name}"))
}

/// The items of a sequence that is neither list nor tuple, such as a `deque` or an array; `None` for texts, mappings and
/// what can only be gone through.
fn sequence<'py>(obj: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    let text = obj.is_instance_of::<PyString>() || obj.is_instance_of::<PyBytes>();
    let indexed = obj.hasattr("__getitem__")? && obj.hasattr("__len__")?;
    if text || !indexed || obj.cast::<PyMapping>().is_ok() {
        return Ok(None);
    }
    obj.try_iter()?.collect::<PyResult<_>>().map(Some)
}

/// The buffer of an object that has one.
fn export(obj: &Bound<'_, PyAny>) -> Option<PyUntypedBuffer> {
    if let Ok(buffer) = PyUntypedBuffer::get(obj) {
        return Some(buffer);
    }
    // Some exporters leave out what a memory view fills in.
    let view = PyMemoryView::from(obj).ok()?;
    PyUntypedBuffer::get(&view).ok()
}
