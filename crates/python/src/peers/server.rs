//! The answering end: shows regions to peers that know the token, and takes their notifications.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire::peer_request::Request as Ask;
use layercake_protocol::wire::peer_response::Response as Answer;
use layercake_protocol::wire::peer_server::{Peer, PeerServer};
use layercake_protocol::wire::{self, PeerRequest, PeerResponse};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Status, Streaming};

use super::NOTIFICATION;
use crate::core::EngineCore;

/// How long a stream may take to prove that it may be here.
const GREET_WITHIN: Duration = Duration::from_secs(10);

/// Answers that a peer has not taken yet; further requests wait.
const QUEUE: usize = 16;

/// Notifications that are kept until they are taken, and their bytes; one more drops the oldest.
const INBOX: usize = 4096;
const INBOX_BYTES: usize = 16 << 20;

/// Longest request: a notification, and its frame.
const REQUEST: usize = NOTIFICATION + 1024;

/// Streams that may be open on one connection: a peer needs one.
const STREAMS: u32 = 8;

/// A name, and a message of any bytes.
pub(crate) type Notification = (String, Vec<u8>);

/// What the streams of one engine share.
pub(super) struct Door {
    pub(super) engine: Arc<EngineCore>,
    pub(super) token: Option<SharedToken>,
    /// What the engine calls itself, where it does.
    pub(super) name: OnceLock<String>,
    inbox: Mutex<Inbox>,
    tasks: TaskTracker,
}

/// Notifications that nobody has taken yet.
#[derive(Default)]
struct Inbox {
    kept: VecDeque<Notification>,
    /// Of their names and messages.
    bytes: usize,
}

impl Inbox {
    fn keep(&mut self, notification: Notification) {
        self.bytes += len(&notification);
        self.kept.push_back(notification);
        while self.kept.len() > INBOX || self.bytes > INBOX_BYTES {
            let Some(oldest) = self.kept.pop_front() else {
                break;
            };
            self.bytes -= len(&oldest);
        }
    }
}

fn len((name, message): &Notification) -> usize {
    name.len() + message.len()
}

impl Door {
    pub(super) fn new(
        engine: Arc<EngineCore>,
        token: Option<SharedToken>,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            engine,
            token,
            name: OnceLock::new(),
            inbox: Mutex::default(),
            tasks,
        }
    }

    /// The notifications that came since the last call.
    pub(super) fn take_notifications(&self) -> Vec<Notification> {
        std::mem::take(&mut *self.inbox.lock()).kept.into()
    }

    fn keep(&self, notify: wire::PeerNotify) {
        let notification = (notify.name, notify.message.into());
        self.inbox.lock().keep(notification);
    }

    fn regions(&self) -> wire::PeerRegions {
        let exports = self.engine.exports();
        wire::PeerRegions {
            endpoint: Some(self.engine.engine().endpoint().into()),
            regions: exports
                .into_iter()
                .map(|(address, region)| wire::PeerRegion {
                    address,
                    len: region.len,
                    region_id: region.region.0,
                    capability: Bytes::copy_from_slice(&region.capability.0),
                })
                .collect(),
            name: self.name.get().cloned().unwrap_or_default(),
        }
    }
}

/// Serves until `stop` is cancelled.
pub(super) async fn serve(door: Arc<Door>, listener: TcpListener, stop: CancellationToken) {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let served = Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .add_service(
            PeerServer::new(Service {
                door,
                stop: stop.clone(),
            })
            .max_decoding_message_size(REQUEST),
        )
        .serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::warn!(%error, "the listener for peers failed");
    }
}

