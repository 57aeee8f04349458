//! Telling "nobody home" from "wrong house".
//!
//! Whoever speaks HTTP/2 begins with a SETTINGS frame. A byte stream that begins otherwise belongs to
//! another service, and its first bytes usually say which; the HTTP library reports only that they
//! made no sense. So the link remembers them.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How many bytes are remembered: enough for a status line or a banner.
const REMEMBERED: usize = 48;

/// Length of a frame's head, and the place and value of a SETTINGS frame's type in it.
const FRAME_HEAD: usize = 9;
const FRAME_TYPE: usize = 3;
const SETTINGS: u8 = 4;

/// What the other side said first.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstBytes(Arc<OnceLock<Vec<u8>>>);

impl FirstBytes {
    /// What other service this is, if the first bytes show that it is one.
    pub(super) fn other_service(&self) -> Option<String> {
        let bytes = self.0.get()?;
        if bytes.len() >= FRAME_HEAD && bytes[FRAME_TYPE] == SETTINGS {
            return None;
        }
        let line: String = String::from_utf8_lossy(bytes)
            .chars()
            .take_while(|c| !c.is_control())
            .collect();
        Some(if line.is_empty() {
            format!(
                "it answers {:02x?}, which is not HTTP/2",
                &bytes[..bytes.len().min(8)]
            )
        } else {
            format!("it answers \"{line}\", which is not HTTP/2")
        })
    }
}

/// A byte stream whose first bytes are remembered.
#[derive(Debug)]
pub(super) struct Sniffed<T> {
    inner: T,
    first: FirstBytes,
}

impl<T> Sniffed<T> {
    pub(super) fn new(inner: T) -> (Self, FirstBytes) {
        let first = FirstBytes::default();
        let sniffed = Self {
            inner,
            first: first.clone(),
        };
        (sniffed, first)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Sniffed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(context, buffer);
        let new = &buffer.filled()[before..];
        if !new.is_empty() {
            self.first
                .0
                .get_or_init(|| new[..new.len().min(REMEMBERED)].to_vec());
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Sniffed<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn verdict(said: &[u8]) -> Option<String> {
        let (near, mut far) = tokio::io::duplex(1024);
        let (mut sniffed, first) = Sniffed::new(near);
        far.write_all(said).await.expect("a duplex takes it");
        drop(far);
        let mut read = Vec::new();
        sniffed.read_to_end(&mut read).await.expect("it is there");
        assert_eq!(read, said, "bytes pass unchanged");
        first.other_service()
    }

    #[tokio::test]
    async fn only_what_is_not_http2_is_another_service() {
        let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100];
        assert_eq!(verdict(&settings).await, None);
        assert_eq!(verdict(b"").await, None);
        let http = verdict(b"HTTP/1.1 400 Bad Request\r\n\r\nx").await;
        assert!(http.is_some_and(|text| text.contains("\"HTTP/1.1 400 Bad Request\"")));
        let ssh = verdict(b"SSH-2.0-x\r\n").await;
        assert!(ssh.is_some_and(|text| text.contains("SSH-2.0-x")));
        assert!(verdict(&[0, 1, 2]).await.is_some());
    }
}
