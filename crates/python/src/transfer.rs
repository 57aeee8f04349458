//! `layercake.TransferEngine`: memory of one process moved to and from that of another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_store::StoreError;
use layercake_store::link::block_on;
use layercake_transport::{Access, Direction, LocalSlice};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::args::{Int, Ints, Seconds};
use crate::core::{EngineCore, EngineSettings, Trust};
use crate::errors::{self, Failure, Kind};
use crate::memory::Use;
use crate::peers::{Move, PeerEngine, Submitted};
use crate::runtime::{self, Owned, SIGNALS_EVERY};
use crate::store::info;

/// How long closing waits for what is in flight, unless the caller says otherwise.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// Moves bytes between registered memory of this process and of others.
///
/// An engine is found under its address, ``host:port``; memory of a peer is named by its address in that
/// process. A peer can only touch what was registered, and only if it knows the shared token where one is
/// set. One engine serves any number of threads. As a context manager it is closed when the block is left.
///
/// Args:
///     listen: Address to listen on for peers, ``host`` or ``host:port``; ``None``: loopback.
///     advertise: ``host:port`` that peers are told to move bytes to, if that differs.
///     token: The secret that all peers share; ``None``: the environment's ``LAYERCAKE_TOKEN``.
///     insecure: Accept connections from and to other hosts without a token.
///     transports: Which to use, such as ``"shm,tcp"``; ``None``: the environment's
///         ``LAYERCAKE_TRANSPORTS``, else all.
#[pyclass(frozen, name = "TransferEngine", module = "layercake", weakref)]
pub(crate) struct PyTransferEngine {
    engine: Owned<Arc<PeerEngine>>,
    closed: AtomicBool,
}

impl PyTransferEngine {
    fn peers(&self) -> PyResult<&Arc<PeerEngine>> {
        let engine = self.engine.get()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Kind::Closed.err("the engine was closed"));
        }
        Ok(engine)
    }

    /// The engine itself, for a store to share.
    pub(crate) fn engine(&self) -> PyResult<Arc<EngineCore>> {
        Ok(Arc::clone(self.peers()?.engine()))
    }

    fn transfer(
        &self,
        py: Python<'_>,
        peer: &str,
        direction: Direction,
        table: [&Ints; 3],
        timeout: Option<Seconds>,
    ) -> PyResult<u64> {
        check_lengths(table)?;
        let engine = self.peers()?;
        let moved = py.detach(|| {
            let moves = moves(engine.engine(), direction, table, true)?;
            let deadline = timeout.map(|timeout| timeout.0);
            let moving = engine.transfer(peer, direction, &moves, deadline);
            Ok(block_on(engine.handle(), moving))
        });
        moved
            .map_err(|failure: Failure| PyErr::from(failure))?
            .map_err(|error| errors::raise_peer(&error))
    }

    fn submit(
        &self,
        py: Python<'_>,
        peer: &str,
        direction: Direction,
        table: [&Ints; 3],
        timeout: Option<Seconds>,
    ) -> PyResult<PyTransfer> {
        check_lengths(table)?;
        let engine = self.peers()?;
        let submitted = py.detach(|| {
            let moves = moves(engine.engine(), direction, table, false)?;
            let deadline = timeout.map(|timeout| timeout.0);
            Ok(engine
                .handle()
                .block_on(engine.submit(peer, direction, &moves, deadline)))
        });
        let submitted = submitted.map_err(|failure: Failure| PyErr::from(failure))?;
        let submitted = submitted.map_err(|error| errors::raise_peer(&error))?;
        Ok(PyTransfer {
            submitted: Owned::new(submitted),
        })
    }
}

impl Drop for PyTransferEngine {
    fn drop(&mut self) {
        // In a forked child there is nothing to end.
        if let Ok(engine) = self.engine.get()
            && !self.closed.load(Ordering::Acquire)
        {
            let engine = Arc::clone(engine);
            let handle = engine.handle().clone();
            runtime::close_behind(&handle, async move {
                engine.close(Instant::now() + CLOSE_WITHIN).await;
            });
        }
    }
}

fn check_lengths(table: [&Ints; 3]) -> PyResult<()> {
    let [addresses, remotes, sizes] = table.map(|list| list.0.len());
    if addresses == remotes && remotes == sizes {
        Ok(())
    } else {
        Err(Kind::InvalidArgument.err(format!(
            "the lists differ in length: {addresses} addresses, {remotes} remote addresses and {sizes} sizes"
        )))
    }
}

