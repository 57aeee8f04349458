//! Small batches, moved by the thread that submits them.
//!
//! What one unit holds is one thread's work anyway, and waking another one for it takes longer than some tens of microseconds:
//! the headers of a usual batch of objects belong here, and small entries of a layer. Nothing is shared, split or queued, so none of what
//! [`super::run`] keeps for that is needed; what a batch comes to is the same.

use std::sync::Arc;
use std::time::Instant;

use super::cut::{Part, UNIT_BYTES, UNIT_PARTS};
use super::run::{Moved, PartMover};
use super::unit::Unit;
use crate::error::PieceError;
use crate::job::{Job, PieceSet};
use crate::transfer::PieceDone;

/// The most bytes of a batch that counts as small, and the most pieces: one unit, which is one thread's work anyway.
const MAX_BYTES: u64 = UNIT_BYTES;
const MAX_PIECES: usize = UNIT_PARTS;

/// The pieces that need something, each as one part; none if they are too many or too large.
pub(super) fn unit(job: &Job, set: &PieceSet) -> Option<Unit> {
    let mut unit = Unit::take();
    let mut bytes = 0_u64;
    for piece in job.pending(set) {
        let len = job.pieces()[piece].remote.len;
        bytes = bytes.saturating_add(len);
        if bytes > MAX_BYTES || unit.parts.len() == MAX_PIECES {
            unit.give();
            return None;
        }
        unit.parts.push(Part {
            piece,
            offset: 0,
            len,
        });
    }
    Some(unit)
}

/// Moves these parts and gives every piece its result.
pub(super) fn run(job: Arc<Job>, mut unit: Unit, mover: &impl PartMover) {
    let Unit { parts, moved } = &mut unit;
    let mut open = Open {
        job: &job,
        unfinished: parts,
    };
    let mut now = Instant::now();
    if let Some(reason) = job.stop_reason(now) {
        moved.resize(parts.len(), Moved::Failed(reason));
    } else if !parts.is_empty() {
        job.mark_started(now);
        let begun = now;
        mover.move_unit(&job, parts, moved);
        now = Instant::now();
        job.add_copy_time(now.saturating_duration_since(begun));
    }
    debug_assert_eq!(moved.len(), parts.len(), "one result per part");
    let verdict = mover.conclude(&job);
    let mut back = Vec::new();
    for (part, &moved) in parts.iter().zip(&*moved) {
        let result = match (moved, verdict) {
            (Moved::Failed(error), _) | (_, Err(error)) => Err(error),
            (Moved::Done(crc), Ok(())) => Ok(PieceDone {
                crc32c: job.wants_checksum().then_some(crc),
            }),
            (Moved::HandBack, Ok(())) => {
                back.extend(u32::try_from(part.piece));
                continue;
            }
        };
        job.finish_at(part.piece, result, Some(now));
    }
    open.unfinished = &[];
    drop(open);
    unit.give();
    if !back.is_empty() {
        mover.hand_back(job, PieceSet::Some(back));
    }
}

/// Ends a batch whose mover panicked: a batch always ends.
struct Open<'a> {
    job: &'a Job,
    unfinished: &'a [Part],
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        for part in self.unfinished {
            self.job.finish(part.piece, Err(PieceError::ShutDown));
        }
    }
}
