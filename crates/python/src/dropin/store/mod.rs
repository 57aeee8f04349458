//! Behind `mooncake_store`: `MooncakeDistributedStore` and what it gives out.
//!
//! The class is a thin layer on [`StoreCore`]: arguments are converted once, the interpreter lock is released, and
//! the coded methods of the core do the rest. What does not need to be quick (enumerations, descriptors,
//! tensors) is Python on top of it.
//!
//! A store that was not set up, or was closed, answers with -600 or the neutral value; in a child of the
//! process that set it up, every call raises `ForkError`. The client is taken out of its lock for the length of
//! a call, so that a `close` in another thread waits for nobody: calls under way end with errors. That lock is only
//! taken with the interpreter lock held, and so never held while Python forks.

mod batches;
mod config;
mod lookup;
mod objects;
mod ranges;
mod report;
mod sessions;
mod settings;
mod tasks;
mod whole;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use self::config::PyConfig;
use self::report::Entries;
use self::settings::Arguments;
use crate::args::{Flag, Int, OneKey};
use crate::core::code::{self, INVALID};
use crate::core::reasons::{self, invalid};
use crate::core::{Health, Keeper, StoreCore};
use crate::memory::PyBufferHandle;
use crate::runtime::{self, Owned};

/// How long closing waits for what is in flight.
const CLOSE_WITHIN: Duration = Duration::from_secs(3);

/// Why calls of a store without a client are refused.
const NOT_SET_UP: &str = "the store was not set up, or was closed";

/// Adds what the module shows.
pub(super) fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyMooncakeStore>()?;
    module.add_class::<PyConfig>()?;
    module.add_class::<PyBufferHandle>()
}

/// A client of the store.
///
/// Calls of any number of threads overlap, and release the interpreter lock while bytes move or the network is
/// waited for. When a call returns, no byte of its memory moves any more.
#[pyclass(
    frozen,
    subclass,
    weakref,
    name = "MooncakeDistributedStore",
    module = "mooncake.store"
)]
#[derive(Default)]
pub(crate) struct PyMooncakeStore {
    client: Mutex<Option<Owned<Client>>>,
}

/// What a store has that was set up.
#[derive(Clone)]
struct Client {
    core: Arc<StoreCore>,
    /// With an engine that it shares: a part in the program's memory that is registered there. Never let go of with a
    /// lock held: the last one waits.
    engine: Option<Keeper>,
}

impl PyMooncakeStore {
    /// The client, if there is one.
    fn core(&self) -> PyResult<Option<Arc<StoreCore>>> {
        let client = self.client.lock();
        let client = client.as_ref().map(Owned::get).transpose()?;
        Ok(client.map(|client| Arc::clone(&client.core)))
    }

    /// One answer, of a call that is made without the interpreter lock.
    fn answer<T: Send>(
        &self,
        py: Python<'_>,
        neutral: T,
        call: impl FnOnce(&StoreCore) -> T + Send,
    ) -> PyResult<T> {
        match self.core()? {
            Some(core) => Ok(py.detach(|| call(&core))),
            None => Ok(neutral),
        }
    }

    /// One code for each entry of the method `name`; failures are written down.
    fn codes(
        &self,
        py: Python<'_>,
        name: &'static str,
        entries: &(impl Entries + Sync),
        call: impl FnOnce(&StoreCore) -> Vec<i64> + Send,
    ) -> PyResult<Vec<i64>> {
        self.try_codes(py, name, entries, |core| Ok(call(core)))
    }

    /// As [`codes`](Self::codes), of a call that a signal can end.
    fn try_codes(
        &self,
        py: Python<'_>,
        name: &'static str,
        entries: &(impl Entries + Sync),
        call: impl FnOnce(&StoreCore) -> PyResult<Vec<i64>> + Send,
    ) -> PyResult<Vec<i64>> {
        let Some(core) = self.core()? else {
            return Ok(entries.refused(name, invalid(NOT_SET_UP)));
        };
        py.detach(|| {
            let codes = call(&core).inspect_err(|_| {
                // Not of the next call, either.
                reasons::take();
            })?;
            report::tell(name, &codes, |index| entries.name(index));
            Ok(codes)
        })
    }

