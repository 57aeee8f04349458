//! What the methods of the Python classes share: who is there to answer, and without the interpreter lock.

use std::sync::Arc;

use layercake_transport::Direction;
use parking_lot::Mutex;
use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::live::{Live, code};
use super::notify::Notify;
use crate::args::{Int, Ints};
use crate::core::{Keeper, SharedEngine};
use crate::runtime::Owned;

/// Moves bytes between memory of this process and of others, by address.
///
/// A peer is named ``host:port``, where the port is what its :meth:`get_rpc_port` gives. Every call answers with
/// a code: 0 is success, negative is failure; ``LAYERCAKE_LOG=debug`` shows the reasons. Between processes of one
/// host bytes are copied once, from memory to memory.
#[pyclass(frozen, subclass, name = "TransferEngine", module = "mooncake.engine")]
pub(crate) struct PyMooncakeEngine {
    /// Locked with the interpreter lock held, and not kept while that is released.
    pub(super) live: Mutex<Option<Owned<Arc<Live>>>>,
}

/// The engine inside a :class:`TransferEngine`, for a store to share: ``setup(..., engine=...)``. It goes on as
/// long as either of the two objects is there.
#[pyclass(frozen, name = "InnerTransferEngine", module = "mooncake.engine")]
pub(crate) struct PyInnerTransferEngine {
    live: Owned<Arc<Live>>,
}

impl PyInnerTransferEngine {
    pub(super) fn new(live: Arc<Live>) -> Self {
        Self {
            live: Owned::new(live),
        }
    }

    /// The engine for a member, and what stands for a Python object that has it: as long as that is there, memory that
    /// was registered stays so.
    pub(crate) fn shared(&self) -> PyResult<(SharedEngine, Keeper)> {
        let live = self.live.get()?;
        let shared = SharedEngine {
            engine: Arc::clone(live.engine()),
            name: Some(live.name()),
            keeper: Some(live.keeper()),
        };
        Ok((shared, Arc::clone(live) as _))
    }
}

/// `TransferOpcode.Read` or `TransferOpcode.Write`.
pub(super) struct Opcode(pub(super) Direction);

impl<'py> FromPyObject<'_, 'py> for Opcode {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let class = obj.get_type().name()?;
        if class.to_string_lossy() == "TransferOpcode" {
            let name = obj.getattr("name")?;
            match &*name.cast::<PyString>()?.to_string_lossy() {
                "Read" => return Ok(Self(Direction::Read)),
                "Write" => return Ok(Self(Direction::Write)),
                _ => {}
            }
        }
        Err(PyTypeError::new_err(format!(
            "TransferOpcode.Read or TransferOpcode.Write is needed, not {class}"
        )))
    }
}

impl PyMooncakeEngine {
    pub(super) fn live(&self) -> PyResult<Option<Arc<Live>>> {
        let live = self.live.lock();
        let live = live.as_ref().map(Owned::get).transpose()?;
        Ok(live.cloned())
    }

    /// Calls `call` without the interpreter lock; `otherwise` if there is no engine.
    pub(super) fn with<T: Send>(
        &self,
        py: Python<'_>,
        otherwise: T,
        call: impl FnOnce(Arc<Live>) -> T + Send,
    ) -> PyResult<T> {
        match self.live()? {
            Some(live) => Ok(py.detach(|| call(live))),
            None => Ok(otherwise),
        }
    }

    pub(super) fn one(
        &self,
        py: Python<'_>,
        peer: &str,
        direction: Direction,
        [local, remote, len]: [Int; 3],
        notify: Option<Notify>,
    ) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| {
            live.transfer(peer, direction, (&[local.0], &[remote.0], &[len.0]), notify)
        })
    }

    pub(super) fn many(
        &self,
        py: Python<'_>,
        peer: &str,
        direction: Direction,
        [local, remote, lens]: [&Ints; 3],
        notify: Option<Notify>,
    ) -> PyResult<i64> {
        self.with(py, code::FAILED, |live| {
            live.transfer(peer, direction, (&local.0, &remote.0, &lens.0), notify)
        })
    }

    pub(super) fn start(
        &self,
        py: Python<'_>,
        peer: &str,
        direction: Direction,
        [local, remote, lens]: [&[u64]; 3],
    ) -> PyResult<u64> {
        self.with(py, 0, |live| {
            live.submit(peer, direction, (local, remote, lens))
        })
    }
}
