//! Writing ranges of put sessions.
//!
//! [`StoreClient::write_ranges`] hands all pieces of a call to the transport before it returns; the future only collects the
//! results. A session's ranges that overlap ranges still under way (of an earlier call) wait for them, while the rest of
//! the call goes on. Every replica gets every byte: a range is written when all replicas have it, with the same checksum.
//!
//! What was handed over together is a [`Round`]. Its results are noted in its sessions by whoever asks first: the call's own
//! future, or an end or an overlapping call that has to wait for it. So nobody waits for a future that is not polled, but
//! for one thing: ranges that had to wait begin only when their own future is polled.
//!
//! All that a round needs lies in a [`WriteCall`], whose memory serves call after call.
//!
//! Dropping the future stops nothing: the call is seen through in the background. The local memory
//! belongs to the transfers until they are done. Lock order: a round before its sessions.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::{fmt, mem, ops};

use layercake_protocol::error::Refusal;
use layercake_transport::{Direction, LocalSlice, PieceDone, PieceError};
use parking_lot::Mutex;

use super::StoreClient;
use super::core::Core;
use super::early::publish;
use super::fanout::{Failure, Fanout, Flight, Spare, Transfers};
use crate::error::StoreError;
use crate::session::cut::{Cut, cut_ranges};
use crate::session::put_state::{CallId, Phase, Publish};
use crate::session::{PutSession, PutShared, Source};

/// A range of an object, and the local memory that holds its bytes or is to hold them.
#[derive(Clone, Debug)]
pub struct Range {
    /// First byte in the object.
    pub offset: u64,
    /// The local bytes; their length is the range's.
    pub local: LocalSlice,
}

/// The most answers that room is made for before there are any.
const MOST_ANSWERS: usize = 4096;

/// Ranges to write into one object.
#[derive(Debug)]
pub struct RangeWrite<'a, R = Vec<Range>> {
    /// The session.
    pub session: &'a PutSession,
    /// At least one range, each with at least one byte. Where two overlap, the first in the list is written.
    pub ranges: R,
}

impl StoreClient {
    /// Writes ranges of many objects, without a call to the master. The answers align with `writes`: the
    /// bytes written, or what is wrong.
    ///
    /// The pieces are under way when this returns; the future resolves when all have ended. A range
    /// that lies outside its object, or has no bytes, refuses all ranges of its entry before any byte
    /// moves. A failed range fails its entry only, and its bytes count as not written: writing them
    /// again heals the session, unless nobody knows whether the failed write is still carried out; then
    /// the session answers [`StoreError::Unconfirmed`] from there on.
    pub fn write_ranges<'a, R>(
        &self,
        writes: impl IntoIterator<Item = RangeWrite<'a, R>>,
    ) -> Writing
    where
        R: IntoIterator<Item = Range>,
    {
        let core = self.core();
        let writes = writes.into_iter();
        let mut call = core.writes.take();
        let (least, most) = writes.size_hint();
        let mut answers = Vec::with_capacity(most.map_or(least, |most| most.min(MOST_ANSWERS)));
        for (index, write) in writes.enumerate() {
            answers.push(call.admit(index, write).err().map(Err));
        }
        Writing {
            core: Arc::clone(core),
            answers,
            waiting: call.take_waiting(),
            round: Some(Round::submit(core, call)),
            turn: None,
            left: false,
        }
    }
}

/// A call of [`StoreClient::write_ranges`] that is under way. Dropping it stops nothing: what was asked for is written.
#[must_use = "nobody knows what became of writes whose answers are not awaited"]
pub struct Writing {
    core: Arc<Core>,
    /// One for each entry of the call; none when it is over.
    answers: Vec<Option<Result<u64, StoreError>>>,
    round: Option<Arc<Round>>,
    /// What was admitted and not submitted.
    waiting: Option<Box<WriteCall>>,
    /// Waits until some of that may run.
    turn: Option<Turn>,
    /// In the background already. A runtime that is over drops it there at once: then it must not begin anew.
    left: bool,
}

