//! The lifecycle contract between an engine and a connector (C1, C2): types and traits, no behaviour.
//!
//! An engine has a scheduler and one worker per rank. The scheduler side ([`SchedulerSide`]) plans and
//! never touches bytes; the worker side ([`WorkerSide`]) moves them. What the scheduler side decides
//! for a step travels as [`StepMetadata`], the same to every rank; what workers saw comes back as
//! [`WorkerResults`]. Threading, order and ownership are in `docs/contracts/connector.md`.

mod caches;
mod event;
mod ids;
mod metadata;
mod results;
mod sides;

pub use caches::{CacheLayout, CacheRegistration, EntryCache, LayerCache};
pub use event::{ComputeEvent, Event, HostEvent};
pub use ids::{BlockHash, BlockId, HashTextError, RequestId};
pub use metadata::{METADATA_VERSION, RequestStep, Span, StepMetadata, TableUpdate};
pub use results::{Absorbed, LayerReady, WorkerResults};
pub use sides::{
    FreeBlocks, Matched, RequestView, ScheduledRequest, SchedulerSide, StepPlan, WorkerSide,
};
