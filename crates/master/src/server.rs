//! Starting and stopping a master.
//!
//! Members come over gRPC or by a framed lane; the first bytes of a connection tell which. [`Master::bind`] listens on the configured address, and for lanes from
//! this host on a unix socket; [`Master::serve`] takes
//! connections from wherever they come, so that tests bring simulated ones. Both end when the given
//! shutdown future does: no new work is taken, what is under way is answered, and what is left after
//! the grace time is cut off. Nothing outlives them: the ticker, the batches and the connections all
//! end here. A runtime is the caller's; none is built.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::ids::Term;
use layercake_protocol::wire::master_server::MasterServer;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};

use crate::config::MasterConfig;
use crate::error::Error;
use crate::monitor::Monitor;
use crate::service::{Core, MasterService};

mod entrance;
mod half_watched;
mod local;
mod severable;
use entrance::Entrance;
use local::LocalListener;
use severable::Severable;

/// Bytes that a client may send on one stream before it has to be read: a batch of 20,000 keys should
/// not wait for a window update on its way.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for all streams of a connection.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Larger frames than the default mean fewer of them for a large batch.
const FRAME: u32 = 256 << 10;
/// Calls and streams that one connection may have open.
const STREAMS_PER_CONNECTION: u32 = 1024;
/// A connection that does not answer a ping this long after the last sign of life is gone.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_ANSWER: Duration = Duration::from_secs(5);

/// A master that serves nobody yet.
#[derive(Debug)]
pub struct Master {
    core: Arc<Core>,
    config: MasterConfig,
}

/// A master whose listener is open: clients that connect wait until it is served.
#[derive(Debug)]
pub struct BoundMaster {
    master: Master,
    listener: TcpListener,
    local_addr: SocketAddr,
    /// For lanes from this host.
    local: Option<LocalListener>,
}

/// Worker threads that suit the runtime of a process which is a master and nothing else: one for every two
/// cores. A worker that takes a message wakes another one to watch for the next, so one more worker than is
/// busy costs each request a change of threads.
#[must_use]
pub fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).max(1)
}

impl Master {
    /// A master with these settings. Its metrics are registered in `registry`.
    pub fn new(config: MasterConfig, registry: &mut Registry) -> Result<Self, Error> {
        let core = Core::new(&config, registry)?;
        Ok(Self { core, config })
    }

    /// A master that listens on `config.listen`.
    pub async fn bind(config: MasterConfig, registry: &mut Registry) -> Result<BoundMaster, Error> {
        let listen = config.listen;
        let master = Self::new(config, registry)?;
        let failed = |source| Error::Listen { listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let local_addr = listener.local_addr().map_err(failed)?;
        let local = master
            .config
            .local_lane
            .then(LocalListener::bind)
            .transpose()
            .unwrap_or_else(|error| {
                tracing::warn!(%error, "no unix socket for members on this host, which will come over TCP");
                None
            });
        Ok(BoundMaster {
            master,
            listener,
            local_addr,
            local,
        })
    }

    /// Its term.
    pub fn term(&self) -> Term {
        self.core.term
    }

    /// A view of it.
    pub fn monitor(&self) -> Monitor {
        Monitor {
            core: Arc::clone(&self.core),
        }
    }

    /// Serves the connections that come until `shutdown` ends. Errors of single connections are theirs.
    pub async fn serve<IO>(
        self,
        incoming: impl Stream<Item = io::Result<IO>> + Send,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), Error>
    where
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        self.serve_with(incoming, None, shutdown).await
    }

    /// As [`serve`](Self::serve), and lanes from this host.
    async fn serve_with<IO>(
        self,
        incoming: impl Stream<Item = io::Result<IO>> + Send,
        local: Option<LocalListener>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), Error>
    where
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { core, config } = self;
        let sever = CancellationToken::new();
        // Whichever way this ends, nothing stays behind.
        let _severed = sever.clone().drop_guard();
        let stop_ticker = CancellationToken::new();
        let _stopped = stop_ticker.clone().drop_guard();
        let ticker = tokio::spawn(Arc::clone(&core).run_ticker(config.tick, stop_ticker.clone()));

        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<MasterServer<MasterService>>().await;
        let connections = core.metrics.connections.clone();
        if let Some(local) = local {
            // Told from here on, and nobody was told before.
            let _ = core.local_lane.set(local.name().to_owned());
            let serving = local.serve(Arc::clone(&core), sever.clone(), connections.clone());
            core.work.spawn(serving);
        }
        let incoming = incoming.map(move |accepted| {
            accepted.map(|io| Severable::new(io, sever.clone(), connections.clone()))
        });
        let incoming = Entrance::new(incoming, Arc::clone(&core));
        let serving = Server::builder()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME)
            .max_concurrent_streams(STREAMS_PER_CONNECTION)
            .http2_keepalive_interval(Some(PING_EVERY))
            .http2_keepalive_timeout(Some(PING_ANSWER))
            .add_service(health_service)
            .add_service(MasterService::serve(Arc::clone(&core)))
            .serve_with_incoming_shutdown(incoming, core.closing.clone().cancelled_owned());
        tokio::pin!(serving);
        let served = tokio::select! {
            served = &mut serving => served.map_err(|source| Error::Serve { source }),
            () = shutdown => {
                health.set_not_serving::<MasterServer<MasterService>>().await;
                core.closing.cancel();
                core.work.close();
                let ended = async {
                    let served = serving.await.map_err(|source| Error::Serve { source });
                    core.work.wait().await;
                    served
                };
                tokio::time::timeout(config.shutdown_grace, ended)
                    .await
                    .unwrap_or(Err(Error::CutOff { grace: config.shutdown_grace }))
            }
        };
        core.closing.cancel();
        stop_ticker.cancel();
        if let Err(error) = ticker.await {
            tracing::error!(%error, "the ticker failed");
        }
        served
    }
}

impl BoundMaster {
    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Its term.
    pub fn term(&self) -> Term {
        self.master.term()
    }

    /// A view of it.
    pub fn monitor(&self) -> Monitor {
        self.master.monitor()
    }

    /// Serves until `shutdown` ends.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        // A request is smaller than a packet and should not wait to fill one.
        let incoming = TcpIncoming::from(self.listener).with_nodelay(Some(true));
        self.master.serve_with(incoming, self.local, shutdown).await
    }
}
