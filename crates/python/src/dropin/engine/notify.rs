//! `mooncake.engine.TransferNotify`.

use parking_lot::Mutex;
use pyo3::prelude::*;

/// A message to the program that owns a peer, sent once the bytes of a transfer are there.
#[pyclass(frozen, name = "TransferNotify", module = "mooncake.engine", subclass)]
pub(super) struct PyTransferNotify(Mutex<Notify>);

/// A name and a text.
#[derive(Clone, Debug, Default)]
pub(super) struct Notify {
    pub(super) name: String,
    pub(super) msg: String,
}

impl From<Notify> for PyTransferNotify {
    fn from(notify: Notify) -> Self {
        Self(Mutex::new(notify))
    }
}

impl PyTransferNotify {
    pub(super) fn get(&self) -> Notify {
        self.0.lock().clone()
    }
}

#[pymethods]
impl PyTransferNotify {
    #[new]
    #[pyo3(signature = (name = String::new(), msg = String::new()))]
    fn new(name: String, msg: String) -> Self {
        Notify { name, msg }.into()
    }

    /// What the message is about.
    #[getter]
    fn name(&self) -> String {
        self.0.lock().name.clone()
    }

    #[setter]
    fn set_name(&self, name: String) {
        self.0.lock().name = name;
    }

    /// The message.
    #[getter]
    fn msg(&self) -> String {
        self.0.lock().msg.clone()
    }

    #[setter]
    fn set_msg(&self, msg: String) {
        self.0.lock().msg = msg;
    }

    fn __repr__(&self) -> String {
        let Notify { name, msg } = self.get();
        format!("TransferNotify(name={name:?}, msg={msg:?})")
    }
}
