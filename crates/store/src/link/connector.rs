//! The seam where a link opens its connection: real TCP, or a simulated network in tests.

use std::future::Future;
use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Opens byte streams to a master.
pub trait Connector: Clone + Send + Sync + 'static {
    /// An open connection.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Connects to `host:port`. The link drops the future when its connect deadline is over.
    fn connect(&self, address: &str) -> impl Future<Output = io::Result<Self::Io>> + Send;
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
}
