//! `layercake.Store`: the class, its life, and its documentation. What the methods do is in the modules
//! beside this one: `objects` (whole objects), `ranges` (sessions, many at a time), `info` (what the
//! cluster tells).

pub(crate) mod info;
mod objects;
mod ranges;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::key::Tenant;
use layercake_store::StoreError;
use layercake_store::link::Timeouts;
use layercake_transport::Access;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::args::{Bytes, BytesMut, Int, Ints, Key, Keys, Ragged, Seconds, Size};
use crate::config::{PyReplicateConfig, or_default};
use crate::core::{EngineCore, EngineSettings, Health, StoreCore, StoreSettings, Trust};
use crate::errors::{self, Kind};
use crate::runtime::{self, Owned};
use crate::serve::Embedded;
use crate::session::{PyGetSession, PyPutSession};
use crate::transfer::PyTransferEngine;

/// How long closing waits for what is in flight, unless the caller says otherwise.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// A member of a cluster: it reads and writes objects and, with a capacity, lends memory.
///
/// One store serves any number of threads; calls overlap, and release the interpreter lock while
/// bytes move or the network is waited for. As a context manager it is closed when the block is left.
///
/// Batch methods answer entry by entry: the result list has one entry per key, in order, and holds the
/// exception where an entry failed. One bad entry never fails its neighbours.
///
/// Args:
///     master: ``host:port`` of the master; ``None``: the environment's ``LAYERCAKE_MASTER``, else where a
///         master of this machine listens by default, 127.0.0.1:50061.
///     name: The member's name, which ``preferred_segments`` refers to. Each process needs its own; ``None``:
///         one is made up.
///     capacity: Bytes to lend to the cluster, as an int or a text such as ``"16GiB"``. 0: none.
///     tenant: Namespace of all keys.
///     token: The secret that all members share; ``None``: the environment's ``LAYERCAKE_TOKEN``.
///     insecure: Accept connections to other hosts without a token.
///     listen: Address to listen on for other members' transfers, ``host`` or ``host:port``; ``None``:
///         loopback.
///     advertise: ``host:port`` that others are told, if that differs.
///     transports: Which to use, such as ``"shm,tcp"``; ``None``: the environment's
///         ``LAYERCAKE_TRANSPORTS``, else all.
///     engine: Move bytes with this engine, whose registered buffers are then known here too. It then
///         decides on token, listening and transports.
///     huge_pages: Ask for huge pages for the lent memory.
///     checksums: Keep a checksum of all that is written, and compare it when reading.
///     timeout: Seconds that one message to the master may take.
///     ready_timeout: Seconds until all lent memory must be in use.
///
/// Raises:
///     MasterUnreachable: Nothing answers at that address, or what answers is no master.
///     AuthenticationError: A token is missing or wrong.
///     InvalidArgument: A value can't be used, or the capacity is more than the free memory.
#[pyclass(frozen, name = "Store", module = "layercake", weakref)]
pub(crate) struct PyStore {
    core: Owned<Arc<StoreCore>>,
    closed: AtomicBool,
    /// A master in this process, which ends with the last store and cluster that it was made for.
    host: Owned<Option<Arc<Embedded>>>,
}

impl PyStore {
    /// Joins with these settings.
    pub(crate) fn open(
        py: Python<'_>,
        settings: StoreSettings,
        shared: Option<Arc<EngineCore>>,
        host: Option<Arc<Embedded>>,
    ) -> PyResult<Self> {
        let core = runtime::run(py, StoreCore::open(settings, shared))?;
        let core = core.map_err(|error| errors::raise(&error))?;
        runtime::close_later(py, &core);
        Ok(Self {
            core: Owned::new(core),
            closed: AtomicBool::new(false),
            host: Owned::new(host),
        })
    }

    fn core(&self) -> PyResult<&Arc<StoreCore>> {
        let core = self.core.get()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Kind::Closed.err("the store was closed"));
        }
        Ok(core)
    }
}

impl Drop for PyStore {
    fn drop(&mut self) {
        // In a forked child there is nothing to end.
        if let (Ok(core), Ok(host)) = (self.core.get(), self.host.get())
            && !self.closed.load(Ordering::Acquire)
        {
            let (core, host) = (Arc::clone(core), host.clone());
            let handle = core.handle().clone();
            handle.spawn(async move {
                core.close(Instant::now() + CLOSE_WITHIN).await;
                drop(host);
            });
        }
    }
}