type Turn = Pin<Box<dyn Future<Output = (Box<WriteCall>, Vec<(usize, StoreError)>)> + Send + Sync>>;

impl Future for Writing {
    type Output = Vec<Result<u64, StoreError>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            if let Some(round) = &this.round {
                ready!(round.poll_ended(cx));
                round.collect();
                round.take_results(&mut this.answers);
                this.round = None;
            }
            if let Some(waiting) = this.waiting.take() {
                this.turn = Some(Box::pin(waiting.await_turn()));
            }
            let Some(turn) = &mut this.turn else {
                let answers = mem::take(&mut this.answers).into_iter();
                let answers = answers
                    .map(|answer| answer.expect("a call that ran to its end has every answer"));
                return Poll::Ready(answers.collect());
            };
            let (mut call, refused) = ready!(turn.as_mut().poll(cx));
            this.turn = None;
            for (index, error) in refused {
                this.answers[index] = Some(Err(error));
            }
            this.waiting = call.take_waiting();
            this.round = Some(Round::submit(&this.core, call));
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let over = self.round.is_none() && self.waiting.is_none() && self.turn.is_none();
        if !over && !self.left {
            let rest = Self {
                core: Arc::clone(&self.core),
                answers: mem::take(&mut self.answers),
                round: self.round.take(),
                waiting: self.waiting.take(),
                turn: self.turn.take(),
                left: true,
            };
            self.core.background(async move { drop(rest.await) });
        }
    }
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing")
            .field("round", &self.round)
            .finish_non_exhaustive()
    }
}

/// Entries of a call that are, or are to be, submitted together.
#[derive(Debug, Default)]
pub(crate) struct WriteCall {
    entries: Vec<Entry>,
    /// Of all entries.
    ranges: Vec<Range>,
    cuts: Vec<Cut>,
    /// Of the cuts.
    slots: Vec<Slot>,
    results: Vec<(usize, Result<u64, StoreError>)>,
    spare: Spare<Tag>,
}

/// What one call means for one session.
#[derive(Debug)]
struct Entry {
    index: usize,
    put: Arc<PutShared>,
    call: CallId,
    /// Nothing that it overlaps is under way.
    ready: bool,
    /// What its bytes are read from.
    source: Option<Source>,
    /// Where its cuts are among those of the call, and its ranges.
    cuts: ops::Range<usize>,
    ranges: ops::Range<usize>,
    /// The first piece that failed.
    failed: Option<StoreError>,
}

/// How one cut fares, over all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Open,
    Written(Option<u32>),
    Failed,
}

/// Which piece: positions in the round's entries, in its cuts and in the entry's places.
#[derive(Clone, Copy, Debug)]
struct Tag {
    entry: u32,
    cut: u32,
    place: u32,
}

