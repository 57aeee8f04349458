//! What a lane is in the middle of: its socket, what is queued for it, and the answers it waits for.
//!
//! The owner answers frames in order, so the frames in flight are a queue and an answer always
//! belongs to the first one. A number in each frame proves it.

mod pings;
mod watch;

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use self::pings::Pings;
use self::watch::Watch;

use super::answer::{Answer, Step};
use super::frame::{FrameError, HEADER_LEN, Header, Kind, MAX_BODY, MAX_OPS};
use super::inbuf::{InBuf, Received};
use super::lane::{Lane, Readiness};
use super::link::Link;
use super::out::{CALL_BYTES, OutQueue, Sent};
use super::raw::{self, MAX_SPANS, Span};
use super::work::{Frame, FrameOp, Next, Run, WireScratch};
use crate::backend::Context;
use crate::batch::Direction;
use crate::error::PieceError;
use crate::stats::Counted;

/// What a turn brought to an end; results are given when no lock is held.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// Frames whose operations have their results.
    pub(super) answered: Vec<Frame>,
    /// Frames that no answer will come for, because of `failed`.
    pub(super) lost: Vec<Frame>,
    /// Runs that were stopped before all of them was sent.
    pub(super) stopped: Vec<(Run, PieceError)>,
    /// The lane went down; whether it was connected.
    pub(super) failed: Option<(PieceError, bool)>,
}

#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "what the socket is ready for, in independent bits"
)]
pub(super) struct LaneState {
    link: Link,
    /// Counted by the peer as one of its live lanes, and as a connection.
    live: Option<Counted>,
    closed: bool,
    out: OutQueue,
    inbuf: InBuf,
    answer: Answer,
    /// Bytes that must be buffered before the answer gets further.
    needed: usize,
    frames: VecDeque<Frame>,
    in_flight: u64,
    next_seq: u64,
    last_progress: Instant,
    /// Bytes of this connection, as far as frames go, that the peer's system was last seen to have.
    taken: u64,
    pings: Pings,
    readable: bool,
    writable: bool,
    /// The peer closed its side: read until the end.
    hung_up: bool,
    watch: Watch,
    wire: WireScratch,
    spare_ops: Vec<FrameOp>,
    spans: Vec<Span>,
}

/// Bytes that are queued ahead of the socket: so many that a call, which takes that much memory and as many
/// heads as belong to its spans, knows whether another one follows.
const AHEAD_BYTES: usize = CALL_BYTES + MAX_SPANS / MAX_OPS * (HEADER_LEN + MAX_BODY);

/// Bytes in the queue are labelled with the number of their frame and of their operation in it.
const LABELS: u64 = MAX_OPS as u64;

