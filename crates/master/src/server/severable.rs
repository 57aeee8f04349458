//! A connection that can be cut from outside, and cuts itself if its peer has nothing to say.
//!
//! The gRPC library runs each connection in a task that nobody can stop. When the grace time of a
//! shutdown is over, those tasks must end: their reads and writes fail, and the library drops them.
//! The library's pings notice a peer that falls silent later; but it waits for ever for the greeting
//! that HTTP/2 begins with, so that has a deadline here.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// Bytes of the greeting: the preface and the head of the first settings.
const GREETING: usize = 33;
/// How long a peer may take for it.
const GREETING_TIME: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Severable<IO> {
    io: IO,
    /// Until the greeting is there: its deadline, and the bytes that it lacks.
    greeting: Option<(Pin<Box<Sleep>>, usize)>,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Counts connections that are open.
    open: Gauge,
}

impl<IO> Severable<IO> {
    pub(super) fn new(io: IO, sever: CancellationToken, open: Gauge) -> Self {
        open.inc();
        Self {
            io,
            greeting: Some((Box::pin(tokio::time::sleep(GREETING_TIME)), GREETING)),
            severed: Box::pin(sever.cancelled_owned()),
            open,
        }
    }

    /// What was done; an error instead of a wait, if the connection was cut.
    fn unless_severed<T>(
        &mut self,
        cx: &mut Context<'_>,
        done: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if done.is_pending() && self.severed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        done
    }
}

impl<IO> Severable<IO> {
    /// Takes note of bytes of the greeting; an error when its time is over.
    fn poll_greeting(&mut self, cx: &mut Context<'_>, read: usize) -> Result<(), io::Error> {
        let Some((deadline, lacks)) = &mut self.greeting else {
            return Ok(());
        };
        *lacks = lacks.saturating_sub(read);
        if *lacks == 0 {
            self.greeting = None;
        } else if deadline.as_mut().poll(cx).is_ready() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl<IO> Drop for Severable<IO> {
    fn drop(&mut self) {
        self.open.dec();
    }
}

impl<IO: Connected> Connected for Severable<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> IO::ConnectInfo {
        self.io.connect_info()
    }
}

// Whoever waits to read or to write is woken by the cut; one that has something to do meanwhile will wait soon.
impl<IO: AsyncRead + Unpin> AsyncRead for Severable<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        self.poll_greeting(cx, buf.filled().len() - before)?;
        self.unless_severed(cx, read)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Severable<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.unless_severed(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.unless_severed(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_severed_connection_fails_at_once_and_counts_no_more() {
        let (near, _far) = tokio::io::duplex(64);
        let (sever, open) = (CancellationToken::new(), Gauge::default());
        let mut connection = Severable::new(near, sever.clone(), open.clone());
        assert_eq!(open.get(), 1);
        let reading = tokio::spawn(async move { connection.read_u8().await });
        tokio::task::yield_now().await;
        sever.cancel();
        let error = reading
            .await
            .expect("it does not panic")
            .expect_err("nobody has sent anything");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(open.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_must_greet_in_time_and_may_be_silent_afterwards() {
        let accept = || {
            let (near, far) = tokio::io::duplex(64);
            let sever = CancellationToken::new();
            (Severable::new(near, sever, Gauge::default()), far)
        };
        let begun = Instant::now();
        let (mut mute, mut far) = accept();
        far.write_all(&[1; GREETING - 1]).await.expect("it is open");
        let mut greeting = [0; GREETING];
        let reading = tokio::time::timeout(GREETING_TIME * 2, mute.read_exact(&mut greeting));
        let error = reading
            .await
            .expect("it gives up")
            .expect_err("one byte lacks");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(begun.elapsed(), GREETING_TIME);

        let (mut polite, mut far) = accept();
        far.write_all(&[1; GREETING]).await.expect("it is open");
        polite
            .read_exact(&mut [0; GREETING])
            .await
            .expect("all is there");
        let reading = tokio::spawn(async move { polite.read_u8().await });
        tokio::time::sleep(GREETING_TIME * 10).await;
        far.write_all(&[7]).await.expect("it is open");
        assert_eq!(
            reading.await.expect("it does not panic").expect("a byte"),
            7
        );
    }
}
