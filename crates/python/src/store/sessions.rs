//! The methods on range sessions.

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::{PyStore, ranges};
use crate::args::{Int, Ints, Key, Keys, Ragged};
use crate::config::{PyReplicateConfig, or_default};
use crate::session::{PyGetSession, PyPutSession};

#[pymethods]
impl PyStore {
    /// Reserves room for an object, to write it range by range.
    ///
    /// Args:
    ///     size: The object's size in bytes, at least 1.
    ///     replace: Replace the object that is there, when the session ends.
    ///     epoch: As :meth:`longest_prefix` returned it; 0: a new one.
    ///     index: The object's index in its prefix.
    ///
    /// Raises:
    ///     AlreadyExists: The key has an object, or another session is writing it.
    ///     NoSpace: There is no room, even after eviction.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    #[pyo3(signature = (key, size, config = None, *, group = None, replace = false, epoch = Int(0), index = Int(0)))]
    fn start_put(
        &self,
        py: Python<'_>,
        key: Key,
        size: Int,
        config: Option<&PyReplicateConfig>,
        group: Option<String>,
        replace: bool,
        epoch: Int,
        index: Int,
    ) -> PyResult<PyPutSession> {
        let at = ranges::recency(epoch, index)?;
        ranges::start_put(
            py,
            self.core()?,
            (key.0, size.0, group),
            &or_default(config),
            at,
            replace,
        )
    }

    /// Reserves room for many objects, in one call to the master.
    ///
    /// Args:
    ///     keys: The keys.
    ///     sizes: Their sizes in bytes, one each.
    ///     epoch, index: As for :meth:`start_put`, for the first key; the others count on.
    ///
    /// Returns:
    ///     For each key a :class:`PutSession`, or an exception as :meth:`start_put` would raise.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    #[pyo3(signature = (keys, sizes, config = None, *, replace = false, epoch = Int(0), index = Int(0)))]
    fn start_puts<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
        sizes: Ints,
        config: Option<&PyReplicateConfig>,
        replace: bool,
        epoch: Int,
        index: Int,
    ) -> PyResult<Bound<'py, PyList>> {
        let at = ranges::recency(epoch, index)?;
        ranges::start_puts(
            py,
            self.core()?,
            &keys,
            &sizes.0,
            &or_default(config),
            at,
            replace,
        )
    }

    /// Writes ranges of many objects, without a call to the master. All ranges are under way together.
    ///
    /// The lists are session-major: row *i* of ``addresses``, ``sizes`` and ``offsets`` belongs to
    /// ``sessions[i]``; the three have equally long rows. Each may be a list of lists, or a two-dimensional
    /// integer array where all rows are equally long.
    ///
    /// Args:
    ///     sessions: Put sessions of this store.
    ///     addresses: First address of each piece of local memory. Faster if it lies in a registered buffer.
    ///     sizes: Bytes of each piece, at least 1.
    ///     offsets: Where each piece goes in its object, in bytes.
    ///
    /// Returns:
    ///     For each session the number of bytes written, or an exception.
    fn write_ranges<'py>(
        &self,
        py: Python<'py>,
        sessions: Vec<PyRef<'py, PyPutSession>>,
        addresses: Ragged,
        sizes: Ragged,
        offsets: Ragged,
    ) -> PyResult<Bound<'py, PyList>> {
        ranges::write(py, self.core()?, &sessions, [&addresses, &sizes, &offsets])
    }

    /// Publishes many objects in one call to the master: for each session None, or an exception as
    /// :meth:`PutSession.end` would raise.
    fn end_puts<'py>(
        &self,
        py: Python<'py>,
        sessions: Vec<PyRef<'py, PyPutSession>>,
    ) -> PyResult<Bound<'py, PyList>> {
        ranges::finish(py, self.core()?, &sessions, true)
    }

    /// Gives many reservations back in one call to the master: for each session None, or an exception.
    fn revoke_puts<'py>(
        &self,
        py: Python<'py>,
        sessions: Vec<PyRef<'py, PyPutSession>>,
    ) -> PyResult<Bound<'py, PyList>> {
        ranges::finish(py, self.core()?, &sessions, false)
    }

    /// Opens a session on an object, to read it range by range.
    #[pyo3(signature = (key, *, epoch = Int(0), index = Int(0)))]
    fn start_get(
        &self,
        py: Python<'_>,
        key: Key,
        epoch: Int,
        index: Int,
    ) -> PyResult<PyGetSession> {
        let at = ranges::recency(epoch, index)?;
        ranges::start_get(py, self.core()?, key.0, at)
    }

    /// Opens sessions on many objects, in one call to the master: for each key a :class:`GetSession`, or
    /// an exception.
    #[pyo3(signature = (keys, *, epoch = Int(0), index = Int(0)))]
    fn start_gets<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
        epoch: Int,
        index: Int,
    ) -> PyResult<Bound<'py, PyList>> {
        let at = ranges::recency(epoch, index)?;
        ranges::start_gets(py, self.core()?, &keys, at)
    }

    /// Reads ranges of many objects, without a call to the master. Arguments as for :meth:`write_ranges`.
    ///
    /// Returns:
    ///     For each session the number of bytes read, or an exception; then its memory holds anything.
    fn read_ranges<'py>(
        &self,
        py: Python<'py>,
        sessions: Vec<PyRef<'py, PyGetSession>>,
        addresses: Ragged,
        sizes: Ragged,
        offsets: Ragged,
    ) -> PyResult<Bound<'py, PyList>> {
        ranges::read(py, self.core()?, &sessions, [&addresses, &sizes, &offsets])
    }

    /// Ends many get sessions in one call to the master.
    fn end_gets(&self, py: Python<'_>, sessions: Vec<PyRef<'_, PyGetSession>>) -> PyResult<()> {
        ranges::end_gets(py, self.core()?, &sessions)
    }
}
