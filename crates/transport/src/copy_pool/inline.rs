//! Small batches, moved by the thread that submits them.
//!
//! That is quicker than waking another one, and takes some tens of microseconds at most: the headers of
//! a usual batch of objects belong here. Nothing is shared, split or queued, so none of what
//! [`super::run`] keeps for that is needed; what a batch comes to is the same.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::cut::{Part, UNIT_BYTES, UNIT_PARTS};
use super::run::{Moved, PartMover, Results};
use crate::error::PieceError;
use crate::job::{Job, PieceSet};
use crate::transfer::PieceDone;

/// The most bytes of a batch that counts as small: of those, waking a thread costs more than copying.
const MAX_BYTES: u64 = UNIT_BYTES;

/// The most pieces. More are left to the copy threads, however small.
const MAX_PIECES: usize = 64;

const _: () = assert!(MAX_PIECES <= UNIT_PARTS);

/// A small batch's pieces. One or few are kept without memory of their own, as what came of them is.
type Parts = SmallVec<[Part; 4]>;

/// The pieces that need something, each as one part; none if they are too many or too large.
pub(super) fn parts(job: &Job, set: &PieceSet) -> Option<Parts> {
    let positions = match set {
        PieceSet::All => job.pieces().len(),
        PieceSet::Some(indices) => indices.len(),
    };
    let mut parts = Parts::with_capacity(positions.min(MAX_PIECES));
    let mut bytes = 0_u64;
    for piece in job.pending(set) {
        let len = job.pieces()[piece].remote.len;
        bytes = bytes.saturating_add(len);
        if bytes > MAX_BYTES || parts.len() == MAX_PIECES {
            return None;
        }
        parts.push(Part {
            piece,
            offset: 0,
            len,
        });
    }
    Some(parts)
}

/// Moves these parts and gives every piece its result.
pub(super) fn run(job: Arc<Job>, parts: &[Part], mover: &impl PartMover) {
    let mut open = Open {
        job: &job,
        unfinished: parts,
    };
    let now = Instant::now();
    let mut results = Results::with_capacity(parts.len());
    if let Some(reason) = job.stop_reason(now) {
        results.resize(parts.len(), Moved::Failed(reason));
    } else if !parts.is_empty() {
        job.mark_started(now);
        mover.move_unit(&job, parts, &mut results);
        job.add_copy_time(now.elapsed());
    }
    debug_assert_eq!(results.len(), parts.len(), "one result per part");
    let verdict = mover.conclude(&job);
    let mut back = Vec::new();
    for (part, moved) in parts.iter().zip(results) {
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
        job.finish(part.piece, result);
    }
    open.unfinished = &[];
    drop(open);
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
