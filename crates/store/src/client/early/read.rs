//! Range reads that wait until what they want was published.
//!
//! A call goes round: it moves the bytes of the entries whose ranges are there, looks at the tables of the others, and pauses
//! when no table has anything new. Pauses double up to [`LONGEST_PAUSE`]. Once nothing has come for [`FIRST_QUESTION`] the master is asked
//! what became of the objects, again after ever longer times up to [`LAST_QUESTION`]: so a commit, a revoke or a lost writer is noticed
//! though nothing in memory tells. While rows come in time, nobody is asked.
//!
//! Only ranges that are whole rows together are read early, since nothing else can be checked; others wait for the commit. A
//! tag of another generation means that the place was not written yet, or is somebody else's by now. Where a
//! record was seen before it is the latter, since tags only grow, and the master is asked at once.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use layercake_protocol::header::{ReadPlan, VerifyError};
use layercake_protocol::range::ByteRange;
use layercake_transport::{Direction, Kept, PieceDone, PieceError};
use tokio::time::Instant;

use super::look::{STALE, look_at};
use super::{EarlySession, Stage};
use crate::client::StoreClient;
use crate::client::core::Core;
use crate::client::fanout::Fanout;
use crate::client::places::Places;
use crate::client::read::{RangeRead, ReadDone};
use crate::client::write::Range;
use crate::error::{Failures, StoreError};
use crate::session::GetSession;
use crate::session::cut::check_range;

/// Bounds of the pause between two looks at the tables.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(8);

/// Bounds of the time between two questions to the master, without anything new.
const FIRST_QUESTION: Duration = Duration::from_millis(20);
const LAST_QUESTION: Duration = Duration::from_millis(500);

/// Ranges to read from one object, as soon as they are there.
#[derive(Debug)]
pub struct EarlyRead<'a> {
    /// The session.
    pub session: &'a EarlySession,
    /// Any number of ranges, each with at least one byte.
    pub ranges: Vec<Range>,
}

impl StoreClient {
    /// Reads ranges of many objects, each as soon as it was published or its object is complete. The answers align with
    /// `reads`; they are there when all are, or after `within`, which the transfers may exceed: entries that
    /// still wait then answer [`StoreError::Timeout`].
    ///
    /// An entry ends with [`StoreError::WriterGone`] when the object was given up, and with
    /// [`Refusal::Superseded`](layercake_protocol::error::Refusal::Superseded) when another took its place. An entry that fails leaves
    /// anything in its own local memory. Dropping the future ends the waiting; transfers under way end by themselves.
    pub fn read_early(&self, reads: Vec<EarlyRead<'_>>, within: Duration) -> EarlyReading {
        self.read_early_keeping(reads, within, None)
    }

    /// As [`read_early`](Self::read_early), and keeps something as
    /// [`read_ranges_keeping`](Self::read_ranges_keeping) does.
    pub fn read_early_keeping(
        &self,
        reads: Vec<EarlyRead<'_>>,
        within: Duration,
        kept: Option<Kept>,
    ) -> EarlyReading {
        let moving = Arc::new(AtomicBool::new(false));
        let mut call = Call {
            client: self.clone(),
            answers: Vec::with_capacity(reads.len()),
            entries: Vec::with_capacity(reads.len()),
            within,
            kept,
            moving: Arc::clone(&moving),
        };
        for read in reads {
            call.admit(read);
        }
        EarlyReading {
            call: Box::pin(call.run()),
            moving,
        }
    }
}

/// One for each entry of a call.
type Answers = Vec<Result<ReadDone, StoreError>>;

/// A call of [`StoreClient::read_early`].
#[must_use = "nothing is read early that nobody awaits"]
pub struct EarlyReading {
    call: Pin<Box<dyn Future<Output = Answers> + Send>>,
    moving: Arc<AtomicBool>,
}

impl EarlyReading {
    /// Whether bytes of what was asked for were under way when it was polled last. If not, all that is left waits for
    /// writers.
    pub fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }
}

impl Future for EarlyReading {
    type Output = Answers;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.call.as_mut().poll(cx)
    }
}

impl fmt::Debug for EarlyReading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EarlyReading")
            .field("moving", &self.is_moving())
            .finish_non_exhaustive()
    }
}

struct Call {
    client: StoreClient,
    answers: Vec<Option<Result<ReadDone, StoreError>>>,
    /// Those without an answer.
    entries: Vec<Entry>,
    within: Duration,
    kept: Option<Kept>,
    /// Told to whoever awaits the call.
    moving: Arc<AtomicBool>,
}

