//! From nothing to an open stream: connect, exchange versions, prove the token both ways, open the
//! stream, join.
//!
//! The stream is a framed lane where the master has one and it can be reached, and gRPC's else: whatever
//! is wrong with the lane, a proxy that knows only HTTP for one, costs a line of the log and no more. A master on the same host
//! offers a lane over a unix socket, which is used if nothing stands between the two: the address that this side
//! called must be the one that the master was called at, or a proxy would be bypassed.
//!
//! Nothing but nonces and versions is sent before the master has proven the token, so a stranger on
//! the master's address learns neither keys nor tickets. Every way to fail has its own error; the
//! whole attempt runs under the caller's deadline.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use layercake_protocol::convert::{
    MAX_MESSAGE_BYTES, TICKET_METADATA, Ticket, decode_status, encode_ticket,
};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::{RequestId, Term};
use layercake_protocol::wire;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::client::Grpc;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

use super::codec::{LinkCodec, encode_body};
use super::connection::{Carrier, Connection, Frames, IfLost, Request, Response, Wires};
use super::connector::Connector;
use super::lane::{self, Lane};
use super::proofs::Proofs;
use super::shared::Shared;
use super::sniff::{FirstBytes, Sniffed};
use crate::error::StoreError;

/// Flow-control windows of the stream and its connection, in bytes: a large answer should not stop
/// and go.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// The pace of heartbeats that is sensible, whatever the master says.
const HEARTBEAT_RANGE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_mins(1));

/// A stream that is open and joined.
pub(super) struct Established {
    pub(super) connection: Arc<Connection>,
    pub(super) inbound: Inbound,
    pub(super) heartbeat_every: Duration,
}

/// What the master says.
pub(super) enum Inbound {
    Grpc(Box<Streaming<wire::MasterFrame>>),
    Lane(Arc<Lane>),
}

/// One attempt.
pub(super) async fn establish<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<Established, StoreError> {
    let connect = shared.config.timeouts.connect;
    let (channel, first, called) =
        match tokio::time::timeout(connect, open(shared, connector)).await {
            Ok(opened) => opened?,
            Err(_) => {
                return Err(shared.unreachable(format!("no connection within {connect:?}")));
            }
        };
    match tokio::time::timeout(connect, greet(shared, connector, channel, called)).await {
        Ok(Ok(established)) => Ok(established),
        Ok(Err(error)) => Err(match first.other_service() {
            Some(detail) => StoreError::NotAMaster {
                address: Arc::clone(&shared.master),
                detail: detail.into(),
            },
            None => error,
        }),
        Err(_) => Err(shared.unreachable(format!(
            "it accepted the connection, but did not answer the greeting within {connect:?}"
        ))),
    }
}

/// Runs what the HTTP library spawns under the link's own account.
#[derive(Clone, Debug)]
struct Tracked(TaskTracker);

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

async fn open<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<(Channel, FirstBytes, Option<SocketAddr>), StoreError> {
    let io = connector
        .connect(&shared.master)
        .await
        .map_err(|error| shared.unreachable(error.to_string()))?;
    let called = C::peer(&io);
    let (io, first) = Sniffed::new(io);
    let timeouts = &shared.config.timeouts;
    let endpoint = Endpoint::from_shared(format!("http://{}", shared.master))
        .map_err(|error| StoreError::InvalidConfig {
            setting: "master",
            detail: format!("\"{}\": {error}", shared.master),
        })?
        .http2_keep_alive_interval(timeouts.ping_every)
        .keep_alive_timeout(timeouts.ping)
        // A stream keeps it from being idle; beside a lane, it is.
        .keep_alive_while_idle(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .executor(Tracked(shared.tracker.clone()));
    // A channel would connect again by itself; this one gets a single connection, since a new one has
    // to be greeted anew.
    let mut io = Some(TokioIo::new(io));
    let channel = endpoint
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let io = io.take();
            std::future::ready(io.ok_or_else(|| std::io::Error::other("it closed the connection")))
        }))
        .await
        .map_err(|error| shared.unreachable(chain(&error)))?;
    Ok((channel, first, called))
}

