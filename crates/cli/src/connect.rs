//! From settings to the libraries' own configurations.

use std::net::SocketAddr;
use std::num::NonZero;
use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_store::link::LinkConfig;
use layercake_transport::{Deadlines, EngineConfig};

use crate::config::programs::TransportSettings;

/// Who may connect: what links and engines share.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    pub(crate) token: Option<SharedToken>,
    pub(crate) insecure: bool,
}

/// A transfer engine by these settings.
pub(crate) fn engine_config(
    settings: &TransportSettings,
    trust: &Trust,
    listen: Option<SocketAddr>,
    advertise: Option<SocketAddr>,
) -> EngineConfig {
    let default = EngineConfig::default();
    EngineConfig {
        listen: listen.unwrap_or(default.listen),
        advertise,
        transports: settings.transports,
        lanes: settings.lanes,
        io_threads: settings.io_threads.unwrap_or(default.io_threads),
        copy_threads: settings.copy_threads.unwrap_or(default.copy_threads),
        window_bytes: settings.window.0,
        token: trust.token.clone(),
        insecure: trust.insecure,
        deadlines: Deadlines {
            progress: settings.progress_deadline,
            transfer: settings.transfer_deadline,
            connect: settings.connect_deadline,
        },
        ..default
    }
}

/// A link to a master by these settings.
pub(crate) fn link_config(master: &str, name: &str, trust: &Trust) -> LinkConfig {
    LinkConfig {
        token: trust.token.clone(),
        insecure: trust.insecure,
        ..LinkConfig::new(master, name)
    }
}

/// Threads of a runtime that serves a few connections: two, or one on a machine with one core.
pub(crate) fn few_threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(2)
}

/// Longest time for leaving a master in order.
pub(crate) const LEAVE_WITHIN: Duration = Duration::from_secs(2);
