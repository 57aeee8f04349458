//! The byte stream under a lane, shared by those who write and those who read.
//!
//! A socket of the system's, TCP or unix, is read by whoever waits for an answer, so the runtime must not be woken for
//! every arrival: it has the socket, as a duplicate, only while it is to read it ([`Line::listen`]), or waits
//! for room to write. Any other stream, a simulated network's for one, is left to the runtime.
//! Locks are held for calls that do not block.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::SendFlags;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// See the module's text.
pub(super) enum Line {
    Socket(Socket),
    Stream(Mutex<Box<dyn Stream>>),
}

/// A socket that does not block.
pub(super) struct Socket {
    fd: OwnedFd,
    /// The runtime's, while it reads.
    reading: Mutex<Option<Registered>>,
    /// The runtime's, while it waits for room.
    writing: Mutex<Option<Registered>>,
}

/// A duplicate of which the runtime is told one thing. A peer that takes bytes off a unix socket tells
/// its other end of room each time, whether that is wanted or not, so one who reads must not be registered for it.
type Registered = AsyncFd<OwnedFd>;

impl Line {
    pub(super) fn stream(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self::Stream(Mutex::new(Box::new(io)))
    }

    /// A line over a socket, which the runtime reads at first. To be called on a runtime.
    pub(super) fn socket(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let socket = Socket {
            fd,
            reading: Mutex::new(None),
            writing: Mutex::new(None),
        };
        socket.listen(true)?;
        Ok(Self::Socket(socket))
    }

    /// The socket, for those who wait for it themselves.
    pub(super) fn as_socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(socket) => Some(socket.fd.as_fd()),
            Self::Stream(_) => None,
        }
    }

    /// Whether the runtime reads the socket. To be called on it, by the one who polls for reading.
    pub(super) fn listen(&self, on: bool) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.listen(on),
            Self::Stream(_) => Ok(()),
        }
    }

    /// Writes what the stream takes at once; `None`: nothing. Whoever waits to write is not told of room
    /// any more, so that must be nobody.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Socket(socket) => socket.try_write(bytes),
            Self::Stream(_) => {
                match self.poll_write(&mut Context::from_waker(Waker::noop()), bytes) {
                    Poll::Ready(written) => written.map(Some),
                    Poll::Pending => Ok(None),
                }
            }
        }
    }

    pub(super) fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let count = match self {
            Self::Socket(socket) => ready!(socket.poll_write(cx, bytes))?,
            Self::Stream(io) => ready!(Pin::new(&mut **io.lock()).poll_write(cx, bytes))?,
        };
        if count == 0 && !bytes.is_empty() {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        Poll::Ready(Ok(count))
    }

    /// Reads what a socket has at once; `None`: nothing, and always so of what is no socket.
    pub(super) fn try_read(&self, room: &mut [u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Socket(socket) => socket.try_read(room),
            Self::Stream(_) => Ok(None),
        }
    }

    /// Reads into `room`; 0 bytes: the end.
    pub(super) fn poll_read(
        &self,
        cx: &mut Context<'_>,
        room: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Socket(socket) => socket.poll_read(cx, room),
            Self::Stream(io) => {
                let mut room = ReadBuf::new(room);
                ready!(Pin::new(&mut **io.lock()).poll_read(cx, &mut room))?;
                Poll::Ready(Ok(room.filled().len()))
            }
        }
    }

    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = std::future::poll_fn(|cx| self.poll_write(cx, bytes)).await?;
            bytes = &bytes[count..];
        }
        Ok(())
    }
}

impl Socket {
    #[expect(
        deprecated,
        reason = "what the unsafe one asks for is true of every `OwnedFd`"
    )]
    fn register(&self, interest: Interest) -> io::Result<Registered> {
        AsyncFd::with_interest(self.fd.try_clone()?, interest)
    }

    fn listen(&self, on: bool) -> io::Result<()> {
        let registered = on.then(|| self.register(Interest::READABLE));
        *self.reading.lock() = registered.transpose()?;
        Ok(())
    }

    fn try_read(&self, room: &mut [u8]) -> io::Result<Option<usize>> {
        at_once(|| rustix::io::read(&self.fd, &mut *room))
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        at_once(|| rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL))
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut registered = self.writing.lock();
        if let Some(count) = self.try_write(bytes)? {
            *registered = None;
            return Poll::Ready(Ok(count));
        }
        loop {
            let socket = match &mut *registered {
                Some(socket) => socket,
                None => registered.insert(self.register(Interest::WRITABLE)?),
            };
            let mut room = ready!(socket.poll_write_ready(cx))?;
            if let Some(count) = self.try_write(bytes)? {
                *registered = None;
                return Poll::Ready(Ok(count));
            }
            room.clear_ready();
        }
    }

    fn poll_read(&self, cx: &mut Context<'_>, room: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut registered = self.reading.lock();
        let socket = match &mut *registered {
            Some(socket) => socket,
            None => registered.insert(self.register(Interest::READABLE)?),
        };
        loop {
            let mut ready = ready!(socket.poll_read_ready(cx))?;
            let count = self.try_read(room)?;
            // Less than there is room for is all that there was: what comes next is told anew.
            if count.is_none_or(|count| (1..room.len()).contains(&count)) {
                ready.clear_ready();
            }
            if let Some(count) = count {
                return Poll::Ready(Ok(count));
            }
        }
    }
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

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Line").field(&self.as_socket()).finish()
    }
}
