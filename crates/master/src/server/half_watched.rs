//! A unix socket of which the runtime is told what is waited for, and nothing else.
//!
//! A peer that takes bytes off a unix socket tells the other end that there is room, each time and whether
//! room was wanted or not. The runtime's own streams are registered for both directions, so each answer that a client read would
//! wake the master once more, for nothing. Here the socket is registered for reading, and a
//! duplicate for writing while there is no room.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// See the module's text.
#[derive(Debug)]
pub(super) struct HalfWatched {
    reading: AsyncFd<OwnedFd>,
    /// While there is no room.
    writing: Option<AsyncFd<OwnedFd>>,
}

impl HalfWatched {
    /// To be called on a runtime.
    pub(super) fn new(io: UnixStream) -> io::Result<Self> {
        Ok(Self {
            reading: watched(io.into_std()?.into(), Interest::READABLE)?,
            writing: None,
        })
    }
}

#[expect(
    deprecated,
    reason = "what the unsafe one asks for is true of every `OwnedFd`"
)]
fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

/// Does what may not be possible at once; `None`: it is not.
fn at_once(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match call() {
            Ok(count) => return Ok(Some(count)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl AsyncRead for HalfWatched {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.reading.poll_read_ready(cx))?;
            let room = buf.initialize_unfilled();
            let count = at_once(|| rustix::io::read(ready.get_inner(), &mut *room))?;
            // Less than there is room for is all that there was: what comes next is told anew.
            if count.is_none_or(|count| (1..room.len()).contains(&count)) {
                ready.clear_ready();
            }
            if let Some(count) = count {
                buf.advance(count);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for HalfWatched {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { reading, writing } = self.get_mut();
        let write = || at_once(|| send(reading.get_ref(), bytes, SendFlags::NOSIGNAL));
        let mut written = write()?;
        while written.is_none() {
            let watch = if let Some(watch) = writing {
                watch
            } else {
                let fd = reading.get_ref().try_clone()?;
                writing.insert(watched(fd, Interest::WRITABLE)?)
            };
            let mut room = ready!(watch.poll_write_ready(cx))?;
            written = write()?;
            if written.is_none() {
                room.clear_ready();
            }
        }
        *writing = None;
        Poll::Ready(Ok(written.unwrap_or_default()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = shutdown(self.reading.get_ref(), Shutdown::Write);
        Poll::Ready(shut.map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> (HalfWatched, UnixStream) {
        let (near, far) = UnixStream::pair().expect("two sockets");
        (HalfWatched::new(near).expect("on a runtime"), far)
    }

    /// Whether it was woken.
    #[derive(Debug, Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn more_than_the_socket_takes_arrives_whole_in_both_directions() {
        let (near, far) = pair();
        let bytes: Vec<u8> = (0..=250).cycle().take(3 << 20).collect();
        let (mut near_read, mut near_write) = tokio::io::split(near);
        let (mut far_read, mut far_write) = far.into_split();
        let send = async {
            near_write.write_all(&bytes).await?;
            near_write.shutdown().await
        };
        let echo = async {
            let count = tokio::io::copy(&mut far_read, &mut far_write).await;
            far_write.shutdown().await.and(count)
        };
        let mut came = Vec::new();
        let back = near_read.read_to_end(&mut came);
        let (all, echoed, back) = tokio::join!(send, echo, back);
        let count = echoed.expect("it is open");
        assert_eq!(
            (count, back.expect("it is open") as u64),
            (3 << 20, 3 << 20)
        );
        assert!(all.is_ok() && came == bytes, "other bytes came back");
    }

    #[tokio::test]
    async fn a_peer_that_takes_bytes_wakes_nobody_who_waits_for_some() {
        let (mut near, mut far) = pair();
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        near.write_all(b"answer").await.expect("there is room");
        let poll = |near: &mut HalfWatched| {
            let mut room = [0; 8];
            let mut room = ReadBuf::new(&mut room);
            let mut cx = Context::from_waker(&waker);
            Pin::new(near).poll_read(&mut cx, &mut room).is_ready()
        };
        assert!(!poll(&mut near));
        far.read_exact(&mut [0; 6]).await.expect("it is there");
        // What comes later has been told, so what came before would have been, too.
        let later = async || {
            let (mut one, mut other) = UnixStream::pair().expect("two sockets");
            other.write_all(b"x").await.expect("there is room");
            one.read_exact(&mut [0; 1]).await.expect("it is there");
        };
        later().await;
        assert!(!woken.0.load(Ordering::SeqCst));
        far.write_all(b"question").await.expect("there is room");
        later().await;
        assert!(woken.0.load(Ordering::SeqCst));
        assert!(poll(&mut near));
    }
}
