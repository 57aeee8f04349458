//! Tells lanes from gRPC by the first bytes that a connection brings.
//!
//! Each connection is looked at by a task of its own, so that one that says nothing holds nobody up.
//! Those that begin with the magic bytes of a lane are served as one; all others go on to the gRPC library
//! with their bytes untouched, whatever they are.

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use layercake_protocol::lane::MAGIC;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::service::{Core, lane};

/// The connections that are not lanes.
pub(super) struct Entrance<S, IO> {
    /// `None`: no more will come.
    incoming: Option<Pin<Box<S>>>,
    core: Arc<Core>,
    looked_at: JoinSet<Option<Rewound<IO>>>,
}

impl<S, IO> Entrance<S, IO> {
    pub(super) fn new(incoming: S, core: Arc<Core>) -> Self {
        Self {
            incoming: Some(Box::pin(incoming)),
            core,
            looked_at: JoinSet::new(),
        }
    }
}

impl<S, IO> Stream for Entrance<S, IO>
where
    S: Stream<Item = io::Result<IO>>,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    type Item = io::Result<Rewound<IO>>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        while let Some(incoming) = &mut this.incoming {
            match incoming.as_mut().poll_next(cx) {
                Poll::Ready(Some(Ok(io))) => {
                    this.looked_at.spawn(look_at(Arc::clone(&this.core), io));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => this.incoming = None,
                Poll::Pending => break,
            }
        }
        loop {
            match this.looked_at.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Some(io)))) => return Poll::Ready(Some(Ok(io))),
                Poll::Ready(Some(Ok(None))) => {}
                Poll::Ready(Some(Err(error))) => {
                    tracing::error!(%error, "a connection was not looked at");
                }
                Poll::Ready(None) if this.incoming.is_none() => return Poll::Ready(None),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}

/// Reads until it is clear what a connection is. One that is for gRPC is given back.
async fn look_at<IO>(core: Arc<Core>, mut io: IO) -> Option<Rewound<IO>>
where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let first = First::read(&mut io).await?;
    if !first.is_lane() {
        let taken = 0;
        return Some(Rewound { first, taken, io });
    }
    let peer = peer(&io).into();
    let lane = lane::serve(Arc::clone(&core), io, peer);
    // It outlives the listener, and the master waits for it when it closes down.
    core.work.spawn(lane);
    None
}

/// The first bytes of a connection, as far as they were read to tell what it is.
#[derive(Debug)]
pub(super) struct First {
    bytes: [u8; MAGIC.len()],
    had: usize,
}

impl First {
    /// Reads them; `None`: it ended before it had said what it is, and was nobody's.
    pub(super) async fn read<IO: AsyncRead + Unpin>(io: &mut IO) -> Option<Self> {
        let mut first = Self {
            bytes: [0; MAGIC.len()],
            had: 0,
        };
        while first.had < MAGIC.len() && first.may_be_lane() {
            let read = std::future::poll_fn(|cx| {
                let mut room = ReadBuf::new(&mut first.bytes[first.had..]);
                let read = Pin::new(&mut *io).poll_read(cx, &mut room);
                read.map_ok(|()| room.filled().len())
            });
            first.had += read.await.ok().filter(|count| *count > 0)?;
        }
        Some(first)
    }

    fn may_be_lane(&self) -> bool {
        self.bytes[..self.had] == MAGIC[..self.had]
    }

    /// Whether they are those of a lane.
    pub(super) fn is_lane(&self) -> bool {
        self.bytes == MAGIC
    }
}

fn peer<IO: Connected>(io: &IO) -> Option<SocketAddr> {
    let info: Box<dyn Any> = Box::new(io.connect_info());
    info.downcast_ref::<TcpConnectInfo>()?.remote_addr()
}

/// A connection whose first bytes were read, and are read again.
#[derive(Debug)]
pub(super) struct Rewound<IO> {
    first: First,
    taken: usize,
    io: IO,
}

impl<IO: Connected> Connected for Rewound<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> IO::ConnectInfo {
        self.io.connect_info()
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Rewound<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.taken == self.first.had {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let rest = &self.first.bytes[self.taken..self.first.had];
        let count = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..count]);
        self.taken += count;
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Rewound<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
