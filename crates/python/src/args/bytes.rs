//! Memory that Python objects lend to a call.
//!
//! A view keeps its object exported (a `bytearray` can't be resized meanwhile) until it is dropped,
//! which is after the call has ended: no transfer outlives the call that was given the view.

use pyo3::Borrowed;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use super::ints::int;
use super::{export, wrong_type};
use crate::memory::PlainBuffer;

const ACCEPTED: &str = "an object with the buffer protocol (bytes, bytearray, memoryview, numpy array …), a torch \
     tensor in host memory, or a tuple (address, length)";

const READ_ONLY: &str = "a writable buffer is needed, not a read-only one";

/// Bytes to read.
pub(crate) struct Bytes {
    addr: usize,
    len: usize,
    owner: Owner,
}

/// Bytes to write to.
pub(crate) struct BytesMut(Bytes);

/// Bytes to read of an object with the buffer protocol, and of nothing else. Items that lie apart are taken
/// as they appear, from a copy.
pub(crate) struct Value(Bytes);

#[expect(dead_code, reason = "what it holds is kept, not looked at")]
enum Owner {
    Buffer(PyUntypedBuffer),
    Plain(PlainBuffer),
    Object(Py<PyAny>),
    /// The caller's word: memory by address.
    Caller,
}

impl Bytes {
    /// First address; anything if there are no bytes.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    /// Length in bytes, whatever the items are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether nobody but the caller's word keeps the memory.
    pub(crate) fn is_by_address(&self) -> bool {
        matches!(self.owner, Owner::Caller)
    }

    fn of(obj: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        if let Some(buffer) = export(obj) {
            return Self::of_buffer(buffer, writable);
        }
        if let Some(buffer) = PlainBuffer::get(obj, writable) {
            return Ok(Self::of_plain(buffer));
        }
        if writable && PlainBuffer::get(obj, false).is_some() {
            return Err(PyTypeError::new_err(READ_ONLY));
        }
        if let Ok(tuple) = obj.cast::<PyTuple>() {
            return Self::of_address(tuple);
        }
        if obj.hasattr("data_ptr")? && obj.hasattr("element_size")? {
            return Self::of_tensor(obj);
        }
        Err(wrong_type(obj, ACCEPTED))
    }

    fn of_buffer(buffer: PyUntypedBuffer, writable: bool) -> PyResult<Self> {
        if writable && buffer.readonly() {
            return Err(PyTypeError::new_err(READ_ONLY));
        }
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "the buffer's items do not lie one after the other: make it contiguous first, \
                 as numpy.ascontiguousarray does",
            ));
        }
        Ok(Self {
            addr: buffer.buf_ptr() as usize,
            len: buffer.len_bytes(),
            owner: Owner::Buffer(buffer),
        })
    }

    fn of_plain(buffer: PlainBuffer) -> Self {
        Self {
            addr: buffer.addr(),
            len: buffer.len(),
            owner: Owner::Plain(buffer),
        }
    }

    fn of_address(tuple: &Bound<'_, PyTuple>) -> PyResult<Self> {
        if tuple.len() != 2 {
            return Err(PyTypeError::new_err(format!(
                "a tuple (address, length) is needed, not one of {} items",
                tuple.len()
            )));
        }
        let size = |at: usize| -> PyResult<usize> {
            let value = int(&tuple.get_item(at)?)?;
            usize::try_from(value)
                .map_err(|_| PyTypeError::new_err("an address of this machine is needed"))
        };
        Ok(Self {
            addr: size(0)?,
            len: size(1)?,
            owner: Owner::Caller,
        })
    }

    fn of_tensor(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let device = tensor
            .getattr("device")?
            .getattr("type")?
            .extract::<String>()?;
        if device != "cpu" {
            return Err(PyValueError::new_err(format!(
                "a tensor in host memory is needed, not on device {device:?}: this build moves host memory only"
            )));
        }
        if !tensor.call_method0("is_contiguous")?.is_truthy()? {
            return Err(PyValueError::new_err(
                "the tensor's elements do not lie one after the other: call contiguous() first",
            ));
        }
        let size = |name: &str| -> PyResult<usize> { tensor.call_method0(name)?.extract() };
        let len = size("numel")?
            .checked_mul(size("element_size")?)
            .ok_or_else(|| PyValueError::new_err("the tensor is larger than memory"))?;
        Ok(Self {
            addr: size("data_ptr")?,
            len,
            owner: Owner::Object(tensor.clone().unbind()),
        })
    }
}

impl<'py> FromPyObject<'_, 'py> for Bytes {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::of(&obj, false)
    }
}

impl<'py> FromPyObject<'_, 'py> for BytesMut {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Bytes::of(&obj, true).map(Self)
    }
}

impl<'py> FromPyObject<'_, 'py> for Value {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Some(buffer) = export(&obj) else {
            if let Some(buffer) = PlainBuffer::get(&obj, false) {
                return Ok(Self(Bytes::of_plain(buffer)));
            }
            return Err(wrong_type(
                &obj,
                "an object with the buffer protocol (bytes, bytearray, memoryview, numpy array …)",
            ));
        };
        if buffer.is_c_contiguous() {
            return Bytes::of_buffer(buffer, false).map(Self);
        }
        let copy = PyMemoryView::from(&obj)?.call_method0("tobytes")?;
        Bytes::of(&copy, false).map(Self)
    }
}

impl std::ops::Deref for Value {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        &self.0
    }
}

impl std::ops::Deref for BytesMut {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        &self.0
    }
}