pub(super) struct Entry {
    index: usize,
    pub(super) session: EarlySession,
    ranges: Vec<Range>,
    wanted: Vec<ByteRange>,
    /// The replica that is read and looked at, and how many failed.
    pub(super) place: usize,
    failed: usize,
    failures: Failures,
    /// A place that had records was somebody else's: the master was asked.
    doubted: bool,
    /// It can't be checked in parts: it waits for the commit.
    pub(super) whole_only: bool,
}

/// An entry whose ranges were published.
struct Ready {
    /// In `entries`.
    at: usize,
    places: Places,
    plan: ReadPlan,
    /// Of each piece, as it arrived.
    crcs: Vec<Option<u32>>,
    error: Option<PieceError>,
}

/// What the entries can do now.
#[derive(Default)]
struct Due {
    complete: Vec<(usize, GetSession)>,
    ready: Vec<Ready>,
}

impl Call {
    fn admit(&mut self, read: EarlyRead<'_>) {
        let index = self.answers.len();
        let size = read.session.size();
        let ranges = read.ranges.iter();
        let wanted = ranges.map(|range| check_range(size, range.offset, range.local.len()));
        match wanted.collect::<Result<Vec<_>, _>>() {
            Ok(wanted) => {
                self.answers.push(None);
                self.entries.push(Entry {
                    index,
                    session: read.session.clone(),
                    ranges: read.ranges,
                    wanted,
                    place: 0,
                    failed: 0,
                    failures: Failures::begin(read.session.leaves_out()),
                    doubted: false,
                    whole_only: false,
                });
            }
            Err(error) => self.answers.push(Some(Err(error))),
        }
    }

