//! The two halves of a connector as the engine calls them.

use super::{
    Absorbed, BlockHash, BlockId, CacheRegistration, Event, LayerReady, RequestId, StepMetadata,
    WorkerResults,
};
use crate::error::ConnectorError;

/// A request that waits to be scheduled.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Its id.
    pub request: &'a RequestId,
    /// Tokens it has: prompt, and what was generated before a preemption.
    pub tokens: u64,
    /// Hashes of its whole blocks, from the first on.
    pub hashes: &'a [BlockHash],
    /// Tokens from the start that the engine has in its own cache.
    pub computed: u64,
}

/// How much of a request the store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matched {
    /// The look-up is still running: ask again, schedule others meanwhile.
    NotKnownYet,
    /// So many tokens beyond those that the engine has. Always fewer than the request's rest: at least
    /// one token is left to compute.
    Tokens(u64),
}

/// A request in a step.
#[derive(Clone, Copy, Debug)]
pub struct ScheduledRequest<'a> {
    /// Its id.
    pub request: &'a RequestId,
    /// Its whole block table.
    pub table: &'a [BlockId],
    /// Hashes of its whole blocks, from the first on, as far as tokens are known.
    pub hashes: &'a [BlockHash],
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens that are in the cache when the step begins; those to be loaded count.
    pub computed: u64,
    /// Tokens that the step computes.
    pub scheduled: u64,
}

/// A step as the engine's scheduler has planned it.
#[derive(Clone, Copy, Debug)]
pub struct StepPlan<'a> {
    /// The requests that compute.
    pub requests: &'a [ScheduledRequest<'a>],
    /// Requests that lost their blocks since the last step.
    pub preempted: &'a [RequestId],
}

/// Whether a finished request's blocks may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeBlocks {
    /// Yes.
    Now,
    /// When [`Absorbed::free`] names the request.
    Delayed,
}

/// The half in the engine's scheduler. Called from one thread; never blocks on the store.
pub trait SchedulerSide {
    /// How much of a waiting request can be loaded. Asked again until it is known; the answer belongs
    /// to the question as it was asked: another number of tokens or hashes is another question.
    fn matched_tokens(&mut self, request: &RequestView<'_>) -> Matched;

    /// The engine has allocated blocks for the request and will load `external` tokens: what
    /// `matched_tokens` gave, or less.
    fn after_allocation(
        &mut self,
        request: &RequestId,
        external: u64,
    ) -> Result<(), ConnectorError>;

    /// The instructions for a step.
    fn build_metadata(&mut self, plan: &StepPlan<'_>) -> Result<StepMetadata, ConnectorError>;

    /// The request has ended, for whatever reason.
    fn request_finished(&mut self, request: &RequestId) -> FreeBlocks;

    /// What the workers said after steps: an entry per rank and step, all of a step at once or apart. Each step counts
    /// once its last rank has spoken ([`Absorbed::confirmed`]).
    fn absorb(&mut self, results: &[WorkerResults]) -> Absorbed;
}

/// The half in each worker. Called from the thread that computes, in the order of the methods.
pub trait WorkerSide {
    /// Says where the caches lie; once, before the first step. Their layout is compared with what the
    /// deployment says. Registering caches again replaces them, once no step is under way.
    fn register_caches(&mut self, caches: &CacheRegistration) -> Result<(), ConnectorError>;

    /// Begins a step: loads start once `ready` says that earlier computation no longer uses the blocks
    /// they go to. Returns when no save reads a block of a preempted request any more.
    fn start_load(&mut self, step: &StepMetadata, ready: Event) -> Result<(), ConnectorError>;

    /// Waits until the layer's loads have ended, well or not. `layer` is the layer's place in the model.
    fn wait_for_layer(&mut self, layer: u32) -> Result<LayerReady, ConnectorError>;

    /// The layer's cache is written as far as this step goes, once `ready` is done.
    fn save_layer(&mut self, layer: u32, ready: Event) -> Result<(), ConnectorError>;

    /// Ends the step's saves; layers that `save_layer` was not called for are handed over now.
    fn wait_for_save(&mut self, ready: Event) -> Result<(), ConnectorError>;

    /// What the scheduler side must know. Each finished request and each invalid block is told once.
    fn take_results(&mut self) -> WorkerResults;

    /// Ends the step on this side.
    fn clear_metadata(&mut self);
}
