//! What an inference engine links to save and load its paged KV cache layer by layer.
//!
//! The scheduler side plans, the worker side moves bytes; both are engine-independent. Decisions are
//! pure state machines; the shells around them use the store's client on a runtime that the engine
//! gives. Contract: `docs/contracts/connector.md`.
//!
//! | module | what it is |
//! |---|---|
//! | [`contract`] | types and traits between engine and connector |
//! | [`options`], [`checks`] | settings and start-up checks, refused by name |
//! | [`request`], [`lookup`], [`scheduler`] | the scheduler side |
//! | [`plan`], [`tracker`], [`convergence`], [`window`], [`prefetch`], [`batcher`], [`fanout`] | the worker's decisions |
//! | [`worker`] | the worker side |
//! | [`keys`], [`stats`] | names of objects; counters and reasons |
#![forbid(unsafe_code)]

mod audit;
pub mod batcher;
pub mod checks;
pub mod contract;
pub mod convergence;
mod error;
pub mod fanout;
pub mod keys;
pub mod lookup;
pub mod options;
pub mod plan;
pub mod prefetch;
mod rate;
pub mod request;
pub mod scheduler;
mod sharing;
pub mod stats;
pub mod tracker;
pub mod window;
pub mod worker;

pub use error::ConnectorError;

/// Sequences in which each of the state machines is compared with its model.
#[cfg(test)]
pub(crate) const SEQUENCES: u32 = 10_000;