    async fn run(mut self) -> Answers {
        let deadline = Instant::now() + self.within;
        let (mut pause, mut question) = (SHORTEST_PAUSE, FIRST_QUESTION);
        let mut ask_at = Instant::now() + question;
        loop {
            let mut doubt = self.move_what_is_there().await;
            if self.entries.is_empty() {
                return self.answers();
            }
            let look = look_at(self.client.core(), &mut self.entries).await;
            doubt |= look.doubt;
            let now = Instant::now();
            if look.news {
                (pause, question) = (SHORTEST_PAUSE, FIRST_QUESTION);
                ask_at = now + question;
            }
            if now >= deadline {
                self.time_out();
                return self.answers();
            }
            if doubt || now >= ask_at {
                let waiting = self.entries.iter().map(|entry| &entry.session);
                let waiting: Vec<EarlySession> =
                    waiting.filter(|it| it.is_writing()).cloned().collect();
                self.client.look_after(&waiting).await;
                question = (question * 2).min(LAST_QUESTION);
                ask_at = Instant::now() + question;
            }
            let over = self.entries.iter().any(|it| !it.session.is_writing());
            if !look.news && !over {
                tokio::time::sleep_until(deadline.min(now + pause)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn time_out(&mut self) {
        for entry in self.entries.drain(..) {
            self.answers[entry.index] = Some(Err(StoreError::Timeout {
                what: "an object's writer",
                after: self.within,
            }));
        }
    }

    fn answers(self) -> Vec<Result<ReadDone, StoreError>> {
        let answers = self.answers.into_iter();
        answers
            .map(|answer| answer.unwrap_or(Err(StoreError::UnknownSession)))
            .collect()
    }

    /// Reads what was published, and what is complete. `true`: the master should be asked about some.
    async fn move_what_is_there(&mut self) -> bool {
        let Due {
            complete,
            mut ready,
        } = self.due();
        let fanout = Fanout::new(Direction::Read, true);
        let mut fanout = fanout.keeping(self.kept.clone());
        for (index, ready) in ready.iter().enumerate() {
            self.entries[ready.at].push_pieces(index, ready, &mut fanout);
        }
        let any = !(ready.is_empty() && complete.is_empty());
        self.moving.store(any, Ordering::Relaxed);
        let early = fanout.submit(&self.client.core().engine);
        let reads = complete.iter().map(|(at, session)| RangeRead {
            session,
            ranges: self.entries[*at].ranges.clone(),
        });
        let kept = self.kept.clone();
        let whole = self.client.read_ranges_keeping(reads, kept);
        early
            .land(|(index, piece): (usize, usize), result| ready[index].landed(piece, result))
            .await;
        let whole = whole.await;
        self.moving.store(false, Ordering::Relaxed);
        for ((at, _), result) in complete.iter().zip(whole) {
            self.answers[self.entries[*at].index] = Some(result);
        }
        let mut doubt = false;
        for ready in ready {
            let entry = &mut self.entries[ready.at];
            match entry.settle(self.client.core(), &ready) {
                Settled::Answer(answer) => self.answers[entry.index] = Some(answer),
                Settled::Again => {}
                Settled::Doubt => doubt = true,
            }
        }
        let answers = &self.answers;
        self.entries.retain(|entry| answers[entry.index].is_none());
        doubt
    }

    /// Looks what the entries can do; those whose session is over have their answer.
    fn due(&mut self) -> Due {
        let mut due = Due::default();
        let answers = &mut self.answers;
        self.entries.retain(|entry| {
            let stage = entry.session.shared.stage.lock();
            if let Stage::Over(error) = &*stage {
                answers[entry.index] = Some(Err(error.clone()));
            }
            answers[entry.index].is_none()
        });
        for (at, entry) in self.entries.iter().enumerate() {
            match &*entry.session.shared.stage.lock() {
                Stage::Complete(session) => due.complete.push((at, session.clone())),
                Stage::Writing(writing)
                    if !entry.whole_only && writing.seen.covers(&entry.wanted) =>
                {
                    let plan = ReadPlan::new(writing.seen.rows(), &entry.wanted);
                    due.ready.push(Ready {
                        at,
                        places: writing.places.clone(),
                        crcs: vec![None; plan.pieces().len()],
                        plan,
                        error: None,
                    });
                }
                Stage::Writing(_) | Stage::Over(_) => {}
            }
        }
        due
    }
}

/// How a read of published bytes ended.
enum Settled {
    Answer(Result<ReadDone, StoreError>),
    /// Another replica, or the commit, is to be tried.
    Again,
    /// The master is to be asked first.
    Doubt,
}

impl Entry {
    fn push_pieces(&self, index: usize, ready: &Ready, fanout: &mut Fanout<(usize, usize)>) {
        let place = &ready.places[self.place % ready.places.len()];
        for (at, piece) in ready.plan.pieces().iter().enumerate() {
            let local = &self.ranges[piece.wanted].local;
            let local = local
                .part(piece.within, piece.range.len())
                .expect("a piece lies inside its range");
            fanout.push(
                &place.target,
                local,
                place.payload(piece.range),
                (index, at),
            );
        }
    }

    fn settle(&mut self, core: &Core, ready: &Ready) -> Settled {
        let target = &ready.places[self.place % ready.places.len()].target;
        let range = self.wanted.first().copied().unwrap_or(ByteRange::to(0));
        let error = match ready.error {
            None => match ready.plan.verify(&ready.crcs) {
                Ok(verified) if verified.unverified_bytes == 0 => {
                    let bytes = verified.verified_bytes;
                    core.suspects.clear(target.segment);
                    core.counters.bytes_read.add(bytes);
                    core.counters.bytes_verified.add(bytes);
                    core.counters.bytes_early.add(bytes);
                    return Settled::Answer(Ok(ReadDone {
                        bytes,
                        verified: bytes,
                        unverified: 0,
                    }));
                }
                // Ranges that overlap each other, for one.
                Ok(_) => {
                    self.whole_only = true;
                    return Settled::Again;
                }
                Err(error) => {
                    core.counters.mismatches.one();
                    let range = match error {
                        VerifyError::Mismatch { range, .. } => range,
                        _ => range,
                    };
                    StoreError::ChecksumMismatch {
                        offset: range.start(),
                        len: range.len(),
                    }
                }
            },
            Some(source) => {
                core.suspects.failed(target, source);
                if source == STALE && !self.doubted {
                    self.doubted = true;
                    return Settled::Doubt;
                }
                StoreError::Transfer {
                    offset: range.start(),
                    len: range.len(),
                    source,
                }
            }
        };
        self.failed += 1;
        self.place += 1;
        if self.failed < ready.places.len() {
            core.counters.failovers.one();
            self.failures.note(error);
            return Settled::Again;
        }
        Settled::Answer(Err(self.failures.with(error)))
    }
}

impl Ready {
    fn landed(&mut self, piece: usize, result: Result<PieceDone, PieceError>) {
        match result {
            Ok(done) => self.crcs[piece] = done.crc32c,
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}