/// The copies of a call; those without bytes are left out.
fn moves(
    engine: &EngineCore,
    direction: Direction,
    [addresses, remotes, sizes]: [&Ints; 3],
    unregistered: bool,
) -> Result<Vec<Move>, Failure> {
    let of = match direction {
        Direction::Read => Use::Write,
        Direction::Write => Use::Read,
    };
    let mut resolver = engine.resolver();
    let mut local = |addr, len| -> Result<LocalSlice, Failure> {
        let local = if unregistered {
            resolver.any(addr, len, of)
        } else {
            resolver.registered(addr, len)
        };
        local.map_err(|error| Kind::InvalidArgument.failure(error.to_string()))
    };
    let pieces = addresses.0.iter().zip(&remotes.0).zip(&sizes.0);
    pieces
        .filter(|(_, size)| **size > 0)
        .map(|((&addr, &remote), &len)| {
            Ok(Move {
                local: local(addr, len)?,
                remote,
            })
        })
        .collect()
}

#[pymethods]
impl PyTransferEngine {
    #[new]
    #[pyo3(signature = (listen = None, *, advertise = None, token = None, insecure = false, transports = None))]
    fn new(
        py: Python<'_>,
        listen: Option<&str>,
        advertise: Option<&str>,
        token: Option<&str>,
        insecure: bool,
        transports: Option<&str>,
    ) -> PyResult<Self> {
        let settings = || -> Result<EngineSettings, StoreError> {
            EngineSettings::local(Trust::new(token, insecure)?)
                .with_transports(transports)?
                .listening_on(listen, advertise)
        };
        // Names are looked up.
        let settings = py.detach(settings).map_err(|error| errors::raise(&error))?;
        let engine = runtime::run(py, PeerEngine::start(settings))?;
        let engine = engine.map_err(|error| errors::raise(&error))?;
        runtime::close_later(py, &engine);
        Ok(Self {
            engine: Owned::new(engine),
            closed: AtomicBool::new(false),
        })
    }

    /// Where peers find this engine: ``host:port``.
    #[getter]
    fn address(&self) -> PyResult<String> {
        Ok(self.engine.get()?.address().to_string())
    }

    /// Registers memory by address. It must stay mapped until it is unregistered.
    ///
    /// Args:
    ///     address: First address.
    ///     size: Bytes.
    ///     access: What peers may do with it: ``"rw"``, ``"r"``, ``"w"``, or ``""``: nothing.
    ///
    /// Raises:
    ///     InvalidArgument: Not memory of this process, memory of a device, or registered already.
    #[pyo3(signature = (address, size, *, access = "rw"))]
    fn register(&self, py: Python<'_>, address: Int, size: Int, access: &str) -> PyResult<()> {
        let access = match access {
            "rw" => Access::RemoteReadWrite,
            "r" => Access::RemoteRead,
            "w" => Access::RemoteWrite,
            "" => Access::LocalOnly,
            _ => {
                return Err(Kind::InvalidArgument.err(format!(
                    "access is {access:?}: \"rw\", \"r\", \"w\" and \"\" are accepted"
                )));
            }
        };
        info::register(py, self.peers()?.engine(), address.0, size.0, access)
    }

    /// Unregisters the memory that begins at ``address``, and waits until no transfer touches it.
    fn unregister(&self, py: Python<'_>, address: Int) -> PyResult<()> {
        info::unregister(py, self.peers()?.engine(), address.0)
    }

    /// Writes local memory to memory of a peer, piece by piece, and returns when all of it is there.
    ///
    /// Pieces without bytes are skipped. Where one fails, the others may have arrived.
    ///
    /// Args:
    ///     peer: The peer's address, ``host:port``.
    ///     addresses: Where each piece begins here. Faster if it lies in registered memory.
    ///     remote_addresses: Where each piece begins in the peer, inside memory that is registered there.
    ///     sizes: Bytes of each piece.
    ///     timeout: Seconds for all of it; ``None``: 30.
    ///
    /// Returns:
    ///     The number of bytes written.
    ///
    /// Raises:
    ///     TransferFailed: The peer is gone, stands still or refuses a piece.
    ///     InvalidArgument: The peer shows no such memory, or the local memory can't be used.
    #[pyo3(signature = (peer, addresses, remote_addresses, sizes, *, timeout = None))]
    fn write(
        &self,
        py: Python<'_>,
        peer: &str,
        addresses: Ints,
        remote_addresses: Ints,
        sizes: Ints,
        timeout: Option<Seconds>,
    ) -> PyResult<u64> {
        let table = [&addresses, &remote_addresses, &sizes];
        self.transfer(py, peer, Direction::Write, table, timeout)
    }

    /// Reads memory of a peer into local memory. Arguments as for :meth:`write`.
    #[pyo3(signature = (peer, addresses, remote_addresses, sizes, *, timeout = None))]
    fn read(
        &self,
        py: Python<'_>,
        peer: &str,
        addresses: Ints,
        remote_addresses: Ints,
        sizes: Ints,
        timeout: Option<Seconds>,
    ) -> PyResult<u64> {
        let table = [&addresses, &remote_addresses, &sizes];
        self.transfer(py, peer, Direction::Read, table, timeout)
    }

