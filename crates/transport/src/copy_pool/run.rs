//! One batch, or some of its pieces, on its way through the copy threads.
//!
//! [`PieceRun`] cuts the pieces into units, has a [`PartMover`] move each, and gathers what came of
//! them. Results are given to the job only when the last unit is over and the mover had its last word:
//! some things, such as whether the peer is still there, are asked once per batch. From then on no
//! byte of the batch moves.
//!
//! A unit is open from when it is taken until its results are noted. The run concludes when no unit is
//! left to take and none is open; the lock on [`Progress`] makes that happen once.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use layercake_protocol::checksum::combine;
use parking_lot::Mutex;

use super::cut::{Cutter, Part, UNIT_BYTES, UNIT_PARTS};
use super::unit::Unit;
use super::{CopyPool, Work, inline};
use crate::error::PieceError;
use crate::job::{Job, PieceSet, WaitHelper};
use crate::transfer::PieceDone;

/// What came of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Its bytes are at their destination. With their CRC-32C, if the batch wants checksums.
    Done(u32),
    /// Its piece failed.
    Failed(PieceError),
    /// This mover can't move its piece, another transport may.
    HandBack,
}

/// What came of the parts of a unit.
pub(crate) type Results = Vec<Moved>;

/// How the bytes of a batch are moved.
pub(crate) trait PartMover: Send + Sync {
    /// Moves these parts and adds one result for each to `moved`, in order.
    fn move_unit(&self, job: &Job, parts: &[Part], moved: &mut Results);

    /// Whether moving these parts takes no longer than to copy them, so that the submitting thread may do it. If
    /// not, the copy threads do.
    fn is_mere_copy(&self, job: &Job, parts: &[Part]) -> bool;

    /// All units are over. An error takes the place of every success.
    fn conclude(&self, job: &Job) -> Result<(), PieceError>;

    /// Passes on pieces of which [`Moved::HandBack`] was said.
    fn hand_back(&self, job: Arc<Job>, pieces: PieceSet);
}

/// See the module's text.
pub(crate) struct PieceRun {
    job: Arc<Job>,
    set: PieceSet,
    mover: Box<dyn PartMover>,
    progress: Mutex<Progress>,
    /// What is known of each piece of the batch, see [`state`].
    states: Box<[AtomicU64]>,
    /// Checksums of the parts of pieces that were split, with their places.
    split: Mutex<HashMap<usize, Vec<(Part, u32)>>>,
}

#[derive(Default)]
struct Progress {
    cutter: Cutter,
    exhausted: bool,
    open: usize,
    concluded: bool,
}

/// What is known of a piece: nothing bad, its checksum, or why it failed.
mod state {
    use crate::error::PieceError;

    pub(super) const CLEAN: u64 = 0;
    pub(super) const HAND_BACK: u64 = 3 << 32;
    const SUMMED: u64 = 1 << 32;
    const FAILED: u64 = 2 << 32;

    pub(super) fn summed(crc: u32) -> u64 {
        SUMMED | u64::from(crc)
    }

    pub(super) fn failed(error: PieceError) -> u64 {
        FAILED | u64::from(error.code())
    }

    /// The checksum, if known, or the error.
    pub(super) fn decode(state: u64) -> Result<Option<u32>, PieceError> {
        let low = u32::try_from(state & u64::from(u32::MAX)).expect("masked");
        match state & !u64::from(u32::MAX) {
            CLEAN => Ok(None),
            SUMMED => Ok(Some(low)),
            _ => Err(u8::try_from(low)
                .ok()
                .and_then(PieceError::from_code)
                .expect("only `failed` makes this state, from a code")),
        }
    }
}

