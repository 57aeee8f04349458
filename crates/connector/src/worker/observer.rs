//! For whoever wants to see transfers beside the computation they hide behind.

use std::fmt;
use std::time::{Duration, Instant};

/// One call of the store for one layer of some blocks, which has ended.
#[derive(Clone, Copy, Debug)]
pub struct LayerTransfer {
    /// Index of the layer in the model.
    pub layer: u32,
    /// Written to the store, or read from it.
    pub save: bool,
    /// Objects in the call.
    pub rows: usize,
    /// When it began.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
    /// The part of that in which it moved nothing, since writers had not got so far. Only with early reads.
    pub waited: Duration,
}

/// Is told about each transfer of a layer, on a thread of the runtime: short, and never waits.
pub trait TransferObserver: Send + Sync + fmt::Debug {
    /// A call has ended.
    fn transferred(&self, transfer: &LayerTransfer);
}