#[pymethods]
impl PyStore {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    #[pyo3(signature = (master = None, *, name = None, capacity = Size(0), tenant = "default", token = None, insecure = false, listen = None, advertise = None, transports = None, engine = None, huge_pages = false, checksums = true, timeout = Seconds(Duration::from_secs(5)), ready_timeout = Seconds(Duration::from_mins(1))))]
    fn new(
        py: Python<'_>,
        master: Option<String>,
        name: Option<String>,
        capacity: Size,
        tenant: &str,
        token: Option<&str>,
        insecure: bool,
        listen: Option<&str>,
        advertise: Option<&str>,
        transports: Option<&str>,
        engine: Option<&PyTransferEngine>,
        huge_pages: bool,
        checksums: bool,
        timeout: Seconds,
        ready_timeout: Seconds,
    ) -> PyResult<Self> {
        let shared = engine.map(PyTransferEngine::engine).transpose()?;
        let settings = || -> Result<StoreSettings, StoreError> {
            let engine = match &shared {
                Some(engine) => engine.settings().sharing(&[
                    ("token", token.is_some()),
                    ("insecure", insecure),
                    ("listen", listen.is_some()),
                    ("advertise", advertise.is_some()),
                    ("transports", transports.is_some()),
                ])?,
                None => EngineSettings::local(Trust::new(token, insecure)?)
                    .with_transports(transports)?
                    .listening_on(listen, advertise)?,
            };
            let default = StoreSettings::client(StoreSettings::master_or_default(master), engine);
            Ok(StoreSettings {
                name: name.unwrap_or(default.name),
                tenant: Tenant::new(tenant).map_err(|error| StoreError::InvalidConfig {
                    setting: "tenant",
                    detail: error.to_string(),
                })?,
                capacity: capacity.0,
                huge_pages,
                checksums,
                timeouts: Timeouts {
                    call: timeout.0,
                    ..default.timeouts
                },
                ready_within: ready_timeout.0,
                ..default
            })
        };
        // Names are looked up.
        let settings = py.detach(settings).map_err(|error| errors::raise(&error))?;
        Self::open(py, settings, shared, None)
    }

    /// The member's name, which ``preferred_segments`` refers to.
    #[getter]
    fn name(&self) -> PyResult<&str> {
        Ok(self.core.get()?.name())
    }

    /// ``"serving"``, ``"closed"``, or ``"master lost"`` while the master can't be reached. Asks nobody.
    #[getter]
    fn health(&self) -> PyResult<&'static str> {
        Ok(match self.core.get()?.health() {
            Health::Serving => "serving",
            Health::Closed => "closed",
            Health::MasterLost => "master lost",
        })
    }

    /// Leaves the cluster: open sessions are revoked or ended, and lent memory is withdrawn with the objects
    /// in it. Repeating it is harmless.
    ///
    /// Args:
    ///     timeout: Seconds to wait for what is in flight; what is left then is settled by the master.
    #[pyo3(signature = (timeout = Seconds(CLOSE_WITHIN)))]
    pub(crate) fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let core = Arc::clone(self.core.get()?);
        if !self.closed.swap(true, Ordering::AcqRel) {
            let until = Instant::now() + timeout.0;
            py.detach(|| core.block(core.close(until)));
        }
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
        self.close(py, Seconds(CLOSE_WITHIN))?;
        Ok(false)
    }

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

    /// Registers memory by address, so that transfers need not check it. It must stay mapped until it is
    /// unregistered.
    ///
    /// Args:
    ///     address: First address.
    ///     size: Bytes.
    ///
    /// Raises:
    ///     InvalidArgument: Not memory of this process, memory of a device, or registered already.
    fn register_buffer(&self, py: Python<'_>, address: Int, size: Int) -> PyResult<()> {
        info::register(
            py,
            self.core()?.engine(),
            address.0,
            size.0,
            Access::LocalOnly,
        )
    }

    /// Unregisters the memory that begins at ``address``, and waits until no transfer touches it.
    fn unregister_buffer(&self, py: Python<'_>, address: Int) -> PyResult<()> {
        info::unregister(py, self.core()?.engine(), address.0)
    }

    /// What the master knows about an object, as a dict.
    fn stat<'py>(&self, py: Python<'py>, key: Key) -> PyResult<Bound<'py, PyDict>> {
        info::stat(py, self.core()?, &key.0)
    }

    /// The keys that begin with ``prefix``, in order, at most ``limit`` of those behind ``after``.
    #[pyo3(signature = (prefix = "", *, limit = 1000, after = None))]
    fn keys(
        &self,
        py: Python<'_>,
        prefix: &str,
        limit: u32,
        after: Option<Key>,
    ) -> PyResult<Vec<String>> {
        info::keys(
            py,
            self.core()?,
            prefix,
            limit,
            after.as_ref().map(|key| &key.0),
        )
    }

    /// The cluster's numbers, as a dict.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::status(py, self.core()?)
    }

    /// The cluster's segments, each as a dict.
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        info::segments(py, self.core()?)
    }

    /// This client's counters, as a dict; ``"transports"`` holds bytes moved by transport and direction.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::stats(py, self.core()?)
    }

    fn __repr__(&self) -> String {
        match self.core.get() {
            Ok(core) => format!(
                "Store(name={:?}, master={:?})",
                core.name(),
                core.client().link().master()
            ),
            Err(_) => "Store(of a parent process)".to_owned(),
        }
    }
}
