//! The metadata service of Layercake: objects, placement, leases, eviction, membership.
//!
//! - [`state`]: the rules, as a synchronous state machine that takes the time as an argument.
//! - `service`: the gRPC shell around it.
//! - [`mooncake`]: the command line of `mooncake_master`, as settings of a master.
//! - [`Master`]: starting, serving, and stopping within a bounded time.
//!
//! Clients and nodes know this crate only by its gRPC interface, in `proto/layercake/v1`. What must change
//! together lies in the state machine behind short locks; the shell holds connections, waiting calls
//! and commands under way, and nothing in it survives a restart or has to.

mod config;
mod error;
mod metrics;
mod monitor;
pub mod mooncake;
mod server;
mod service;
pub mod state;

pub use config::{Limits, MasterConfig, first_generation};
pub use error::Error;
pub use metrics::{CallStat, Calls, SIZE_CLASSES};
pub use monitor::{Health, Monitor};
pub use server::{BoundMaster, Master, threads};