    /// Starts what :meth:`write` does, and returns a :class:`Transfer` at once. The local memory must be
    /// registered.
    #[pyo3(signature = (peer, addresses, remote_addresses, sizes, *, timeout = None))]
    fn submit_write(
        &self,
        py: Python<'_>,
        peer: &str,
        addresses: Ints,
        remote_addresses: Ints,
        sizes: Ints,
        timeout: Option<Seconds>,
    ) -> PyResult<PyTransfer> {
        let table = [&addresses, &remote_addresses, &sizes];
        self.submit(py, peer, Direction::Write, table, timeout)
    }

    /// Starts what :meth:`read` does, and returns a :class:`Transfer` at once. The local memory must be
    /// registered.
    #[pyo3(signature = (peer, addresses, remote_addresses, sizes, *, timeout = None))]
    fn submit_read(
        &self,
        py: Python<'_>,
        peer: &str,
        addresses: Ints,
        remote_addresses: Ints,
        sizes: Ints,
        timeout: Option<Seconds>,
    ) -> PyResult<PyTransfer> {
        let table = [&addresses, &remote_addresses, &sizes];
        self.submit(py, peer, Direction::Read, table, timeout)
    }

    /// Asks a peer whether it is there: returns if it is, raises if not.
    fn probe(&self, py: Python<'_>, peer: &str) -> PyResult<()> {
        let engine = self.peers()?;
        let answer = py.detach(|| engine.handle().block_on(engine.probe(peer)));
        answer.map(drop).map_err(|error| errors::raise_peer(&error))
    }

    /// Sends a message to the program that owns a peer, and returns when the peer has it.
    ///
    /// Args:
    ///     name: What the message is about.
    ///     message: Any bytes. With the name they are 64 KiB at most.
    fn notify(&self, py: Python<'_>, peer: &str, name: String, message: &[u8]) -> PyResult<()> {
        let engine = self.peers()?;
        let message = message.to_vec();
        let sent = py.detach(|| engine.handle().block_on(engine.notify(peer, name, message)));
        sent.map_err(|error| errors::raise_peer(&error))
    }

    /// The messages that peers sent since the last call, as ``(name, message)``.
    fn notifications<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (name, message) in self.peers()?.take_notifications() {
            list.append((name, PyBytes::new(py, &message)))?;
        }
        Ok(list)
    }

    /// Bytes moved, by transport and direction.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::transports(py, self.peers()?.engine())
    }

    /// Ends the engine; transfers in flight end with errors. Repeating it is harmless.
    #[pyo3(signature = (timeout = Seconds(CLOSE_WITHIN)))]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let engine = Arc::clone(self.engine.get()?);
        if !self.closed.swap(true, Ordering::AcqRel) {
            let until = Instant::now() + timeout.0;
            py.detach(|| engine.handle().block_on(engine.close(until)));
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

    fn __repr__(&self) -> String {
        match self.engine.get() {
            Ok(engine) => format!("TransferEngine(address=\"{}\")", engine.address()),
            Err(_) => "TransferEngine(of a parent process)".to_owned(),
        }
    }
}

/// Bytes under way. Made by :meth:`TransferEngine.submit_write` and :meth:`TransferEngine.submit_read`;
/// dropping it stops nothing.
#[pyclass(frozen, name = "Transfer", module = "layercake")]
pub(crate) struct PyTransfer {
    submitted: Owned<Submitted>,
}

#[pymethods]
impl PyTransfer {
    /// Whether every byte has arrived or failed.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.submitted.get()?.transfer.is_done())
    }

    /// Waits until every byte has arrived or failed. A signal handler that raises ends the wait, not the transfer.
    ///
    /// Args:
    ///     timeout: Seconds; ``None``: as long as the transfer may take.
    ///
    /// Returns:
    ///     The number of bytes moved; None if the time is over first.
    ///
    /// Raises:
    ///     TransferFailed: A piece failed.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<u64>> {
        let submitted = self.submitted.get()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout.0));
        let outcome = loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNALS_EVERY, |left| left.min(SIGNALS_EVERY));
            match py.detach(|| submitted.transfer.wait_timeout(slice)) {
                None if left.is_none_or(|left| left > slice) => py.check_signals()?,
                outcome => break outcome,
            }
        };
        let moved = outcome
            .map(|outcome| submitted.result(&outcome))
            .transpose();
        moved.map_err(|error| errors::raise_peer(&error))
    }

    /// Has the pieces that were not sent yet fail. The transfer ends as always.
    fn cancel(&self) -> PyResult<()> {
        self.submitted.get()?.transfer.cancel();
        Ok(())
    }
}
