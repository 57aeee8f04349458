//! `layercake.serve()`: a master and memory for it, in this process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_master::{Error, Master, MasterConfig};
use layercake_store::StoreError;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use pyo3::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::args::{Seconds, Size};
use crate::core::{EngineSettings, MemberName, StoreSettings, Trust};
use crate::errors::{self, Kind};
use crate::runtime::{self, Close, Owned};
use crate::store::PyStore;

/// A master that runs on the runtime's threads, until it is stopped or dropped.
pub(crate) struct Embedded {
    handle: Handle,
    address: SocketAddr,
    running: Mutex<Option<Running>>,
}

struct Running {
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), Error>>,
}

impl Embedded {
    async fn start(config: MasterConfig) -> Result<Arc<Self>, Error> {
        let bound = Master::bind(config, &mut Registry::default()).await?;
        let address = bound.local_addr();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(bound.serve(async {
            // Also when the sender is gone.
            let _ = stopped.await;
        }));
        Ok(Arc::new(Self {
            handle: Handle::current(),
            address,
            running: Mutex::new(Some(Running { stop, serving })),
        }))
    }

    fn stop(&self, until: Instant) {
        let Some(Running { stop, serving }) = self.running.lock().take() else {
            return;
        };
        drop(stop);
        let left = until.saturating_duration_since(Instant::now());
        let ended = self
            .handle
            .block_on(async { tokio::time::timeout(left, serving).await });
        tracing::debug!(in_time = ended.is_ok(), "the embedded master ended");
    }
}

impl Close for Embedded {
    fn close_by(&self, until: Instant) {
        self.stop(until);
    }

    fn is_needed_by_others(&self) -> bool {
        true
    }
}

/// A cluster in this process. Made by :func:`serve`.
///
/// As a context manager it ends when the block is left.
#[pyclass(frozen, name = "Cluster", module = "layercake")]
pub(crate) struct PyCluster {
    master: Owned<Arc<Embedded>>,
    store: Py<PyStore>,
}

#[pymethods]
impl PyCluster {
    /// ``host:port`` of the master, for stores in this and in other processes.
    #[getter]
    fn master(&self) -> PyResult<String> {
        Ok(self.master.get()?.address.to_string())
    }

    /// The store that lends the cluster's memory.
    #[getter]
    fn store(&self, py: Python<'_>) -> Py<PyStore> {
        self.store.clone_ref(py)
    }

    /// Ends the cluster, and with it all objects in it. Repeating it is harmless.
    #[pyo3(signature = (timeout = Seconds(Duration::from_secs(5))))]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let until = Instant::now() + timeout.0;
        self.store.get().close(py, timeout)?;
        let master = self.master.get()?;
        py.detach(|| master.stop(until));
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
        self.close(py, Seconds(Duration::from_secs(5)))?;
        Ok(false)
    }

    fn __repr__(&self) -> String {
        match self.master.get() {
            Ok(master) => format!("Cluster(master=\"{}\")", master.address),
            Err(_) => "Cluster(of a parent process)".to_owned(),
        }
    }
}

/// Starts a cluster in this process: a master, and a store that lends memory to it.
///
/// Other processes of this machine can join it (``Store(cluster.master)``); it ends with this process.
///
/// Args:
///     capacity: Bytes to lend, as an int or a text such as ``"1GiB"``.
///     listen: ``host:port`` of the master; port 0: any free one. Off loopback, a token is needed, or
///         ``insecure``.
///     lease: Seconds for which readers may rely on an object.
///     name, token, insecure, transports: As for :class:`Store`.
///
/// Returns:
///     The cluster; ``cluster.store`` is its first store.
#[pyfunction]
#[pyo3(signature = (capacity = Size(256 << 20), *, listen = "127.0.0.1:0", lease = Seconds(Duration::from_secs(10)), name = None, token = None, insecure = false, transports = None))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn serve(
    py: Python<'_>,
    capacity: Size,
    listen: &str,
    lease: Seconds,
    name: Option<String>,
    token: Option<&str>,
    insecure: bool,
    transports: Option<&str>,
) -> PyResult<PyCluster> {
    let settings = || -> Result<EngineSettings, StoreError> {
        let trust = Trust::new(token, insecure)?;
        let engine = EngineSettings::local(trust).with_transports(transports)?;
        engine.listening_on(Some(listen), None)
    };
    // Names are looked up.
    let mut engine = py.detach(settings).map_err(|error| errors::raise(&error))?;
    let mut config = MasterConfig {
        listen: engine.listen,
        token: engine.trust.token.clone(),
        insecure: engine.trust.insecure,
        ..MasterConfig::default()
    };
    config.state.lease = lease.0;
    // The transfers have a port of their own.
    engine.listen.set_port(0);
    let master = runtime::run(py, Embedded::start(config))?;
    let master = master.map_err(|error| failed_start(&error))?;
    let default = StoreSettings::client(master.address.to_string(), engine);
    let store = PyStore::open(
        py,
        StoreSettings {
            name: name.map_or(default.name, MemberName::Given),
            capacity: capacity.0,
            ..default
        },
        None,
        Some(Arc::clone(&master)),
    );
    match store {
        Ok(store) => {
            runtime::close_later(py, &master);
            Ok(PyCluster {
                master: Owned::new(master),
                store: Py::new(py, store)?,
            })
        }
        Err(error) => {
            py.detach(|| master.stop(Instant::now() + Duration::from_secs(1)));
            Err(error)
        }
    }
}

fn failed_start(error: &Error) -> PyErr {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    Kind::InvalidArgument.err(text)
}
