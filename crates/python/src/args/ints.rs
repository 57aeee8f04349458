//! Integers: addresses, sizes and offsets.

use pyo3::Borrowed;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PySequence, PyString, PyTuple};

use super::{export, wrong_type};

const ACCEPTED: &str = "an int from 0 to 2**64 - 1";
const ACCEPTED_LIST: &str =
    "a list, a tuple or a one-dimensional array of 4 or 8 byte integers from 0 to 2**64 - 1";

/// One unsigned 64-bit integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Int {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        int(&obj).map(Self)
    }
}

/// A truth value: a bool, or an int or `None` that stands for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flag(pub(crate) bool);

impl<'py> FromPyObject<'_, 'py> for Flag {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if obj.is_none() || obj.is_instance_of::<PyInt>() {
            return obj.is_truthy().map(Self);
        }
        Err(wrong_type(&obj, "a bool"))
    }
}

/// A list of unsigned 64-bit integers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ints(pub(crate) Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Ints {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut values = Vec::new();
        append(&obj, &mut values)?;
        Ok(Self(values))
    }
}

pub(super) fn int(obj: &Bound<'_, PyAny>) -> PyResult<u64> {
    // A bool is an instance of int, and has an index.
    if obj.is_instance_of::<PyBool>() {
        return Err(wrong_type(obj, ACCEPTED));
    }
    if let Ok(int) = obj.cast::<PyInt>() {
        return int.extract::<u64>().map_err(|_| out_of_range(obj));
    }
    if !obj.hasattr("__index__")? {
        return Err(wrong_type(obj, ACCEPTED));
    }
    obj.extract::<u64>().map_err(|_| out_of_range(obj))
}

fn out_of_range(obj: &Bound<'_, PyAny>) -> PyErr {
    let value = obj.repr().map_or_else(
        |_| "a value".to_owned(),
        |text| text.to_string_lossy().chars().take(40).collect(),
    );
    PyTypeError::new_err(format!("{ACCEPTED} is needed, not {value}"))
}

/// Appends the integers of a list, tuple or array.
pub(super) fn append(obj: &Bound<'_, PyAny>, values: &mut Vec<u64>) -> PyResult<()> {
    if let Ok(list) = obj.cast::<PyList>() {
        reserve(values, list.len())?;
        for item in list.iter() {
            values.push(int(&item)?);
        }
        return Ok(());
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        reserve(values, tuple.len())?;
        for item in tuple.iter_borrowed() {
            values.push(int(&item)?);
        }
        return Ok(());
    }
    let Some(buffer) = export(obj) else {
        return append_sequence(obj, values);
    };
    let array = IntArray::read(obj.py(), buffer, ACCEPTED_LIST)?;
    if array.shape.len() != 1 {
        return Err(PyTypeError::new_err(format!(
            "{ACCEPTED_LIST} is needed, not an array of {} dimensions",
            array.shape.len()
        )));
    }
    values.extend_from_slice(&array.values);
    Ok(())
}

fn reserve(values: &mut Vec<u64>, more: usize) -> PyResult<()> {
    let reserved = values.try_reserve(more);
    reserved.map_err(|_| PyMemoryError::new_err(format!("no memory for {more} more integers")))
}

/// Appends the integers of a sequence without a buffer that is no text: a `range`, say.
fn append_sequence(obj: &Bound<'_, PyAny>, values: &mut Vec<u64>) -> PyResult<()> {
    match obj.cast::<PySequence>() {
        Ok(sequence) if !obj.is_instance_of::<PyString>() => {
            reserve(values, sequence.len()?)?;
            for item in sequence.try_iter()? {
                // It may have said less than it has.
                reserve(values, 1)?;
                values.push(int(&item?)?);
            }
            Ok(())
        }
        _ => Err(wrong_type(obj, ACCEPTED_LIST)),
    }
}

/// The integers of an object with the buffer protocol, in C order.
pub(super) struct IntArray {
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<u64>,
}

impl IntArray {
    /// Takes a copy; `accepted` says in a `TypeError` what the argument may be.
    pub(super) fn of(obj: &Bound<'_, PyAny>, accepted: &str) -> PyResult<Self> {
        match export(obj) {
            Some(buffer) => Self::read(obj.py(), buffer, accepted),
            None => Err(wrong_type(obj, accepted)),
        }
    }

    fn read(py: Python<'_>, buffer: PyUntypedBuffer, accepted: &str) -> PyResult<Self> {
        let shape = buffer.shape().to_vec();
        let values = match ElementType::from_format(buffer.format()) {
            ElementType::UnsignedInteger { bytes: 8 } => buffer.into_typed::<u64>()?.to_vec(py)?,
            ElementType::UnsignedInteger { bytes: 4 } => {
                let values = buffer.into_typed::<u32>()?.to_vec(py)?;
                values.into_iter().map(u64::from).collect()
            }
            ElementType::SignedInteger { bytes: 8 } => {
                non_negative(buffer.into_typed::<i64>()?.to_vec(py)?)?
            }
            ElementType::SignedInteger { bytes: 4 } => {
                non_negative(buffer.into_typed::<i32>()?.to_vec(py)?)?
            }
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "{accepted} is needed, not an array of other elements"
                )));
            }
        };
        Ok(Self { shape, values })
    }
}

fn non_negative<T: Copy + TryInto<u64> + std::fmt::Display>(values: Vec<T>) -> PyResult<Vec<u64>> {
    values
        .into_iter()
        .map(|value| {
            value
                .try_into()
                .map_err(|_| PyTypeError::new_err(format!("{ACCEPTED} is needed, not {value}")))
        })
        .collect()
}
