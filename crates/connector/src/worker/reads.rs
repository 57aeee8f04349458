//! One call that reads a part of some rows: a layer, or whole objects.
//!
//! A row with one block is read into it. One with several is read into each of them, or once into a
//! staging slot and copied from there, whichever [`fanout`](crate::fanout) says. Whole objects are not staged: a slot
//! has room for a layer.
//!
//! A [`Call`] is driven by who asked for it, and its memory serves layer after layer. A call that reads from unfinished objects
//! rests while nothing of what is left was written: that is no part of what a transfer takes. One that is dropped before it is over, as the runtime was shut
//! down, counts as under way until its transfers have ended.

use std::ops::Range as Span;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use layercake_protocol::ids::Generation;
use layercake_store::{
    EarlyRead, EarlyReading, EarlySession, GetSession, Range, RangeRead, ReadDone, Reading,
    StoreError,
};
use layercake_transport::{Kept, LocalSlice, PieceError};

use super::board::{Flight, Loading};
use super::caches::{Part, Placed, Scratch};
use super::receiver::LoadJob;
use super::shared::Shared;
use super::staging::Slot;
use super::traffic::Passage;
use crate::contract::BlockId;

/// A session on a row's object.
pub(crate) enum Session {
    Complete(GetSession),
    /// Perhaps still being written. In a job all are, or none is.
    Early(EarlySession),
}

impl Session {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Complete(session) => session.size(),
            Self::Early(session) => session.size(),
        }
    }

    pub(crate) fn generation(&self) -> Generation {
        match self {
            Self::Complete(session) => session.generation(),
            Self::Early(session) => session.generation(),
        }
    }

    pub(crate) fn layout_id(&self) -> u64 {
        match self {
            Self::Complete(session) => session.layout_id(),
            Self::Early(session) => session.layout_id(),
        }
    }

    /// The lease to give back, if there is one.
    pub(crate) fn into_complete(self) -> Option<GetSession> {
        match self {
            Self::Complete(session) => Some(session),
            Self::Early(session) => session.completed(),
        }
    }
}

/// A call that reads a part of some rows.
#[derive(Default)]
pub(crate) struct Call {
    pub(crate) part: Part,
    pub(crate) rows: Vec<usize>,
    /// One for each row, once it is over: what is wrong.
    pub(crate) results: Vec<Option<StoreError>>,
    /// Bytes that were asked for, and that were read from the store.
    pub(crate) asked: u64,
    pub(crate) bytes: u64,
    /// For how long bytes were under way.
    pub(crate) took: Duration,
    /// Of all rows.
    blocks: Vec<BlockId>,
    /// For each row, which of them are its.
    targets: Vec<Span<usize>>,
    reads: Vec<Read>,
    /// Copies to make once the reads are done.
    copies: Vec<Copy>,
    /// Where the pieces of what is copied lie in the layer.
    within: Vec<(u64, u64)>,
    work: Work,
    begun: Option<Instant>,
    /// Objects may be unfinished.
    early: bool,
    /// Since when bytes have been under way, if they are.
    moving: Option<Instant>,
    guards: Option<Guards>,
}

/// What others know of a call by.
struct Guards {
    flight: Flight,
    /// None while it rests.
    passage: Option<Passage>,
    /// Of the job.
    loading: Arc<Loading>,
}

#[derive(Default)]
enum Work {
    #[default]
    None,
    Reading(Reading),
    Early(EarlyReading),
    /// Gives the positions of rows whose copies failed.
    Copying(Pin<Box<dyn Future<Output = Vec<usize>> + Send>>),
}

/// One read of a call.
struct Read {
    /// Position of its row.
    at: usize,
    into: Into,
}

enum Into {
    /// A block of those of all rows.
    Block(usize),
    /// The slot of a copy.
    Slot(usize),
}

struct Copy {
    /// Position of the row.
    at: usize,
    slot: Slot,
    /// What is read into the slot.
    ranges: Vec<Range>,
    targets: Vec<Vec<LocalSlice>>,
}

/// The ranges of a read.
enum Ranges<P> {
    Placed(P),
    Slot(std::vec::IntoIter<Range>),
}

impl<P: Iterator<Item = Range>> Iterator for Ranges<P> {
    type Item = Range;