impl WriteCall {
    fn admit<R>(&mut self, index: usize, write: RangeWrite<'_, R>) -> Result<(), StoreError>
    where
        R: IntoIterator<Item = Range>,
    {
        let put = write.session.shared();
        let (first, first_cut) = (self.ranges.len(), self.cuts.len());
        self.ranges.extend(write.ranges);
        let ranges = self.ranges[first..].iter();
        let lens = ranges.map(|range| (range.offset, range.local.len()));
        cut_ranges(put.size, lens, &mut self.cuts)?;
        let admitted = put.admit(&self.cuts[first_cut..])?;
        self.entries.push(Entry {
            index,
            put: Arc::clone(put),
            call: admitted.call,
            ready: admitted.ready,
            source: admitted.source,
            cuts: first_cut..self.cuts.len(),
            ranges: first..self.ranges.len(),
            failed: None,
        });
        Ok(())
    }

    /// Parts with the entries that may not run yet, if there are any.
    fn take_waiting(&mut self) -> Option<Box<Self>> {
        if self.entries.iter().all(|entry| entry.ready) {
            return None;
        }
        let mut waiting = Box::<Self>::default();
        for entry in self.entries.extract_if(.., |entry| !entry.ready) {
            let (cuts, ranges) = (waiting.cuts.len(), waiting.ranges.len());
            waiting.cuts.extend(&self.cuts[entry.cuts.clone()]);
            waiting
                .ranges
                .extend_from_slice(&self.ranges[entry.ranges.clone()]);
            waiting.entries.push(Entry {
                cuts: cuts..waiting.cuts.len(),
                ranges: ranges..waiting.ranges.len(),
                ..entry
            });
        }
        Some(waiting)
    }

    /// Waits for the first entry's turn, and looks which others have theirs. With those that are refused.
    async fn await_turn(mut self: Box<Self>) -> (Box<Self>, Vec<(usize, StoreError)>) {
        let mut refused = Vec::new();
        let Some(first) = self.entries.first() else {
            return (self, refused);
        };
        let turn = first.put.may_run(first.call, first.source.as_ref()).await;
        let mut turn = Some(turn.map(|()| true));
        self.entries.retain_mut(|entry| {
            let try_run = || entry.put.try_run(entry.call, entry.source.as_ref());
            let turn = turn.take().unwrap_or_else(try_run);
            let error = match turn {
                Ok(ready) => {
                    entry.ready = ready;
                    return true;
                }
                Err(error) => error,
            };
            refused.push((entry.index, error));
            false
        });
        (self, refused)
    }

    fn submit(&mut self, core: &Core) -> Flight<Tag> {
        let fanout = Fanout::new(Direction::Write, core.config.checksums);
        let mut fanout = fanout.reusing(mem::take(&mut self.spare));
        for (at, entry) in self.entries.iter().enumerate() {
            let ranges = &self.ranges[entry.ranges.clone()];
            entry.push_pieces(index_of(at), &self.cuts, ranges, &mut fanout);
        }
        self.slots.resize(self.cuts.len(), Slot::Open);
        fanout.submit(&core.engine)
    }

    /// Notes what became of the pieces. Gives what is to be published.
    fn settle(&mut self, round: &Round, flight: Flight<Tag>) -> Vec<(Arc<PutShared>, Publish)> {
        let Self {
            entries,
            ranges,
            cuts,
            slots,
            results,
            spare,
        } = self;
        *spare = flight.collect(|tag, result| {
            let entry = &mut entries[tag.entry as usize];
            entry.landed(&round.core, cuts, slots, tag, result);
        });
        let mut publishing = Vec::new();
        for mut entry in entries.drain(..) {
            let (result, publish) = entry.settle(round, slots, &ranges[entry.ranges.clone()]);
            results.push((entry.index, result));
            if !publish.records.is_empty() {
                publishing.push((entry.put, publish));
            }
        }
        publishing
    }
}

/// Entries of one call that were submitted together.
pub(crate) struct Round {
    core: Arc<Core>,
    transfers: Transfers,
    inner: Mutex<RoundState>,
}

struct RoundState {
    /// Until it is collected.
    flight: Option<Flight<Tag>>,
    call: Box<WriteCall>,
}

impl Round {
    fn submit(core: &Arc<Core>, mut call: Box<WriteCall>) -> Arc<Self> {
        let flight = call.submit(core);
        let round = Arc::new(Self {
            core: Arc::clone(core),
            transfers: flight.transfers(),
            inner: Mutex::new(RoundState {
                flight: Some(flight),
                call,
            }),
        });
        for entry in &round.inner.lock().call.entries {
            entry.put.flying(&round);
        }
        round
    }

    /// Waits until every piece has ended, and has its sessions know.
    pub(crate) async fn settled(&self) {
        poll_fn(|cx| self.poll_ended(cx)).await;
        self.collect();
    }

    fn poll_ended(&self, cx: &Context<'_>) -> Poll<()> {
        for transfer in &self.transfers {
            ready!(transfer.poll_ended(cx));
        }
        Poll::Ready(())
    }

    fn collect(&self) {
        let mut inner = self.inner.lock();
        let Some(flight) = inner.flight.take() else {
            return;
        };
        let publishing = inner.call.settle(self, flight);
        drop(inner);
        publish(&self.core, publishing);
    }

