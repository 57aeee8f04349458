//! A batch under way, shared by the back end that moves it and the handles that wait for it.
//!
//! Each piece has a slot of its own that goes from pending to one final value, once; the last one to
//! do so completes the job. A back end calls [`Job::finish`] only when no byte of that piece can move
//! any more, and for every piece that it was given: that is all it owes. Slots are atomics, so pieces
//! of one job may end on any thread without a lock.
//!
//! The regions of local slices are pinned from creation to completion: unregistering waits for them.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::batch::{Batch, Direction, Piece};
use crate::config::TransportKind;
use crate::endpoint::Endpoint;
use crate::error::PieceError;
use crate::lead::{self, Lead};
use crate::memory::Pins;
use crate::stats::{StatsTable, nanos};
use crate::transfer::{Kept, Outcome, PieceDone};

mod slot;

/// What a back end offers to those who wait for one of its jobs.
pub(crate) trait WaitHelper: Send + Sync {
    /// Does some of the job's work on the calling thread, no longer than `until`. Returns whether
    /// calling again may help; if not, the thread sleeps until the job is done.
    fn help(&self, job: &Arc<Job>, until: Option<Instant>) -> bool;

    /// The connection that the job is under way on, for the calling thread to look after. If it can't do
    /// that, somebody else does.
    fn lead(&self, _job: &Arc<Job>) -> Option<Lead> {
        None
    }

    /// Somebody wants to know of the job, or does not any more, and will not lead.
    fn look(&self) {}
}

/// Which pieces of a job a back end is given.
#[derive(Clone, Debug)]
pub(crate) enum PieceSet {
    All,
    /// Indices, ascending.
    Some(Vec<u32>),
}

/// What the thread that submits a batch does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Something else: it may be one of an async runtime.
    GoesOn,
    /// This one waits for the batch. Others, on which a batch begins that had to wait for its peer first, have more to do.
    Waits(ThreadId),
}

pub(crate) struct Job {
    batch: Batch,
    caller: Caller,
    submitted: Instant,
    deadline: Instant,
    slots: SmallVec<[AtomicU64; 1]>,
    /// Bytes of all pieces.
    bytes: u64,
    remaining: AtomicUsize,
    /// [`TransportKind::index`] of what carries it, or [`NO_TRANSPORT`].
    transport: AtomicU8,
    cancelled: AtomicBool,
    /// Nanoseconds from submission to the first byte; 0 is "not yet".
    started: AtomicU64,
    copy_nanos: AtomicU64,
    stats: Arc<StatsTable>,
    helper: OnceLock<Arc<dyn WaitHelper>>,
    state: Mutex<State>,
    changed: Condvar,
    done: AtomicBool,
}

#[derive(Default)]
struct State {
    pins: Pins,
    /// Until the job is done.
    kept: Option<Kept>,
    wakers: Vec<Waker>,
}

const NO_TRANSPORT: u8 = u8::MAX;

impl Job {
    /// Takes a batch in. Pieces that can't start (lengths differ, local memory withdrawn) and pieces
    /// of zero bytes are terminal at once.
    pub(crate) fn new(
        batch: Batch,
        default_deadline: Duration,
        stats: Arc<StatsTable>,
        caller: Caller,
    ) -> Arc<Self> {
        let mut pins = Pins::new();
        let mut early: Vec<(usize, Result<PieceDone, PieceError>)> = Vec::new();
        for (index, piece) in batch.pieces.iter().enumerate() {
            if piece.local.len() != piece.remote.len {
                early.push((index, Err(PieceError::LengthMismatch)));
            } else if !piece.local.pin_into(&mut pins) {
                early.push((index, Err(PieceError::LocalInvalid)));
            } else if piece.remote.len == 0 {
                let crc32c = batch.checksum.then_some(0);
                early.push((index, Ok(PieceDone { crc32c })));
            }
        }
        let count = batch.pieces.len();
        let job = Self::with_slots(batch, count, default_deadline, stats, pins, caller);
        if count == 0 {
            job.complete(None);
        }
        for (index, result) in early {
            job.finish(index, result);
        }
        job
    }

    fn with_slots(
        batch: Batch,
        count: usize,
        default_deadline: Duration,
        stats: Arc<StatsTable>,
        pins: Pins,
        caller: Caller,
    ) -> Arc<Self> {
        let submitted = Instant::now();
        let allowed = batch.deadline.unwrap_or(default_deadline);
        let deadline = submitted
            .checked_add(allowed)
            .unwrap_or_else(|| submitted + FAR);
        let lens = batch.pieces.iter().map(|piece| piece.remote.len);
        Arc::new(Self {
            bytes: lens.fold(0, u64::saturating_add),
            batch,
            caller,
            submitted,
            deadline,
            slots: (0..count).map(|_| AtomicU64::new(slot::PENDING)).collect(),
            remaining: AtomicUsize::new(count),
            transport: AtomicU8::new(NO_TRANSPORT),
            cancelled: AtomicBool::new(false),
            started: AtomicU64::new(0),
            copy_nanos: AtomicU64::new(0),
            stats,
            helper: OnceLock::new(),
            state: Mutex::new(State {
                pins,
                kept: None,
                wakers: Vec::new(),
            }),
            changed: Condvar::new(),
            done: AtomicBool::new(false),
        })
    }