    fn next(&mut self) -> Option<Range> {
        match self {
            Self::Placed(ranges) => ranges.next(),
            Self::Slot(ranges) => ranges.next(),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match self {
            Self::Placed(ranges) => ranges.size_hint(),
            Self::Slot(ranges) => ranges.size_hint(),
        }
    }
}

impl Call {
    /// Submits the reads of `part` of these of the job's `sessions`. `false`: the caches have no such block, and nothing
    /// was submitted. The call before must be over.
    pub(crate) fn begin(
        &mut self,
        shared: &Shared,
        job: &LoadJob,
        part: Part,
        (sessions, chosen): (&[(usize, Session)], &[usize]),
        scratch: &mut Scratch,
    ) -> bool {
        self.clear(part);
        let session_of = |at: usize| &sessions[chosen[at]];
        job.receiving.0.look(|state| {
            for at in 0..chosen.len() {
                let (row, first) = (session_of(at).0, self.blocks.len());
                self.rows.push(row);
                self.blocks.extend(state.blocks(row));
                self.targets.push(first..self.blocks.len());
            }
        });
        let Some(placed) = job.caches.place(part, &self.blocks, scratch) else {
            return false;
        };
        self.plan(shared, job, &placed);
        self.asked = job.caches.part_len(part) * self.reads.len() as u64;
        let begun = Instant::now();
        shared.prefetch.lock().ask(self.asked, begun);
        self.begun = Some(begun);
        let copies = &mut self.copies;
        let reads = self.reads.iter().map(|read| {
            let ranges = match read.into {
                Into::Block(block) => Ranges::Placed(placed.ranges(block)),
                Into::Slot(copy) => {
                    Ranges::Slot(std::mem::take(&mut copies[copy].ranges).into_iter())
                }
            };
            (&session_of(read.at).1, ranges)
        });
        self.work = submit(shared, reads, &job.loading);
        let mut flight = job.receiving.0.take_off();
        self.early = matches!(self.work, Work::Early(_));
        flight.rest(self.early);
        self.moving = (!self.early).then_some(begun);
        let passage = (!self.early).then(|| shared.traffic.load());
        self.guards = Some(Guards {
            flight,
            passage,
            loading: Arc::clone(&job.loading),
        });
        true
    }

    /// Forgets the call before.
    fn clear(&mut self, part: Part) {
        self.part = part;
        self.rows.clear();
        self.results.clear();
        (self.asked, self.bytes, self.took) = (0, 0, Duration::ZERO);
        self.blocks.clear();
        self.targets.clear();
        self.reads.clear();
        self.copies.clear();
        self.within.clear();
    }

    /// A read for each block, or one for all of a row's.
    fn plan(&mut self, shared: &Shared, job: &LoadJob, placed: &Placed<'_>) {
        let mut fanned_out = 0;
        for (at, blocks) in self.targets.iter().enumerate() {
            if blocks.len() > 1 {
                if let Part::Layer(layer) = self.part {
                    if self.within.is_empty() {
                        self.within.extend(job.caches.within(layer));
                    }
                    let staged = stage(shared, job, (at, blocks.clone()), placed, &self.within);
                    if let Some(copy) = staged {
                        let into = Into::Slot(self.copies.len());
                        self.reads.push(Read { at, into });
                        self.copies.push(copy);
                        fanned_out += blocks.len() as u64;
                        continue;
                    }
                }
                if self.part.is_first() {
                    shared.counters.repeated_reads.add(blocks.len() as u64);
                }
            }
            let reads = blocks.clone().map(Into::Block);
            self.reads.extend(reads.map(|into| Read { at, into }));
        }
        if self.part.is_first() {
            shared.counters.fanned_out_blocks.add(fanned_out);
        }
    }

    /// Goes on until everything has come back.
    pub(crate) fn poll_over(&mut self, shared: &Arc<Shared>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.work {
                Work::None => break,
                Work::Reading(reading) => {
                    let read = ready!(Pin::new(reading).poll(cx));
                    self.read(shared, read);
                }
                Work::Early(reading) => {
                    let polled = Pin::new(&mut *reading).poll(cx);
                    let moving = reading.is_moving();
                    if polled.is_pending() {
                        self.note_moving(shared, moving);
                    }
                    let read = ready!(polled);
                    self.read(shared, read);
                }
                Work::Copying(copying) => {
                    let failed = ready!(copying.as_mut().poll(cx));
                    for at in failed {
                        self.results[at] = Some(StoreError::Transfer {
                            offset: 0,
                            len: 0,
                            source: PieceError::NoTransport,
                        });
                    }
                    self.work = Work::None;
                }
            }
        }
        if let Some(begun) = self.begun.take() {
            self.over(shared, begun);
        }
        Poll::Ready(())
    }

    fn over(&mut self, shared: &Shared, begun: Instant) {
        self.took = self.moved();
        self.moving = None;
        let waited = if self.early {
            begun.elapsed().saturating_sub(self.took)
        } else {
            Duration::ZERO
        };
        let micros = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        shared.counters.early_wait_micros.add(micros);
        shared.observed(self.part, false, self.rows.len(), begun, waited);
        self.guards = None;
    }

