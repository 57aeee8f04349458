//! Writing ranges of put sessions.
//!
//! [`StoreClient::write_ranges`] hands all pieces of a call to the transport before it returns; the
//! future only collects the results. A session's ranges that overlap ranges still under way (of an
//! earlier call) wait for them, while the rest of the call goes on. Every replica gets every byte: a
//! range is written when all replicas have it, with the same checksum.
//!
//! Dropping the future stops nothing: the call is seen through in the background. The local memory
//! belongs to the transfers until they are done.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_transport::{Direction, LocalSlice, PieceDone, PieceError};

use super::StoreClient;
use super::core::Core;
use super::fanout::{Fanout, Flight};
use crate::error::StoreError;
use crate::session::cut::{Cut, cut_ranges};
use crate::session::put_state::{CallId, Phase};
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
    /// again heals the session.
    pub fn write_ranges(
        &self,
        writes: Vec<RangeWrite<'_>>,
    ) -> impl Future<Output = Vec<Result<u64, StoreError>>> + Send + 'static {
        let mut call = WriteCall::new(Arc::clone(self.core()), writes.len());
        for write in writes {
            call.admit(write);
        }
        call.submit_ready();
        self.core().see_through(call.run())
    }
}

/// One call of `write_ranges`.
struct WriteCall {
    core: Arc<Core>,
    /// One for each entry of the call.
    answers: Vec<Option<Result<u64, StoreError>>>,
    /// The entries that were admitted and have not ended.
    entries: Vec<Entry>,
    flight: Flight<Tag>,
}

struct Entry {
    index: usize,
    put: Arc<PutShared>,
    call: CallId,
    stage: Stage,
    cuts: Vec<Cut>,
    ranges: Vec<Range>,
    slots: Vec<Slot>,
    /// The first piece that failed.
    failed: Option<StoreError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Ready,
    Flying,
}

/// How one cut fares, over all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Open,
    Written(Option<u32>),
    Failed,
}

/// Which piece: positions in `entries`, in the entry's cuts and in its places.
#[derive(Clone, Copy, Debug)]
struct Tag {
    entry: u32,
    cut: u32,
    place: u32,
}

impl WriteCall {
    fn new(core: Arc<Core>, len: usize) -> Self {
        Self {
            core,
            answers: Vec::with_capacity(len),
            entries: Vec::with_capacity(len),
            flight: Flight::default(),
        }
    }

    fn admit(&mut self, write: RangeWrite<'_>) {
        let index = self.answers.len();
        let put = write.session.shared();
        let lens = write
            .ranges
            .iter()
            .map(|range| (range.offset, range.local.len()));
        let admitted = cut_ranges(put.size, lens).and_then(|cuts| {
            put.admit(&cuts)
                .map(|(call, running)| (cuts, call, running))
        });
        match admitted {
            Ok((cuts, call, running)) => {
                self.answers.push(None);
                self.entries.push(Entry {
                    index,
                    put: Arc::clone(put),
                    call,
                    stage: if running {
                        Stage::Ready
                    } else {
                        Stage::Waiting
                    },
                    slots: vec![Slot::Open; cuts.len()],
                    cuts,
                    ranges: write.ranges,
                    failed: None,
                });
            }
            Err(error) => self.answers.push(Some(Err(error))),
        }
    }

    /// Submits the entries that may run.
    fn submit_ready(&mut self) {
        let mut fanout = Fanout::new(Direction::Write, self.core.config.checksums);
        for (at, entry) in self.entries.iter_mut().enumerate() {
            if entry.stage == Stage::Ready {
                entry.stage = Stage::Flying;
                entry.push_pieces(index_of(at), &mut fanout);
            }
        }
        self.flight = fanout.submit(&self.core.engine);
    }

    async fn run(mut self) -> Vec<Result<u64, StoreError>> {
        loop {
            self.land().await;
            self.settle_landed();
            if self.entries.is_empty() {
                return self.answers();
            }
            self.await_turn().await;
            self.submit_ready();
        }
    }

    async fn land(&mut self) {
        let Self {
            core,
            entries,
            flight,
            ..
        } = self;
        flight
            .land(|tag, result| {
                if let Some(entry) = entries.get_mut(tag.entry as usize) {
                    entry.landed(core, tag, result);
                }
            })
            .await;
    }

    /// Ends the entries whose pieces have all ended; those that wait remain.
    fn settle_landed(&mut self) {
        let Self {
            core,
            answers,
            entries,
            ..
        } = self;
        entries.retain_mut(|entry| {
            if entry.stage == Stage::Flying {
                answers[entry.index] = Some(entry.settle(core));
            }
            entry.stage != Stage::Flying
        });
    }

    /// Waits for the first waiting entry's turn, and looks which others have theirs.
    async fn await_turn(&mut self) {
        let Some(first) = self.entries.first() else {
            return;
        };
        let turn = first.put.may_run(first.call).await;
        let Self {
            answers, entries, ..
        } = self;
        let mut turn = Some(turn.map(|()| true));
        entries.retain_mut(|entry| {
            let turn = turn.take().unwrap_or_else(|| entry.put.is_turn(entry.call));
            match turn {
                Ok(true) => entry.stage = Stage::Ready,
                Ok(false) => {}
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

impl Entry {
    fn push_pieces(&self, entry: u32, fanout: &mut Fanout<Tag>) {
        for (cut_at, cut) in self.cuts.iter().enumerate() {
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

    fn landed(&mut self, core: &Core, tag: Tag, result: Result<PieceDone, PieceError>) {
        let slot = &mut self.slots[tag.cut as usize];
        let range = self.cuts[tag.cut as usize].range;
        let target = &self.put.places[tag.place as usize].target;
        let failure = match result {
            Ok(done) => {
                core.suspects.clear(target.segment);
                match *slot {
                    Slot::Open => {
                        *slot = Slot::Written(done.crc32c);
                        return;
                    }
                    Slot::Written(crc) if crc == done.crc32c => return,
                    Slot::Failed => return,
                    // The local bytes changed while they were read: the replicas differ.
                    Slot::Written(_) => StoreError::ChecksumMismatch {
                        offset: range.start(),
                        len: range.len(),
                    },
                }
            }
            Err(PieceError::Refused(layercake_transport::Refusal::StaleGeneration)) => {
                core.settled(&self.put, Phase::Superseded);
                Refusal::Superseded.into()
            }
            Err(error) => {
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

    fn settle(&mut self, core: &Core) -> Result<u64, StoreError> {
        let slots = &self.slots;
        let abandoned = self.put.finish(self.call, |at| match slots[at] {
            Slot::Written(crc) => Ok(crc),
            Slot::Open | Slot::Failed => Err(()),
        });
        if abandoned {
            core.finisher.settle_later(Arc::clone(&self.put));
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => {
                let lens = self.ranges.iter().map(|range| range.local.len());
                let bytes = lens.fold(0, u64::saturating_add);
                let copies = self.put.places.len() as u64;
                core.counters
                    .bytes_written
                    .add(bytes.saturating_mul(copies));
                Ok(bytes)
            }
        }
    }
}

fn index_of(at: usize) -> u32 {
    u32::try_from(at).expect("a call has fewer entries than fit into memory")
}
