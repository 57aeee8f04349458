//! Reading ranges of get sessions.
//!
//! [`StoreClient::read_ranges`] hands all pieces of a call to the transport before it returns. Ranges
//! are cut at the bounds of the rows that were written, so that each whole row that is read can be
//! compared with its checksum (L5). An entry that fails at one replica, because the peer is gone,
//! the place was reused or a checksum does not fit, is read again from the next one; an entry whose
//! lease ended before its last byte arrived is reported failed, whatever arrived. Of a session whose payload came
//! along with its header nothing is moved any more: a read is a copy.
//!
//! All that a call needs while it is under way lies in a [`ReadCall`], whose memory serves call after call.
//!
//! Dropping the future stops nothing: the call is seen through in the background. The local memory
//! belongs to the transfers until they are done, and the session's lease is kept until then.

use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::ops;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use layercake_protocol::error::Refusal;
use layercake_protocol::header::{ReadPlan, Verified, VerifyError};
use layercake_protocol::ids::SegmentId;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::ObjectRef;
use layercake_transport::{Direction, Kept, PieceDone, PieceError};

use super::StoreClient;
use super::core::{Core, now};
use super::fanout::{Fanout, Flight};
use super::write::Range;
use crate::error::{Failures, StoreError};
use crate::session::cut::check_range;
use crate::session::{GetSession, GetShared, Payload};

/// Ranges to read from one object.
#[derive(Debug)]
pub struct RangeRead<'a, R = Vec<Range>> {
    /// The session.
    pub session: &'a GetSession,
    /// Any number of ranges, each with at least one byte.
    pub ranges: R,
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
    pub fn read_ranges<'a, R>(&self, reads: impl IntoIterator<Item = RangeRead<'a, R>>) -> Reading
    where
        R: IntoIterator<Item = Range>,
    {
        self.read_ranges_keeping(reads, None)
    }

    /// As [`read_ranges`](Self::read_ranges), and keeps something until nothing is read into the local memory any more, whatever
    /// becomes of the future and of the client's runtime. Its end may come on a thread that moves bytes: it must
    /// be short, and wait for nothing.
    pub fn read_ranges_keeping<'a, R>(
        &self,
        reads: impl IntoIterator<Item = RangeRead<'a, R>>,
        kept: Option<Kept>,
    ) -> Reading
    where
        R: IntoIterator<Item = Range>,
    {
        let core = self.core();
        let mut call = core.reads.take();
        call.kept = kept;
        for read in reads {
            call.admit(read);
        }
        call.submit(core);
        Reading {
            core: Arc::clone(core),
            call: Some(call),
        }
    }
}

/// A call of [`StoreClient::read_ranges`] that is under way. Dropping it stops nothing: what was asked for is read.
#[must_use = "nobody knows what became of reads whose answers are not awaited"]
pub struct Reading {
    core: Arc<Core>,
    /// Until it is over.
    call: Option<Box<ReadCall>>,
}

impl Future for Reading {
    type Output = Vec<Result<ReadDone, StoreError>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { core, call } = &mut *self;
        let under_way = call.as_mut();
        let under_way = under_way.expect("a future is not polled after it is done");
        ready!(under_way.poll_over(core, cx));
        let mut over = call.take().expect("it is there");
        let answers = over.answers();
        over.clear();
        let room = over.ranges.capacity();
        core.reads.give(over, room);
        Poll::Ready(answers)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(mut call) = self.call.take() {
            let core = Arc::clone(&self.core);
            // Not as a call like this one: a runtime that is over drops it at once, and it would begin anew.
            let rest = async move { poll_fn(|cx| call.poll_over(&core, cx)).await };
            self.core.background(rest);
        }
    }
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.call.as_ref().map(|call| call.entries.len());
        f.debug_struct("Reading")
            .field("entries", &entries)
            .finish_non_exhaustive()
    }
}