    /// The code of the only entry.
    fn code(
        &self,
        py: Python<'_>,
        name: &'static str,
        key: &OneKey,
        call: impl FnOnce(&StoreCore) -> Vec<i64> + Send,
    ) -> PyResult<i64> {
        let mut codes = self.codes(py, name, &key.0, call)?;
        Ok(codes.pop().unwrap_or(INVALID))
    }

    /// Takes the client out.
    fn take(&self) -> PyResult<Option<Client>> {
        let mut client = self.client.lock();
        let taken = client.as_ref().map(Owned::get).transpose()?.cloned();
        *client = None;
        Ok(taken)
    }

    fn open(
        &self,
        py: Python<'_>,
        arguments: Arguments,
        engine: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i64> {
        let (shared, engine) = settings::engine(engine)?.unzip();
        let of_engine = shared.as_ref();
        let of_engine = of_engine.map(|shared| shared.engine.settings().clone());
        // Name servers and masters may keep one waiting: a signal ends either.
        let handle = runtime::handle(py)?;
        let read = settings::read(arguments, of_engine);
        let settings = match runtime::run_interruptibly(py, &handle, read)? {
            Ok(settings) => settings,
            Err(error) => return Ok(refused(&error)),
        };
        self.close(py)?;
        let opened = settings::open(settings, shared);
        let core = match runtime::run_interruptibly(py, &handle, opened)? {
            Ok(core) => core,
            Err(error) => {
                tracing::error!(%error, "the store was not set up");
                let code = code::of(&error, code::Call::Session);
                // Told already.
                reasons::take();
                return Ok(code);
            }
        };
        runtime::close_later(py, &core);
        let client = Owned::new(Client { core, engine });
        let before = self.client.lock().replace(client);
        if let Some(before) = before {
            // Another thread was quicker: the last one stays.
            close(py, &before.get()?.core);
        }
        Ok(0)
    }
}

fn refused(error: &settings::Refused) -> i64 {
    tracing::error!(%error, "the store was not set up");
    error.code()
}

/// Leaves the cluster, without the interpreter lock.
fn close(py: Python<'_>, core: &StoreCore) {
    py.detach(|| core.block(core.close(Instant::now() + CLOSE_WITHIN)));
}

impl Drop for PyMooncakeStore {
    fn drop(&mut self) {
        // In a forked child there is nothing to end.
        if let Ok(Some(Client { core, engine })) = self.take() {
            let handle = core.handle().clone();
            runtime::close_behind(&handle, async move {
                core.close(Instant::now() + CLOSE_WITHIN).await;
            });
            // Here, not behind: then the memory is the program's alone.
            drop(engine);
        }
    }
}

#[pymethods]
impl PyMooncakeStore {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Joins a cluster: ``setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol,
    /// rdma_devices, master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path='',
    /// tenant_id='default', enable_client_http_server=False, client_http_port=9300)``, or ``setup(config, engine=None)`` with a
    /// dict of the same names, of which the first two must be there; ``None`` stands for one that is not.
    ///
    /// Args:
    ///     local_hostname: Host name or address that others reach this process by. A port that is given becomes part of
    ///         the segment's name.
    ///     metadata_server: ``"P2PHANDSHAKE"`` or an HTTP address; neither is needed.
    ///     global_segment_size: Bytes to lend; 0: none. As an int, or a text with a unit.
    ///     local_buffer_size: Not needed: values are not staged.
    ///     protocol: ``"tcp"``, which uses shared memory between processes of one host.
    ///     rdma_devices: Not used.
    ///     master_server_addr: ``host:port`` of the master.
    ///     engine: What ``TransferEngine.get_engine()`` gives: buffers that are registered with it are known here, too.
    ///     enable_ssd_offload: There is no offloading yet: objects stay in memory.
    ///     ssd_offload_path: Not used.
    ///     tenant_id: Namespace of the keys, if the master separates tenants.
    ///     enable_client_http_server: There is none.
    ///     client_http_port: Only checked.
    ///
    /// Returns:
    ///     0, or a negative code, with the reason on standard error.
    #[expect(clippy::too_many_arguments, reason = "they are positional in Mooncake")]
    #[pyo3(signature = (local_hostname = None, metadata_server = None, global_segment_size = None, local_buffer_size = None, protocol = None, rdma_devices = None, master_server_addr = None, engine = None, enable_ssd_offload = Flag(false), ssd_offload_path = "", tenant_id = "default", enable_client_http_server = Flag(false), client_http_port = Int(settings::DEFAULT_HTTP_PORT), *, config = None))]
    fn setup(
        &self,
        py: Python<'_>,
        local_hostname: Option<&Bound<'_, PyAny>>,
        metadata_server: Option<String>,
        global_segment_size: Option<settings::Bytes>,
        local_buffer_size: Option<settings::Bytes>,
        protocol: Option<String>,
        rdma_devices: Option<String>,
        master_server_addr: Option<String>,
        engine: Option<Bound<'_, PyAny>>,
        enable_ssd_offload: Flag,
        ssd_offload_path: &str,
        tenant_id: Option<&str>,
        enable_client_http_server: Flag,
        client_http_port: Int,
        config: Option<Bound<'_, PyDict>>,
    ) -> PyResult<i64> {
        let engine = engine.as_ref().filter(|engine| !engine.is_none());
        let first_is_dict = local_hostname.and_then(|first| first.cast::<PyDict>().ok());
        if let Some(dict) = config.as_ref().or(first_is_dict) {
            return match Arguments::of_dict(dict)? {
                Ok(arguments) => self.open(py, arguments, engine),
                Err(error) => Ok(refused(&error)),
            };
        }
        let _ = (local_buffer_size, rdma_devices, ssd_offload_path);
        let arguments = Arguments {
            local_hostname: settings::needed(
                "local_hostname",
                local_hostname.map(PyAnyMethods::extract).transpose()?,
            )?,
            metadata_server: settings::needed("metadata_server", metadata_server)?,
            capacity: settings::needed("global_segment_size", global_segment_size)?.0,
            protocol: settings::needed("protocol", protocol)?,
            master: settings::needed("master_server_addr", master_server_addr)?,
            offload: enable_ssd_offload.0,
            tenant: tenant_id.unwrap_or(settings::DEFAULT_TENANT).to_owned(),
            http: enable_client_http_server.0,
            http_port: client_http_port.0,
        };
        self.open(py, arguments, engine)
    }

