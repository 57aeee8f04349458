//! Reading ranges of get sessions.
//!
//! [`StoreClient::read_ranges`] hands all pieces of a call to the transport before it returns. Ranges
//! are cut at the bounds of the rows that were written, so that each whole row that is read can be
//! compared with its checksum (L5). An entry that fails at one replica, because the peer is gone,
//! the place was reused or a checksum does not fit, is read again from the next one; an entry whose
//! lease ended before its last byte arrived is reported failed, whatever arrived. Of a session whose payload came
//! along with its header nothing is moved any more: a read is a copy.
//!
//! Dropping the future stops nothing: the call is seen through in the background. The local memory
//! belongs to the transfers until they are done, and the session's lease is kept until then.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use layercake_protocol::error::Refusal;
use layercake_protocol::header::{ReadPlan, Verified, VerifyError};
use layercake_protocol::ids::SegmentId;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::ObjectRef;
use layercake_transport::{Direction, PieceDone, PieceError};

use super::StoreClient;
use super::core::{Core, now};
use super::fanout::{Fanout, Flight};
use super::write::Range;
use crate::error::StoreError;
use crate::session::cut::check_range;
use crate::session::{GetSession, GetShared, Payload};

/// Ranges to read from one object.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// The session.
    pub session: &'a GetSession,
    /// Any number of ranges, each with at least one byte.
    pub ranges: Vec<Range>,
}

/// What a read of one entry brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadDone {
    /// All bytes.
    pub bytes: u64,
    /// Of these, the bytes whose checksum was compared and fits.
    pub verified: u64,
    /// Of these, the bytes that could not be verified: of rows that were not read whole, or that have no
    /// checksum.
    pub unverified: u64,
}

impl StoreClient {
    /// Reads ranges of many objects, without a call to the master. The answers align with `reads`. An
    /// entry that fails leaves anything in its own local memory, and its neighbours alone.
    pub fn read_ranges(
        &self,
        reads: Vec<RangeRead<'_>>,
    ) -> impl Future<Output = Vec<Result<ReadDone, StoreError>>> + Send + 'static {
        let mut call = ReadCall::new(Arc::clone(self.core()), reads.len());
        for read in reads {
            call.admit(read);
        }
        call.submit();
        self.core().see_through(call.run())
    }
}

/// One call of `read_ranges`.
struct ReadCall {
    core: Arc<Core>,
    answers: Vec<Option<Result<ReadDone, StoreError>>>,
    entries: Vec<Entry>,
    flight: Flight<Tag>,
    mismatches: Mismatches,
}

/// Bytes that did not fit their checksum, for one line in the log.
#[derive(Debug, Default)]
struct Mismatches {
    count: u64,
    sample: Option<(ObjectRef, SegmentId, VerifyError)>,
}

/// Which piece: positions in `entries` and in the entry's plan.
#[derive(Clone, Copy, Debug)]
struct Tag {
    entry: u32,
    piece: u32,
}

struct Entry {
    index: usize,
    get: Arc<GetShared>,
    ranges: Vec<Range>,
    plan: ReadPlan,
    /// Of each piece, as it arrived.
    crcs: Vec<Option<u32>>,
    /// The replica that is tried, and how many were.
    place: usize,
    tried: usize,
    failed: Option<StoreError>,
}

impl ReadCall {
    fn new(core: Arc<Core>, len: usize) -> Self {
        Self {
            core,
            answers: Vec::with_capacity(len),
            entries: Vec::with_capacity(len),
            flight: Flight::default(),
            mismatches: Mismatches::default(),
        }
    }

    fn admit(&mut self, read: RangeRead<'_>) {
        let get = read.session.shared();
        let index = self.answers.len();
        let wanted = read.ranges.iter();
        let wanted: Result<Vec<ByteRange>, _> = wanted
            .map(|range| check_range(get.size, range.offset, range.local.len()))
            .collect();
        let begun = wanted.and_then(|wanted| {
            let begun = get.lease.lease().begin_read(now());
            begun
                .map(|()| wanted)
                .map_err(|_| Refusal::LeaseExpired.into())
        });
        match begun {
            Ok(wanted) if let Some(payload) = &get.payload => {
                let done = copied(get, payload, &read.ranges, &wanted);
                self.answers.push(Some(done));
            }
            Ok(wanted) => {
                let plan = ReadPlan::new(&get.rows, &wanted);
                self.answers.push(None);
                self.entries.push(Entry {
                    index,
                    get: Arc::clone(get),
                    ranges: read.ranges,
                    crcs: vec![None; plan.pieces().len()],
                    plan,
                    place: get.first_place(),
                    tried: 1,
                    failed: None,
                });
            }
            Err(error) => self.answers.push(Some(Err(error))),
        }
    }

    /// Submits all entries, each to its replica.
    fn submit(&mut self) {
        let mut fanout = Fanout::new(Direction::Read, self.core.config.checksums);
        for (at, entry) in self.entries.iter().enumerate() {
            entry.push_pieces(index_of(at), &mut fanout);
        }
        self.flight = fanout.submit(&self.core.engine);
    }

    async fn run(mut self) -> Vec<Result<ReadDone, StoreError>> {
        loop {
            self.land().await;
            self.settle();
            if self.entries.is_empty() {
                self.report_mismatches();
                return self.answers();
            }
            self.submit();
        }
    }

    async fn land(&mut self) {
        let Self {
            core,
            entries,
            flight,
            ..
        } = self;
        std::mem::take(flight)
            .land(|tag, result| {
                if let Some(entry) = entries.get_mut(tag.entry as usize) {
                    entry.landed(core, tag.piece as usize, result);
                }
            })
            .await;
    }

