//! Buffers as plain bytes, of objects whose items Python can't describe to us.
//!
//! What an object says of its items is of no interest where only its bytes are moved. Scalars have no shape, and some
//! items (numpy's times, fields of structures) have no format that a memory view knows; asked for bytes alone,
//! their objects export them like others.
//!
//! # Invariant
//!
//! A [`PlainBuffer`] is a view that an exporter has filled and that was not released; its object lives and its bytes
//! stay where they are until it is dropped, which releases it once.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use pyo3::ffi;
use pyo3::prelude::*;

/// An exported buffer, released when it is dropped. Boxed, since exporters may keep its address.
pub(crate) struct PlainBuffer(Box<ffi::Py_buffer>);

// SAFETY: the view is read only, but for its release, which attaches to the interpreter.
unsafe impl Send for PlainBuffer {}
// SAFETY: as above: no method changes the view.
unsafe impl Sync for PlainBuffer {}

impl PlainBuffer {
    /// The bytes of an object, which lie one after the other; writable ones if asked for. `None`: it has none such.
    pub(crate) fn get(obj: &Bound<'_, PyAny>, writable: bool) -> Option<Self> {
        let flags: c_int = if writable {
            ffi::PyBUF_WRITABLE
        } else {
            ffi::PyBUF_SIMPLE
        };
        let mut view = Box::new(MaybeUninit::<ffi::Py_buffer>::zeroed());
        // SAFETY: the object is alive, and the view is memory for one, zeroed as exporters expect.
        let got = unsafe { ffi::PyObject_GetBuffer(obj.as_ptr(), view.as_mut_ptr(), flags) };
        if got != 0 {
            // It has no buffer, or not such a one: the error is set, and taken.
            drop(PyErr::take(obj.py()));
            return None;
        }
        // SAFETY: the exporter has filled it.
        Some(Self(unsafe { view.assume_init() }))
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.0.buf as usize
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.0.len).unwrap_or(0)
    }
}

impl Drop for PlainBuffer {
    fn drop(&mut self) {
        // Without an interpreter there is nobody to tell.
        let _ = Python::try_attach(|_| {
            // SAFETY: it was filled by an exporter and is released once, attached to the interpreter.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}
