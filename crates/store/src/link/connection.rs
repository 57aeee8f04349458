//! One open stream, and the calls in flight on it.
//!
//! A call registers under its request id, hands its frame to the stream (a bounded queue: a slow
//! master makes callers wait), and waits for its answer. When the stream breaks, every waiting call
//! learns so at once.
//!
//! A start whose caller goes away (its future dropped, its deadline over) may still be answered: the
//! entry stays, and the answer is taken back through the outbox. Lock order: `pending` is never held
//! together with another lock.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use layercake_protocol::convert::{Context, Ticket};
use layercake_protocol::ids::{ClientId, Generation, RequestId, Term};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::ObjectRef;
use layercake_protocol::wire;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::codec::{Outgoing, decode_body};
use super::outbox::{Chore, Outbox};
use super::types::Life;

pub(super) type Response = wire::master_frame::Response;

/// Frames that wait for the connection to take them.
const QUEUE: usize = 256;

/// A request that is ready to be sent, any number of times.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) body: Bytes,
    pub(super) tenant: Tenant,
    /// Whether it may be sent again when it is not known what became of it.
    pub(super) repeat: bool,
    /// Whether its answer gives the caller reservations, which must be given back if it is gone.
    pub(super) reserves: bool,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskError {
    /// The stream is broken. If the frame was not handed over, the master did not see it.
    Broken { handed_over: bool },
    /// The deadline passed.
    Elapsed,
}

struct Pending {
    reply: oneshot::Sender<Response>,
    /// The request, if its answer must be taken back when nobody waits for it any more.
    reserving: Option<(Tenant, Bytes)>,
}

/// The frames that go out on a stream.
pub(super) type Frames = mpsc::Receiver<Outgoing>;

/// An open stream.
pub(super) struct Connection {
    pub(super) term: Term,
    pub(super) life: Life,
    /// For the unary calls of tools.
    pub(super) channel: Channel,
    pub(super) ticket: Ticket,
    /// Asks for the stream's end.
    pub(super) stop: CancellationToken,
    /// The stream has ended, and the link's status says so.
    broken: CancellationToken,
    wires: Wires,
}

/// The stream before its membership is known.
pub(super) struct Wires {
    client: ClientId,
    outgoing: mpsc::Sender<Outgoing>,
    /// `None`: broken.
    pending: Mutex<Option<HashMap<u64, Pending>>>,
    outbox: Arc<Outbox>,
}

impl Wires {
    pub(super) fn new(client: ClientId, outbox: Arc<Outbox>) -> (Self, Frames) {
        let (outgoing, frames) = mpsc::channel(QUEUE);
        let wires = Self {
            client,
            outgoing,
            pending: Mutex::new(Some(HashMap::new())),
            outbox,
        };
        (wires, frames)
    }

    pub(super) fn frame(&self, term: Option<Term>, id: RequestId, request: &Request) -> Outgoing {
        let context = Context {
            term,
            client: self.client,
            request: id,
            tenant: request.tenant.clone(),
        };
        Outgoing {
            context: (&context).into(),
            body: request.body.clone(),
        }
    }

    /// Queues a frame whose answer is read by the caller.
    pub(super) async fn send(&self, frame: Outgoing) -> Result<(), AskError> {
        self.outgoing
            .send(frame)
            .await
            .map_err(|_| AskError::Broken { handed_over: false })
    }
}

impl Connection {
    pub(super) fn new(
        wires: Wires,
        term: Term,
        life: Life,
        channel: Channel,
        ticket: Ticket,
    ) -> Self {
        Self {
            term,
            life,
            channel,
            ticket,
            stop: CancellationToken::new(),
            broken: CancellationToken::new(),
            wires,
        }
    }