    /// Ends the entries that have what they want, or have no replica left to try.
    fn settle(&mut self) {
        let Self {
            core,
            answers,
            entries,
            mismatches,
            ..
        } = self;
        entries.retain_mut(|entry| {
            answers[entry.index] = entry.settle(core, mismatches);
            answers[entry.index].is_none()
        });
    }

    fn report_mismatches(&self) {
        if let Some((object, segment, error)) = &self.mismatches.sample {
            let count = self.mismatches.count;
            tracing::warn!(count, ?object, %segment, %error, "stored bytes do not fit their checksum");
        }
    }

    fn answers(self) -> Vec<Result<ReadDone, StoreError>> {
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.expect("a call that ran to its end has every answer"))
            .collect()
    }
}

impl Entry {
    fn push_pieces(&self, entry: u32, fanout: &mut Fanout<Tag>) {
        let place = &self.get.places[self.place];
        for (at, piece) in self.plan.pieces().iter().enumerate() {
            let local = &self.ranges[piece.wanted].local;
            let local = if piece.range.len() == local.len() {
                local.clone()
            } else {
                local
                    .part(piece.within, piece.range.len())
                    .expect("a piece lies inside its range")
            };
            let tag = Tag {
                entry,
                piece: index_of(at),
            };
            fanout.push(&place.target, local, place.payload(piece.range), tag);
        }
    }

    fn landed(&mut self, core: &Core, piece: usize, result: Result<PieceDone, PieceError>) {
        let target = &self.get.places[self.place].target;
        match result {
            Ok(done) => {
                core.suspects.clear(target.segment);
                self.crcs[piece] = done.crc32c;
            }
            // The place was reused: the lease must be over, known here or not.
            Err(PieceError::Refused(layercake_transport::Refusal::StaleGeneration)) => {
                self.failed.get_or_insert(Refusal::LeaseExpired.into());
            }
            Err(source) => {
                core.suspects.failed(target, source);
                let range = self.plan.pieces()[piece].range;
                self.failed.get_or_insert(StoreError::Transfer {
                    offset: range.start(),
                    len: range.len(),
                    source,
                });
            }
        }
    }

    /// The answer; `None`: another replica is to be tried.
    fn settle(
        &mut self,
        core: &Core,
        mismatches: &mut Mismatches,
    ) -> Option<Result<ReadDone, StoreError>> {
        let read = match self.failed.take() {
            Some(error) => Err(error),
            None => self.verify(core, mismatches),
        };
        let error = match read {
            Ok(verified) => return Some(self.done(core, verified)),
            Err(error) => error,
        };
        if self.tried < self.get.places.len() {
            core.counters.failovers.one();
            self.tried += 1;
            self.place = (self.place + 1) % self.get.places.len();
            return None;
        }
        // The read counts as ended either way; why it failed is the better answer.
        let over = self.get.lease.lease().end_read(now());
        Some(Err(
            over.map_or_else(|_| Refusal::LeaseExpired.into(), |()| error)
        ))
    }

    fn verify(&self, core: &Core, mismatches: &mut Mismatches) -> Result<Verified, StoreError> {
        self.plan.verify(&self.crcs).map_err(|error| {
            core.counters.mismatches.one();
            mismatches.count += 1;
            let range = match error {
                VerifyError::Mismatch { range, .. } => range,
                _ => ByteRange::to(self.get.size),
            };
            mismatches.sample.get_or_insert_with(|| {
                let segment = self.get.places[self.place].replica.segment;
                (self.get.lease.lease().object().clone(), segment, error)
            });
            StoreError::ChecksumMismatch {
                offset: range.start(),
                len: range.len(),
            }
        })
    }

    fn done(&self, core: &Core, verified: Verified) -> Result<ReadDone, StoreError> {
        self.get.preferred.store(self.place, Ordering::Relaxed);
        let over = self.get.lease.lease().end_read(now());
        over.map_err(|_| StoreError::Refused(Refusal::LeaseExpired))?;
        let done = ReadDone {
            bytes: verified.verified_bytes + verified.unverified_bytes,
            verified: verified.verified_bytes,
            unverified: verified.unverified_bytes,
        };
        core.counters.bytes_read.add(done.bytes);
        core.counters.bytes_verified.add(done.verified);
        core.counters.bytes_unverified.add(done.unverified);
        Ok(done)
    }
}

/// Reads ranges of a payload that is here, under a lease on which a read has begun.
fn copied(
    get: &GetShared,
    payload: &Payload,
    ranges: &[Range],
    wanted: &[ByteRange],
) -> Result<ReadDone, StoreError> {
    let mut done = ReadDone::default();
    let mut copied = Ok(());
    for (Range { local, .. }, &range) in ranges.iter().zip(wanted) {
        if !payload.part(range).is_some_and(|bytes| local.fill(bytes)) {
            copied = Err(StoreError::Transfer {
                offset: range.start(),
                len: range.len(),
                source: PieceError::LocalInvalid,
            });
            break;
        }
        done.bytes += range.len();
        done.verified += payload.verified_in(&get.rows, range);
    }
    let over = get.lease.lease().end_read(now());
    over.map_err(|_| StoreError::Refused(Refusal::LeaseExpired))?;
    copied?;
    done.unverified = done.bytes - done.verified;
    Ok(done)
}

fn index_of(at: usize) -> u32 {
    u32::try_from(at).expect("a call has fewer entries than fit into memory")
}
