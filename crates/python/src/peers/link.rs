//! The asking end: one stream to a peer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::ids::{Capability, RegionId};
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire::peer_client::PeerClient;
use layercake_protocol::wire::peer_request::Request as Ask;
use layercake_protocol::wire::peer_response::Response as Answer;
use layercake_protocol::wire::{self, PeerRequest, PeerResponse};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tonic::{Code, Status, Streaming};

use super::table::{Region, Table};
use super::{ASK_WITHIN, PeerError};

/// Requests that wait to be sent; further ones wait before that.
const QUEUE: usize = 16;

/// A stream to a peer that has proven itself. Dropping it ends the stream.
pub(super) struct Link {
    peer: String,
    requests: mpsc::Sender<PeerRequest>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
    _reader: DropGuard,
}

/// The requests without an answer; `None`: the stream has ended.
type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>;

/// What a peer shows.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) table: Table,
    pub(super) name: String,
}

impl Link {
    /// Connects and greets, within [`ASK_WITHIN`].
    pub(super) async fn open(
        peer: &str,
        token: Option<&SharedToken>,
        tasks: &TaskTracker,
    ) -> Result<Self, PeerError> {
        let opening = Self::greet(peer, token, tasks);
        match tokio::time::timeout(ASK_WITHIN, opening).await {
            Ok(link) => link,
            Err(_) => Err(unreachable(
                peer,
                format!("no answer within {ASK_WITHIN:?}"),
            )),
        }
    }

    async fn greet(
        peer: &str,
        token: Option<&SharedToken>,
        tasks: &TaskTracker,
    ) -> Result<Self, PeerError> {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{peer}"));
        let endpoint = endpoint.map_err(|_| PeerError::Address {
            peer: peer.to_owned(),
        })?;
        let channel = endpoint
            .connect_timeout(ASK_WITHIN)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(ASK_WITHIN)
            .keep_alive_timeout(ASK_WITHIN)
            .keep_alive_while_idle(true)
            .connect()
            .await
            .map_err(|error| unreachable(peer, cause(&error)))?;
        let (requests, queue) = mpsc::channel(QUEUE);
        let nonce = draw_nonce();
        let hello = PeerRequest {
            id: 0,
            request: Some(Ask::Hello(wire::PeerHello {
                version: Some(version::CURRENT.into()),
                nonce: Bytes::copy_from_slice(&nonce),
            })),
        };
        // The queue is empty and longer than the greeting.
        let _ = requests.try_send(hello);
        let stream = PeerClient::new(channel)
            .talk(ReceiverStream::new(queue))
            .await;
        let mut answers = stream
            .map_err(|status| of_status(peer, &status))?
            .into_inner();
        let welcome = match next(peer, &mut answers).await? {
            Answer::Welcome(welcome) => welcome,
            answer => return Err(unexpected(peer, answer)),
        };
        let proof = prove(peer, token, &nonce, &welcome)?;
        let proof = PeerRequest {
            id: 0,
            request: Some(Ask::Proof(wire::PeerProof { proof })),
        };
        let _ = requests.try_send(proof);
        match next(peer, &mut answers).await? {
            Answer::Done(_) => {}
            answer => return Err(unexpected(peer, answer)),
        }
        let waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let stop = CancellationToken::new();
        let reader = read(answers, Arc::clone(&waiting));
        tasks.spawn(stop.clone().run_until_cancelled_owned(reader));
        Ok(Self {
            peer: peer.to_owned(),
            requests,
            waiting,
            next: AtomicU64::new(1),
            _reader: stop.drop_guard(),
        })
    }

    /// Whether the stream has ended.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.lock().is_none()
    }

    async fn ask(&self, request: Ask) -> Result<Answer, PeerError> {
        let over = || unreachable(&self.peer, "it closed the stream".to_owned());
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match &mut *self.waiting.lock() {
            Some(waiting) => waiting.insert(id, answer),
            None => return Err(over()),
        };
        let request = PeerRequest {
            id,
            request: Some(request),
        };
        let exchange = async {
            self.requests.send(request).await.map_err(|_| over())?;
            answered.await.map_err(|_| over())
        };
        let answer = tokio::time::timeout(ASK_WITHIN, exchange).await;
        if let Some(waiting) = &mut *self.waiting.lock() {
            waiting.remove(&id);
        }
        match answer {
            Ok(Ok(Answer::Error(error))) => Err(refused(&self.peer, error)),
            Ok(answer) => answer,
            Err(_) => Err(unreachable(
                &self.peer,
                format!("no answer within {ASK_WITHIN:?}"),
            )),
        }
    }

    /// What the peer shows now.
    pub(super) async fn describe(&self) -> Result<View, PeerError> {
        match self.ask(Ask::Describe(wire::PeerDescribe {})).await? {
            Answer::Regions(regions) => view(regions).map_err(|error| PeerError::NotAPeer {
                peer: self.peer.clone(),
                detail: error.to_string(),
            }),
            answer => Err(unexpected(&self.peer, answer)),
        }
    }

    /// Returns when the peer has the message.
    pub(super) async fn notify(&self, name: String, message: Vec<u8>) -> Result<(), PeerError> {
        let notify = wire::PeerNotify {
            name,
            message: message.into(),
        };
        match self.ask(Ask::Notify(notify)).await? {
            Answer::Done(_) => Ok(()),
            answer => Err(unexpected(&self.peer, answer)),
        }
    }
}