    /// For how long bytes have been under way so far.
    fn moved(&self) -> Duration {
        let running = self.moving.map(|since| since.elapsed());
        self.took + running.unwrap_or_default()
    }

    fn note_moving(&mut self, shared: &Shared, moving: bool) {
        if moving == self.moving.is_some() {
            return;
        }
        self.took = self.moved();
        self.moving = moving.then(Instant::now);
        if let Some(guards) = &mut self.guards {
            guards.flight.rest(!moving);
            guards.passage = moving.then(|| shared.traffic.load());
        }
    }

    /// The reads have come back: notes what they brought, and begins with the copies.
    fn read(&mut self, shared: &Arc<Shared>, read: Vec<Result<ReadDone, StoreError>>) {
        self.results.resize(self.rows.len(), None);
        let mut read = read.into_iter();
        for &Read { at, .. } in &self.reads {
            match read.next() {
                Some(Ok(done)) => self.bytes += done.bytes,
                Some(Err(error)) => self.results[at] = Some(error),
                None => self.results[at] = Some(StoreError::UnknownSession),
            }
        }
        let seconds = self.moved().as_secs_f64();
        shared.fanout.lock().note_remote(self.bytes, seconds);
        let mut copies = std::mem::take(&mut self.copies);
        copies.retain(|copy| self.results[copy.at].is_none());
        if copies.is_empty() {
            self.work = Work::None;
            return;
        }
        self.note_moving(shared, true);
        let within = std::mem::take(&mut self.within);
        let guards = self.guards.as_ref().expect("it is not over");
        let kept: Kept = Arc::clone(&guards.loading) as _;
        let copying = copy(Arc::clone(shared), copies, within, kept);
        self.work = Work::Copying(Box::pin(copying));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(guards) = self.guards.take() {
            guards.flight.leave();
        }
    }
}

/// Hands reads to the store. Those that wait for a writer are given half the time that the computation waits for a layer,
/// so that they fail before it does.
fn submit<'a, P: Iterator<Item = Range>>(
    shared: &Shared,
    reads: impl Iterator<Item = (&'a Session, Ranges<P>)>,
    loading: &Arc<Loading>,
) -> Work {
    let mut early = Vec::new();
    let complete = reads.filter_map(|(session, ranges)| match session {
        Session::Complete(session) => Some(RangeRead { session, ranges }),
        Session::Early(session) => {
            early.push(EarlyRead {
                session,
                ranges: ranges.collect(),
            });
            None
        }
    });
    let kept: Kept = Arc::clone(loading) as _;
    let reading = shared
        .store
        .read_ranges_keeping(complete, Some(Arc::clone(&kept)));
    if early.is_empty() {
        return Work::Reading(reading);
    }
    // None of them is complete.
    drop(reading);
    let within = shared.options.layer_timeout / 2;
    Work::Early(shared.store.read_early_keeping(early, within, Some(kept)))
}

/// Copies from slots to the blocks that need the same. The positions of rows that it failed for.
async fn copy(
    shared: Arc<Shared>,
    copies: Vec<Copy>,
    within: Vec<(u64, u64)>,
    kept: Kept,
) -> Vec<usize> {
    let len: u64 = within.iter().map(|(_, len)| len).sum();
    let mut failed = Vec::new();
    for copy in copies {
        let begun = Instant::now();
        let targets = copy.targets.len() as u64;
        let copying = copy.slot.copy(copy.targets, &within, Arc::clone(&kept));
        if copying.await {
            let seconds = begun.elapsed().as_secs_f64();
            shared.fanout.lock().note_local(len * targets, seconds);
        } else {
            failed.push(copy.at);
        }
    }
    failed
}

/// Plans to read a row's layer once for these blocks. `None`: it is not worth it, or there is no slot.
fn stage(
    shared: &Shared,
    job: &LoadJob,
    (at, blocks): (usize, Span<usize>),
    placed: &Placed<'_>,
    within: &[(u64, u64)],
) -> Option<Copy> {
    let staging = job.staging.as_ref()?;
    if !shared.fanout.lock().read_once(blocks.len()) {
        return None;
    }
    let slot = staging.slot()?;
    let ranges = slot.ranges(placed.ranges(blocks.start), within)?;
    let locals = |block| placed.ranges(block).map(|range| range.local).collect();
    Some(Copy {
        at,
        slot,
        ranges,
        targets: blocks.map(locals).collect(),
    })
}
