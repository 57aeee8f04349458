//! What the benches share: a peer in a process of its own, the limits of the machine, a
//! state machine with memory, keys, tables.
//!
//! Absolute figures differ from machine to machine and from minute to minute. So every bench that
//! states how fast something is measures the machine's own limit (a plain copy, a raw socket) in
//! turns with it, and the ratio is what counts.

pub mod driver;
pub mod keys;
pub mod limits;
pub mod peer;
pub mod pool;
pub mod report;
pub mod table;
