//! Small batches, moved by the thread that submits them.
//!
//! One unit is one thread's work anyway, and to wake a copy thread for it takes as long as to copy some tens of
//! kilobytes. Usual batches of this kind are the headers of objects, and small entries of a layer. Nothing is shared,
//! split or queued, so none of what [`super::run`] keeps for that is needed; what a batch comes to is the same.
//!
//! The submitting thread may be one of an async runtime, so it is kept for no longer than a unit takes to copy, unless it
//! waits for the batch in any case: until another thread is awake, it has copied a megabyte by itself. Where the mover
//! says that there is more to do, such as to bring in pages that were never touched, a batch of any size is left to the
//! copy threads.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::cut::{Part, UNIT_BYTES, UNIT_PARTS};
use super::run::{Moved, PartMover};
use super::unit::Unit;
use crate::error::PieceError;
use crate::job::{Caller, Job, PieceSet};
use crate::transfer::PieceDone;

/// The most bytes of a batch that counts as small, and the most pieces.
fn limits(job: &Job) -> (u64, usize) {
    match job.caller() {
        Caller::Waits(thread) if thread == thread::current().id() => (4 * UNIT_BYTES, UNIT_PARTS),
        Caller::Waits(_) | Caller::GoesOn => (UNIT_BYTES, UNIT_PARTS),
    }
}

/// The pieces that need something, each as one part; none if they are too many, too large, or not merely to be
/// copied.
pub(super) fn unit(job: &Job, set: &PieceSet, mover: &impl PartMover) -> Option<Unit> {
    let (max_bytes, max_pieces) = limits(job);
    let all = matches!(set, PieceSet::All);
    if all && (job.bytes() > max_bytes || job.pieces().len() > max_pieces) {
        return None;
    }
    let mut unit = Unit::take();
    let mut bytes = 0_u64;
    for piece in job.pending(set) {
        let len = job.pieces()[piece].remote.len;
        bytes = bytes.saturating_add(len);
        if bytes > max_bytes || unit.parts.len() == max_pieces {
            unit.give();
            return None;
        }
        unit.parts.push(Part {
            piece,
            offset: 0,
            len,
        });
    }
    if !mover.is_mere_copy(job, &unit.parts) {
        unit.give();
        return None;
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
    let results = parts.iter().zip(&*moved).filter_map(|(part, &moved)| {
        let result = match (moved, verdict) {
            (Moved::Failed(error), _) | (_, Err(error)) => Err(error),
            (Moved::Done(crc), Ok(())) => Ok(PieceDone {
                crc32c: job.wants_checksum().then_some(crc),
            }),
            (Moved::HandBack, Ok(())) => {
                back.extend(u32::try_from(part.piece));
                return None;
            }
        };
        Some((part.piece, result))
    });
    job.finish_all(results, now);
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
