//! Writing ranges of put sessions.
//!
//! [`StoreClient::write_ranges`] hands all pieces of a call to the transport before it returns; the
//! future only collects the results. A session's ranges that overlap ranges still under way (of an
//! earlier call) wait for them, while the rest of the call goes on. Every replica gets every byte: a
//! range is written when all replicas have it, with the same checksum.
//!
//! What was handed over together is a [`Round`]. Its results are noted in its sessions by whoever asks
//! first: the call's own future, or an end or an overlapping call that has to wait for it. So nobody
//! waits for a future that is not polled, but for one thing: ranges that had to wait begin only when
//! their own future is polled.
//!
//! Dropping the future stops nothing: the call is seen through in the background. The local memory
//! belongs to the transfers until they are done. Lock order: a round before its sessions.

use std::sync::Arc;
use std::{fmt, mem, ops};

use layercake_protocol::error::Refusal;
use layercake_transport::{Direction, LocalSlice, PieceDone, PieceError, Transfer};
use parking_lot::Mutex;

use super::StoreClient;
use super::core::Core;
use super::early::publish;
use super::fanout::{Failure, Fanout, Flight};
use crate::error::StoreError;
use crate::session::cut::{Cut, cut_ranges};
use crate::session::put_state::{CallId, Phase, Publish};
use crate::session::{PutSession, PutShared};

/// A range of an object, and the local memory that holds its bytes or is to hold them.
#[derive(Clone, Debug)]
pub struct Range {
    /// First byte in the object.
    pub offset: u64,
    /// The local bytes; their length is the range's.
    pub local: LocalSlice,
}

/// Ranges to write into one object.
#[derive(Debug)]
pub struct RangeWrite<'a> {
    /// The session.
    pub session: &'a PutSession,
    /// At least one range, each with at least one byte. Where two overlap, the first in the list is written.
    pub ranges: Vec<Range>,
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
    pub fn write_ranges(
        &self,
        writes: Vec<RangeWrite<'_>>,
    ) -> impl Future<Output = Vec<Result<u64, StoreError>>> + Send + 'static {
        let core = self.core();
        let mut answers = Vec::with_capacity(writes.len());
        let mut entries = Vec::with_capacity(writes.len());
        let mut cuts = Vec::with_capacity(writes.len());
        for (index, write) in writes.into_iter().enumerate() {
            answers.push(match Entry::admit(index, write, &mut cuts) {
                Ok(entry) => {
                    entries.push(entry);
                    None
                }
                Err(error) => Some(Err(error)),
            });
        }
        let mut call = WriteCall {
            core: Arc::clone(core),
            answers,
            waiting: entries,
            cuts: cuts.into(),
            round: None,
        };
        call.submit_ready();
        core.see_through(call.run())
    }
}

/// One call of `write_ranges`.
struct WriteCall {
    core: Arc<Core>,
    /// One for each entry of the call.
    answers: Vec<Option<Result<u64, StoreError>>>,
    /// Entries that were admitted and not submitted.
    waiting: Vec<Entry>,
    /// Of all entries.
    cuts: Arc<[Cut]>,
    round: Option<Arc<Round>>,
}

/// What one call means for one session.
struct Entry {
    index: usize,
    put: Arc<PutShared>,
    call: CallId,
    /// Nothing that it overlaps is under way.
    ready: bool,
    /// Where its cuts are among those of the call.
    cuts: ops::Range<usize>,
    ranges: Vec<Range>,
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

/// Which piece: positions in the round's entries, in the call's cuts and in the entry's places.
#[derive(Clone, Copy, Debug)]
struct Tag {
    entry: u32,
    cut: u32,
    place: u32,
}

impl WriteCall {
    /// Submits the entries that may run, as one round.
    fn submit_ready(&mut self) {
        let waiting = mem::take(&mut self.waiting);
        let (ready, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|e| e.ready);
        self.waiting = waiting;
        if !ready.is_empty() {
            self.round = Some(Round::submit(&self.core, &self.cuts, ready));
        }
    }

    async fn run(mut self) -> Vec<Result<u64, StoreError>> {
        loop {
            if let Some(round) = self.round.take() {
                round.settled().await;
                for (index, result) in round.take_results() {
                    self.answers[index] = Some(result);
                }
            }
            if self.waiting.is_empty() {
                return self.answers();
            }
            self.await_turn().await;
            self.submit_ready();
        }
    }

