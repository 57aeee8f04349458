//! What can go wrong with a master as a whole. What a request is refused with is a
//! [`Refusal`](layercake_protocol::error::Refusal), never one of these.

use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;

use crate::state::ConfigError;

/// Why a master can't start or had to stop.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A listener that other hosts can reach, and nothing that keeps strangers out.
    #[error(
        "listening on {listen} lets other hosts in: that needs a shared token, or `insecure` to do without"
    )]
    OpenListener {
        /// The address that was asked for.
        listen: SocketAddr,
    },
    /// A setting is outside of what is accepted.
    #[error("setting `{setting}` is {value}: {accepted}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: &'static str,
    },
    /// A rule of the object table is outside of what is accepted.
    #[error(transparent)]
    State(#[from] ConfigError),
    /// The address can't be listened on.
    #[error("can't listen on {listen}")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The server ended although nobody stopped it.
    #[error("serving the control plane failed")]
    Serve {
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
    /// Stopping took longer than it may; what was still open was cut off.
    #[error("connections were still open {grace:?} after the shutdown began and were cut off")]
    CutOff {
        /// How long was waited.
        grace: Duration,
    },
}
