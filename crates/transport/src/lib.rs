//! Registered memory and batch transfers between processes.
//!
//! An [`Engine`] owns memory that peers may touch ([`Memory`]) and moves bytes between its own memory
//! and that of other engines: a [`Batch`] of [`Piece`]s goes in, a [`Transfer`] comes out that can be
//! polled, awaited or waited for. A peer is named by its [`Endpoint`]; how the bytes travel (same
//! process, shared memory, TCP) is the engine's choice among what both ends have, and visible.
//!
//! What holds for every transport:
//! - A piece is done when its bytes are applied at the destination, never when they were sent.
//! - A transfer resolves once, when every piece is terminal; after that no byte of it moves.
//! - A piece fails alone: its neighbours go on.
//! - A peer can touch registered memory only, inside its bounds, with its capability and access, and
//!   with a generation that is not stale; the owner's memory is never at a peer's mercy.
//! - Every wait has a deadline; a dead peer costs its own transfers only.
//!
//! Threads, not a runtime: the engine starts its own and stops them on [`Engine::shutdown`] or when its
//! last handle is dropped. The crate reads no environment variables and installs no global state.

mod backend;
mod batch;
mod config;
mod copy_pool;
mod endpoint;
mod engine;
mod error;
mod job;
mod lead;
mod local;
mod mapped;
mod memory;
#[cfg(feature = "mock")]
pub mod mock;
mod racy;
mod shm;
mod stats;
mod tcp;
#[cfg(feature = "testing")]
pub mod testing;
mod transfer;
mod transports;

pub use batch::{Batch, Direction, Piece, RemoteSlice};
pub use config::{Deadlines, EngineConfig, TransportKind, TransportSet};
pub use endpoint::{Endpoint, HostId};
pub use engine::{Engine, PeerPresence, QuietMark};
pub use error::{Error, PieceError, Refusal};
pub use lead::{Awaited, Lead};
pub use memory::{
    Access, AllocateOptions, HostBuffer, LocalSlice, Memory, RegionDescriptor, TAG_GRANULE,
};
pub use stats::{OperationStats, Stats};
pub use transfer::{Ended, Kept, Outcome, PieceDone, Transfer};