/// What a call of `read_ranges` is made of.
#[derive(Debug, Default)]
pub(crate) struct ReadCall {
    entries: Vec<Entry>,
    /// Of all entries.
    ranges: Vec<Range>,
    /// One for each entry; those of earlier calls may follow.
    plans: Vec<ReadPlan>,
    /// Of each piece of all entries, as it arrived.
    crcs: Vec<Option<u32>>,
    /// Of the entry that is being admitted.
    wanted: Vec<ByteRange>,
    /// Entries without an answer.
    open: usize,
    flight: Flight<Tag>,
    mismatches: Mismatches,
    kept: Option<Kept>,
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

#[derive(Debug)]
struct Entry {
    get: Arc<GetShared>,
    /// Where its ranges are among those of the call, and the checksums of its pieces.
    ranges: ops::Range<usize>,
    crcs: ops::Range<usize>,
    /// The replica that is tried, and how many were.
    place: usize,
    tried: usize,
    failed: Option<StoreError>,
    /// Of replicas before.
    failures: Failures,
    answer: Option<Result<ReadDone, StoreError>>,
}

/// An entry with what the call has for it.
struct Open<'a> {
    entry: &'a mut Entry,
    plan: &'a ReadPlan,
    crcs: &'a [Option<u32>],
}

impl ReadCall {
    fn admit<R: IntoIterator<Item = Range>>(&mut self, read: RangeRead<'_, R>) {
        let get = read.session.shared();
        let (first, first_crc) = (self.ranges.len(), self.crcs.len());
        self.ranges.extend(read.ranges);
        let mut entry = Entry {
            get: Arc::clone(get),
            ranges: first..self.ranges.len(),
            crcs: first_crc..first_crc,
            place: get.first_place(),
            tried: 1,
            failed: None,
            failures: Failures::begin(get.left_out),
            answer: None,
        };
        let at = self.entries.len();
        if self.plans.len() == at {
            self.plans.push(ReadPlan::default());
        }
        match self.begin(get, first) {
            Ok(()) if let Some(payload) = &get.payload => {
                let ranges = &self.ranges[first..];
                entry.answer = Some(copied(get, payload, ranges, &self.wanted));
            }
            Ok(()) => {
                let plan = &mut self.plans[at];
                plan.remake(&get.rows, &self.wanted);
                let pieces = first_crc + plan.pieces().len();
                self.crcs.resize(pieces, None);
                entry.crcs.end = pieces;
                self.open += 1;
            }
            Err(error) => entry.answer = Some(Err(error)),
        }
        self.entries.push(entry);
    }

    /// Checks the ranges from `first` on, and begins to read under the session's lease.
    fn begin(&mut self, get: &GetShared, first: usize) -> Result<(), StoreError> {
        self.wanted.clear();
        for range in &self.ranges[first..] {
            let wanted = check_range(get.size, range.offset, range.local.len())?;
            self.wanted.push(wanted);
        }
        let begun = get.lease.lease().begin_read(now());
        begun.map_err(|_| Refusal::LeaseExpired.into())
    }

    /// Submits all entries without an answer, each to its replica.
    fn submit(&mut self, core: &Core) {
        let spare = mem::take(&mut self.flight).into_spare();
        let fanout = Fanout::new(Direction::Read, core.config.checksums);
        let mut fanout = fanout.reusing(spare).keeping(self.kept.clone());
        let open = self.entries.iter().zip(&self.plans).enumerate();
        for (at, (entry, plan)) in open.filter(|(_, (entry, _))| entry.answer.is_none()) {
            let ranges = &self.ranges[entry.ranges.clone()];
            entry.push_pieces(index_of(at), plan, ranges, &mut fanout);
        }
        self.flight = fanout.submit(&core.engine);
    }

    /// Goes on until every entry has its answer.
    fn poll_over(&mut self, core: &Core, cx: &Context<'_>) -> Poll<()> {
        loop {
            ready!(self.poll_landed(core, cx));
            self.settle(core);
            if self.open == 0 {
                self.report_mismatches();
                return Poll::Ready(());
            }
            self.submit(core);
        }
    }

    fn poll_landed(&mut self, core: &Core, cx: &Context<'_>) -> Poll<()> {
        let Self {
            entries,
            plans,
            crcs,
            flight,
            ..
        } = self;
        flight.poll_landed(cx, &mut |tag: Tag, result| {
            let (at, piece) = (tag.entry as usize, tag.piece as usize);
            let result = result.map_err(|failure| failure.error);
            if let Some(done) = entries[at].landed(core, &plans[at], piece, result) {
                crcs[entries[at].crcs.start + piece] = done.crc32c;
            }
        })
    }