impl LaneState {
    pub(super) fn new() -> Self {
        Self {
            link: Link::Down,
            live: None,
            closed: false,
            out: OutQueue::default(),
            inbuf: InBuf::new(),
            answer: Answer::default(),
            needed: 0,
            frames: VecDeque::new(),
            in_flight: 0,
            next_seq: 0,
            last_progress: Instant::now(),
            taken: 0,
            pings: Pings::default(),
            readable: false,
            writable: false,
            hung_up: false,
            watch: Watch::new(),
            wire: WireScratch::default(),
            spare_ops: Vec::new(),
            spans: Vec::new(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.up().is_some()
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Whether the peer owes something: an answer, or taking what is to be sent.
    pub(super) fn is_busy(&self) -> bool {
        self.link.until().is_some() || !self.frames.is_empty() || !self.out.is_empty()
    }

    pub(super) fn note(&mut self, ready: Readiness) {
        self.readable |= ready.readable || ready.closed;
        self.writable |= ready.writable;
        self.hung_up |= ready.closed;
    }

    /// As [`LaneState::note`], by the event loop: what came in is left to a thread that waits for it.
    pub(super) fn note_event(&mut self, ready: Readiness) {
        let readable = ready.readable && !self.watch.is_aside();
        self.note(Readiness { readable, ..ready });
    }

    /// This process stood still itself; the peer gets its time anew.
    pub(super) fn forgive(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// Why the lane has to be given up, if so.
    pub(super) fn overdue(&mut self, now: Instant, progress: Duration) -> Option<PieceError> {
        if let Some(until) = self.link.until() {
            return (now >= until).then_some(PieceError::Unreachable);
        }
        if !self.is_busy() {
            return None;
        }
        self.see_what_is_taken(now);
        if now.saturating_duration_since(self.last_progress) >= progress {
            return Some(PieceError::Stalled);
        }
        // Giving up a frame costs the lane, and with it the frames of others. One that moves answers a
        // late frame soon, so it gets some time for that: a batch may resolve that much after its
        // deadline, as its documentation says. One that only trickles may not go on for ever.
        let late = |frame: &Frame| now >= frame.job.deadline() + progress;
        self.frames.iter().any(late).then_some(PieceError::Timeout)
    }

    /// A peer on a slow link moves as long as its system takes bytes: this one's may have taken all there
    /// are at once, and an answer comes only behind a whole frame.
    fn see_what_is_taken(&mut self, now: Instant) {
        let Some(stream) = self.link.up() else {
            return;
        };
        // Where the system can't tell, bytes that it takes and what comes in must do.
        let Ok(waiting) = raw::unacknowledged(stream.as_fd()) else {
            return;
        };
        let taken = self.out.sent().saturating_sub(waiting);
        let taken = taken.min(self.end_of_frames());
        if taken > self.taken {
            self.taken = taken;
            self.last_progress = now;
        }
    }

    /// Where the bytes of the frames in flight end. Pongs behind them are none of their progress.
    fn end_of_frames(&self) -> u64 {
        self.frames.back().map_or(u64::MAX, |frame| frame.end)
    }

    /// Goes down. What was in flight is lost. The socket is closed when this returns.
    pub(super) fn fail(&mut self, error: PieceError, settled: &mut Settled) {
        if self.live.is_none() {
            return;
        }
        let was_up = self.is_up();
        self.link.close();
        self.live = None;
        self.out = OutQueue::default();
        self.inbuf = InBuf::new();
        self.answer = Answer::default();
        self.in_flight = 0;
        settled.lost.extend(self.frames.drain(..));
        settled.failed = Some((error, was_up));
    }

    /// Goes down and stays there.
    pub(super) fn close(&mut self, settled: &mut Settled) {
        self.closed = true;
        self.fail(PieceError::ShutDown, settled);
    }

    /// Whether the connection ended while nothing was in flight: that harms nobody.
    pub(super) fn ended_idle(&self, error: PieceError) -> bool {
        error == PieceError::PeerGone && self.is_up() && self.frames.is_empty()
    }

    /// Moves what can be moved, about `budget` bytes at most. Returns whether there is more to do at
    /// once. On an error the caller lets the lane fail.
    pub(super) fn run(
        &mut self,
        lane: &Lane,
        context: &Context,
        now: Instant,
        budget: usize,
        settled: &mut Settled,
    ) -> Result<bool, PieceError> {
        if self.closed {
            let runs = lane.peer().drain().into_iter();
            settled
                .stopped
                .extend(runs.map(|run| (run, PieceError::ShutDown)));
            return Ok(false);
        }
        if self.link.is_down() {
            if !lane.peer().has_work() {
                return Ok(false);
            }
            self.connect(lane, context, now)?;
        }
        if !self.is_up() {
            let expected = lane.peer().engine;
            let Self {
                link,
                out,
                inbuf,
                spans,
                ..
            } = self;
            if !link.advance(expected, context, out, inbuf, spans)? {
                return Ok(false);
            }
            lane.peer().lane_is_up();
            self.last_progress = now;
        }
        let mut moved = 0;
        while moved < budget {
            let sent = self.send(lane, context, now, settled)?;
            let received = self.receive(context, now, settled)?;
            if sent + received == 0 {
                return Ok(false);
            }
            moved += sent + received;
        }
        Ok(true)
    }

    fn connect(&mut self, lane: &Lane, context: &Context, now: Instant) -> Result<(), PieceError> {
        lane.peer().lane_begins();
        self.live = Some(context.stats.connection());
        self.readable = true;
        self.writable = true;
        self.hung_up = false;
        self.next_seq = 0;
        self.taken = 0;
        self.pings = Pings::default();
        self.watch = Watch::new();
        self.last_progress = now;
        let until = now + context.config.deadlines.connect;
        self.link = Link::begin(lane.peer().addr, until, |stream| {
            lane.home().watch(stream, lane.token())
        })?;
        Ok(())
    }

    /// Takes frames in as the window allows, and sends once. Returns the bytes that were sent.
    fn send(
        &mut self,
        lane: &Lane,
        context: &Context,
        now: Instant,
        settled: &mut Settled,
    ) -> Result<usize, PieceError> {
        self.fill(lane, context, now, settled);
        let Some(stream) = self.link.up() else {
            return Ok(0);
        };
        if !self.writable || self.out.is_empty() {
            return Ok(0);
        }
        let begun = Instant::now();
        let first_seq = self.next_seq - self.frames.len() as u64;
        let frames = &mut self.frames;
        let sent = self
            .out
            .send(stream.as_fd(), &mut self.spans, |label, bytes| {
                let place = (label / LABELS).checked_sub(first_seq);
                let in_memory = |n: u64| usize::try_from(n).ok();
                if let (Some(place), Some(op)) =
                    (place.and_then(in_memory), in_memory(label % LABELS))
                    && let Some(frame) = frames.get_mut(place)
                {
                    frame.leaving(op, bytes);
                }
            })
            .map_err(lost)?;
        let (sent, full) = match sent {
            Sent::Bytes { sent, full } => (sent, full),
            Sent::Full => (0, true),
            Sent::Mark | Sent::Nothing => return Ok(0),
        };
        self.writable = !full;
        if full && self.watch.misses_room() {
            self.take_back(lane)?;
        }
        if sent == 0 {
            return Ok(0);
        }
        if let Some(frame) = self.frames.back() {
            frame.job.add_copy_time(begun.elapsed());
        }
        if self.out.sent() - (sent as u64) < self.end_of_frames() {
            self.last_progress = now;
        }
        Ok(sent)
    }

    fn fill(&mut self, lane: &Lane, context: &Context, now: Instant, settled: &mut Settled) {
        while self.out.unsent() < AHEAD_BYTES && self.in_flight < context.config.window_bytes {
            let ops = std::mem::take(&mut self.spare_ops);
            match lane.peer().next(now, &mut self.wire, ops) {
                Next::Send(frame) => self.enqueue(frame, now),
                Next::Stopped(run, error) => settled.stopped.push((run, error)),
                Next::Nothing(ops) => {
                    self.spare_ops = ops;
                    return;
                }
            }
        }
    }

    fn enqueue(&mut self, mut frame: Frame, now: Instant) {
        frame.job.mark_started(now);
        if !self.is_busy() {
            self.last_progress = now;
        }
        let write = frame.job.direction() == Direction::Write;
        let count = |n: usize| u16::try_from(n).expect("a frame has few operations");
        let header = Header {
            kind: match (frame.is_probe(), write) {
                (true, _) => Kind::Ping,
                (false, true) => Kind::Write,
                (false, false) => Kind::Read,
            },
            flags: 0,
            count: count(self.wire.ops.len()),
            regions: count(self.wire.regions.len()),
            seq: self.next_seq,
            payload: frame.payload,
        };
        let label = self.next_seq * LABELS;
        self.next_seq += 1;
        let wire = &self.wire;
        self.out.push_head(|out| {
            header.encode(out);
            wire.regions.iter().for_each(|region| region.encode(out));
            wire.ops.iter().for_each(|op| op.encode(out));
        });
        if write {
            for (op, label) in frame.ops.iter().zip(label..) {
                self.out.push_memory(op.local, label);
            }
        }
        frame.end = self.out.sent() + self.out.unsent() as u64;
        self.in_flight += frame.cost();
        self.frames.push_back(frame);
    }

    /// Receives once and takes in what came. Returns the bytes that came.
    fn receive(
        &mut self,
        context: &Context,
        now: Instant,
        settled: &mut Settled,
    ) -> Result<usize, PieceError> {
        let Some(stream) = self.link.up() else {
            return Ok(0);
        };
        if !self.readable || self.pings.wait(self.out.sent()) {
            return Ok(0);
        }
        self.spans.clear();
        self.answer.gather(&mut self.spans);
        let begun = Instant::now();
        let received = self
            .inbuf
            .receive(stream.as_fd(), &mut self.spans, self.needed)
            .map_err(lost)?;
        let (placed, buffered) = match received {
            Received::Bytes {
                placed,
                buffered,
                short,
            } => {
                self.readable = !short || self.hung_up;
                (placed, buffered)
            }
            Received::Empty => {
                self.readable = false;
                return Ok(0);
            }
            Received::End => return Err(PieceError::PeerGone),
        };
        if let Some(frame) = self.frames.front_mut() {
            self.answer.advance(placed, frame);
            frame.job.add_copy_time(begun.elapsed());
        }
        self.take_answers(settled).map_err(|error| {
            tracing::debug!(%error, "a peer broke the protocol");
            context.stats.add_malformed();
            PieceError::Protocol
        })?;
        if self.pings.leave_some_of(placed + buffered) {
            self.last_progress = now;
        }
        Ok(placed + buffered)
    }

    fn take_answers(&mut self, settled: &mut Settled) -> Result<(), FrameError> {
        loop {
            let first_seq = self.next_seq - self.frames.len() as u64;
            let first = self.frames.front_mut().map(|frame| (first_seq, frame));
            match self.answer.step(&mut self.inbuf, first)? {
                Step::Needs(bytes) => {
                    self.needed = bytes;
                    return Ok(());
                }
                Step::Answered => {
                    let sent = self.out.sent();
                    if self.frames.front().is_some_and(|frame| frame.end > sent) {
                        // Its bytes are still named in the queue: it has its results when that is gone.
                        return Err(FrameError::EarlyAnswer { seq: first_seq });
                    }
                    if let Some(frame) = self.frames.pop_front() {
                        self.in_flight = self.in_flight.saturating_sub(frame.cost());
                        settled.answered.push(frame);
                    }
                }
                Step::Ping(seq) => {
                    let pong = Header {
                        kind: Kind::Pong,
                        flags: 0,
                        count: 0,
                        regions: 0,
                        seq,
                        payload: 0,
                    };
                    self.out.push_head(|out| pong.encode(out));
                    self.pings.add(self.out.sent() + self.out.unsent() as u64);
                }
            }
        }
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "maps an error that is not used any more"
)]
fn lost(error: io::Error) -> PieceError {
    tracing::debug!(%error, "a connection was lost");
    PieceError::PeerGone
}

#[cfg(test)]
mod tests;
