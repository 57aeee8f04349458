//! The methods on whole objects.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::{PyStore, objects, ranges};
use crate::args::{Bytes, BytesMut, Int, Key, Keys, Seconds};
use crate::config::{PyReplicateConfig, or_default};
use crate::errors;

#[pymethods]
impl PyStore {
    /// Stores an object if its key is free.
    ///
    /// Args:
    ///     key: 1 to 65,535 bytes of UTF-8.
    ///     data: At least one byte: any object with the buffer protocol, a torch tensor in host memory, or a tuple
    ///         ``(address, length)``. Its bytes are taken as they lie in memory.
    ///     config: Placement; ``None``: one replica anywhere.
    ///     group: Objects of one group are evicted together.
    ///
    /// Returns:
    ///     True if it was stored; False if the key has an object, or a writer: that one stays.
    ///
    /// Raises:
    ///     NoSpace: There is no room, even after eviction.
    #[pyo3(signature = (key, data, config = None, *, group = None))]
    fn put(
        &self,
        py: Python<'_>,
        key: Key,
        data: Bytes,
        config: Option<&PyReplicateConfig>,
        group: Option<String>,
    ) -> PyResult<bool> {
        objects::put(
            py,
            self.core()?,
            key.0,
            &data,
            &or_default(config),
            group,
            false,
        )
    }

    /// Stores an object, and replaces the one that is there. Readers see the old bytes until the new ones are
    /// whole; get sessions that are open go on with the old ones, or fail.
    #[pyo3(signature = (key, data, config = None, *, group = None))]
    fn upsert(
        &self,
        py: Python<'_>,
        key: Key,
        data: Bytes,
        config: Option<&PyReplicateConfig>,
        group: Option<String>,
    ) -> PyResult<()> {
        objects::put(
            py,
            self.core()?,
            key.0,
            &data,
            &or_default(config),
            group,
            true,
        )
        .map(drop)
    }

