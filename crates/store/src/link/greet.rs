//! From nothing to an open stream: connect, exchange versions, prove the token both ways, open the
//! stream, join.
//!
//! Nothing but nonces and versions is sent before the master has proven the token, so a stranger on
//! the master's address learns neither keys nor tickets. Every way to fail has its own error; the
//! whole attempt runs under the caller's deadline.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use layercake_protocol::auth::{Nonce, Side, draw_nonce};
use layercake_protocol::convert::{
    MAX_MESSAGE_BYTES, TICKET_METADATA, Ticket, decode_status, encode_ticket,
};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::{RequestId, Term};
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::client::Grpc;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

use super::codec::{LinkCodec, encode_body};
use super::connection::{Connection, Request, Response, Wires};
use super::connector::Connector;
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
    pub(super) inbound: Streaming<wire::MasterFrame>,
    pub(super) heartbeat_every: Duration,
}

/// One attempt.
pub(super) async fn establish<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<Established, StoreError> {
    let connect = shared.config.timeouts.connect;
    let (channel, first) = match tokio::time::timeout(connect, open(shared, connector)).await {
        Ok(opened) => opened?,
        Err(_) => {
            return Err(shared.unreachable(format!("no connection within {connect:?}")));
        }
    };
    match tokio::time::timeout(connect, greet(shared, channel)).await {
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
) -> Result<(Channel, FirstBytes), StoreError> {
    let io = connector
        .connect(&shared.master)
        .await
        .map_err(|error| shared.unreachable(error.to_string()))?;
    let (io, first) = Sniffed::new(io);
    let timeouts = &shared.config.timeouts;
    let endpoint = Endpoint::from_shared(format!("http://{}", shared.master))
        .map_err(|error| StoreError::InvalidConfig {
            setting: "master",
            detail: format!("\"{}\": {error}", shared.master),
        })?
        .http2_keep_alive_interval(timeouts.ping_every)
        .keep_alive_timeout(timeouts.ping)
        .keep_alive_while_idle(true)
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
    Ok((channel, first))
}

async fn greet(shared: &Shared, channel: Channel) -> Result<Established, StoreError> {
    let ticket = authenticate(shared, &channel).await?;
    let (wires, frames) = Wires::new(shared.client, Arc::clone(&shared.outbox));
    let join = Request {
        body: encode_body(wire::client_frame::Request::Join(wire::JoinRequest {
            name: shared.config.name.clone(),
            endpoint: shared.config.endpoint.as_ref().map(Into::into),
        })),
        tenant: shared.config.tenant.clone(),
        repeat: false,
        reserves: false,
    };
    let id = shared.next_request();
    wires
        .send(wires.frame(None, id, &join))
        .await
        .map_err(|_| shared.unreachable("the stream ended before it began".to_owned()))?;

    let mut outbound = tonic::Request::new(ReceiverStream::new(frames));
    outbound
        .metadata_mut()
        .insert(TICKET_METADATA, encode_ticket(&ticket));
    let mut grpc = Grpc::new(channel.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    grpc.ready()
        .await
        .map_err(|error| shared.unreachable(chain(&error)))?;
    let path = PathAndQuery::from_static("/layercake.v1.Master/Open");
    let mut inbound = grpc
        .streaming(outbound, path, LinkCodec)
        .await
        .map_err(|status| shared.status_error(&status))?
        .into_inner();

    let joined = joined(shared, id, &mut inbound).await?;
    let term = Term(joined.term);
    let life = shared.begin_life(term, joined.fresh);
    shared
        .shares_tenants
        .store(joined.shared_tenants, Ordering::Relaxed);
    let (least, most) = HEARTBEAT_RANGE;
    Ok(Established {
        connection: Arc::new(Connection::new(wires, term, life, channel, ticket)),
        inbound,
        heartbeat_every: Duration::from_millis(joined.heartbeat_every_ms).clamp(least, most),
    })
}

/// Versions and proofs, both ways.
async fn authenticate(shared: &Shared, channel: &Channel) -> Result<Ticket, StoreError> {
    let master = || Arc::clone(&shared.master);
    let token = shared.config.token.as_ref();
    let mut client = wire::master_client::MasterClient::new(channel.clone());
    let nonce = draw_nonce();
    let hello = client
        .hello(wire::HelloRequest {
            version: Some(version::CURRENT.into()),
            nonce: Bytes::copy_from_slice(&nonce),
            program: format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
        })
        .await
        .map_err(|status| shared.hello_error(&status))?
        .into_inner();

    let theirs: Version = hello
        .version
        .ok_or_else(|| shared.bad_answer(WireError::Missing { field: "version" }))?
        .into();
    version::CURRENT
        .accept(theirs)
        .map_err(|mismatch| StoreError::Version {
            master: master(),
            mismatch,
        })?;
    let master_nonce: Nonce = hello.nonce.as_ref().try_into().map_err(|_| {
        shared.bad_answer(WireError::Invalid {
            field: "nonce",
            detail: format!("{} bytes, 32 are needed", hello.nonce.len()),
        })
    })?;
    if let Some(token) = token {
        token
            .check(Side::Responder, &nonce, &master_nonce, &hello.proof)
            .map_err(|_| StoreError::MasterUnproven { master: master() })?;
    } else if hello.token_required {
        return Err(StoreError::TokenRequired { master: master() });
    }
    let proof = token.map_or_else(Bytes::new, |token| {
        Bytes::copy_from_slice(&token.prove(Side::Initiator, &nonce, &master_nonce))
    });
    let answer = client
        .authenticate(wire::AuthenticateRequest {
            client_nonce: Bytes::copy_from_slice(&nonce),
            master_nonce: hello.nonce,
            proof,
        })
        .await
        .map_err(|status| shared.status_error(&status))?
        .into_inner();
    answer.ticket.as_ref().try_into().map_err(|_| {
        shared.bad_answer(WireError::Invalid {
            field: "ticket",
            detail: format!("{} bytes, 16 are needed", answer.ticket.len()),
        })
    })
}

/// The answer to the join, which comes before any other.
async fn joined(
    shared: &Shared,
    id: RequestId,
    inbound: &mut Streaming<wire::MasterFrame>,
) -> Result<wire::JoinResponse, StoreError> {
    loop {
        let frame = inbound
            .message()
            .await
            .map_err(|status| shared.status_error(&status))?
            .ok_or_else(|| shared.unreachable("it closed the stream".to_owned()))?;
        // A command may come first. It is repeated until it is answered.
        if frame.request_id == 0 {
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
