//! The seam where a link opens its connection: real TCP, or a simulated network in tests.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Opens byte streams to a master.
pub trait Connector: Clone + Send + Sync + 'static {
    /// An open connection.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Connects to `host:port`. The link drops the future when its connect deadline is over.
    fn connect(&self, address: &str) -> impl Future<Output = io::Result<Self::Io>> + Send;

    /// What a connection is. For one that is a socket of the system's, callers that block wait at the socket
    /// itself.
    fn opened(io: Self::Io) -> io::Result<Opened<Self::Io>> {
        Ok(Opened::Stream(io))
    }

    /// The address at the other end, if the system knows it. A master on this host that was called there offers a
    /// shorter way; what has no address is left as it is.
    fn peer(_io: &Self::Io) -> Option<SocketAddr> {
        None
    }
}

/// What a connection is.
#[derive(Debug)]
pub enum Opened<Io> {
    /// A socket, taken off the runtime.
    Socket(std::net::TcpStream),
    /// Some other stream.
    Stream(Io),
}

/// Plain TCP without delay for small messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpConnector;

impl Connector for TcpConnector {
    type Io = TcpStream;

    async fn connect(&self, address: &str) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    fn opened(io: TcpStream) -> io::Result<Opened<TcpStream>> {
        io.into_std().map(Opened::Socket)
    }

    fn peer(io: &TcpStream) -> Option<SocketAddr> {
        io.peer_addr().ok()
    }
}
