//! From Rust errors to Python exceptions.
//!
//! The classes are defined in `layercake/errors.py`, where people read them; here is which error
//! becomes which class. The text is the error's own.

use layercake_protocol::error::Refusal;
use layercake_store::StoreError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyType};

use crate::peers::PeerError;

/// The exceptions of `layercake.errors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AlreadyExists,
    Authentication,
    ChecksumMismatch,
    Closed,
    Error,
    Fork,
    Incomplete,
    InvalidArgument,
    LeaseExpired,
    Leased,
    MasterTimeout,
    MasterUnreachable,
    NoSpace,
    NotFound,
    NotReady,
    SessionEnded,
    Superseded,
    TransferFailed,
    Unconfirmed,
    VersionMismatch,
}

impl Kind {
    const fn class(self) -> &'static str {
        match self {
            Self::AlreadyExists => "AlreadyExists",
            Self::Authentication => "AuthenticationError",
            Self::ChecksumMismatch => "ChecksumMismatch",
            Self::Closed => "Closed",
            Self::Error => "LayercakeError",
            Self::Fork => "ForkError",
            Self::Incomplete => "Incomplete",
            Self::InvalidArgument => "InvalidArgument",
            Self::LeaseExpired => "LeaseExpired",
            Self::Leased => "Leased",
            Self::MasterTimeout => "MasterTimeout",
            Self::MasterUnreachable => "MasterUnreachable",
            Self::NoSpace => "NoSpace",
            Self::NotFound => "NotFound",
            Self::NotReady => "NotReady",
            Self::SessionEnded => "SessionEnded",
            Self::Superseded => "Superseded",
            Self::TransferFailed => "TransferFailed",
            Self::Unconfirmed => "Unconfirmed",
            Self::VersionMismatch => "VersionMismatch",
        }
    }

    /// The exception of this class with this text.
    pub(crate) fn err(self, text: impl Into<String>) -> PyErr {
        self.failure(text).into()
    }

    /// The same as a plain value.
    pub(crate) fn failure(self, text: impl Into<String>) -> Failure {
        Failure {
            kind: self,
            text: text.into(),
        }
    }

    fn find(self, py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
        static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let module =
            MODULE.get_or_try_init(py, || py.import("layercake.errors").map(Bound::unbind))?;
        let class = module.bind(py).getattr(self.class())?;
        Ok(class.cast_into()?)
    }
}

/// What becomes an exception when the interpreter lock is held again.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    text: String,
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| match failure.kind.find(py) {
            Ok(class) => Self::from_type(class, failure.text),
            Err(error) => error,
        })
    }
}

/// What a store's error becomes.
pub(crate) fn of_store(error: &StoreError) -> Failure {
    kind_of(error).failure(error.to_string())
}

/// The exception that a store's error becomes.
pub(crate) fn raise(error: &StoreError) -> PyErr {
    of_store(error).into()
}

/// The exception that a failure with a peer becomes.
pub(crate) fn raise_peer(error: &PeerError) -> PyErr {
    let kind = match error {
        PeerError::Address { .. } | PeerError::UnknownMemory { .. } | PeerError::TooLong { .. } => {
            Kind::InvalidArgument
        }
        PeerError::TokenRequired { .. } | PeerError::Untrusted { .. } => Kind::Authentication,
        PeerError::Version { .. } => Kind::VersionMismatch,
        PeerError::Refused { refusal, .. } => kind_of_refusal(refusal),
        PeerError::Closed => Kind::Closed,
        PeerError::Unreachable { .. } | PeerError::NotAPeer { .. } | PeerError::Pieces { .. } => {
            Kind::TransferFailed
        }
    };
    kind.err(error.to_string())
}

fn kind_of(error: &StoreError) -> Kind {
    match error {
        StoreError::Refused(refusal) => kind_of_refusal(refusal),
        StoreError::InvalidConfig { .. }
        | StoreError::OutOfBounds { .. }
        | StoreError::EmptyRange { .. }
        | StoreError::SegmentTooLarge { .. }
        | StoreError::Engine(_) => Kind::InvalidArgument,
        StoreError::MasterUnreachable { .. } | StoreError::NotAMaster { .. } => {
            Kind::MasterUnreachable
        }
        StoreError::MasterTimeout { .. } => Kind::MasterTimeout,
        StoreError::OpenConnection { .. }
        | StoreError::TokenRequired { .. }
        | StoreError::WrongToken { .. }
        | StoreError::MasterUnproven { .. } => Kind::Authentication,
        StoreError::Version { .. } => Kind::VersionMismatch,
        StoreError::Closed => Kind::Closed,
        StoreError::ChecksumMismatch { .. } => Kind::ChecksumMismatch,
        StoreError::Transfer { .. }
        | StoreError::HeaderMismatch { .. }
        | StoreError::Timeout { .. } => Kind::TransferFailed,
        StoreError::FingerprintMismatch { .. } => Kind::NotFound,
        StoreError::Incomplete { .. } => Kind::Incomplete,
        StoreError::Unconfirmed => Kind::Unconfirmed,
        StoreError::SessionEnded | StoreError::UnknownSession => Kind::SessionEnded,
        _ => Kind::Error,
    }
}

fn kind_of_refusal(refusal: &Refusal) -> Kind {
    match refusal {
        Refusal::InvalidArgument { .. } | Refusal::TooLarge { .. } => Kind::InvalidArgument,
        Refusal::NotFound | Refusal::Unreachable => Kind::NotFound,
        Refusal::NotReady => Kind::NotReady,
        Refusal::AlreadyExists | Refusal::InProgress => Kind::AlreadyExists,
        Refusal::Leased => Kind::Leased,
        Refusal::LeaseExpired => Kind::LeaseExpired,
        Refusal::NoSpace { .. } | Refusal::QuotaExceeded | Refusal::UnknownTenant => Kind::NoSpace,
        Refusal::Superseded => Kind::Superseded,
        Refusal::Unauthenticated => Kind::Authentication,
        Refusal::Version { .. } => Kind::VersionMismatch,
        Refusal::ShuttingDown | Refusal::WrongTerm => Kind::MasterUnreachable,
        _ => Kind::Error,
    }
}