impl PieceRun {
    /// Starts moving the pieces: at once on this thread if they are few and small and merely to be copied, else on
    /// the pool's threads and those that wait for the job.
    pub(crate) fn start(
        job: Arc<Job>,
        set: PieceSet,
        mover: impl PartMover + 'static,
        pool: &CopyPool,
    ) {
        if let Some(unit) = inline::unit(&job, &set, &mover) {
            return inline::run(job, unit, &mover);
        }
        let states = job.pieces().iter().map(|_| AtomicU64::new(state::CLEAN));
        let run = Arc::new(Self {
            states: states.collect(),
            job,
            set,
            mover: Box::new(mover),
            progress: Mutex::default(),
            split: Mutex::default(),
        });
        run.job.set_helper(Arc::new(Helper(Arc::downgrade(&run))));
        let units = run.units();
        pool.submit(run, units);
    }

    /// About how many units it takes, for as many threads to be woken.
    fn units(&self) -> usize {
        let (all, some) = (self.job.pieces().len().max(1), self.positions());
        let by_pieces = some.div_ceil(UNIT_PARTS);
        let by_bytes = usize::try_from(self.job.bytes().div_ceil(UNIT_BYTES));
        by_bytes
            .map_or(usize::MAX, |units| units.saturating_mul(some).div_ceil(all))
            .max(by_pieces)
    }

    fn positions(&self) -> usize {
        match &self.set {
            PieceSet::All => self.job.pieces().len(),
            PieceSet::Some(indices) => indices.len(),
        }
    }

    /// The piece at a position of the set, unless it needs nothing any more.
    fn piece_at(&self, position: usize) -> Option<usize> {
        let piece = match &self.set {
            PieceSet::All => position,
            PieceSet::Some(indices) => usize::try_from(*indices.get(position)?).ok()?,
        };
        (!self.job.is_terminal(piece)).then_some(piece)
    }

    /// Takes the next unit. `false` if there is none.
    fn claim(&self, unit: &mut Vec<Part>) -> bool {
        let mut progress = self.progress.lock();
        if progress.exhausted {
            return false;
        }
        if let Some(reason) = self.job.stop_reason(Instant::now()) {
            self.stop(&mut progress, reason);
        } else {
            let count = self.positions();
            let piece_at = |position| {
                let piece = self.piece_at(position)?;
                Some((piece, self.job.pieces()[piece].remote.len))
            };
            progress.cutter.next_unit(count, piece_at, unit);
            progress.exhausted = unit.is_empty();
        }
        if progress.exhausted {
            self.conclude_if_over(progress);
            return false;
        }
        progress.open += 1;
        true
    }

    /// Fails the pieces that are not wholly in a unit yet.
    fn stop(&self, progress: &mut Progress, reason: PieceError) {
        let count = self.positions();
        for position in progress.cutter.stop(count)..count {
            if let Some(piece) = self.piece_at(position) {
                self.note(piece, state::failed(reason));
            }
        }
        progress.exhausted = true;
    }

    /// Notes a failure or a checksum of a piece that lies in several units, perhaps; the first one stays.
    fn note(&self, piece: usize, value: u64) {
        let state = &self.states[piece];
        // What a failed exchange would mean is known already, and has been noted.
        let _kept =
            state.compare_exchange(state::CLEAN, value, Ordering::AcqRel, Ordering::Acquire);
    }

    fn has_failed(&self, piece: usize) -> bool {
        self.states[piece].load(Ordering::Acquire) != state::CLEAN
    }

    fn record(&self, part: &Part, moved: Moved) {
        let value = match moved {
            Moved::Done(crc) if self.job.wants_checksum() => state::summed(crc),
            Moved::Done(_) => return,
            Moved::Failed(error) => state::failed(error),
            Moved::HandBack => state::HAND_BACK,
        };
        if part.len == self.job.pieces()[part.piece].remote.len {
            // All of the piece: nobody else notes anything of it.
            self.states[part.piece].store(value, Ordering::Release);
        } else if let Moved::Done(crc) = moved {
            let mut split = self.split.lock();
            split.entry(part.piece).or_default().push((*part, crc));
        } else {
            self.note(part.piece, value);
        }
    }

