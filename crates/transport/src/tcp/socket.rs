//! Sockets as this transport wants them: non-blocking, without delay, with keep-alive.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// How long a connection may be silent before the system asks the peer whether it is still there.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);

/// Bytes that the system may hold for a connection in each direction. With less, the two ends wake each
/// other for every few hundred kilobytes, which costs a third of the processor time per byte on
/// loopback.
const SOCKET_BUFFER: usize = 2 << 20;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

pub(super) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // A restarted process gets its port back while connections of the old one linger.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY);
    socket.set_tcp_keepalive(&keepalive)
}

/// Begins to connect. The socket becomes writable when that has ended, well or not.
pub(super) fn connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    let stream: TcpStream = socket.into();
    configure(&stream)?;
    match SockRef::from(&stream).connect(&addr.into()) {
        Ok(()) => Ok(stream),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(stream),
        Err(error) => Err(error),
    }
}

/// Whether connecting has ended, and how.
pub(super) fn connected(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the peer has closed its side, whatever of it is still to be read. Asks the system.
pub(super) fn has_hung_up(stream: &TcpStream) -> bool {
    let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut socket = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Interrupted or not possible: the event loop will be told.
    poll(&mut socket, Some(&now)).is_ok() && socket[0].revents().intersects(hung_up)
}

/// Ends a connection so that bytes which are still queued, here or at the peer, are dropped rather
/// than delivered late. Whoever waits for the socket is woken; the last handle closes it.
pub(super) fn abort(stream: &TcpStream) {
    if let Err(error) = SockRef::from(stream).set_linger(Some(Duration::ZERO)) {
        tracing::debug!(%error, "closing a connection without a reset");
    }
    // It may not be connected at all.
    let _not_connected = stream.shutdown(Shutdown::Both);
}