struct Service {
    door: Arc<Door>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl Peer for Service {
    type TalkStream = ReceiverStream<Result<PeerResponse, Status>>;

    async fn talk(
        &self,
        request: tonic::Request<Streaming<PeerRequest>>,
    ) -> Result<tonic::Response<Self::TalkStream>, Status> {
        let (answers, stream) = mpsc::channel(QUEUE);
        let talk = Talk {
            door: Arc::clone(&self.door),
            requests: request.into_inner(),
            answers,
        };
        // The end of the engine is the end of its streams, whatever peers do.
        let talking = self.stop.clone().run_until_cancelled_owned(talk.run());
        self.door.tasks.spawn(talking);
        Ok(tonic::Response::new(ReceiverStream::new(stream)))
    }
}

/// One stream.
struct Talk {
    door: Arc<Door>,
    requests: Streaming<PeerRequest>,
    answers: mpsc::Sender<Result<PeerResponse, Status>>,
}

/// The stream is over: the peer has gone, or was told why.
struct Over;

impl Talk {
    async fn run(mut self) {
        let greeted = tokio::time::timeout(GREET_WITHIN, self.greet()).await;
        if let Ok(Ok(())) = greeted {
            while let Ok(()) = self.answer_next().await {}
        }
    }

    async fn next(&mut self) -> Result<(u64, Ask), Over> {
        match self.requests.message().await {
            Ok(Some(PeerRequest {
                id,
                request: Some(request),
            })) => Ok((id, request)),
            _ => Err(Over),
        }
    }

    async fn answer(&self, id: u64, answer: Answer) -> Result<(), Over> {
        let response = PeerResponse {
            id,
            response: Some(answer),
        };
        self.answers.send(Ok(response)).await.map_err(|_| Over)
    }

    async fn refuse(&self, id: u64, refusal: &Refusal) -> Over {
        // Gone or told: over in either case.
        let _ = self.answer(id, Answer::Error(refusal.into())).await;
        Over
    }

    /// Versions, and proofs both ways.
    async fn greet(&mut self) -> Result<(), Over> {
        let (id, Ask::Hello(hello)) = self.next().await? else {
            return Err(Over);
        };
        let (welcome, nonces) = match self.welcome(&hello) {
            Ok(welcome) => welcome,
            Err(refusal) => return Err(self.refuse(id, &refusal).await),
        };
        self.answer(id, Answer::Welcome(welcome)).await?;
        let (id, Ask::Proof(proof)) = self.next().await? else {
            return Err(Over);
        };
        let (theirs, ours) = nonces;
        let known = self.door.token.as_ref().is_none_or(|token| {
            token
                .check(Side::Initiator, &theirs, &ours, &proof.proof)
                .is_ok()
        });
        if !known {
            return Err(self.refuse(id, &Refusal::Unauthenticated).await);
        }
        self.answer(id, Answer::Done(wire::PeerDone {})).await
    }

    fn welcome(
        &self,
        hello: &wire::PeerHello,
    ) -> Result<(wire::PeerWelcome, (Nonce, Nonce)), Refusal> {
        let theirs: Version = hello
            .version
            .ok_or(WireError::Missing { field: "version" })?
            .into();
        version::CURRENT
            .accept(theirs)
            .map_err(|mismatch| Refusal::Version {
                detail: mismatch.to_string(),
            })?;
        let their_nonce: Nonce =
            hello
                .nonce
                .as_ref()
                .try_into()
                .map_err(|_| WireError::Invalid {
                    field: "nonce",
                    detail: format!("{} bytes, 32 are needed", hello.nonce.len()),
                })?;
        let our_nonce = draw_nonce();
        let token = self.door.token.as_ref();
        let proof = token.map_or_else(Bytes::new, |token| {
            Bytes::copy_from_slice(&token.prove(Side::Responder, &their_nonce, &our_nonce))
        });
        let welcome = wire::PeerWelcome {
            version: Some(version::CURRENT.into()),
            nonce: Bytes::copy_from_slice(&our_nonce),
            proof,
            token_required: token.is_some(),
        };
        Ok((welcome, (their_nonce, our_nonce)))
    }

    async fn answer_next(&mut self) -> Result<(), Over> {
        let (id, request) = self.next().await?;
        let answer = match request {
            Ask::Describe(_) => Answer::Regions(self.door.regions()),
            Ask::Notify(notify) => {
                self.door.keep(notify);
                Answer::Done(wire::PeerDone {})
            }
            Ask::Hello(_) | Ask::Proof(_) => {
                let refusal = Refusal::invalid("the greeting is over");
                return Err(self.refuse(id, &refusal).await);
            }
        };
        self.answer(id, answer).await
    }
}
