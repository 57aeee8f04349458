//! Ports that stay with a test while nobody listens on them.
//!
//! A master that is killed leaves its port to whoever asks next, a master of another test for instance.
//! A socket that is bound and does not listen keeps it: connections are refused, no one else is given
//! the port, and whoever means it may listen on it.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// A port on loopback.
#[derive(Debug)]
pub(crate) struct Port {
    socket: TcpSocket,
}

impl Port {
    pub(crate) fn reserve() -> Self {
        let socket = bound(SocketAddr::from(([127, 0, 0, 1], 0)));
        Self { socket }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.socket.local_addr().expect("it is bound")
    }

    /// Listens on the port, within a runtime.
    pub(crate) fn listen(&self) -> TcpListener {
        let socket = bound(self.address());
        socket.listen(1024).expect("nobody listens there")
    }
}

fn bound(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    // Both sockets of a port have to allow that they share it.
    socket.set_reuseaddr(true).expect("a socket");
    socket.bind(address).expect("the port is ours");
    socket
}