    /// Waits for the first waiting entry's turn, and looks which others have theirs.
    async fn await_turn(&mut self) {
        let Some(first) = self.waiting.first() else {
            return;
        };
        let turn = first.put.may_run(first.call).await;
        let Self {
            answers, waiting, ..
        } = self;
        let mut turn = Some(turn.map(|()| true));
        waiting.retain_mut(|entry| {
            let turn = turn.take().unwrap_or_else(|| entry.put.try_run(entry.call));
            match turn {
                Ok(ready) => entry.ready = ready,
                Err(error) => answers[entry.index] = Some(Err(error)),
            }
            answers[entry.index].is_none()
        });
    }

    fn answers(self) -> Vec<Result<u64, StoreError>> {
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.expect("a call that ran to its end has every answer"))
            .collect()
    }
}

/// Entries of one call that were submitted together.
pub(crate) struct Round {
    core: Arc<Core>,
    cuts: Arc<[Cut]>,
    transfers: Vec<Transfer>,
    inner: Mutex<RoundState>,
}

struct RoundState {
    /// Until it is collected.
    flight: Option<Flight<Tag>>,
    entries: Vec<Entry>,
    /// Of the call's cuts.
    slots: Vec<Slot>,
    results: Vec<(usize, Result<u64, StoreError>)>,
}

impl Round {
    fn submit(core: &Arc<Core>, cuts: &Arc<[Cut]>, entries: Vec<Entry>) -> Arc<Self> {
        let mut fanout = Fanout::new(Direction::Write, core.config.checksums);
        for (at, entry) in entries.iter().enumerate() {
            entry.push_pieces(index_of(at), cuts, &mut fanout);
        }
        let flight = fanout.submit(&core.engine);
        let puts: Vec<Arc<PutShared>> = entries.iter().map(|e| Arc::clone(&e.put)).collect();
        let round = Arc::new(Self {
            core: Arc::clone(core),
            cuts: Arc::clone(cuts),
            transfers: flight.transfers(),
            inner: Mutex::new(RoundState {
                flight: Some(flight),
                results: Vec::with_capacity(entries.len()),
                entries,
                slots: vec![Slot::Open; cuts.len()],
            }),
        });
        for put in puts {
            put.flying(&round);
        }
        round
    }

    /// Waits until every piece has ended, and has its sessions know.
    pub(crate) async fn settled(&self) {
        for transfer in &self.transfers {
            transfer.clone().await;
        }
        self.collect();
    }

    fn collect(&self) {
        let mut inner = self.inner.lock();
        let RoundState {
            flight,
            entries,
            slots,
            results,
        } = &mut *inner;
        let Some(flight) = flight.take() else {
            return;
        };
        flight.collect(|tag, result| {
            let entry = &mut entries[tag.entry as usize];
            entry.landed(&self.core, &self.cuts, slots, tag, result);
        });
        let mut publishing = Vec::new();
        for mut entry in entries.drain(..) {
            let (result, publish) = entry.settle(self, slots);
            results.push((entry.index, result));
            if !publish.records.is_empty() {
                publishing.push((entry.put, publish));
            }
        }
        drop(inner);
        publish(&self.core, publishing);
    }

    fn take_results(&self) -> Vec<(usize, Result<u64, StoreError>)> {
        mem::take(&mut self.inner.lock().results)
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
    fn admit(index: usize, write: RangeWrite<'_>, cuts: &mut Vec<Cut>) -> Result<Self, StoreError> {
        let put = write.session.shared();
        let first = cuts.len();
        let lens = write.ranges.iter();
        let lens = lens.map(|range| (range.offset, range.local.len()));
        cut_ranges(put.size, lens, cuts)?;
        let (call, ready) = put.admit(&cuts[first..])?;
        Ok(Self {
            index,
            put: Arc::clone(put),
            call,
            ready,
            cuts: first..cuts.len(),
            ranges: write.ranges,
            failed: None,
        })
    }

    fn push_pieces(&self, entry: u32, cuts: &[Cut], fanout: &mut Fanout<Tag>) {
        for cut_at in self.cuts.clone() {
            let cut = cuts[cut_at];
            let local = &self.ranges[cut.source].local;
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
    fn settle(&mut self, round: &Round, slots: &[Slot]) -> (Result<u64, StoreError>, Publish) {
        let core = &round.core;
        let slots = &slots[self.cuts.clone()];
        let (abandoned, publish) = self.put.finish(self.call, round, |at| match slots[at] {
            Slot::Written(crc) => Ok(crc),
            Slot::Open | Slot::Failed => Err(()),
        });
        if abandoned {
            core.finisher.settle_later(Arc::clone(&self.put));
        }
        if let Some(error) = self.failed.take() {
            return (Err(error), publish);
        }
        let lens = self.ranges.iter().map(|range| range.local.len());
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
