//! The byte stream under a lane, shared by those who write and those who read.
//!
//! One lock around the stream, held for calls that do not block.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// See the module's text.
pub(super) struct Line(Mutex<Box<dyn Stream>>);

impl Line {
    pub(super) fn new(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(Mutex::new(Box::new(io)))
    }

    /// Writes what the stream takes at once; `None`: nothing. Whoever waits to write is not told of room
    /// any more, so that must be nobody.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        match self.poll_write(&mut Context::from_waker(Waker::noop()), bytes) {
            Poll::Ready(written) => written.map(Some),
            Poll::Pending => Ok(None),
        }
    }

    pub(super) fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match ready!(Pin::new(&mut **self.0.lock()).poll_write(cx, bytes))? {
            0 if !bytes.is_empty() => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            count => Poll::Ready(Ok(count)),
        }
    }

    /// Reads into `room`; 0 bytes: the end.
    pub(super) fn poll_read(
        &self,
        cx: &mut Context<'_>,
        room: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let mut room = ReadBuf::new(room);
        ready!(Pin::new(&mut **self.0.lock()).poll_read(cx, &mut room))?;
        Poll::Ready(Ok(room.filled().len()))
    }

    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = std::future::poll_fn(|cx| self.poll_write(cx, bytes)).await?;
            bytes = &bytes[count..];
        }
        Ok(())
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}
