//! The mock transport of one engine, and the parts in which it applies pieces.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use layercake_protocol::ids::EngineId;

use super::Network;
use crate::backend::{Backend, Context};
use crate::batch::Direction;
use crate::config::TransportKind;
use crate::error::{PieceError, Refusal};
use crate::job::{Job, PieceSet};
use crate::racy;
use crate::transfer::PieceDone;

pub(crate) struct MockBackend {
    context: Arc<Context>,
    network: Arc<Network>,
    closed: AtomicBool,
}

impl MockBackend {
    pub(crate) fn start(context: &Arc<Context>, network: Arc<Network>) -> Arc<Self> {
        network.join(context);
        Arc::new(Self {
            context: Arc::clone(context),
            network,
            closed: AtomicBool::new(false),
        })
    }
}

impl Backend for MockBackend {
    fn kind(&self) -> TransportKind {
        TransportKind::Mock
    }

    fn submit(&self, job: Arc<Job>, pieces: PieceSet) {
        if self.closed.load(Ordering::SeqCst) {
            return job.fail(&pieces, PieceError::ShutDown);
        }
        job.mark_started(Instant::now());
        let pieces: Vec<usize> = job.pending(&pieces).collect();
        self.network.plan(&self.context, &job, &pieces);
    }

    fn shutdown(&self, _deadline: Instant) {
        self.closed.store(true, Ordering::SeqCst);
        self.network
            .remove(self.context.engine, PieceError::PeerGone);
    }
}

impl fmt::Debug for MockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockBackend")
            .field("engine", &self.context.engine)
            .finish_non_exhaustive()
    }
}

/// A part of a piece on its way.
#[derive(Clone)]
pub(super) struct PartOfPiece {
    from: EngineId,
    job: Arc<Job>,
    piece: usize,
    offset: u64,
    len: u64,
    /// Parts of the piece that are not applied yet.
    left: Arc<AtomicU64>,
}

impl PartOfPiece {
    /// Cuts a piece.
    pub(super) fn cut(from: EngineId, job: &Arc<Job>, piece: usize, part_bytes: u64) -> Vec<Self> {
        let len = job.pieces()[piece].remote.len;
        let step = part_bytes.max(1);
        let left = Arc::new(AtomicU64::new(len.div_ceil(step)));
        let part = |index: u64| {
            let offset = index * step;
            let (job, left) = (Arc::clone(job), Arc::clone(&left));
            Self {
                from,
                job,
                piece,
                offset,
                len: step.min(len - offset),
                left,
            }
        };
        (0..len.div_ceil(step)).map(part).collect()
    }

    pub(super) fn from(&self) -> EngineId {
        self.from
    }

    pub(super) fn to(&self) -> EngineId {
        self.job.peer().engine
    }

    pub(super) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.left, &other.left) && self.offset == other.offset
    }

    pub(super) fn fail(&self, error: PieceError) {
        self.job.finish(self.piece, Err(error));
    }

    /// Applies the part, unless its piece has ended already.
    pub(super) fn apply(&self, owner: &Context) {
        if self.job.is_terminal(self.piece) {
            return;
        }
        if self.job.is_cancelled() {
            return self.fail(PieceError::Cancelled);
        }
        let begun = Instant::now();
        let moved = self.copy(owner);
        self.job.add_copy_time(begun.elapsed());
        match moved {
            Err(refusal) => {
                if refusal.is_security() {
                    owner.stats.add_security_refusal();
                }
                self.fail(PieceError::Refused(refusal));
            }
            Ok(()) => {
                if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    let local = &self.job.pieces()[self.piece].local;
                    let wanted = self.job.wants_checksum();
                    let crc32c = wanted.then(|| racy::crc(local.source(), 0));
                    self.job.finish(self.piece, Ok(PieceDone { crc32c }));
                }
            }
        }
    }

    fn copy(&self, owner: &Context) -> Result<(), Refusal> {
        let piece = &self.job.pieces()[self.piece];
        let remote = &piece.remote;
        let direction = self.job.direction();
        let pin = owner.registry.open(remote.region, &remote.capability)?;
        let entry = pin.entry();
        entry.check_op(direction, remote.offset, remote.len)?;
        let offset = remote.offset + self.offset;
        let generation = remote.generation.filter(|_| owner.config.generation_checks);
        if let Some(generation) = generation {
            entry.check_before(direction, offset, self.len, generation)?;
        }
        let size = |n: u64| usize::try_from(n).expect("a range inside mapped memory fits");
        let (start, len) = (size(self.offset), size(self.len));
        let (target, source) = match direction {
            Direction::Read => (
                piece.local.target().part(start, len),
                entry.source(offset, len),
            ),
            Direction::Write => (
                entry.target(offset, len),
                piece.local.source().part(start, len),
            ),
        };
        let (Some(target), Some(source)) = (target, source) else {
            return Err(Refusal::OutOfBounds);
        };
        racy::copy(target, source);
        if let Some(generation) = generation {
            entry.check_after(offset, self.len, generation)?;
        }
        Ok(())
    }
}
