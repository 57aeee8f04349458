//! One open stream, and the calls in flight on it.
//!
//! A call registers under its request id, hands its frame to what carries the stream (a lane, or gRPC
//! through a bounded queue: a slow master makes callers wait), and waits for its answer. When the stream
//! breaks, every waiting call learns so at once. Deadlines are looked after by [`Connection::sweep`], not
//! by a timer for each call, which would wake the runtime's driver: a call may end so much late.
//!
//! A start whose caller goes away (its future dropped, its deadline over) may still be answered: the
//! entry stays, and the answer, or the start itself if the stream breaks first, is taken back through the outbox. Lock order: `pending` is never held
//! together with another lock.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use layercake_protocol::convert::{Context, Ticket};
use layercake_protocol::ids::{ClientId, RequestId, Term};
use layercake_protocol::key::Tenant;
use layercake_protocol::wire;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::codec::Outgoing;
use super::drive::drives;
use super::lane::{Lane, Offer};
use super::outbox::{Chore, Outbox};
use super::signs::Signs;
use super::types::{Life, LinkCarrier};
use super::unanswered::Start;

pub(super) type Response = wire::master_frame::Response;

/// Frames that wait for the connection to take them.
const QUEUE: usize = 256;

/// A request that is ready to be sent, any number of times.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) body: Bytes,
    pub(super) tenant: Tenant,
    pub(super) if_lost: IfLost,
    /// Whether its answer gives the caller reservations, which must be given back if it is gone.
    pub(super) reserves: bool,
}

/// What is done about a request whose connection broke before the answer came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfLost {
    /// The caller is told: twice would not be the same as once.
    Tell,
    /// It is sent again, if the connection is renewed at once.
    Repeat,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskError {
    /// The stream is broken. If the frame was not handed over, not even in part, the master did not see it.
    Broken { handed_over: bool },
    /// The deadline passed.
    Elapsed,
}

struct Pending {
    /// `None`: the caller was told that its time is over.
    reply: Option<oneshot::Sender<Result<Response, AskError>>>,
    deadline: Instant,
    /// If the answer must be taken back when nobody waits for it any more.
    reserving: Option<Start>,
}

/// The frames that go out on a gRPC stream.
pub(super) type Frames = mpsc::Receiver<Outgoing>;

/// What carries frames to the master.
pub(super) enum Carrier {
    Grpc(mpsc::Sender<Outgoing>),
    Lane(Arc<Lane>),
}

impl Carrier {
    /// A queue of frames for a gRPC stream.
    pub(super) fn grpc() -> (Self, Frames) {
        let (outgoing, frames) = mpsc::channel(QUEUE);
        (Self::Grpc(outgoing), frames)
    }

    /// Hands a frame over.
    async fn send(
        &self,
        context: wire::ClientFrame,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<(), AskError> {
        const BROKEN: AskError = AskError::Broken { handed_over: false };
        match self {
            Self::Grpc(outgoing) => match outgoing.try_send(Outgoing {
                context,
                body: body.clone(),
            }) {
                Ok(()) => Ok(()),
                Err(TrySendError::Closed(_)) => Err(BROKEN),
                Err(TrySendError::Full(frame)) => timeout_at(deadline, outgoing.send(frame))
                    .await
                    .map_err(|_| AskError::Elapsed)?
                    .map_err(|_| BROKEN),
            },
            Self::Lane(lane) => loop {
                match lane.writer.offer(&context, body) {
                    Ok(()) => return Ok(()),
                    Err(Offer::Broken) => return Err(BROKEN),
                    Err(Offer::Lost) => return Err(AskError::Broken { handed_over: true }),
                    Err(Offer::Refused(error)) => {
                        tracing::error!(%error, "a request does not fit into a frame");
                        return Err(BROKEN);
                    }
                    Err(Offer::Full) => {}
                }
                let room = lane.writer.room();
                tokio::pin!(room);
                room.as_mut().enable();
                match lane.writer.offer(&context, body) {
                    Err(Offer::Full) => timeout_at(deadline, room)
                        .await
                        .map_err(|_| AskError::Elapsed)?,
                    Ok(()) => return Ok(()),
                    Err(Offer::Lost) => return Err(AskError::Broken { handed_over: true }),
                    Err(Offer::Broken | Offer::Refused(_)) => {}
                }
            },
        }
    }
}

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
    /// Calls wait, and the sweeper goes round.
    swept: AtomicBool,
    asked: Notify,
    pub(super) signs: Signs,
}

/// The stream before its membership is known.
pub(super) struct Wires {
    client: ClientId,
    pub(super) carrier: Carrier,
    /// `None`: broken.
    pending: Mutex<Option<Calls>>,
    outbox: Arc<Outbox>,
}

type Calls = HashMap<u64, Pending, BuildHasherDefault<IdHasher>>;

/// Request ids are this side's own numbers: nobody chooses them to collide.
#[derive(Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // Spreads consecutive numbers over all bits.
        self.0 = id.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

impl Wires {
    pub(super) fn new(client: ClientId, carrier: Carrier, outbox: Arc<Outbox>) -> Self {
        Self {
            client,
            carrier,
            pending: Mutex::new(Some(Calls::default())),
            outbox,
        }
    }

