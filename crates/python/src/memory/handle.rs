//! Bytes of an object that a Python program keeps and writes to as it likes: an exporter of its own.

use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::core::ObjectCopy;
use crate::runtime::Owned;

/// A copy of an object's bytes, as a writable buffer. It lives for as long as the handle or a view of it is
/// there, whatever becomes of the object and of the store. In a forked child every use is a `ForkError`.
#[pyclass(frozen, name = "BufferHandle", module = "mooncake.store", weakref)]
pub(crate) struct PyBufferHandle {
    /// Not empty, and never moved.
    copy: Owned<ObjectCopy>,
}

impl PyBufferHandle {
    pub(crate) fn new(copy: ObjectCopy) -> Self {
        Self {
            copy: Owned::new(copy),
        }
    }
}

#[pymethods]
impl PyBufferHandle {
    /// First address.
    fn ptr(&self) -> PyResult<usize> {
        Ok(self.copy.get()?.addr())
    }

    /// Bytes.
    fn size(&self) -> PyResult<u64> {
        Ok(self.copy.get()?.len())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.size()?).unwrap_or(usize::MAX))
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("BufferHandle(size={})", self.size()?))
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let copy = slf.get().copy.get()?;
        let len = ffi::Py_ssize_t::try_from(copy.len())
            .map_err(|_| PyBufferError::new_err("the buffer is larger than an address space"))?;
        let start = copy.addr() as *mut std::ffi::c_void;
        // SAFETY: the interpreter passes a view to be filled. The bytes belong to the handle, which the view
        // keeps alive; nothing of ours touches them any more, so that Python may write to them.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, 0, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        // SAFETY: the view was just filled.
        let view = unsafe { &mut *view };
        if !view.format.is_null() {
            // Signed bytes, as Mooncake's handles have.
            view.format = c"b".as_ptr().cast_mut();
        }
        Ok(())
    }
}