/// Hands answers to those who wait, until the stream ends.
async fn read(mut answers: Streaming<PeerResponse>, waiting: Arc<Waiting>) {
    // However this ends, nobody waits for more.
    let ended = Ended(waiting);
    while let Ok(Some(PeerResponse {
        id,
        response: Some(answer),
    })) = answers.message().await
    {
        let waiting = ended
            .0
            .lock()
            .as_mut()
            .and_then(|waiting| waiting.remove(&id));
        if let Some(waiting) = waiting {
            // It may have given up.
            let _ = waiting.send(answer);
        }
    }
}

struct Ended(Arc<Waiting>);

impl Drop for Ended {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

async fn next(peer: &str, answers: &mut Streaming<PeerResponse>) -> Result<Answer, PeerError> {
    match answers.message().await {
        Ok(Some(PeerResponse {
            response: Some(Answer::Error(error)),
            ..
        })) => Err(refused(peer, error)),
        Ok(Some(PeerResponse {
            response: Some(answer),
            ..
        })) => Ok(answer),
        Ok(_) => Err(unreachable(peer, "it closed the stream".to_owned())),
        Err(status) => Err(of_status(peer, &status)),
    }
}

/// Checks the peer's version and proof, and makes this side's.
fn prove(
    peer: &str,
    token: Option<&SharedToken>,
    nonce: &Nonce,
    welcome: &wire::PeerWelcome,
) -> Result<Bytes, PeerError> {
    let peer = || peer.to_owned();
    let malformed = |detail: &str| PeerError::NotAPeer {
        peer: peer(),
        detail: detail.to_owned(),
    };
    let theirs: Version = welcome
        .version
        .ok_or_else(|| malformed("it names no version"))?
        .into();
    version::CURRENT
        .accept(theirs)
        .map_err(|mismatch| PeerError::Version {
            peer: peer(),
            mismatch,
        })?;
    let Some(token) = token else {
        if welcome.token_required {
            return Err(PeerError::TokenRequired { peer: peer() });
        }
        return Ok(Bytes::new());
    };
    let their_nonce: Nonce = welcome
        .nonce
        .as_ref()
        .try_into()
        .map_err(|_| malformed("it sent no nonce"))?;
    token
        .check(Side::Responder, nonce, &their_nonce, &welcome.proof)
        .map_err(|_| PeerError::Untrusted { peer: peer() })?;
    Ok(Bytes::copy_from_slice(&token.prove(
        Side::Initiator,
        nonce,
        &their_nonce,
    )))
}

fn view(regions: wire::PeerRegions) -> Result<View, WireError> {
    let endpoint = regions
        .endpoint
        .ok_or(WireError::Missing { field: "endpoint" })?;
    let table = regions.regions.into_iter().map(|region| {
        let capability: [u8; 16] =
            region
                .capability
                .as_ref()
                .try_into()
                .map_err(|_| WireError::Invalid {
                    field: "capability",
                    detail: format!("{} bytes, 16 are needed", region.capability.len()),
                })?;
        Ok(Region {
            address: region.address,
            len: region.len,
            id: RegionId(region.region_id),
            capability: Capability(capability),
        })
    });
    let table = table.collect::<Result<Vec<_>, WireError>>()?;
    Ok(View {
        endpoint: Arc::new(endpoint.try_into()?),
        table: Table::new(table),
        name: regions.name,
    })
}

fn unreachable(peer: &str, reason: String) -> PeerError {
    PeerError::Unreachable {
        peer: peer.to_owned(),
        reason,
    }
}

fn unexpected(peer: &str, answer: Answer) -> PeerError {
    let detail = match answer {
        Answer::Error(error) => return refused(peer, error),
        Answer::Welcome(_) => "it greeted twice",
        Answer::Done(_) | Answer::Regions(_) => "it answered another question",
    };
    PeerError::NotAPeer {
        peer: peer.to_owned(),
        detail: detail.to_owned(),
    }
}

fn refused(peer: &str, error: wire::Error) -> PeerError {
    let peer = peer.to_owned();
    match Refusal::try_from(error) {
        Ok(Refusal::Unauthenticated) => PeerError::Untrusted { peer },
        Ok(refusal) => PeerError::Refused { peer, refusal },
        Err(error) => PeerError::NotAPeer {
            peer,
            detail: error.to_string(),
        },
    }
}

/// What a status means as the answer to the stream.
fn of_status(peer: &str, status: &Status) -> PeerError {
    match status.code() {
        Code::Unimplemented | Code::Internal | Code::Unknown | Code::NotFound => {
            PeerError::NotAPeer {
                peer: peer.to_owned(),
                detail: status.message().to_owned(),
            }
        }
        _ => unreachable(peer, status.message().to_owned()),
    }
}

/// The innermost reason of an error.
fn cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