    fn conclude_if_over(&self, mut progress: parking_lot::MutexGuard<'_, Progress>) {
        let over = progress.exhausted && progress.open == 0 && !progress.concluded;
        progress.concluded |= over;
        drop(progress);
        if over {
            self.conclude();
        }
    }

    fn conclude(&self) {
        let verdict = self.mover.conclude(&self.job);
        let mut split = std::mem::take(&mut *self.split.lock());
        let mut back = Vec::new();
        let results = (0..self.positions()).filter_map(|position| {
            let piece = self.piece_at(position)?;
            let state = self.states[piece].load(Ordering::Acquire);
            let known = match (state, verdict) {
                (state::HAND_BACK, Ok(())) => {
                    back.extend(u32::try_from(piece));
                    return None;
                }
                (state::HAND_BACK, Err(error)) => Err(error),
                (state, verdict) => state::decode(state).and_then(|crc| verdict.map(|()| crc)),
            };
            let done = known.map(|crc| PieceDone {
                crc32c: crc.or_else(|| split.remove(&piece).map(join_parts)),
            });
            Some((piece, done))
        });
        self.job.finish_all(results, Instant::now());
        if !back.is_empty() {
            self.mover
                .hand_back(Arc::clone(&self.job), PieceSet::Some(back));
        }
    }
}

/// The checksum of a piece from those of its parts.
fn join_parts(mut parts: Vec<(Part, u32)>) -> u32 {
    parts.sort_unstable_by_key(|(part, _)| part.offset);
    let parts = parts.into_iter();
    parts.fold(0, |sum, (part, crc)| combine(sum, crc, part.len))
}

impl Work for PieceRun {
    fn run_unit(&self) -> bool {
        let mut unit = Unit::take();
        if !self.claim(&mut unit.parts) {
            unit.give();
            return false;
        }
        let Unit { parts, moved } = &mut unit;
        let start = Instant::now();
        self.job.mark_started(start);
        // The rest of a piece that failed is not worth moving.
        parts.retain(|part| part.offset == 0 || !self.has_failed(part.piece));
        let open = OpenUnit {
            run: self,
            parts,
            moved,
            start,
        };
        self.mover.move_unit(&self.job, open.parts, open.moved);
        debug_assert_eq!(open.moved.len(), open.parts.len(), "one result per part");
        drop(open);
        unit.give();
        true
    }

    fn is_exhausted(&self) -> bool {
        self.progress.lock().exhausted
    }

    fn abandon(&self) {
        let mut progress = self.progress.lock();
        if !progress.exhausted {
            self.stop(&mut progress, PieceError::ShutDown);
        }
        self.conclude_if_over(progress);
    }
}

/// Closes a unit, also when its mover panicked: a batch always ends.
struct OpenUnit<'a> {
    run: &'a PieceRun,
    parts: &'a [Part],
    moved: &'a mut Results,
    start: Instant,
}

impl Drop for OpenUnit<'_> {
    fn drop(&mut self) {
        let missing = std::iter::repeat(Moved::Failed(PieceError::ShutDown));
        for (part, moved) in self.parts.iter().zip(self.moved.drain(..).chain(missing)) {
            self.run.record(part, moved);
        }
        self.run.job.add_copy_time(self.start.elapsed());
        let mut progress = self.run.progress.lock();
        progress.open -= 1;
        self.run.conclude_if_over(progress);
    }
}

/// Lets a thread that waits for the job run units of it. Weak, since the job holds it.
struct Helper(Weak<PieceRun>);

impl WaitHelper for Helper {
    fn help(&self, _job: &Arc<Job>, _until: Option<Instant>) -> bool {
        // One unit takes microseconds; the caller looks at the time between two.
        self.0.upgrade().is_some_and(|run| run.run_unit())
    }
}

impl fmt::Debug for PieceRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PieceRun")
            .field("job", &self.job)
            .finish_non_exhaustive()
    }
}
