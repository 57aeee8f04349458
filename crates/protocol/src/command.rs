//! What the master tells its members to do (requirement S7): make sure that no late write lands.
//!
//! A command is repeated until its member answers it, so carrying it out twice must be harmless.

use crate::ids::{ClientId, EngineId, Generation, SegmentId};
use crate::key::Tenant;
use crate::replica::ObjectRef;

/// Names one command among all of a master's term.
pub type FenceId = u64;

/// A place that a writer may no longer write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FencedPlace {
    /// Offset in the segment, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The tags of its granules are raised to this one at least.
    pub generation: Generation,
}

/// To a node: raise the tags of these places, so that their former writer is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Names the command in its answer.
    pub id: FenceId,
    /// The node's segment.
    pub segment: SegmentId,
    /// Places in it.
    pub places: Vec<FencedPlace>,
    /// The writer whose late writes are meant.
    pub writer: ClientId,
    /// The writer's transfer engine, where the master knows it: while a copy of it is under way, a late
    /// write is possible.
    pub engine: Option<EngineId>,
}

/// To a client: these put sessions were taken away, give them up and let their transfers drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DropSessions {
    /// Names the command in its answer.
    pub id: FenceId,
    /// Namespace of the objects.
    pub tenant: Tenant,
    /// The sessions.
    pub objects: Vec<ObjectRef>,
}