    /// Leaves the cluster: what was lent is withdrawn with the objects in it, and open sessions are given up.
    /// Repeating it is harmless, and the store can be set up again.
    fn close(&self, py: Python<'_>) -> PyResult<i64> {
        if let Some(client) = self.take()? {
            close(py, &client.core);
        }
        Ok(0)
    }

    /// 0: healthy; 1: not set up, or closed; 2: the master can't be reached.
    fn health_check(&self) -> PyResult<i64> {
        Ok(match self.core()?.map(|core| core.health()) {
            Some(Health::Serving) => 0,
            None | Some(Health::Closed) => 1,
            Some(Health::MasterLost) => 2,
        })
    }

    /// ``host:port``: the name of this client's segment, which ``preferred_segment`` refers to.
    fn get_hostname(&self) -> PyResult<String> {
        let core = self.core()?;
        Ok(core.map_or_else(String::new, |core| core.name().to_owned()))
    }

    /// Registers memory by address, so that transfers need not check it. It must stay mapped until it is unregistered.
    fn register_buffer(&self, py: Python<'_>, buffer_ptr: Int, size: Int) -> PyResult<i64> {
        self.answer(py, INVALID, |core| {
            match core.register(buffer_ptr.0, size.0) {
                Ok(()) => 0,
                Err(error) => {
                    tracing::warn!(%error, "memory was not registered");
                    INVALID
                }
            }
        })
    }

    /// Unregisters the memory that begins at ``buffer_ptr``, and waits until no transfer touches it.
    fn unregister_buffer(&self, py: Python<'_>, buffer_ptr: Int) -> PyResult<i64> {
        self.answer(py, INVALID, |core| match core.unregister(buffer_ptr.0) {
            Ok(()) => 0,
            Err(error) => {
                tracing::warn!(%error, "memory was not unregistered");
                INVALID
            }
        })
    }

    fn __repr__(&self) -> String {
        match self.core() {
            Ok(Some(core)) => format!("MooncakeDistributedStore({:?})", core.name()),
            Ok(None) => "MooncakeDistributedStore(not set up)".to_owned(),
            Err(_) => "MooncakeDistributedStore(of a parent process)".to_owned(),
        }
    }
}
