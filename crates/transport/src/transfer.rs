//! The caller's handle on a batch that was submitted.
//!
//! A transfer can be polled, waited for by a thread, or awaited as a future; all see the same result,
//! and it stays the same once it is there. Dropping the handle changes nothing about the transfer:
//! its pieces run on, and the memory that they touch is kept until they are done.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::config::TransportKind;
use crate::error::PieceError;
use crate::job::Job;

/// Something that lives until no byte of a transfer moves any more, whatever becomes of those who wait for it. Its end may come on
/// a thread that moves bytes: it must be short, and wait for nothing.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// A piece whose bytes have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceDone {
    /// CRC-32C of the bytes as they are on the caller's side, where the batch asked for it.
    pub crc32c: Option<u32>,
}

/// The end of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What carried it; none if it failed before one was chosen.
    pub transport: Option<TransportKind>,
    /// One result per piece, in the batch's order.
    pub pieces: Vec<Result<PieceDone, PieceError>>,
}

impl Outcome {
    /// Whether every piece arrived.
    pub fn is_ok(&self) -> bool {
        self.pieces.iter().all(Result::is_ok)
    }

    /// The first piece's error, if any failed.
    pub fn first_error(&self) -> Option<PieceError> {
        self.pieces
            .iter()
            .find_map(|piece| piece.as_ref().err().copied())
    }
}

/// A batch under way. See the module's text for what dropping it means: nothing.
#[must_use = "a transfer that nobody looks at fails silently"]
#[derive(Clone)]
pub struct Transfer {
    job: Arc<Job>,
}

impl Transfer {
    pub(crate) fn new(job: Arc<Job>) -> Self {
        Self { job }
    }

    /// Whether every piece is terminal.
    pub fn is_done(&self) -> bool {
        self.job.look();
        self.job.is_done()
    }

    /// The outcome, once every piece is terminal.
    pub fn poll(&self) -> Option<Outcome> {
        self.is_done().then(|| self.job.outcome())
    }

    /// As the future, for many transfers in turn: registers the waker until every piece is terminal, and then gives
    /// the results without memory for them.
    pub fn poll_ended(&self, cx: &Context<'_>) -> Poll<Ended<'_>> {
        if self.job.poll_done(cx.waker()) {
            Poll::Ready(Ended { job: &self.job })
        } else {
            Poll::Pending
        }
    }

    /// The results, once every piece is terminal, as [`poll`](Self::poll) gives them but without memory for them.
    pub fn ended(&self) -> Option<Ended<'_>> {
        self.is_done().then(|| Ended { job: &self.job })
    }

    /// Waits until every piece is terminal. The batch's deadline bounds it, up to the grace that a
    /// back end needs to be sure that no byte moves any more.
    pub fn wait(&self) -> Outcome {
        self.job.wait(None);
        self.job.outcome()
    }

    /// Waits at most this long.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Outcome> {
        let deadline = Instant::now().checked_add(timeout);
        self.job.wait(deadline).then(|| self.job.outcome())
    }

    /// Asks for pieces that were not sent yet to end as [`PieceError::Cancelled`]. Pieces under way
    /// run on, and the transfer resolves as always.
    pub fn cancel(&self) {
        self.job.cancel();
    }
}

/// The results of a transfer that has ended, where they lie.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    job: &'a Job,
}

impl Ended<'_> {
    /// What carried it, as in [`Outcome`].
    pub fn transport(&self) -> Option<TransportKind> {
        self.job.transport()
    }

    /// One result per piece, in the batch's order.
    pub fn pieces(&self) -> impl Iterator<Item = Result<PieceDone, PieceError>> {
        self.job.results()
    }
}

impl Future for Transfer {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        if self.job.poll_done(cx.waker()) {
            Poll::Ready(self.job.outcome())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // Without a handle nobody may come to wait for it.
        self.job.look();
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("job", &self.job).finish()
    }
}
