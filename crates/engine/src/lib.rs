//! A small but real inference engine, as the example and the proof of the connector.
//!
//! A decoder-only transformer computes on the CPU over a paged KV cache; a scheduler batches requests
//! continuously, prefills in chunks, shares prefixes and preempts; ranks share the heads of each layer.
//! Every float of the result is made by the same operations in the same order, whatever the chunks, the
//! batch, the number of ranks, and wherever the cache's bytes came from. So "with the cache loaded from
//! the store" can be compared with "computed here" bit for bit.
//!
//! The engine uses nothing of the connector but its public API: `docs/engine.md` walks through how.
//!
//! | module | what it is |
//! |---|---|
//! | [`model`] | the transformer: what a step computes on one rank |
//! | `cache` | paged memory that transfers reach |
//! | `scheduler` | requests, blocks, steps |
//! | `parallel` | ranks as threads |
//! | [`run`] | the engine: scheduler, ranks and connector together |
#![forbid(unsafe_code)]

mod cache;
mod error;
pub mod model;
mod parallel;
pub mod run;
mod scheduler;

pub use error::EngineError;