    /// Hands a request over, whose answer is awaited elsewhere.
    pub(super) async fn send(
        &self,
        term: Option<Term>,
        id: RequestId,
        request: &Request,
        deadline: Instant,
    ) -> Result<(), AskError> {
        let context = Context {
            term,
            client: self.client,
            request: id,
            tenant: request.tenant.clone(),
        };
        let context = wire::ClientFrame {
            context: Some((&context).into()),
            request: None,
        };
        self.carrier.send(context, &request.body, deadline).await
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
            swept: AtomicBool::new(false),
            asked: Notify::new(),
            signs: Signs::new(),
        }
    }

    /// The lane that carries it, if it is not gRPC.
    pub(super) fn lane(&self) -> Option<&Lane> {
        match &self.wires.carrier {
            Carrier::Lane(lane) => Some(lane),
            Carrier::Grpc(_) => None,
        }
    }

    pub(super) fn carrier(&self) -> LinkCarrier {
        match self.lane() {
            Some(lane) if lane.is_local => LinkCarrier::UnixLane,
            Some(_) => LinkCarrier::TcpLane,
            None => LinkCarrier::Grpc,
        }
    }

    /// Whether calls wait for answers.
    pub(super) fn is_waited_for(&self) -> bool {
        let pending = self.wires.pending.lock();
        pending.as_ref().is_some_and(|calls| !calls.is_empty())
    }

    /// Sends a request and waits for its answer.
    pub(super) async fn ask(
        &self,
        id: RequestId,
        request: &Request,
        deadline: Instant,
    ) -> Result<Response, AskError> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending {
            reply: Some(reply),
            deadline,
            reserving: Start::of(id, request),
        };
        match self.wires.pending.lock().as_mut() {
            Some(calls) => calls.insert(id.0, pending),
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
        let sent = self.wires.send(Some(self.term), id, request, deadline);
        if let Err(error) = sent.await {
            if error != AskError::Elapsed {
                self.stop.cancel();
            }
            return Err(error);
        }
        waiting.handed_over = true;
        match self.lane() {
            // Whoever leads looks after deadlines, too.
            Some(_) if drives(self.wires.client) => {}
            Some(lane) => {
                self.be_swept();
                lane.reader.call_back();
            }
            None => self.be_swept(),
        }
        match (&mut waiting.answer).await {
            Ok(Ok(answer)) => {
                waiting.over = true;
                Ok(answer)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => {
                // Whoever asked knows what it means for a start.
                waiting.over = true;
                Err(AskError::Broken { handed_over: true })
            }
        }
    }

    /// Has the sweeper go round while calls wait.
    pub(super) fn be_swept(&self) {
        if !self.swept.load(Ordering::Relaxed) && !self.swept.swap(true, Ordering::AcqRel) {
            self.asked.notify_one();
        }
    }

    /// Ends calls whose time is over, by looking at all of them every so often while there are any.
    pub(super) async fn sweep(&self, every: Duration) -> std::convert::Infallible {
        loop {
            self.asked.notified().await;
            while self.swept.load(Ordering::Relaxed) {
                sleep(every).await;
                self.end_overdue();
            }
        }
    }

    /// Ends calls whose time is over.
    pub(super) fn end_overdue(&self) {
        let now = Instant::now();
        let mut overdue = Vec::new();
        {
            let mut pending = self.wires.pending.lock();
            let Some(calls) = pending.as_mut() else {
                return;
            };
            let mut waited_for = false;
            for call in calls.values_mut() {
                if call.deadline <= now {
                    overdue.extend(call.reply.take());
                }
                waited_for |= call.reply.is_some();
            }
            // Under the lock: whoever comes later finds it so.
            self.swept.store(waited_for, Ordering::Release);
        }
        for reply in overdue {
            // Whoever has gone meanwhile knows.
            let _ = reply.send(Err(AskError::Elapsed));
        }
    }

    /// Hands an answer to its caller, or back where the caller has gone.
    pub(super) fn answer(&self, id: u64, response: Response) {
        let pending = self
            .wires
            .pending
            .lock()
            .as_mut()
            .and_then(|pending| pending.remove(&id));
        let Some(Pending {
            reply, reserving, ..
        }) = pending
        else {
            return;
        };
        let unwanted = match reply {
            Some(reply) => reply.send(Ok(response)).err(),
            None => Some(Ok(response)),
        };
        if let (Some(Ok(response)), Some(start)) = (unwanted, reserving) {
            self.take_back(start, &response);
        }
    }

    /// Wakes every waiting call with [`AskError::Broken`], and refuses new ones. The link's status must
    /// not name this connection any more.
    pub(super) fn fail(&self) {
        self.stop.cancel();
        self.broken.cancel();
        // The senders are dropped outside the lock: that wakes their receivers.
        let pending = self.wires.pending.lock().take();
        for call in pending.into_iter().flatten().map(|(_, call)| call) {
            // Of those that still wait, each looks after its own.
            let abandoned = call.reply.as_ref().is_none_or(oneshot::Sender::is_closed);
            if let (true, Some(start)) = (abandoned, call.reserving) {
                self.never_answered(start);
            }
        }
    }

    /// Waits until the link has let go of this stream.
    pub(super) async fn ended(&self) {
        self.broken.cancelled().await;
    }

    fn take_back(&self, start: Start, response: &Response) {
        if let Some(chore) = start.revoke(self.life, response) {
            self.wires.outbox.push(chore);
        }
    }

    fn never_answered(&self, start: Start) {
        let life = self.life;
        self.wires.outbox.push(Chore::TakeBack { life, start });
    }
}

/// A call that has not come back yet; dropping it cleans up.
struct Waiting<'a> {
    connection: &'a Connection,
    id: RequestId,
    request: &'a Request,
    handed_over: bool,
    over: bool,
    answer: oneshot::Receiver<Result<Response, AskError>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.answer.close();
        if let (true, Some(start)) = (self.handed_over, Start::of(self.id, self.request)) {
            // The reader finds the caller gone from here on. What it sent just before is here.
            if let Ok(Ok(response)) = self.answer.try_recv() {
                self.connection.take_back(start, &response);
            } else if self.connection.wires.pending.lock().is_none() {
                self.connection.never_answered(start);
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
