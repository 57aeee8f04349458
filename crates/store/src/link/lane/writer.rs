//! How callers' frames get onto a lane: by the callers themselves.
//!
//! A caller appends its frame to the queue. If nobody is writing, it writes, and whatever others append
//! meanwhile; else the one that is writing takes the frame along. So a single caller makes one system
//! call and wakes nobody, and many callers share theirs. What the stream does not take at once, and
//! what keeps coming after a few rounds, is left to [`Writer::run`], which the link's task drives.
//!
//! The queue is bounded: beyond [`MOST_QUEUED`] bytes callers wait for room. Exactly one holds the pen at
//! a time (`Queue::writing`), and only that one touches `in_hand`. Lock order: `in_hand`, then `queue`;
//! the queue's lock is not held over a system call.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use layercake_protocol::lane::{EMPTY, LaneError, put_frame_of};
use layercake_protocol::wire::ClientFrame;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::line::Line;

/// Callers wait while so many bytes wait for the one that writes.
const MOST_QUEUED: usize = 256 << 10;

/// How often a caller goes on to write what others have appended meanwhile.
const ROUNDS: usize = 4;

/// What an empty buffer may keep.
const MOST_KEPT: usize = 256 << 10;

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    /// Somebody holds the pen.
    writing: bool,
    /// Callers that wait for room.
    waiting: bool,
    broken: bool,
}

/// Frames that somebody is writing.
#[derive(Debug, Default)]
struct InHand {
    bytes: Vec<u8>,
    written: usize,
}

/// Why a frame was not taken.
#[derive(Debug)]
pub(in crate::link) enum Offer {
    /// Too much is queued: [`Writer::room`] tells when to try again.
    Full,
    /// The lane is broken.
    Broken,
    /// It broke when the frame had been taken, which was written or not.
    Lost,
    /// It is no frame that the master would take.
    Refused(LaneError),
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::link) struct Writer {
    line: Arc<Line>,
    queue: Mutex<Queue>,
    in_hand: Mutex<InHand>,
    /// The pen was left to [`Self::run`].
    left: Notify,
    room: Notify,
    /// Something was said since somebody looked.
    said: AtomicBool,
}

impl Writer {
    pub(super) fn new(line: Arc<Line>) -> Self {
        Self {
            line,
            queue: Mutex::default(),
            in_hand: Mutex::default(),
            left: Notify::new(),
            room: Notify::new(),
            said: AtomicBool::new(false),
        }
    }

    /// Takes a frame, in two parts of its encoded form; it is written now or soon.
    pub(in crate::link) fn offer(&self, context: &ClientFrame, body: &[u8]) -> Result<(), Offer> {
        self.append(|bytes| put_frame_of(bytes, context, body))
    }

    /// Says an empty frame if nothing was said since the last time.
    pub(super) fn say_something(&self, whatever: bool) -> Result<(), Offer> {
        if self.said.swap(false, Ordering::Relaxed) && !whatever {
            return Ok(());
        }
        let said = self.append(|bytes| {
            bytes.extend_from_slice(&EMPTY);
            Ok(())
        });
        match said {
            // There is plenty on its way.
            Err(Offer::Full) => Ok(()),
            said => said,
        }
    }

    fn append(&self, put: impl FnOnce(&mut Vec<u8>) -> Result<(), LaneError>) -> Result<(), Offer> {
        {
            let mut queue = self.queue.lock();
            if queue.broken {
                return Err(Offer::Broken);
            }
            if queue.bytes.len() >= MOST_QUEUED {
                queue.waiting = true;
                return Err(Offer::Full);
            }
            put(&mut queue.bytes).map_err(Offer::Refused)?;
            if std::mem::replace(&mut queue.writing, true) {
                return Ok(());
            }
        }
        self.said.store(true, Ordering::Relaxed);
        self.write().map_err(|_| Offer::Lost)
    }

    /// Waits until there is room in the queue, or the lane is broken: enable it, offer again, await it.
    pub(in crate::link) fn room(&self) -> Notified<'_> {
        self.room.notified()
    }

    /// Writes as a caller does, who holds the pen.
    fn write(&self) -> io::Result<()> {
        let mut in_hand = self.in_hand.lock();
        for _ in 0..ROUNDS {
            if !self.take(&mut in_hand) {
                return Ok(());
            }
            while in_hand.written < in_hand.bytes.len() {
                let written = self.line.try_write(&in_hand.bytes[in_hand.written..]);
                let Some(count) = written.inspect_err(|_| self.break_off())? else {
                    self.left.notify_one();
                    return Ok(());
                };
                in_hand.written += count;
            }
        }
        drop(in_hand);
        self.left.notify_one();
        Ok(())
    }

    /// Takes what is queued, once all before it is written; `false`: nothing, and the pen is put down.
    fn take(&self, in_hand: &mut InHand) -> bool {
        if in_hand.written < in_hand.bytes.len() {
            return true;
        }
        in_hand.written = 0;
        in_hand.bytes.clear();
        in_hand.bytes.shrink_to(MOST_KEPT);
        let mut queue = self.queue.lock();
        queue.writing = !queue.bytes.is_empty();
        std::mem::swap(&mut queue.bytes, &mut in_hand.bytes);
        if std::mem::take(&mut queue.waiting) {
            self.room.notify_waiters();
        }
        queue.writing
    }

    /// Writes what callers leave; ends when the lane breaks.
    pub(in crate::link) async fn run(&self) -> io::Error {
        loop {
            self.left.notified().await;
            if let Err(error) = std::future::poll_fn(|cx| self.poll_write(cx)).await {
                self.break_off();
                return error;
            }
        }
    }

    fn poll_write(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut in_hand = self.in_hand.lock();
        while self.take(&mut in_hand) {
            let rest = &in_hand.bytes[in_hand.written..];
            in_hand.written += ready!(self.line.poll_write(cx, rest))?;
        }
        Poll::Ready(Ok(()))
    }

    fn break_off(&self) {
        let mut queue = self.queue.lock();
        queue.broken = true;
        queue.bytes = Vec::new();
        self.room.notify_waiters();
    }
}
