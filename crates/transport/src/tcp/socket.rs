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

/// Frees a connection that stays on this host from being paced. There is no network to be fair to, and
/// some congestion controls (BBR) let timers decide when bytes go: on loopback that costs a third of the
/// processor time per byte and leaves both ends waiting. Other connections keep what the system is set to.
pub(super) fn unpace_on_host(stream: &TcpStream) {
    let ends = stream
        .local_addr()
        .and_then(|here| Ok((here.ip(), stream.peer_addr()?.ip())));
    if !matches!(ends, Ok((here, there)) if here == there) {
        return;
    }
    // Built into every kernel, and open to every process.
    if let Err(error) = SockRef::from(stream).set_tcp_congestion(b"reno") {
        tracing::debug!(%error, "a connection keeps its congestion control");
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_on_this_host_are_not_paced() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let here = connect(listener.local_addr().expect("bound")).expect("loopback connects");
        let mut ready = [PollFd::new(&here, PollFlags::OUT)];
        poll(&mut ready, None).expect("a socket");
        assert!(connected(&here).expect("somebody listens"));
        unpace_on_host(&here);
        let control = SockRef::from(&here).tcp_congestion().expect("a socket");
        assert!(control.starts_with(b"reno"), "{control:?}");
    }
}
