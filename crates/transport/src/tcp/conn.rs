//! One connection from a peer, seen from the side that owns the memory.
//!
//! Driven by one event loop alone, so it has no lock. Frames are carried out in order: the payload of
//! a write goes straight to where it belongs and is acknowledged when all of it is there; the data of
//! a read is queued by address and goes out from where it is. Regions are pinned while a frame is in
//! work, so a peer that stops in the middle of one is given up after the progress deadline, and one
//! that trickles when a frame, or an answer that it does not take, is older than the deadlines of a
//! transfer and of progress together: a peer can't keep a region from being withdrawn. Answers that a
//! peer does not take are bounded: then no more frames are read.
//!
//! What a peer left behind that has hung up is not carried out: it may have been told that its frames
//! failed. Its hang-up comes as an event; after a gap, in which this process may have stood still, the
//! system is asked before anything more is received.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use self::greeting::Stage;
use self::reply::Reply;
use super::admit::Admitted;
use super::frame::{FLAG_STATUSES, FrameError, HEADER_LEN, Header, Kind, Request};
use super::guests::Guest;
use super::hello::{CLIENT_HELLO_LEN, Verdict};
use super::inbuf::{InBuf, Received};
use super::lane::Readiness;
use super::out::{OutQueue, Sent};
use super::payload::{Discard, PayloadCursor};
use super::raw::Span;
use super::socket;
use crate::backend::Context;
use crate::batch::Direction;
use crate::config::Deadlines;
use crate::stats::Counted;

