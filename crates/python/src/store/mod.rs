//! `layercake.Store`: the class, its life, and what it tells about itself. Its other methods, with their
//! documentation, are in `whole` (whole objects) and `sessions`; what they do is in `objects` and `ranges`.

pub(crate) mod info;
mod objects;
mod ranges;
mod sessions;
mod whole;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::key::Tenant;
use layercake_store::StoreError;
use layercake_store::link::Timeouts;
use layercake_transport::Access;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::args::{Int, Key, Seconds, Size};
use crate::core::{
    EngineCore, EngineSettings, Health, MemberName, StoreCore, StoreSettings, Trust,
};
use crate::errors::{self, Kind};
use crate::runtime::{self, Owned};
use crate::serve::Embedded;
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
        let core = runtime::run(py, StoreCore::open(settings, shared.map(Into::into)))?;
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
            runtime::close_behind(&handle, async move {
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
                name: name.map_or(default.name, MemberName::Given),
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
