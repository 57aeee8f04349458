//! A connection that can be cut from outside.
//!
//! The gRPC library runs each connection in a task that nobody can stop. When the grace time of a
//! shutdown is over, those tasks must end: their reads and writes fail, and the library drops them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

#[derive(Debug)]
pub(super) struct Severable<IO> {
    io: IO,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Counts connections that are open.
    open: Gauge,
}

impl<IO> Severable<IO> {
    pub(super) fn new(io: IO, sever: CancellationToken, open: Gauge) -> Self {
        open.inc();
        Self {
            io,
            severed: Box::pin(sever.cancelled_owned()),
            open,
        }
    }

    fn poll_severed(&mut self, cx: &mut Context<'_>) -> Result<(), io::Error> {
        if self.severed.as_mut().poll(cx).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
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

// A connection always waits to read, so a severed one is always woken.
impl<IO: AsyncRead + Unpin> AsyncRead for Severable<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_severed(cx)?;
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Severable<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_severed(cx)?;
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_severed(cx)?;
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
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
    use tokio::io::AsyncReadExt as _;

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
}
