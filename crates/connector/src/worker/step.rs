//! What the thread that computes knows of the step it is in.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::Board;
use super::sender::SaveStep;
use crate::contract::{RequestId, StepMetadata};

/// The step that computes.
pub(super) struct Step {
    pub(super) number: u64,
    pub(super) requests: Vec<RequestId>,
    pub(super) board: Option<Arc<Board>>,
    pub(super) save: Option<Save>,
    /// What became of its loads was told.
    pub(super) told: bool,
    /// A wait for its loads was in vain, and the engine knows.
    pub(super) late: bool,
    /// The layer that computes, and when it began to.
    pub(super) computing: Option<(usize, Instant)>,
    pub(super) computed: Duration,
    pub(super) waited: Duration,
}

impl Step {
    /// One without loads and saves.
    pub(super) fn new(step: &StepMetadata) -> Self {
        Self {
            number: step.step,
            requests: step.requests.iter().map(|r| r.request.clone()).collect(),
            board: None,
            save: None,
            told: false,
            late: false,
            computing: None,
            computed: Duration::ZERO,
            waited: Duration::ZERO,
        }
    }
}

pub(super) struct Save {
    /// What the sender was given.
    pub(super) step: Arc<SaveStep>,
    pub(super) handed: Vec<bool>,
    pub(super) ended: bool,
    /// How long it may still hold the computation up.
    pub(super) stall: Duration,
}