    /// Stores many objects, each if its key is free.
    ///
    /// Args:
    ///     items: ``(key, data)`` pairs, as for :meth:`put`.
    ///
    /// Returns:
    ///     For each item True, False or an exception, as :meth:`put` would return or raise.
    #[pyo3(signature = (items, config = None))]
    fn put_many<'py>(
        &self,
        py: Python<'py>,
        items: Vec<(Key, Bytes)>,
        config: Option<&PyReplicateConfig>,
    ) -> PyResult<Bound<'py, PyList>> {
        objects::put_many(py, self.core()?, items, &or_default(config))
    }

    /// The bytes of an object.
    ///
    /// Raises:
    ///     NotFound: There is none.
    ///     NotReady: Its writer has not finished.
    fn get<'py>(&self, py: Python<'py>, key: Key) -> PyResult<Bound<'py, PyBytes>> {
        objects::get(py, self.core()?, key.0)
    }

    /// The bytes of many objects: for each key ``bytes``, or an exception as :meth:`get` would raise.
    fn get_many<'py>(&self, py: Python<'py>, keys: Keys) -> PyResult<Bound<'py, PyList>> {
        objects::get_many(py, self.core()?, &keys)
    }

    /// Reads an object into a buffer with room for all of it.
    ///
    /// Returns:
    ///     The object's size in bytes. After an error, the buffer holds anything.
    fn get_into(&self, py: Python<'_>, key: Key, buffer: BytesMut) -> PyResult<u64> {
        objects::get_into(py, self.core()?, key.0, &buffer)
    }

    /// Reads many objects, each into a buffer with room for all of it.
    ///
    /// Args:
    ///     items: ``(key, buffer)`` pairs, as for :meth:`get_into`.
    ///
    /// Returns:
    ///     For each item the object's size in bytes, or an exception.
    fn get_into_many<'py>(
        &self,
        py: Python<'py>,
        items: Vec<(Key, BytesMut)>,
    ) -> PyResult<Bound<'py, PyList>> {
        objects::get_into_many(py, self.core()?, &items)
    }

    /// Whether an object is there, whole. It is then protected from eviction for as long as a lease lasts.
    fn exists(&self, py: Python<'_>, key: Key) -> PyResult<bool> {
        let core = self.core()?;
        let keys = [key.0];
        let found = py.detach(|| core.block(core.client().exists(&keys, ranges::NOW)).pop());
        Ok(objects::only(found)?)
    }

    /// Which objects are there: for each key True, False or an exception.
    ///
    /// Args:
    ///     readable: Count only those with a replica on a live segment.
    #[pyo3(signature = (keys, *, readable = false))]
    fn exists_many<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
        readable: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        objects::exists_many(py, self.core()?, &keys, readable)
    }

    /// How many of the keys, from the first on, can all be read.
    ///
    /// Asks window by window and stops behind the first miss.
    ///
    /// Args:
    ///     keys: The blocks of a prefix, in order.
    ///     window: Keys to ask for at a time.
    ///
    /// Returns:
    ///     ``(blocks, epoch)``: hand the epoch on to the starts that follow, so that this request's blocks
    ///     are evicted from the tail of their prefix.
    #[pyo3(signature = (keys, window = Int(64)))]
    fn longest_prefix(
        &self,
        py: Python<'_>,
        keys: Vec<Key>,
        window: Int,
    ) -> PyResult<(usize, u64)> {
        objects::longest_prefix(py, self.core()?, keys, window.0)
    }

    /// An object's size in bytes.
    fn size(&self, py: Python<'_>, key: Key) -> PyResult<u64> {
        let core = self.core()?;
        let keys = [key.0];
        let size = py.detach(|| core.block(core.client().sizes(&keys)).pop());
        Ok(objects::only(size)?)
    }

    /// Removes an object.
    ///
    /// Args:
    ///     force: Also if readers rely on it; their sessions read on or fail, but never see other bytes.
    ///
    /// Raises:
    ///     NotFound, NotReady, Leased
    #[pyo3(signature = (key, *, force = false))]
    fn remove(&self, py: Python<'_>, key: Key, force: bool) -> PyResult<()> {
        let core = self.core()?;
        let keys = [key.0];
        let done = py.detach(|| core.block(core.client().remove(&keys, force)).pop());
        Ok(objects::only(done)?)
    }

    /// Removes many objects: for each key None, or an exception as :meth:`remove` would raise.
    #[pyo3(signature = (keys, *, force = false))]
    fn remove_many<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
        force: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        objects::remove_many(py, self.core()?, &keys, force)
    }

    /// Removes the objects whose key the regular expression matches anywhere, and returns their number.
    /// Those that readers rely on stay, unless ``force``; those that are being written always do.
    #[pyo3(signature = (pattern, *, force = false))]
    fn remove_matching(&self, py: Python<'_>, pattern: &str, force: bool) -> PyResult<u64> {
        let core = self.core()?;
        let removed = py.detach(|| core.block(core.client().remove_matching(pattern, force)));
        removed.map_err(|error| errors::raise(&error))
    }

    /// Removes all objects of the tenant, and returns their number. As :meth:`remove_matching`.
    #[pyo3(signature = (*, force = false))]
    fn remove_all(&self, py: Python<'_>, force: bool) -> PyResult<u64> {
        let core = self.core()?;
        let removed = py.detach(|| core.block(core.client().remove_all(force)));
        removed.map_err(|error| errors::raise(&error))
    }

    /// Waits until each object is whole. Nothing is polled.
    ///
    /// Args:
    ///     timeout: Seconds.
    ///
    /// Returns:
    ///     For each key None, or an exception: ``NotReady`` after the time, ``NotFound`` if its writer failed.
    fn wait_complete<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
        timeout: Seconds,
    ) -> PyResult<Bound<'py, PyList>> {
        objects::wait_complete(py, self.core()?, &keys, timeout.0)
    }
}