async fn greet<C: Connector>(
    shared: &Shared,
    connector: &C,
    channel: Channel,
    called: Option<SocketAddr>,
) -> Result<Established, StoreError> {
    let Admitted {
        ticket,
        has_lane,
        local_lane,
    } = authenticate(shared, &channel).await?;
    let lane = if has_lane && shared.config.lane {
        let local = local_lane.filter(|local| shared.config.local_lane && is_for(local, called));
        open_lane(shared, connector, local).await
    } else {
        None
    };
    let (wires, mut inbound, id) = if let Some(lane) = lane {
        let carrier = Carrier::Lane(Arc::clone(&lane));
        let (wires, id) = say_join(shared, carrier).await?;
        (wires, Inbound::Lane(lane), id)
    } else {
        let (carrier, frames) = Carrier::grpc();
        let (wires, id) = say_join(shared, carrier).await?;
        let inbound = open_stream(shared, &channel, &ticket, frames).await?;
        (wires, Inbound::Grpc(Box::new(inbound)), id)
    };
    let joined = joined(shared, id, &mut inbound).await?;
    let term = Term(joined.term);
    let life = shared.begin_life(term, joined.fresh);
    shared
        .shares_tenants
        .store(joined.shared_tenants, Ordering::Relaxed);
    shared.lease_ms.store(joined.lease_ms, Ordering::Relaxed);
    let (least, most) = HEARTBEAT_RANGE;
    Ok(Established {
        connection: Arc::new(Connection::new(wires, term, life, channel, ticket)),
        inbound,
        heartbeat_every: Duration::from_millis(joined.heartbeat_every_ms).clamp(least, most),
    })
}

/// Whether a lane over a unix socket leads where this side's call went, to `called`, and around nobody.
fn is_for(local: &wire::LocalLane, called: Option<SocketAddr>) -> bool {
    let called = called.map(|called| SocketAddr::new(called.ip().to_canonical(), called.port()));
    called.is_some() && local.reached_at.parse().ok() == called
}

/// A lane, if there is a way. It has half the time of the attempt, so that gRPC has the other, and a unix socket half of that.
async fn open_lane<C: Connector>(
    shared: &Shared,
    connector: &C,
    local: Option<wire::LocalLane>,
) -> Option<Arc<Lane>> {
    let begun = tokio::time::Instant::now();
    let within = shared.config.timeouts.connect / 2;
    if let Some(local) = local {
        let opening = lane::open_local(shared, &local.name);
        match greeted_in(shared, within / 2, opening).await {
            Ok(lane) => return Some(lane),
            Err(error @ StoreError::MasterUnproven { .. }) => {
                tracing::warn!(master = %shared.master, %error, "somebody else is at the master's unix socket, going over TCP");
            }
            // In another network namespace, for one.
            Err(error) => {
                tracing::debug!(master = %shared.master, %error, "no way over the unix socket, going over TCP");
            }
        }
    }
    let left = within.saturating_sub(begun.elapsed());
    greeted_in(shared, left, lane::open(shared, connector))
        .await
        .inspect_err(|error| {
            tracing::info!(master = %shared.master, %error, "no lane to the master, staying with gRPC");
        })
        .ok()
}

async fn greeted_in(
    shared: &Shared,
    within: Duration,
    opens: impl Future<Output = Result<Arc<Lane>, StoreError>>,
) -> Result<Arc<Lane>, StoreError> {
    let opened = tokio::time::timeout(within, opens).await;
    opened.unwrap_or_else(|_| {
        Err(shared.unreachable(format!("no greeting on the lane within {within:?}")))
    })
}

/// Makes the wires, and says on them that this member joins. The request's id.
async fn say_join(shared: &Shared, carrier: Carrier) -> Result<(Wires, RequestId), StoreError> {
    let wires = Wires::new(shared.client, carrier, Arc::clone(&shared.outbox));
    let join = Request {
        body: encode_body(wire::client_frame::Request::Join(wire::JoinRequest {
            name: shared.config.name.clone(),
            endpoint: shared.config.endpoint.as_ref().map(Into::into),
        })),
        tenant: shared.config.tenant.clone(),
        if_lost: IfLost::Tell,
        reserves: false,
    };
    let id = shared.next_request();
    let deadline = tokio::time::Instant::now() + shared.config.timeouts.connect;
    wires
        .send(None, id, &join, deadline)
        .await
        .map_err(|_| shared.unreachable("the stream ended before it began".to_owned()))?;
    Ok((wires, id))
}

