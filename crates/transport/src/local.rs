//! Transfers inside one engine: copies between its own regions, on the copy threads, small batches on the
//! thread that submits them.
//!
//! The rules are those of every transport: region, capability, access, bounds and generation are
//! checked for each piece, and refusals counted, though owner and caller are one.

use std::sync::Arc;
use std::time::Instant;

use crate::backend::{Backend, Context};
use crate::batch::{Direction, RemoteSlice};
use crate::config::TransportKind;
use crate::copy_pool::{CopyPool, Moved, Part, PartMover, PieceRun, Results};
use crate::error::{PieceError, Refusal};
use crate::job::{Job, PieceSet};
use crate::memory::Served;
use crate::racy;

#[derive(Debug)]
pub(crate) struct LocalBackend {
    context: Arc<Context>,
    pool: Arc<CopyPool>,
}

impl LocalBackend {
    pub(crate) fn new(context: Arc<Context>, pool: Arc<CopyPool>) -> Self {
        Self { context, pool }
    }
}

impl Backend for LocalBackend {
    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn submit(&self, job: Arc<Job>, pieces: PieceSet) {
        let mover = LocalMover {
            context: Arc::clone(&self.context),
        };
        PieceRun::start(job, pieces, mover, &self.pool);
    }

    /// The engine stops the copy threads, which other transports use as well.
    fn shutdown(&self, _deadline: Instant) {}
}

struct LocalMover {
    context: Arc<Context>,
}

/// The region that was used last; neighbouring parts mostly use the same one.
type LastRegion = Option<(RemoteSlice, Served)>;

impl LocalMover {
    fn open<'a>(
        &self,
        remote: &RemoteSlice,
        last: &'a mut LastRegion,
    ) -> Result<&'a Served, Refusal> {
        let same = |known: &RemoteSlice| {
            known.region == remote.region && known.capability == remote.capability
        };
        if !last.as_ref().is_some_and(|(known, _)| same(known)) {
            *last = Some((
                *remote,
                self.context
                    .registry
                    .open(remote.region, &remote.capability)?,
            ));
        }
        last.as_ref()
            .map(|(_, pin)| pin)
            .ok_or(Refusal::UnknownRegion)
    }

    fn move_part(&self, job: &Job, part: &Part, last: &mut LastRegion) -> Result<u32, Refusal> {
        let piece = &job.pieces()[part.piece];
        let remote = &piece.remote;
        let direction = job.direction();
        let entry = self.open(remote, last)?.entry();
        entry.check_op(direction, remote.offset, remote.len)?;
        let offset = remote.offset + part.offset;
        let generation = remote
            .generation
            .filter(|_| self.context.config.generation_checks);
        if let Some(generation) = generation {
            entry.check_before(direction, offset, part.len, generation)?;
        }
        let size = |n: u64| usize::try_from(n).expect("a range inside mapped memory fits");
        let (start, len) = (size(part.offset), size(part.len));
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
        let crc = if job.wants_checksum() {
            racy::copy_crc(target, source, 0)
        } else {
            racy::copy_past(target, source);
            0
        };
        if let Some(generation) = generation {
            entry.check_after(offset, part.len, generation)?;
        }
        Ok(crc)
    }
}

impl PartMover for LocalMover {
    fn move_unit(&self, job: &Job, parts: &[Part], moved: &mut Results) {
        let mut last = None;
        for part in parts {
            let result = self.move_part(job, part, &mut last);
            if let Err(refusal) = result
                && refusal.is_security()
                && part.offset == 0
            {
                self.context.stats.add_security_refusal();
            }
            moved.push(match result {
                Ok(crc) => Moved::Done(crc),
                Err(refusal) => Moved::Failed(PieceError::Refused(refusal)),
            });
        }
    }

    fn is_mere_copy(&self, _job: &Job, _parts: &[Part]) -> bool {
        true
    }

    fn conclude(&self, _job: &Job) -> Result<(), PieceError> {
        Ok(())
    }

    fn hand_back(&self, job: Arc<Job>, pieces: PieceSet) {
        self.context.fall_back(job, pieces, TransportKind::Local);
    }
}
