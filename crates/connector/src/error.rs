//! What can go wrong in a connector, and what the engine can do about it.
//!
//! Errors of single blocks are not here: a failed load is an invalid block, a failed save a counter.
//! What is left is what makes a whole call fail: settings and layouts that are refused at start-up, a
//! caller that does not keep to the contract, and waits whose deadline passed.

use std::time::Duration;

use layercake_protocol::key::KeyError;
use layercake_protocol::layout::{LayoutError, TemplateError};
use thiserror::Error;

use crate::contract::RequestId;

/// A call of the connector failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ConnectorError {
    /// There is no option of this name.
    #[error("there is no option {name:?}; accepted are {accepted}")]
    UnknownOption {
        /// The name given.
        name: String,
        /// All names.
        accepted: String,
    },
    /// An option has a value that can't be used.
    #[error("option {name}: {value} is not accepted, {accepted} is")]
    BadOption {
        /// Its name.
        name: &'static str,
        /// The value given, as JSON.
        value: String,
        /// What is accepted.
        accepted: String,
    },
    /// Two options can't both hold.
    #[error("options {first} and {second} contradict each other: {detail}")]
    Contradiction {
        /// One of them, with its value.
        first: &'static str,
        /// The other, with its value.
        second: &'static str,
        /// Why.
        detail: &'static str,
    },
    /// The deployment is of a kind that this connector does not cover.
    #[error("{setting} = {value} is not supported: {accepted}")]
    Unsupported {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: &'static str,
    },
    /// Two sides of one deployment, or of two that want to share blocks, differ.
    #[error("{what} differs: {ours} here, {theirs} there")]
    Mismatch {
        /// What is compared.
        what: &'static str,
        /// This side's value.
        ours: String,
        /// The other side's value.
        theirs: String,
    },
    /// Engines that are to share blocks can't, or whether they can is not to be found out.
    #[error("sharing group {group:?}: {detail}")]
    Sharing {
        /// The option `sharing_group`.
        group: String,
        /// What differs, with both values, or what went wrong.
        detail: String,
    },
    /// A step's metadata is of a version that this side does not read.
    #[error("metadata of version {found}: version {accepted} is accepted")]
    MetadataVersion {
        /// The version found.
        found: u64,
        /// The version this side reads.
        accepted: u32,
    },
    /// A step's metadata makes no sense.
    #[error("the step's metadata makes no sense: {detail}")]
    Metadata {
        /// Where.
        detail: String,
    },
    /// A call names a request that the connector was never told of.
    #[error("request {request:?} is not known")]
    UnknownRequest {
        /// Its id.
        request: RequestId,
    },
    /// A call came at a time when the contract does not allow it.
    #[error("{call} is not allowed now: {detail}")]
    OutOfOrder {
        /// The call.
        call: &'static str,
        /// What has to come first.
        detail: &'static str,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {after:?}")]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The registered caches make no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A layer's ranges don't fit the registered caches.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The deployment's parts make no keys.
    #[error(transparent)]
    Key(#[from] KeyError),
}