/// Opens the stream over gRPC.
async fn open_stream(
    shared: &Shared,
    channel: &Channel,
    ticket: &Ticket,
    frames: Frames,
) -> Result<Streaming<wire::MasterFrame>, StoreError> {
    let mut outbound = tonic::Request::new(ReceiverStream::new(frames));
    outbound
        .metadata_mut()
        .insert(TICKET_METADATA, encode_ticket(ticket));
    let mut grpc = Grpc::new(channel.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    grpc.ready()
        .await
        .map_err(|error| shared.unreachable(chain(&error)))?;
    let path = PathAndQuery::from_static("/layercake.v1.Master/Open");
    let inbound = grpc
        .streaming(outbound, path, LinkCodec)
        .await
        .map_err(|status| shared.status_error(&status))?;
    Ok(inbound.into_inner())
}

/// What the greeting ends with.
struct Admitted {
    ticket: Ticket,
    has_lane: bool,
    local_lane: Option<wire::LocalLane>,
}

/// Versions and proofs, both ways.
async fn authenticate(shared: &Shared, channel: &Channel) -> Result<Admitted, StoreError> {
    let mut client = wire::master_client::MasterClient::new(channel.clone());
    let proofs = Proofs::begin(shared);
    let hello = client
        .hello(proofs.hello())
        .await
        .map_err(|status| shared.hello_error(&status))?
        .into_inner();
    let has_lane = hello.lane;
    let answer = client
        .authenticate(proofs.proof(hello)?)
        .await
        .map_err(|status| shared.status_error(&status))?
        .into_inner();
    Ok(Admitted {
        ticket: proofs.ticket(&answer)?,
        has_lane,
        local_lane: answer.local_lane,
    })
}

/// The answer to the join, which comes before any other.
async fn joined(
    shared: &Shared,
    id: RequestId,
    inbound: &mut Inbound,
) -> Result<wire::JoinResponse, StoreError> {
    loop {
        let frame = match inbound {
            Inbound::Grpc(inbound) => inbound
                .message()
                .await
                .map_err(|status| shared.status_error(&status))?,
            Inbound::Lane(lane) => tokio::select! {
                frame = lane.reader.message() => {
                    frame.map_err(|error| shared.unreachable(error.to_string()))?
                }
                error = lane.writer.run() => return Err(shared.unreachable(error.to_string())),
            },
        };
        let frame: wire::MasterFrame =
            frame.ok_or_else(|| shared.unreachable("it closed the stream".to_owned()))?;
        // A command may come first. It is repeated until it is answered.
        if frame.request_id == 0 && !matches!(frame.response, Some(Response::Error(_))) {
            continue;
        }
        return match frame.response {
            Some(Response::Join(joined)) if frame.request_id == id.0 => Ok(joined),
            Some(Response::Error(error)) => Err(match Refusal::try_from(error) {
                Ok(refusal) => shared.refused(refusal),
                Err(error) => shared.bad_answer(error),
            }),
            _ => Err(shared.bad_answer(WireError::Missing { field: "join" })),
        };
    }
}

impl Shared {
    pub(super) fn unreachable(&self, reason: String) -> StoreError {
        StoreError::MasterUnreachable {
            master: Arc::clone(&self.master),
            reason: reason.into(),
        }
    }

    pub(super) fn bad_answer(&self, source: WireError) -> StoreError {
        StoreError::BadAnswer {
            master: Arc::clone(&self.master),
            source,
        }
    }

    /// A refusal of a whole call or connection.
    pub(super) fn refused(&self, refusal: Refusal) -> StoreError {
        match refusal {
            Refusal::Unauthenticated => StoreError::WrongToken {
                master: Arc::clone(&self.master),
            },
            other => StoreError::Refused(other),
        }
    }

    /// What a gRPC status means.
    pub(super) fn status_error(&self, status: &tonic::Status) -> StoreError {
        if let Some(refusal) = decode_status(status) {
            return self.refused(refusal);
        }
        match status.code() {
            Code::Unauthenticated => self.refused(Refusal::Unauthenticated),
            Code::Unimplemented => self.not_a_master(status),
            _ => self.unreachable(describe(status)),
        }
    }

    /// What a gRPC status means as the answer to the very first call.
    fn hello_error(&self, status: &tonic::Status) -> StoreError {
        let transport = std::error::Error::source(status).is_some();
        match status.code() {
            Code::Unknown | Code::Internal | Code::NotFound | Code::PermissionDenied
                if !transport && decode_status(status).is_none() =>
            {
                self.not_a_master(status)
            }
            _ => self.status_error(status),
        }
    }

    fn not_a_master(&self, status: &tonic::Status) -> StoreError {
        StoreError::NotAMaster {
            address: Arc::clone(&self.master),
            detail: describe(status).into(),
        }
    }
}

/// A status for people, without the debug noise of its metadata.
fn describe(status: &tonic::Status) -> String {
    match std::error::Error::source(status) {
        Some(source) => format!("{}: {}", status.message(), chain(source)),
        None if status.message().is_empty() => status.code().description().to_owned(),
        None => status.message().to_owned(),
    }
}

/// An error and what lies under it, without repetitions.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        next = error.source();
    }
    text
}
