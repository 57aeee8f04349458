//! `layercake replay-worker`: one client process of a replay.
//!
//! It is started by the replay and speaks with it over standard input and output; see `messages`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_protocol::key::Tenant;
use layercake_protocol::layout::ModelGeometry;
use layercake_store::link::MasterLink;
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::{Direction, Engine, Stats, TransportKind};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::connector::ConnectorRequests;
use super::keys::BlockKeys;
use super::messages::{Done, FromWorker, Measured, Moved, Request, Setup, ToWorker};
use super::request::SessionRequests;
use crate::config::programs::{Common, TransportSettings};
use crate::config::{Flags, Settings as _, Sources};
use crate::connect::{self, Trust};
use crate::{output, process, security};

/// Options of `layercake replay-worker`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: Flags<Common>,
    #[command(flatten)]
    pub(crate) transport: Flags<TransportSettings>,
}

/// Longest time for leaving the cluster at the end.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// Runs until told to finish, or until standard input closes.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let flags = [&options.common.given[..], &options.transport.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, TransportSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let transport = TransportSettings::take(&resolved)?;
    process::start_logging(&common)?;
    let trust = Trust {
        token: security::token(&common)?.map(|token| token.shared),
        insecure: common.insecure,
    };
    let runtime = process::runtime(1)?;
    let worked = runtime.block_on(async {
        let mut commands = Commands::read(process::stdin_pipe()?);
        work(&mut commands, &transport, &trust).await
    });
    runtime.shutdown_timeout(LEAVE_WITHIN);
    worked
}

/// The replay's messages, read as they come, so that its end is noticed while a request is worked on.
struct Commands {
    lines: mpsc::Receiver<String>,
    gone: CancellationToken,
    _reader: AbortOnDropHandle<()>,
}

impl Commands {
    fn read(from: pipe::Receiver) -> Self {
        let gone = CancellationToken::new();
        let (send, lines) = mpsc::channel(4);
        let end = gone.clone().drop_guard();
        let reader = tokio::spawn(async move {
            let _end = end;
            let mut from = BufReader::new(from).lines();
            while let Ok(Some(line)) = from.next_line().await {
                if send.send(line).await.is_err() {
                    return;
                }
            }
        });
        Self {
            lines,
            gone,
            _reader: AbortOnDropHandle::new(reader),
        }
    }

    /// The next message; `None` when the replay is gone.
    async fn next(&mut self) -> Result<Option<ToWorker>> {
        let line = self.lines.recv().await;
        line.map(|line| {
            serde_json::from_str(&line).with_context(|| format!("no message: \"{line}\""))
        })
        .transpose()
    }
}

async fn work(commands: &mut Commands, transport: &TransportSettings, trust: &Trust) -> Result<()> {
    let Some(command) = commands.next().await? else {
        return Ok(());
    };
    let ToWorker::Setup(setup) = command else {
        bail!("the first message is no setup");
    };
    let engine = Engine::start(connect::engine_config(transport, trust, None, None))?;
    let mut worker = Worker::connect(&setup, &engine, trust).await?;
    output::print_json(&FromWorker::Ready)?;
    while let Some(command) = commands.next().await? {
        match command {
            ToWorker::Setup(_) => bail!("a second setup"),
            ToWorker::Request(request) => {
                let done = tokio::select! {
                    done = worker.requests.run(&request) => done?,
                    // Nobody waits for the answer: what is open ends with this process.
                    () = commands.gone.cancelled() => return Ok(()),
                };
                output::print_json(&FromWorker::Done(done))?;
            }
            ToWorker::Finish => {
                let mut measured = std::mem::take(worker.requests.measured());
                measured.transports = moved(&engine.stats());
                output::print_json(&FromWorker::Finished(measured))?;
                break;
            }
        }
    }
    worker.leave().await;
    engine.shutdown(LEAVE_WITHIN);
    Ok(())
}

/// How requests are worked off.
enum Requests {
    Sessions(Box<SessionRequests>),
    Connector(Box<ConnectorRequests>),
}

impl Requests {
    async fn run(&mut self, request: &Request) -> Result<Done> {
        match self {
            Self::Sessions(requests) => requests.run(request).await,
            // Waits as an engine's thread does, each time with a deadline.
            Self::Connector(requests) => tokio::task::block_in_place(|| requests.run(request)),
        }
    }

    fn measured(&mut self) -> &mut Measured {
        match self {
            Self::Sessions(requests) => &mut requests.measured,
            Self::Connector(requests) => &mut requests.measured,
        }
    }
}

struct Worker {
    link: MasterLink,
    client: StoreClient,
    requests: Requests,
}

impl Worker {
    async fn connect(setup: &Setup, engine: &Engine, trust: &Trust) -> Result<Self> {
        let geometry: ModelGeometry = setup.geometry.parse().context("the setup's geometry")?;
        let layout = geometry.layout().clone();
        let mut config = connect::link_config(&setup.master, &setup.name, trust);
        config.endpoint = Some(engine.endpoint().clone());
        let link = MasterLink::connect(config).await?;
        let config = ClientConfig {
            tenant: Tenant::new(&setup.tenant)?,
            ..ClientConfig::default()
        };
        let client = StoreClient::new(&link, engine.clone(), config)?;
        let keys = BlockKeys::new(&setup.tenant, &setup.run, &layout)?;
        let requests = if setup.connector {
            let requests = ConnectorRequests::new(setup, &layout, &client, engine)?;
            Requests::Connector(Box::new(requests))
        } else {
            let staging = setup.staging_bytes;
            let requests = SessionRequests::new(client.clone(), engine, layout, keys, staging)?;
            Requests::Sessions(Box::new(requests))
        };
        Ok(Self {
            link,
            client,
            requests,
        })
    }

    async fn leave(self) {
        if let Requests::Connector(requests) = self.requests
            && let Err(error) = requests.close(LEAVE_WITHIN).await
        {
            tracing::debug!(%error, "the connector did not end in order");
        }
        if let Err(error) = self.client.close(LEAVE_WITHIN).await {
            tracing::debug!(%error, "the client did not close in order");
        }
        if let Err(error) = self.link.close(LEAVE_WITHIN).await {
            tracing::debug!(%error, "the link did not close in order");
        }
    }
}

/// What an engine moved, by the transports that moved anything.
fn moved(stats: &Stats) -> Vec<Moved> {
    let mut all: Vec<Moved> = Vec::new();
    for transport in TransportKind::ALL {
        let bytes = |direction| {
            stats
                .operation(transport, direction)
                .map_or(0, |operation| operation.bytes)
        };
        let moved = Moved {
            transport: transport.name().to_owned(),
            bytes_written: bytes(Direction::Write),
            bytes_read: bytes(Direction::Read),
        };
        if moved.bytes_written + moved.bytes_read > 0 {
            all.push(moved);
        }
    }
    all
}
