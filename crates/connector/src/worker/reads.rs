//! One call that reads a part of some rows: a layer, or whole objects.
//!
//! A row with one block is read into it. One with several is read into each of them, or once into a
//! staging slot and copied from there, whichever [`fanout`](crate::fanout) says. Whole objects are not staged: a slot
//! has room for a layer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::Generation;
use layercake_protocol::layout::AppliedRanges;
use layercake_store::{EarlyRead, EarlySession, GetSession, RangeRead, ReadDone, StoreError};
use layercake_transport::{LocalSlice, PieceError};

use super::caches::Part;
use super::receiver::LoadJob;
use super::shared::Shared;
use super::staging::Slot;

/// What a call came to.
pub(crate) struct Done {
    pub(crate) part: Part,
    pub(crate) rows: Vec<usize>,
    /// One for each row: what is wrong.
    pub(crate) results: Vec<Option<StoreError>>,
    /// Bytes read from the store.
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
    /// Bytes that were asked for.
    pub(crate) asked: u64,
}

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

type Reading = std::pin::Pin<Box<dyn Future<Output = Vec<Result<ReadDone, StoreError>>> + Send>>;

/// A call whose reads are under way.
pub(crate) struct Call {
    part: Part,
    rows: Vec<usize>,
    /// For each read, the position of its row.
    reads: Vec<usize>,
    /// Copies to make once the reads are done.
    copies: Vec<Copy>,
    within: Vec<(u64, u64)>,
    reading: Reading,
    begun: Instant,
    asked: u64,
}

struct Copy {
    /// Position of the row.
    at: usize,
    slot: Slot,
    targets: Vec<Vec<LocalSlice>>,
}

impl Call {
    /// Submits the reads of `part`. `None`: the caches have no such block.
    pub(crate) fn new(
        shared: &Shared,
        job: &LoadJob,
        part: Part,
        rows: &[&(usize, Session)],
        scratch: &mut AppliedRanges,
    ) -> Option<Self> {
        let within: Vec<(u64, u64)> = match part {
            Part::Layer(layer) => job.caches.within(layer).collect(),
            Part::Whole => Vec::new(),
        };
        let mut reads = Vec::with_capacity(rows.len());
        let mut of_row = Vec::with_capacity(rows.len());
        let mut copies = Vec::new();
        for (at, (row, session)) in rows.iter().enumerate() {
            let blocks = job.receiving.0.look(|state| state.blocks(*row).to_vec());
            let targets = job.caches.part(part, &blocks, scratch)?;
            if part != Part::Whole
                && let Some((copy, ranges)) = stage(shared, job, at, &targets, &within)
            {
                copies.push(copy);
                of_row.push(at);
                reads.push((session, ranges));
                continue;
            }
            if targets.len() > 1 && part.is_first() {
                shared.counters.repeated_reads.add(targets.len() as u64);
            }
            for ranges in targets {
                of_row.push(at);
                reads.push((session, ranges));
            }
        }
        if part.is_first() {
            let targets = copies.iter().map(|copy| copy.targets.len() as u64).sum();
            shared.counters.fanned_out_blocks.add(targets);
        }
        let begun = Instant::now();
        let asked = job.caches.part_len(part) * reads.len() as u64;
        shared.prefetch.lock().ask(asked, begun);
        Some(Self {
            part,
            rows: rows.iter().map(|(row, _)| *row).collect(),
            reads: of_row,
            copies,
            within,
            begun,
            asked,
            reading: reading(shared, reads),
        })
    }

    pub(crate) async fn run(self, shared: Arc<Shared>) -> Done {
        let read = self.reading.await;
        let (mut bytes, mut results) = (0, vec![None; self.rows.len()]);
        for (number, &at) in self.reads.iter().enumerate() {
            match read.get(number) {
                Some(Ok(done)) => bytes += done.bytes,
                Some(Err(error)) => results[at] = Some(error.clone()),
                None => results[at] = Some(StoreError::UnknownSession),
            }
        }
        let took = self.begun.elapsed();
        shared.fanout.lock().note_remote(bytes, took.as_secs_f64());
        for copy in self.copies {
            if results[copy.at].is_some() {
                continue;
            }
            let begun = Instant::now();
            let targets = copy.targets.len() as u64;
            if copy.slot.copy(copy.targets, &self.within).await {
                let len: u64 = self.within.iter().map(|(_, len)| len).sum();
                let seconds = begun.elapsed().as_secs_f64();
                shared.fanout.lock().note_local(len * targets, seconds);
            } else {
                results[copy.at] = Some(StoreError::Transfer {
                    offset: 0,
                    len: 0,
                    source: PieceError::NoTransport,
                });
            }
        }
        shared.observed(self.part, false, self.rows.len(), self.begun);
        Done {
            part: self.part,
            rows: self.rows,
            results,
            bytes,
            took: self.begun.elapsed(),
            asked: self.asked,
        }
    }
}

/// Hands reads to the store. Those that wait for a writer are given half the time that the computation waits for a layer,
/// so that they fail before it does.
fn reading(shared: &Shared, reads: Vec<(&Session, Vec<layercake_store::Range>)>) -> Reading {
    let (mut complete, mut early) = (Vec::new(), Vec::new());
    for (session, ranges) in reads {
        match session {
            Session::Complete(session) => complete.push(RangeRead { session, ranges }),
            Session::Early(session) => early.push(EarlyRead { session, ranges }),
        }
    }
    if early.is_empty() {
        return Box::pin(shared.store.read_ranges(complete));
    }
    let within = shared.options.layer_timeout / 2;
    Box::pin(shared.store.read_early(early, within))
}

/// Plans to read a row's layer once. `None`: it is not worth it, or there is no slot.
fn stage(
    shared: &Shared,
    job: &LoadJob,
    at: usize,
    targets: &[Vec<layercake_store::Range>],
    within: &[(u64, u64)],
) -> Option<(Copy, Vec<layercake_store::Range>)> {
    let staging = job.staging.as_ref()?;
    if !shared.fanout.lock().read_once(targets.len()) {
        return None;
    }
    let slot = staging.slot()?;
    let ranges = slot.ranges(targets.first()?, within)?;
    let locals = |ranges: &Vec<layercake_store::Range>| {
        ranges.iter().map(|range| range.local.clone()).collect()
    };
    let copy = Copy {
        at,
        slot,
        targets: targets.iter().map(locals).collect(),
    };
    Some((copy, ranges))
}