    /// Ends the entries that have what they want, or have no replica left to try.
    fn settle(&mut self, core: &Core) {
        let Self {
            entries,
            plans,
            crcs,
            open,
            mismatches,
            ..
        } = self;
        for (entry, plan) in entries.iter_mut().zip(plans) {
            if entry.answer.is_some() {
                continue;
            }
            let crcs = &crcs[entry.crcs.clone()];
            let mut settling = Open { entry, plan, crcs };
            let answer = settling.settle(core, mismatches);
            *open -= usize::from(answer.is_some());
            entry.answer = answer;
        }
    }

    fn report_mismatches(&self) {
        if let Some((object, segment, error)) = &self.mismatches.sample {
            let count = self.mismatches.count;
            tracing::warn!(count, ?object, %segment, %error, "stored bytes do not fit their checksum");
        }
    }

    fn answers(&mut self) -> Vec<Result<ReadDone, StoreError>> {
        let answers = self.entries.drain(..).map(|entry| entry.answer);
        answers
            .map(|answer| answer.expect("a call that ran to its end has every answer"))
            .collect()
    }

    /// Keeps nothing of the call but its memory.
    fn clear(&mut self) {
        self.entries.clear();
        self.ranges.clear();
        self.crcs.clear();
        self.open = 0;
        self.mismatches = Mismatches::default();
        self.kept = None;
    }
}

impl Entry {
    fn push_pieces(&self, entry: u32, plan: &ReadPlan, ranges: &[Range], fanout: &mut Fanout<Tag>) {
        let place = &self.get.places[self.place];
        for (at, piece) in plan.pieces().iter().enumerate() {
            let local = &ranges[piece.wanted].local;
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

    /// A piece has ended. What it brought, if it arrived.
    fn landed(
        &mut self,
        core: &Core,
        plan: &ReadPlan,
        piece: usize,
        result: Result<PieceDone, PieceError>,
    ) -> Option<PieceDone> {
        let target = &self.get.places[self.place].target;
        match result {
            Ok(done) => {
                core.suspects.clear(target.segment);
                return Some(done);
            }
            // The place was reused: the lease must be over, known here or not.
            Err(PieceError::Refused(layercake_transport::Refusal::StaleGeneration)) => {
                self.failed.get_or_insert(Refusal::LeaseExpired.into());
            }
            Err(source) => {
                core.suspects.failed(target, source);
                let range = plan.pieces()[piece].range;
                self.failed.get_or_insert(StoreError::Transfer {
                    offset: range.start(),
                    len: range.len(),
                    source,
                });
            }
        }
        None
    }
}

impl Open<'_> {
    /// The answer; `None`: another replica is to be tried.
    fn settle(
        &mut self,
        core: &Core,
        mismatches: &mut Mismatches,
    ) -> Option<Result<ReadDone, StoreError>> {
        let read = match self.entry.failed.take() {
            Some(error) => Err(error),
            None => self.verify(core, mismatches),
        };
        let error = match read {
            Ok(verified) => return Some(self.done(core, verified)),
            Err(error) => error,
        };
        let entry = &mut *self.entry;
        if entry.tried < entry.get.places.len() {
            core.counters.failovers.one();
            entry.failures.note(error);
            entry.tried += 1;
            entry.place = (entry.place + 1) % entry.get.places.len();
            return None;
        }
        let error = entry.failures.with(error);
        // The read counts as ended either way; why it failed is the better answer.
        let over = entry.get.lease.lease().end_read(now());
        Some(Err(
            over.map_or_else(|_| Refusal::LeaseExpired.into(), |()| error)
        ))
    }

    fn verify(&self, core: &Core, mismatches: &mut Mismatches) -> Result<Verified, StoreError> {
        let get = &self.entry.get;
        self.plan.verify(self.crcs).map_err(|error| {
            core.counters.mismatches.one();
            mismatches.count += 1;
            let range = match error {
                VerifyError::Mismatch { range, .. } => range,
                _ => ByteRange::to(get.size),
            };
            mismatches.sample.get_or_insert_with(|| {
                let segment = get.places[self.entry.place].replica.segment;
                (get.lease.lease().object().clone(), segment, error)
            });
            StoreError::ChecksumMismatch {
                offset: range.start(),
                len: range.len(),
            }
        })
    }

    fn done(&self, core: &Core, verified: Verified) -> Result<ReadDone, StoreError> {
        let get = &self.entry.get;
        get.preferred.store(self.entry.place, Ordering::Relaxed);
        let over = get.lease.lease().end_read(now());
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