    /// Sends a request and waits for its answer.
    pub(super) async fn ask(
        &self,
        id: RequestId,
        request: &Request,
        deadline: Instant,
    ) -> Result<Response, AskError> {
        let (reply, answer) = oneshot::channel();
        let reserving = request
            .reserves
            .then(|| (request.tenant.clone(), request.body.clone()));
        match self.wires.pending.lock().as_mut() {
            Some(pending) => pending.insert(id.0, Pending { reply, reserving }),
            None => return Err(AskError::Broken { handed_over: false }),
        };
        let mut waiting = Waiting {
            connection: self,
            id,
            request,
            handed_over: false,
            over: false,
            answer,
        };
        let frame = self.wires.frame(Some(self.term), id, request);
        match timeout_at(deadline, self.wires.outgoing.send(frame)).await {
            Ok(Ok(())) => waiting.handed_over = true,
            Ok(Err(_)) => {
                self.stop.cancel();
                return Err(AskError::Broken { handed_over: false });
            }
            Err(_) => return Err(AskError::Elapsed),
        }
        let Ok(answer) = timeout_at(deadline, &mut waiting.answer).await else {
            return Err(AskError::Elapsed);
        };
        waiting.over = true;
        answer.map_err(|_| AskError::Broken { handed_over: true })
    }

    /// Hands an answer to its caller, or back where the caller has gone.
    pub(super) fn answer(&self, id: u64, response: Response) {
        let pending = self
            .wires
            .pending
            .lock()
            .as_mut()
            .and_then(|pending| pending.remove(&id));
        let Some(Pending { reply, reserving }) = pending else {
            return;
        };
        if let Err(response) = reply.send(response)
            && let Some((tenant, body)) = reserving
        {
            self.take_back(tenant, body, &response);
        }
    }

    /// Wakes every waiting call with [`AskError::Broken`], and refuses new ones. The link's status must
    /// not name this connection any more.
    pub(super) fn fail(&self) {
        self.stop.cancel();
        self.broken.cancel();
        // The senders are dropped outside the lock: that wakes their receivers.
        let pending = self.wires.pending.lock().take();
        drop(pending);
    }

    /// Waits until the link has let go of this stream.
    pub(super) async fn ended(&self) {
        self.broken.cancelled().await;
    }

    fn take_back(&self, tenant: Tenant, body: Bytes, response: &Response) {
        let objects = reserved(body, response);
        if !objects.is_empty() {
            self.wires.outbox.push(Chore::Revoke {
                life: self.life,
                tenant,
                objects,
            });
        }
    }
}

/// The reservations that an answer grants to the request of `body`.
fn reserved(body: Bytes, response: &Response) -> Vec<ObjectRef> {
    use wire::client_frame::Request;
    let Response::PutStart(answer) = response else {
        return Vec::new();
    };
    let entries = match decode_body(body) {
        Some(Request::PutStart(start)) => start.entries,
        Some(Request::UpsertStart(upsert)) => upsert.start.unwrap_or_default().entries,
        _ => return Vec::new(),
    };
    let ok = i32::from(wire::Refusal::None);
    entries
        .into_iter()
        .zip(&answer.results)
        .filter(|(_, put)| put.refusal == ok)
        .filter_map(|(entry, put)| {
            Some(ObjectRef {
                key: ObjectKey::new(&entry.key).ok()?,
                generation: Generation(put.generation),
            })
        })
        .collect()
}

/// A call that has not come back yet; dropping it cleans up.
struct Waiting<'a> {
    connection: &'a Connection,
    id: RequestId,
    request: &'a Request,
    handed_over: bool,
    over: bool,
    answer: oneshot::Receiver<Response>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.answer.close();
        if self.request.reserves && self.handed_over {
            // The reader finds the caller gone from here on. What it sent just before is here.
            if let Ok(response) = self.answer.try_recv() {
                let Request { tenant, body, .. } = self.request.clone();
                self.connection.take_back(tenant, body, &response);
            }
        } else if let Some(pending) = self.connection.wires.pending.lock().as_mut() {
            pending.remove(&self.id.0);
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("term", &self.term)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}
