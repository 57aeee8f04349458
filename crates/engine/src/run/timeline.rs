//! What a rank did when, and what was moved beside it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_connector::worker::{LayerTransfer, TransferObserver};
use parking_lot::Mutex;

/// Something that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    /// Computing, the simulated time included.
    Compute,
    /// Waiting for a layer's load.
    Wait,
    /// A call that reads a layer of some blocks.
    Load,
    /// A call that writes a layer of some blocks.
    Save,
}

/// A stretch of time, counted from the engine's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the layer.
    pub layer: u32,
    /// What it was spent with.
    pub activity: Activity,
    /// Its begin.
    pub begin: Duration,
    /// Its end.
    pub end: Duration,
}

/// The spans of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    start: Instant,
    spans: Arc<Mutex<Vec<Span>>>,
}

/// What the connector tells about transfers goes to the timeline and to the engine's owner.
#[derive(Debug)]
pub(crate) struct Observers {
    pub(crate) timeline: Option<Timeline>,
    pub(crate) owner: Option<Arc<dyn TransferObserver>>,
}

impl Timeline {
    pub(crate) fn new(start: Instant) -> Self {
        Self {
            start,
            spans: Arc::default(),
        }
    }

    pub(crate) fn note(&self, layer: u32, activity: Activity, begin: Instant, end: Instant) {
        let since = |at: Instant| at.saturating_duration_since(self.start);
        self.spans.lock().push(Span {
            layer,
            activity,
            begin: since(begin),
            end: since(end),
        });
    }

    pub(crate) fn take(&self) -> Vec<Span> {
        std::mem::take(&mut self.spans.lock())
    }
}

impl TransferObserver for Observers {
    fn transferred(&self, transfer: &LayerTransfer) {
        if let Some(timeline) = &self.timeline {
            timeline.transferred(transfer);
        }
        if let Some(owner) = &self.owner {
            owner.transferred(transfer);
        }
    }
}

impl Timeline {
    fn transferred(&self, transfer: &LayerTransfer) {
        let activity = if transfer.save {
            Activity::Save
        } else {
            Activity::Load
        };
        let end = transfer.begun + transfer.took;
        self.note(transfer.layer, activity, transfer.begun, end);
    }
}
