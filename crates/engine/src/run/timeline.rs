//! What a rank did when, in one step.

use std::time::Duration;

/// Something that a rank's thread spends its time with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    /// Computing, the simulated time included.
    Compute,
    /// Waiting for a layer's load.
    WaitForLoad,
}

/// A stretch of time, counted from the engine's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the step.
    pub step: u64,
    /// Index of the layer.
    pub layer: u32,
    /// What it was spent with.
    pub activity: Activity,
    /// Its begin.
    pub begin: Duration,
    /// Its end.
    pub end: Duration,
}
