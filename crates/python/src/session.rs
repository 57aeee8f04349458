//! The Python handles on range sessions.
//!
//! A handle holds its session in a slot, since ending consumes it. Range calls borrow the slot while
//! their pieces are handed to the transport, which never blocks; ending takes the session out, and
//! puts it back if the end can be repeated.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_store::{EndError, GetSession, PutSession, Range, RangeRead, RangeWrite, StoreError};
use layercake_transport::LocalSlice;
use parking_lot::{RwLock, RwLockReadGuard};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{Bytes, BytesMut, Int};
use crate::core::StoreCore;
use crate::errors::{self, Failure, Kind};
use crate::memory;
use crate::runtime::Owned;

/// A session that is open, and the store it belongs to.
pub(crate) struct Slot<S> {
    pub(crate) core: Arc<StoreCore>,
    session: RwLock<Option<S>>,
}

impl<S> Slot<S> {
    fn new(core: Arc<StoreCore>, session: S) -> Self {
        Self {
            core,
            session: RwLock::new(Some(session)),
        }
    }

    /// Borrows the session. A call may borrow one more than once.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Option<S>> {
        self.session.read_recursive()
    }

    pub(crate) fn take(&self) -> Option<S> {
        self.session.write().take()
    }

    pub(crate) fn put_back(&self, session: S) {
        *self.session.write() = Some(session);
    }
}

fn over() -> PyErr {
    errors::raise(&StoreError::SessionEnded)
}

/// An object that is being written, range by range.
///
/// Made by :meth:`Store.start_put` and :meth:`Store.start_puts`. As a context manager it ends when the
/// block is left, and is revoked if that was by an exception. A session that is dropped is revoked in
/// the background.
#[pyclass(frozen, name = "PutSession", module = "layercake")]
pub(crate) struct PyPutSession {
    key: String,
    size: u64,
    slot: Owned<Slot<PutSession>>,
}

impl PyPutSession {
    pub(crate) fn new(core: Arc<StoreCore>, session: PutSession) -> Self {
        Self {
            key: session.key().to_string(),
            size: session.size(),
            slot: Owned::new(Slot::new(core, session)),
        }
    }

    pub(crate) fn slot(&self) -> PyResult<&Slot<PutSession>> {
        self.slot.get()
    }

    fn finish(&self, py: Python<'_>, commit: bool) -> PyResult<()> {
        let slot = self.slot()?;
        let done = py.detach(|| {
            let session = slot.take()?;
            let client = slot.core.client();
            let mut done = if commit {
                slot.core.block(client.end_puts(vec![session]))
            } else {
                slot.core.block(client.revoke_puts(vec![session]))
            };
            done.pop()
        });
        match done {
            None => Err(over()),
            Some(done) => settle(slot, done).map_err(|error| errors::raise(&error)),
        }
    }
}

/// Puts a session that can be ended again back into its slot.
pub(crate) fn settle(
    slot: &Slot<PutSession>,
    done: Result<(), EndError>,
) -> Result<(), StoreError> {
    done.map_err(|EndError { error, session }| {
        if let Some(session) = session {
            slot.put_back(session);
        }
        error
    })
}

#[pymethods]
impl PyPutSession {
    /// The object's key.
    #[getter]
    fn key(&self) -> &str {
        &self.key
    }

    /// The object's size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// Bytes written so far, each counted once; 0 when the session is over.
    #[getter]
    fn written(&self) -> PyResult<u64> {
        let session = self.slot()?.read();
        Ok(session.as_ref().map_or(0, PutSession::written_bytes))
    }

    /// Bytes that nobody wrote yet, or whose last write failed, as ``(start, end)`` in ascending order.
    #[getter]
    fn missing(&self) -> PyResult<Vec<(u64, u64)>> {
        let session = self.slot()?.read();
        let missing = session
            .as_ref()
            .map(PutSession::missing)
            .unwrap_or_default();
        Ok(missing.iter().map(|gap| (gap.start(), gap.end())).collect())
    }

    /// Writes ``data`` to the bytes of the object from ``offset`` on, and returns when they are there.
    ///
    /// Ranges may be written in any order, and again: the later call wins. If it fails, the bytes count
    /// as not written, and can be written again.
    ///
    /// Args:
    ///     offset: First byte in the object.
    ///     data: Any object with the buffer protocol, a torch tensor in host memory, or a tuple
    ///         ``(address, length)``. Its bytes are taken as they lie in memory.
    ///
    /// Returns:
    ///     The number of bytes written.
    fn write(&self, py: Python<'_>, offset: Int, data: Bytes) -> PyResult<u64> {
        let slot = self.slot()?;
        let local = usable(memory::lent(&data))?;
        let written = py.detach(|| {
            let writing = {
                let session = slot.read();
                let ranges = vec![Range {
                    offset: offset.0,
                    local,
                }];
                let write = RangeWrite {
                    session: session.as_ref()?,
                    ranges,
                };
                slot.core.client().write_ranges(vec![write])
            };
            slot.core.block(writing).pop()
        });
        drop(data);
        written
            .ok_or_else(over)?
            .map_err(|error| errors::raise(&error))
    }