/// Why a connection is closed.
#[derive(Debug, Error)]
pub(super) enum Closed {
    #[error("the peer closed it")]
    ByPeer,
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    #[error("the peer broke the protocol: {0}")]
    Malformed(#[from] FrameError),
    #[error("the peer's greeting is none")]
    NotAHello,
    #[error("the peer could not prove the shared token")]
    Untrusted,
    #[error("the peer was turned away: {0:?}")]
    TurnedAway(Verdict),
    #[error("the peer made no progress, or too little")]
    Stalled,
}

pub(super) struct Conn {
    stream: TcpStream,
    peer: SocketAddr,
    guest: Guest,
    context: Arc<Context>,
    stage: Stage,
    opened: Instant,
    /// The time of this turn.
    now: Instant,
    last_progress: Instant,
    /// When the first bytes of the frame in work had come, if there is one.
    frame_since: Option<Instant>,
    /// When the socket was looked at last.
    looked: Instant,
    readable: bool,
    writable: bool,
    hung_up: bool,
    inbuf: InBuf,
    needed: usize,
    out: OutQueue,
    /// The write whose payload is coming in, by its number.
    writing: Option<u64>,
    write: Admitted,
    cursor: PayloadCursor,
    replies: VecDeque<Reply>,
    spare: Vec<Admitted>,
    places: Vec<Span>,
    /// Received since answers were sent last.
    unanswered: usize,
    _counted: Counted,
}

/// Answers to reads that may wait to be sent.
const MAX_REPLIES: usize = 64;

/// Bytes of answers, without the data of reads, that may wait to be sent.
pub(super) const MAX_UNSENT_HEADS: usize = 256 << 10;

/// Bytes that are moved in one turn before others get theirs.
const TURN_BYTES: usize = 4 << 20;

/// Answers go out after so many bytes at the latest, for the peer's window to move on; each wakes it.
const ANSWER_AFTER: usize = 1 << 20;

/// So long after the last look, a peer may have gone and its event not have been seen.
const GAP: Duration = Duration::from_millis(500);

impl Conn {
    pub(super) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        guest: Guest,
        context: Arc<Context>,
        now: Instant,
    ) -> Self {
        let counted = context.stats.connection();
        Self {
            stream,
            peer,
            guest,
            context,
            stage: Stage::Hello,
            opened: now,
            now,
            last_progress: now,
            frame_since: None,
            looked: now,
            readable: true,
            writable: true,
            hung_up: false,
            inbuf: InBuf::new(),
            needed: CLIENT_HELLO_LEN,
            out: OutQueue::default(),
            writing: None,
            write: Admitted::default(),
            cursor: PayloadCursor::default(),
            replies: VecDeque::new(),
            spare: Vec::new(),
            places: Vec::new(),
            unanswered: 0,
            _counted: counted,
        }
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn note(&mut self, ready: Readiness) {
        self.readable |= ready.readable || ready.closed;
        self.writable |= ready.writable;
        self.hung_up |= ready.closed;
    }

    /// Whether the peer owes something.
    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.stage, Stage::Open)
            || self.writing.is_some()
            || !self.out.is_empty()
            || !self.inbuf.available().is_empty()
    }

    pub(super) fn forgive(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// Whether the peer has to be given up.
    pub(super) fn is_overdue(&self, now: Instant, deadlines: &Deadlines) -> bool {
        let since = |then| now.saturating_duration_since(then);
        if !matches!(self.stage, Stage::Open) {
            return since(self.opened) >= deadlines.connect;
        }
        let whole = deadlines.transfer.saturating_add(deadlines.progress);
        let oldest = [self.frame_since, self.replies.front().map(|it| it.since)];
        (self.is_busy() && since(self.last_progress) >= deadlines.progress)
            || oldest
                .into_iter()
                .flatten()
                .any(|then| since(then) >= whole)
    }

    /// Moves what can be moved. Returns whether there is more to do at once.
    pub(super) fn run(&mut self, now: Instant, scratch: &mut Scratch) -> Result<bool, Closed> {
        self.now = now;
        let mut moved = 0;
        while moved < TURN_BYTES {
            // A peer that hung up has given up what it got no answer to: that must not be carried
            // out late.
            if self.hung_up {
                return Err(Closed::ByPeer);
            }
            let received = self.receive(now, scratch)?;
            let sent = if received == 0 || self.unanswered >= ANSWER_AFTER {
                self.send(now, scratch)?
            } else {
                0
            };
            if received + sent == 0 {
                return Ok(false);
            }
            moved += received + sent;
        }
        self.send(now, scratch)?;
        Ok(true)
    }

    fn receive(&mut self, now: Instant, scratch: &mut Scratch) -> Result<usize, Closed> {
        self.take_frames()?;
        if !self.readable || self.is_blocked() {
            return Ok(0);
        }
        let looked = std::mem::replace(&mut self.looked, Instant::now());
        if self.looked.saturating_duration_since(looked) >= GAP && socket::has_hung_up(&self.stream)
        {
            return Err(Closed::ByPeer);
        }
        scratch.spans.clear();
        if self.writing.is_some() {
            self.cursor.gather(&mut scratch.spans, &mut scratch.discard);
        }
        let received = self
            .inbuf
            .receive(self.stream.as_fd(), &mut scratch.spans, self.needed)?;
        let (placed, buffered) = match received {
            Received::Bytes {
                placed,
                buffered,
                short,
            } => {
                self.readable = !short;
                (placed, buffered)
            }
            Received::Empty => {
                self.readable = false;
                return Ok(0);
            }
            Received::End => return Err(Closed::ByPeer),
        };
        self.last_progress = now;
        self.cursor.advance(placed, |_, _| {});
        self.unanswered += placed + buffered;
        self.take_frames()?;
        Ok(placed + buffered)
    }

    /// Whether answers pile up so that no more frames are taken.
    fn is_blocked(&self) -> bool {
        self.replies.len() >= MAX_REPLIES || self.out.unsent_heads() > MAX_UNSENT_HEADS
    }

    fn take_frames(&mut self) -> Result<(), Closed> {
        while self.step()? {}
        // A frame that is not looked at before answers are taken is not the peer's debt.
        let begun =
            self.writing.is_some() || (!self.inbuf.available().is_empty() && !self.is_blocked());
        self.frame_since = begun.then(|| self.frame_since.unwrap_or(self.now));
        Ok(())
    }

    /// Takes what is buffered one step further. Returns whether another step may be possible.
    fn step(&mut self) -> Result<bool, Closed> {
        match self.stage {
            Stage::Hello => self.hello(),
            Stage::Proof {
                initiator,
                responder,
            } => self.proof(&initiator, &responder),
            Stage::Open => match self.writing {
                Some(seq) => {
                    self.cursor.take(&mut self.inbuf, |_, _| {});
                    if self.cursor.left() > 0 {
                        self.needed = 0;
                        return Ok(false);
                    }
                    self.finish_write(seq);
                    Ok(true)
                }
                None if self.is_blocked() => Ok(false),
                None => self.frame(),
            },
            Stage::Leaving(_) => Ok(false),
        }
    }

    fn frame(&mut self) -> Result<bool, Closed> {
        let available = self.inbuf.available();
        let Some(bytes) = available.first_chunk() else {
            self.needed = HEADER_LEN;
            return Ok(false);
        };
        let header = Header::decode(bytes)?;
        let len = HEADER_LEN + header.body_len();
        let Some(body) = available.get(HEADER_LEN..len) else {
            self.needed = len;
            return Ok(false);
        };
        match header.kind {
            Kind::Write => {
                let request = Request::decode(&header, body)?;
                self.cursor.clear();
                let cursor = &mut self.cursor;
                self.write
                    .judge(&self.context, Direction::Write, &request, |place, len| {
                        let refused = || usize::try_from(len).expect("a frame's payload is capped");
                        cursor.push(place.unwrap_or_else(|| Span {
                            addr: 0,
                            len: refused(),
                        }));
                    });
                self.writing = Some(header.seq);
            }
            Kind::Read => {
                let request = Request::decode(&header, body)?;
                let mut reply = self.spare.pop().unwrap_or_default();
                let mut places = std::mem::take(&mut self.places);
                places.clear();
                reply.judge(&self.context, Direction::Read, &request, |place, _| {
                    places.extend(place);
                });
                self.push_reply(&header, reply, &places);
                self.places = places;
            }
            Kind::Ping => {
                let pong = Header {
                    kind: Kind::Pong,
                    ..header
                };
                self.out.push_head(|out| pong.encode(out));
            }
            kind @ (Kind::Written | Kind::Data | Kind::Pong) => {
                return Err(FrameError::Misdirected { kind }.into());
            }
        }
        self.inbuf.consume(len);
        if self.writing.is_none() {
            self.frame_since = None;
        }
        Ok(true)
    }

    fn finish_write(&mut self, seq: u64) {
        self.writing = None;
        self.frame_since = None;
        self.needed = HEADER_LEN;
        self.write.check_after();
        let statuses = &self.write.statuses;
        let all_ok = self.write.all_ok();
        let header = Header {
            kind: Kind::Written,
            flags: if all_ok { 0 } else { FLAG_STATUSES },
            count: u16::try_from(statuses.len()).expect("a frame has few operations"),
            regions: 0,
            seq,
            payload: 0,
        };
        self.out.push_head(|out| {
            header.encode(out);
            if !all_ok {
                out.extend_from_slice(statuses);
            }
        });
        self.write.complete(&self.context, Direction::Write);
    }

    fn send(&mut self, now: Instant, scratch: &mut Scratch) -> Result<usize, Closed> {
        self.unanswered = 0;
        let mut total = 0;
        while self.writable && total < TURN_BYTES {
            match self
                .out
                .send(self.stream.as_fd(), &mut scratch.spans, |_, _| {})?
            {
                Sent::Bytes { sent, full } => {
                    self.writable = !full;
                    self.last_progress = now;
                    total += sent;
                }
                Sent::Full => self.writable = false,
                Sent::Mark => self.finish_reply(),
                Sent::Nothing => {
                    if let Stage::Leaving(verdict) = self.stage {
                        return Err(Closed::TurnedAway(verdict));
                    }
                    break;
                }
            }
        }
        Ok(total)
    }

    /// Counts why the connection ended.
    pub(super) fn count(&self, closed: &Closed) {
        match closed {
            Closed::Malformed(_) | Closed::NotAHello => self.context.stats.add_malformed(),
            Closed::Untrusted | Closed::TurnedAway(Verdict::Token) => {
                self.context.stats.add_untrusted();
            }
            Closed::ByPeer | Closed::Broken(_) | Closed::TurnedAway(_) | Closed::Stalled => {}
        }
    }
}

/// What one event loop lends to its connections, one at a time.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) spans: Vec<Span>,
    pub(super) discard: Discard,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            spans: Vec::new(),
            discard: super::payload::discard(),
        }
    }
}

mod greeting;
mod reply;
#[cfg(test)]
mod tests;
