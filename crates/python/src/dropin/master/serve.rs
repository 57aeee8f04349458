//! A master's life as a process: start, serve, stop.

use std::env::VarError;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use layercake_master::mooncake::{Address, Settings};
use layercake_master::{Error, Master, MasterConfig};
use layercake_protocol::auth::SharedToken;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::http::{self, Admin, QuotaFile};

/// Where the cluster's shared token comes from.
const ENV_TOKEN: &str = "LAYERCAKE_TOKEN";

/// Answers under way may take this long at a stop.
const GRACE: Duration = Duration::from_millis(500);

/// Why the command ends with an error.
#[derive(Debug, Error)]
pub(super) enum Failed {
    #[error("the threads of the runtime can't be started: {0}")]
    Runtime(io::Error),
    #[error("can't listen for signals: {0}")]
    Signals(io::Error),
    #[error("--{flag}=\"{host}\": {source}")]
    Host {
        flag: &'static str,
        host: String,
        source: io::Error,
    },
    #[error("can't listen on {address} (--{flag}): {source}")]
    Listen {
        flag: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    #[error("the token in {ENV_TOKEN} can't be used: {0}")]
    Token(String),
    #[error("{}", with_causes(.0))]
    Master(#[from] Error),
}

fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// What a process waits for when all is well.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    /// Listens from now on.
    fn listen() -> Result<Self, Failed> {
        let listen = |kind| signal(kind).map_err(Failed::Signals);
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Runs a master until SIGTERM or SIGINT.
pub(super) fn run(settings: Settings) -> Result<(), Failed> {
    block_on(layercake_master::threads(), serve(settings))
}

/// Runs a metadata server alone until SIGTERM or SIGINT.
pub(super) fn run_metadata(address: &Address) -> Result<(), Failed> {
    block_on(1, async {
        let mut stop = Stop::listen()?;
        let listener = listener("host", address).await?;
        let token = CancellationToken::new();
        tokio::select! {
            () = http::serve(listener, http::metadata(), token) => {}
            () = stop.wait() => {}
        }
        Ok(())
    })
}

fn block_on(
    threads: usize,
    program: impl Future<Output = Result<(), Failed>>,
) -> Result<(), Failed> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("mooncake-master")
        .enable_all()
        .build()
        .map_err(Failed::Runtime)?;
    let ended = runtime.block_on(program);
    runtime.shutdown_timeout(Duration::from_millis(200));
    ended
}

async fn serve(settings: Settings) -> Result<(), Failed> {
    let mut stopped = Stop::listen()?;
    let token = match std::env::var(ENV_TOKEN) {
        Ok(text) if !text.is_empty() => {
            let token = SharedToken::new(&text);
            Some(token.map_err(|error| Failed::Token(error.to_string()))?)
        }
        Err(VarError::NotUnicode(_)) => return Err(Failed::Token("it is not UTF-8".to_owned())),
        _ => None,
    };
    let listen = resolve("rpc_address", &settings.rpc).await?;
    let open = token.is_none() && !listen.ip().is_loopback();
    let config = MasterConfig {
        listen,
        // As the command that it stands in for, which asks nobody for anything.
        insecure: open,
        token,
        shutdown_grace: GRACE,
        state: settings.state,
        ..MasterConfig::default()
    };
    // In this order: whoever finds the HTTP port open can connect to the master as well.
    let mut registry = Registry::default();
    let master = Master::bind(config, &mut registry).await?;
    let metadata = match &settings.metadata {
        Some(address) => Some(listener("http_metadata_server_host", address).await?),
        None => None,
    };
    let admin = listener("metrics_host", &settings.http).await?;
    if open {
        tracing::warn!(
            %listen,
            "open to every host that reaches this address: set {ENV_TOKEN} to a shared token for master and clients, \
             or give --rpc_address=127.0.0.1 --metrics_host=127.0.0.1"
        );
    }
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let mut servers = tokio::task::JoinSet::new();
    let answers = Admin::new(
        master.monitor(),
        registry,
        QuotaFile::new(settings.quota_file),
    );
    servers.spawn(http::serve(admin, answers.router(), stop.clone()));
    if let Some(metadata) = metadata {
        servers.spawn(http::serve(metadata, http::metadata(), stop.clone()));
    }
    let served = master.serve(stopped.wait()).await;
    stop.cancel();
    // Connections that idle are not waited for.
    servers.shutdown().await;
    match served {
        // Members keep their connections to the last: cutting them off is how it ends.
        Ok(()) | Err(Error::CutOff { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn resolve(flag: &'static str, address: &Address) -> Result<SocketAddr, Failed> {
    let failed = |source| Failed::Host {
        flag,
        host: address.host.clone(),
        source,
    };
    let host = address.host.trim_start_matches('[').trim_end_matches(']');
    let mut found = tokio::net::lookup_host((host, address.port))
        .await
        .map_err(failed)?;
    found
        .next()
        .ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}

async fn listener(flag: &'static str, address: &Address) -> Result<TcpListener, Failed> {
    let address = resolve(flag, address).await?;
    TcpListener::bind(address)
        .await
        .map_err(|source| Failed::Listen {
            flag,
            address,
            source,
        })
}
