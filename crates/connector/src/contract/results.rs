//! What comes back from the workers, and what the scheduler side makes of it.

use serde::{Deserialize, Serialize};

use super::{BlockId, RequestId};

/// What one rank has to tell after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerResults {
    /// The rank.
    pub rank: u32,
    /// The step it is about.
    pub step: u64,
    /// Requests of [`StepMetadata::finished`](super::StepMetadata::finished) whose last save is over. Each
    /// is told once.
    pub finished: Vec<RequestId>,
    /// Local blocks whose load failed in this step: their bytes are undefined.
    pub invalid_blocks: Vec<BlockId>,
    /// Bytes loaded in this step and the time that took, for the decision whether loads pay.
    pub loaded_bytes: u64,
    /// Microseconds in which at least one load was under way.
    pub load_micros: u64,
    /// Microseconds from the step's start to the end of its last layer, without waiting for loads.
    pub compute_micros: u64,
}

/// What an engine has to do about workers' results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Absorbed {
    /// Requests whose blocks may be freed now.
    pub free: Vec<RequestId>,
    /// Every rank is through with every step up to this one, and whoever computed from void blocks in them has been
    /// named. What they computed may be handed out: sampled tokens, the end of a request, loaded blocks to others; but
    /// nothing of a request that was preempted since.
    pub confirmed: u64,
    /// Requests to be cut to so many tokens and computed again from there. What was sampled for them in the steps that
    /// have just been confirmed, or in later ones, is dropped.
    pub recompute: Vec<(RequestId, u64)>,
    /// Requests that failed by policy, each with the number of its tokens whose cache is good. The engine ends
    /// them with [`request_finished`](super::SchedulerSide::request_finished) like any other.
    pub failed: Vec<(RequestId, u64)>,
}

impl Absorbed {
    /// Whether nothing is asked of the engine.
    pub fn is_empty(&self) -> bool {
        self.free.is_empty() && self.recompute.is_empty() && self.failed.is_empty()
    }
}

/// A layer is there, as far as it can be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerReady {
    /// All local blocks of this step whose load has failed so far, ascending. Whatever is computed from
    /// them is void.
    pub invalid_blocks: Vec<BlockId>,
}