    /// Publishes the object: from here on it can be read. Waits for writes under way.
    ///
    /// Raises:
    ///     Incomplete: Bytes are missing. The session stays open: write them and end again.
    ///     Superseded: Another writer took over, or the session was discarded.
    ///     MasterUnreachable, MasterTimeout: The session takes no more ranges; end or revoke again.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.finish(py, true)
    }

    /// Gives the reservation back: key and room are free at once.
    fn revoke(&self, py: Python<'_>) -> PyResult<()> {
        self.finish(py, false)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        class_: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if self.slot()?.read().is_none() {
            return Ok(false);
        }
        if class_.is_none() {
            self.finish(py, true)?;
        } else if let Err(error) = self.finish(py, false) {
            // The block's own exception is the one to see; the reservation times out.
            drop(error);
        }
        Ok(false)
    }

    fn __repr__(&self) -> String {
        format!("PutSession(key={:?}, size={})", self.key, self.size)
    }
}

/// An object that is being read, under a lease that is renewed in the background.
///
/// Made by :meth:`Store.start_get` and :meth:`Store.start_gets`. As a context manager it ends when the
/// block is left. All its reads see one version of the object.
#[pyclass(frozen, name = "GetSession", module = "layercake")]
pub(crate) struct PyGetSession {
    key: String,
    size: u64,
    slot: Owned<Slot<GetSession>>,
}

impl PyGetSession {
    pub(crate) fn new(core: Arc<StoreCore>, session: GetSession) -> Self {
        Self {
            key: session.key().to_string(),
            size: session.size(),
            slot: Owned::new(Slot::new(core, session)),
        }
    }

    pub(crate) fn slot(&self) -> PyResult<&Slot<GetSession>> {
        self.slot.get()
    }

    fn read_range(&self, offset: u64, local: LocalSlice) -> Option<Result<u64, StoreError>> {
        let slot = self.slot().ok()?;
        let reading = {
            let session = slot.read();
            let ranges = vec![Range { offset, local }];
            let read = RangeRead {
                session: session.as_ref()?,
                ranges,
            };
            slot.core.client().read_ranges(vec![read])
        };
        let done = slot.core.block(reading).pop()?;
        Some(done.map(|done| done.bytes))
    }
}

#[pymethods]
impl PyGetSession {
    /// The object's key.
    #[getter]
    fn key(&self) -> &str {
        &self.key
    }

    /// The object's size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// Reads ``length`` bytes of the object from ``offset`` on; ``None``: all up to its end.
    ///
    /// Raises:
    ///     LeaseExpired: The lease could not be renewed: start again.
    #[pyo3(signature = (offset = Int(0), length = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Int,
        length: Option<Int>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.slot()?;
        let left = self.size.saturating_sub(offset.0);
        let length = length.map_or(left, |length| length.0);
        if length == 0 || length > left {
            let error = if length == 0 {
                StoreError::EmptyRange { offset: offset.0 }
            } else {
                StoreError::OutOfBounds {
                    offset: offset.0,
                    len: length,
                    size: self.size,
                }
            };
            return Err(errors::raise(&error));
        }
        memory::fill_bytes(py, length, |local| {
            let read = py.detach(|| self.read_range(offset.0, local));
            read.ok_or_else(over)?
                .map_err(|error| errors::raise(&error))
        })
    }

    /// Reads the bytes of the object from ``offset`` on into ``buffer``, as many as it has room for.
    ///
    /// Args:
    ///     offset: First byte in the object.
    ///     buffer: A writable object with the buffer protocol, a torch tensor in host memory, or a tuple
    ///         ``(address, length)``.
    ///
    /// Returns:
    ///     The number of bytes read, which is the buffer's length. After an error, the buffer holds
    ///     anything.
    fn read_into(&self, py: Python<'_>, offset: Int, buffer: BytesMut) -> PyResult<u64> {
        self.slot()?;
        let local = usable(memory::lent_mut(&buffer))?;
        let read = py.detach(|| self.read_range(offset.0, local));
        drop(buffer);
        read.ok_or_else(over)?
            .map_err(|error| errors::raise(&error))
    }

    /// Ends the session, and gives its lease back if it was the last one on the object.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        let slot = self.slot()?;
        py.detach(|| {
            if let Some(session) = slot.take() {
                slot.core.block(slot.core.client().end_gets(vec![session]));
            }
        });
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _class: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.end(py)?;
        Ok(false)
    }

    fn __repr__(&self) -> String {
        format!("GetSession(key={:?}, size={})", self.key, self.size)
    }
}

/// The exception for memory that can't be used.
pub(crate) fn usable(local: Result<LocalSlice, memory::Unusable>) -> Result<LocalSlice, Failure> {
    local.map_err(|error| Kind::InvalidArgument.failure(error.to_string()))
}

/// The answer where a store's call gave fewer than it should: never seen.
pub(crate) fn lost() -> StoreError {
    Refusal::invalid("the call had no answer for this entry").into()
}