    /// A job of no bytes, whose one result says whether the peer answered.
    pub(crate) fn probe(
        peer: Arc<Endpoint>,
        deadline: Duration,
        stats: Arc<StatsTable>,
    ) -> Arc<Self> {
        let pieces = Vec::new();
        let batch = Batch {
            peer,
            direction: Direction::Read,
            pieces,
            checksum: false,
            deadline: None,
        };
        Self::with_slots(batch, 1, deadline, stats, Pins::new(), Caller::GoesOn)
    }

    /// Keeps this until no byte moves any more.
    pub(crate) fn keep(&self, kept: Kept) {
        let mut state = self.state.lock();
        if !self.is_done() {
            state.kept = Some(kept);
        }
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.batch.pieces
    }

    /// How many bytes all pieces have together.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn peer(&self) -> &Arc<Endpoint> {
        &self.batch.peer
    }

    pub(crate) fn direction(&self) -> Direction {
        self.batch.direction
    }

    pub(crate) fn caller(&self) -> Caller {
        self.caller
    }

    pub(crate) fn wants_checksum(&self) -> bool {
        self.batch.checksum
    }

    /// When the transfer as a whole has to be over.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// How long the transfer as a whole may take.
    #[cfg(feature = "mock")]
    pub(crate) fn allowed(&self) -> Duration {
        self.deadline.saturating_duration_since(self.submitted)
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Why pieces that were not sent yet must not be, if so.
    pub(crate) fn stop_reason(&self, now: Instant) -> Option<PieceError> {
        if self.is_cancelled() {
            Some(PieceError::Cancelled)
        } else if now >= self.deadline {
            Some(PieceError::Timeout)
        } else {
            None
        }
    }

    /// Notes what carries the job from here on.
    pub(crate) fn set_transport(&self, kind: TransportKind) {
        let index = u8::try_from(kind.index()).unwrap_or(NO_TRANSPORT);
        self.transport.store(index, Ordering::Relaxed);
    }

    /// Lets waiting threads take part. The first helper stays.
    pub(crate) fn set_helper(&self, helper: Arc<dyn WaitHelper>) {
        // A second back end of the same job has its own threads: it does without.
        let _already_set = self.helper.set(helper);
    }

    /// Notes that the first byte is about to move, at `now`; later calls change nothing.
    pub(crate) fn mark_started(&self, now: Instant) {
        if self.started.load(Ordering::Relaxed) == 0 {
            let waited = nanos(now.saturating_duration_since(self.submitted)).max(1);
            let _lost_race =
                self.started
                    .compare_exchange(0, waited, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Adds time that a thread spent moving the job's bytes.
    pub(crate) fn add_copy_time(&self, time: Duration) {
        self.copy_nanos.fetch_add(nanos(time), Ordering::Relaxed);
    }

    /// Whether the piece has its result.
    pub(crate) fn is_terminal(&self, index: usize) -> bool {
        self.slots
            .get(index)
            .is_none_or(|slot| slot.load(Ordering::Acquire) != slot::PENDING)
    }

    /// The pieces of `set` that are not terminal.
    pub(crate) fn pending<'a>(&'a self, set: &'a PieceSet) -> impl Iterator<Item = usize> + 'a {
        let (all, some) = match set {
            PieceSet::All => (0..self.slots.len(), &[][..]),
            PieceSet::Some(indices) => (0..0, indices.as_slice()),
        };
        let some = some.iter().filter_map(|index| usize::try_from(*index).ok());
        all.chain(some).filter(|index| !self.is_terminal(*index))
    }

    /// Gives a piece its result. No byte of it may move afterwards. The first result stays.
    pub(crate) fn finish(&self, index: usize, result: Result<PieceDone, PieceError>) {
        let Some(slot) = self.slots.get(index) else {
            return;
        };
        let value = slot::encode(result);
        let set = slot.compare_exchange(slot::PENDING, value, Ordering::AcqRel, Ordering::Acquire);
        if set.is_ok() && self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.complete(None);
        }
    }

    /// Gives pieces their results that nobody else gives any meanwhile, by who knows what time it is. As
    /// [`Job::finish`], but the processors need not agree on each.
    pub(crate) fn finish_all(
        &self,
        results: impl Iterator<Item = (usize, Result<PieceDone, PieceError>)>,
        now: Instant,
    ) {
        let mut finished = 0;
        for (index, result) in results {
            if let Some(slot) = self.slots.get(index)
                && slot.load(Ordering::Relaxed) == slot::PENDING
            {
                slot.store(slot::encode(result), Ordering::Release);
                finished += 1;
            }
        }
        if finished > 0 && self.remaining.fetch_sub(finished, Ordering::AcqRel) == finished {
            self.complete(Some(now));
        }
    }

    /// Fails those pieces of `set` that have no result yet.
    pub(crate) fn fail(&self, set: &PieceSet, error: PieceError) {
        for index in self.pending(set) {
            self.finish(index, Err(error));
        }
    }

    fn complete(&self, now: Option<Instant>) {
        self.record(now);
        let (kept, wakers) = {
            let mut state = self.state.lock();
            drop(std::mem::take(&mut state.pins));
            self.done.store(true, Ordering::Release);
            (state.kept.take(), std::mem::take(&mut state.wakers))
        };
        drop(kept);
        self.changed.notify_all();
        for waker in wakers {
            waker.wake();
        }
    }

    fn record(&self, now: Option<Instant>) {
        let mut ok = (0, 0);
        let mut failed: Vec<(PieceError, u64)> = Vec::new();
        if self.results().all(|result| result.is_ok()) {
            ok = (self.pieces().len() as u64, self.bytes);
        } else {
            for (result, piece) in self.results().zip(self.pieces()) {
                let Err(error) = result else {
                    ok = (ok.0 + 1, ok.1 + piece.remote.len);
                    continue;
                };
                match failed.iter_mut().find(|(known, _)| *known == error) {
                    Some((_, count)) => *count += 1,
                    None => failed.push((error, 1)),
                }
            }
        }
        let Some(kind) = self.transport() else {
            for (error, count) in failed {
                self.stats.add_unrouted(error, count);
            }
            return;
        };
        let counters = self.stats.operation(kind, self.direction());
        counters.add_pieces(ok.0, ok.1);
        for (error, count) in failed {
            counters.add_error(error, count);
        }
        let now = now.unwrap_or_else(Instant::now);
        let total = now.saturating_duration_since(self.submitted);
        let queue = match self.started.load(Ordering::Relaxed) {
            0 => total,
            started => Duration::from_nanos(started),
        };
        let copy = Duration::from_nanos(self.copy_nanos.load(Ordering::Relaxed));
        counters.add_batch(queue, total.saturating_sub(queue), copy);
    }

    pub(crate) fn transport(&self) -> Option<TransportKind> {
        let index = self.transport.load(Ordering::Relaxed);
        TransportKind::ALL.get(usize::from(index)).copied()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// The results; meaningful once the job is done.
    pub(crate) fn results(&self) -> impl Iterator<Item = Result<PieceDone, PieceError>> {
        let result = |slot: &AtomicU64| {
            slot::decode(slot.load(Ordering::Acquire)).unwrap_or(Err(PieceError::Timeout))
        };
        self.slots.iter().map(result)
    }

    /// The results with what carried the job.
    pub(crate) fn outcome(&self) -> Outcome {
        Outcome {
            transport: self.transport(),
            pieces: self.results().collect(),
        }
    }

    /// Waits until the job is done or `until` has passed; says whether it is done.
    pub(crate) fn wait(self: &Arc<Self>, until: Option<Instant>) -> bool {
        if self.is_done() {
            return true;
        }
        if let Some(helper) = self.helper.get() {
            while !self.is_done() && until.is_none_or(|until| Instant::now() < until) {
                if !helper.help(self, until) {
                    break;
                }
            }
        }
        let mut state = self.state.lock();
        while !self.is_done() {
            match until {
                None => self.changed.wait(&mut state),
                Some(until) => {
                    if self.changed.wait_until(&mut state, until).timed_out() {
                        break;
                    }
                }
            }
        }
        self.is_done()
    }

    /// Whether the job is done; if not, `waker` is woken when it is.
    pub(crate) fn poll_done(self: &Arc<Self>, waker: &Waker) -> bool {
        {
            let mut state = self.state.lock();
            if self.is_done() {
                return true;
            }
            if !state.wakers.iter().any(|known| known.will_wake(waker)) {
                state.wakers.push(waker.clone());
            }
        }
        if !lead::note(self) {
            self.look();
        }
        false
    }

    /// The connection that the job is under way on, for this thread to look after.
    pub(crate) fn lead(self: &Arc<Self>) -> Option<Lead> {
        self.helper.get()?.lead(self)
    }

    /// Notes that somebody wants to know of the job, or does not any more, without leading.
    pub(crate) fn look(&self) {
        if let Some(helper) = self.helper.get()
            && !self.is_done()
        {
            helper.look();
        }
    }

    /// Whether this is the helper of those who wait.
    pub(crate) fn is_helped_by(&self, helper: &Arc<impl WaitHelper>) -> bool {
        let known = self.helper.get().map(Arc::as_ptr);
        known.is_some_and(|known| std::ptr::addr_eq(known, Arc::as_ptr(helper)))
    }
}

/// Stands in for a deadline that the clock can't represent.
const FAR: Duration = Duration::from_hours(24 * 365);

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("peer", &self.batch.peer.engine)
            .field("direction", &self.direction())
            .field("pieces", &self.slots.len())
            .field("remaining", &self.remaining.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}