    /// Puts the results of what was collected to their places, and lets go of the call's memory.
    fn take_results(&self, answers: &mut [Option<Result<u64, StoreError>>]) {
        let mut call = mem::take(&mut self.inner.lock().call);
        for (index, result) in call.results.drain(..) {
            answers[index] = Some(result);
        }
        call.entries.clear();
        call.ranges.clear();
        call.cuts.clear();
        call.slots.clear();
        let room = call.ranges.capacity();
        self.core.writes.give(call, room);
    }
}

impl fmt::Debug for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round")
            .field("transfers", &self.transfers)
            .finish_non_exhaustive()
    }
}

impl Entry {
    fn push_pieces(&self, entry: u32, cuts: &[Cut], ranges: &[Range], fanout: &mut Fanout<Tag>) {
        for cut_at in self.cuts.clone() {
            let cut = cuts[cut_at];
            let local = &ranges[cut.source].local;
            let local = if cut.range.len() == local.len() {
                local.clone()
            } else {
                local
                    .part(cut.within, cut.range.len())
                    .expect("a cut lies inside its range")
            };
            for (place_at, place) in self.put.places.iter().enumerate() {
                let tag = Tag {
                    entry,
                    cut: index_of(cut_at),
                    place: index_of(place_at),
                };
                fanout.push(&place.target, local.clone(), place.payload(cut.range), tag);
            }
        }
    }

    fn landed(
        &mut self,
        core: &Core,
        cuts: &[Cut],
        slots: &mut [Slot],
        tag: Tag,
        result: Result<PieceDone, Failure>,
    ) {
        let slot = &mut slots[tag.cut as usize];
        let range = cuts[tag.cut as usize].range;
        let target = &self.put.places[tag.place as usize].target;
        if let Err(Failure { in_doubt: true, .. }) = result {
            core.in_doubt(&self.put);
        }
        let result = result.map_err(|failure| failure.error);
        let failure = match (result, *slot) {
            (Ok(done), Slot::Open) => {
                core.suspects.clear(target.segment);
                *slot = Slot::Written(done.crc32c);
                return;
            }
            (Ok(done), Slot::Written(crc)) if crc == done.crc32c => return,
            (Ok(_), Slot::Failed) => return,
            // The local bytes changed while they were read: the replicas differ.
            (Ok(_), Slot::Written(_)) => StoreError::ChecksumMismatch {
                offset: range.start(),
                len: range.len(),
            },
            (Err(PieceError::Refused(layercake_transport::Refusal::StaleGeneration)), _) => {
                core.settled(&self.put, Phase::Superseded);
                Refusal::Superseded.into()
            }
            (Err(error), _) => {
                core.suspects.failed(target, error);
                StoreError::Transfer {
                    offset: range.start(),
                    len: range.len(),
                    source: error,
                }
            }
        };
        *slot = Slot::Failed;
        self.failed.get_or_insert(failure);
    }

    /// The call's result, and what the session publishes.
    fn settle(
        &mut self,
        round: &Round,
        slots: &[Slot],
        ranges: &[Range],
    ) -> (Result<u64, StoreError>, Publish) {
        let core = &round.core;
        let slots = &slots[self.cuts.clone()];
        let source = self.source.take();
        let outcome = |at: usize| match slots[at] {
            Slot::Written(crc) => Ok(crc),
            Slot::Open | Slot::Failed => Err(()),
        };
        let end = self.put.finish(self.call, source.as_ref(), round, outcome);
        let publish = end.publish;
        if end.abandoned {
            core.finisher.settle_later(Arc::clone(&self.put));
        }
        if end.withdrawn {
            return (Err(StoreError::SourceWithdrawn), publish);
        }
        if let Some(error) = self.failed.take() {
            return (Err(error), publish);
        }
        let lens = ranges.iter().map(|range| range.local.len());
        let bytes = lens.fold(0, u64::saturating_add);
        let copies = self.put.places.len() as u64;
        core.counters
            .bytes_written
            .add(bytes.saturating_mul(copies));
        (Ok(bytes), publish)
    }
}

fn index_of(at: usize) -> u32 {
    u32::try_from(at).expect("a call has fewer entries than fit into memory")
}
