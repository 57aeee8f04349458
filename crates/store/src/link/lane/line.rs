//! The byte stream under a lane, shared by those who write and those who read.
//!
//! A socket of the system's is read by whoever waits for an answer, so the runtime must not be woken for
//! every arrival: it has the socket, as a duplicate, only while it is to read it ([`Line::listen`]), or waits
//! for room to write. Any other stream, a simulated network's for one, is left to the runtime.
//! Locks are held for calls that do not block.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// See the module's text.
pub(super) enum Line {
    Socket(Socket),
    Stream(Mutex<Box<dyn Stream>>),
}

/// A socket that does not block.
pub(super) struct Socket {
    tcp: TcpStream,
    /// The runtime's, while it reads.
    reading: Mutex<Option<tokio::net::TcpStream>>,
    /// The runtime's, while it waits for room.
    writing: Mutex<Option<tokio::net::TcpStream>>,
}

impl Line {
    pub(super) fn stream(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self::Stream(Mutex::new(Box::new(io)))
    }

    /// A line over a socket, which the runtime reads at first. To be called on a runtime.
    pub(super) fn socket(tcp: TcpStream) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        let socket = Socket {
            tcp,
            reading: Mutex::new(None),
            writing: Mutex::new(None),
        };
        socket.listen(true)?;
        Ok(Self::Socket(socket))
    }

    /// The socket, for those who wait for it themselves.
    pub(super) fn as_socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(socket) => Some(socket.tcp.as_fd()),
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
            Self::Socket(socket) => at_once(|| (&socket.tcp).read(room)),
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
    /// The socket for the runtime.
    fn duplicate(&self) -> io::Result<tokio::net::TcpStream> {
        tokio::net::TcpStream::from_std(self.tcp.try_clone()?)
    }

    fn listen(&self, on: bool) -> io::Result<()> {
        *self.reading.lock() = on.then(|| self.duplicate()).transpose()?;
        Ok(())
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        at_once(|| (&self.tcp).write(bytes))
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut registered = self.writing.lock();
        if let Some(count) = self.try_write(bytes)? {
            *registered = None;
            return Poll::Ready(Ok(count));
        }
        let socket = match &mut *registered {
            Some(socket) => socket,
            None => registered.insert(self.duplicate()?),
        };
        let written = ready!(Pin::new(socket).poll_write(cx, bytes));
        *registered = None;
        Poll::Ready(written)
    }

    fn poll_read(&self, cx: &mut Context<'_>, room: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut registered = self.reading.lock();
        let socket = match &mut *registered {
            Some(socket) => socket,
            None => registered.insert(self.duplicate()?),
        };
        let mut room = ReadBuf::new(room);
        ready!(Pin::new(socket).poll_read(cx, &mut room))?;
        Poll::Ready(Ok(room.filled().len()))
    }
}

/// Does what may not be possible at once; `None`: it is not.
fn at_once(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match call() {
            Ok(count) => return Ok(Some(count)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Line").field(&self.as_socket()).finish()
    }
}
