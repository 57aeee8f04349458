//! A small working master over real gRPC, for tests of the link: it keeps objects in a map, answers
//! what it is asked, records what it saw, and misbehaves on demand.
//!
//! It runs on a runtime of its own, so that it can be killed like a process (all its sockets close
//! without a word), or frozen like a stopped one (it answers nothing, not even pings).

mod objects;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::convert::{Context, decode_ticket};
use layercake_protocol::error::Refusal;
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_protocol::wire::master_frame::Response as Answer;
use layercake_protocol::wire::master_server::{Master, MasterServer};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use objects::Objects;

/// Which request a fault or a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Exists,
    GetStart,
    GetEnd,
    PutStart,
    PutEnd,
    PutRevoke,
    WaitComplete,
    Remove,
    Mount,
    Unmount,
    Heartbeat,
    FenceDone,
    Join,
    Leave,
    Other,
}

impl Kind {
    fn of(body: &Body) -> Self {
        match body {
            Body::Exists(_) => Self::Exists,
            Body::GetStart(_) => Self::GetStart,
            Body::GetEnd(_) => Self::GetEnd,
            Body::PutStart(_) => Self::PutStart,
            Body::PutEnd(_) => Self::PutEnd,
            Body::PutRevoke(_) => Self::PutRevoke,
            Body::WaitComplete(_) => Self::WaitComplete,
            Body::Remove(_) => Self::Remove,
            Body::Mount(_) => Self::Mount,
            Body::Unmount(_) => Self::Unmount,
            Body::Heartbeat(_) => Self::Heartbeat,
            Body::FenceDone(_) => Self::FenceDone,
            Body::Join(_) => Self::Join,
            Body::Leave(_) => Self::Leave,
            _ => Self::Other,
        }
    }
}

/// How the master treats one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The stream breaks, and nothing was done.
    Drop,
    /// It is carried out, and the stream breaks instead of the answer.
    ApplyThenDrop,
    /// It is carried out; the answer waits for [`FakeMaster::release`].
    Hold,
    /// It is carried out and never answered.
    Swallow,
    /// The whole call is refused.
    Refuse(Refusal),
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub kind: Kind,
    pub context: Context,
    pub body: Body,
}

/// What the master is like.
#[derive(Clone, Debug)]
pub(crate) struct Nature {
    pub token: Option<SharedToken>,
    /// Proves the token, but turns every caller's proof away.
    pub turns_away: bool,
    pub version: Version,
    pub term: u64,
    pub heartbeat_every: Duration,
}

impl Default for Nature {
    fn default() -> Self {
        Self {
            token: None,
            turns_away: false,
            version: version::CURRENT,
            term: 1,
            heartbeat_every: Duration::from_mins(1),
        }
    }
}

#[derive(Default)]
struct State {
    nature: Nature,
    seen: Vec<Seen>,
    hellos: u64,
    authentications: u64,
    faults: HashMap<Kind, VecDeque<Fault>>,
    members: HashSet<u128>,
    objects: Objects,
    streams: Vec<mpsc::Sender<Result<wire::MasterFrame, Status>>>,
    missing: Vec<u64>,
    ticket: u8,
}

/// A handle on the master; clones share it, and it outlives the runtimes that serve it.
#[derive(Clone)]
pub(crate) struct FakeMaster {
    state: Arc<Mutex<State>>,
    release: Arc<Semaphore>,
    changed: Arc<Notify>,
}

impl Default for FakeMaster {
    fn default() -> Self {
        Self {
            state: Arc::default(),
            release: Arc::new(Semaphore::new(0)),
            changed: Arc::default(),
        }
    }
}

/// A master that is being served.
pub(crate) struct Served {
    pub address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Served {
    /// Ends it like SIGKILL.
    pub(crate) fn kill(mut self) {
        let runtime = self.runtime.take().expect("it is served");
        // On a thread of its own, since it waits: the port is free when this returns.
        std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(10)))
            .join()
            .expect("it ends");
    }

    /// Stops it like SIGSTOP until the guard is dropped.
    pub(crate) fn freeze(&self) -> std::sync::mpsc::Sender<()> {
        let (guard, thaw) = std::sync::mpsc::channel::<()>();
        let runtime = self.runtime.as_ref().expect("it is served");
        runtime.spawn(async move {
            let _ = thaw.recv();
        });
        guard
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl FakeMaster {
    pub(crate) fn new(nature: Nature) -> Self {
        let master = Self::default();
        master.state.lock().nature = nature;
        master
    }

    /// Serves on a port of its own.
    pub(crate) fn serve(&self) -> Served {
        self.serve_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// Serves on this address, which another may have had before.
    pub(crate) fn serve_at(&self, address: SocketAddr) -> Served {
        // One thread, so that blocking it freezes everything.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let master = self.clone();
        let (bound, address_of) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            let listener = TcpListener::bind(address).await.expect("the port is free");
            bound
                .send(listener.local_addr().expect("bound"))
                .expect("awaited");
            tonic::transport::Server::builder()
                .add_service(MasterServer::new(master).max_decoding_message_size(64 << 20))
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .expect("it serves");
        });
        let address = address_of
            .recv_timeout(Duration::from_secs(10))
            .expect("it binds at once");
        Served {
            address,
            runtime: Some(runtime),
        }
    }

    /// A new master in the place of the old: another term, nobody and nothing known.
    pub(crate) fn restart(&self) {
        let mut state = self.state.lock();
        state.nature.term += 1;
        state.members.clear();
        state.objects = Objects::default();
        state.streams.clear();
    }

    /// Forgets its members, as after their time to live.
    pub(crate) fn forget_members(&self) {
        self.state.lock().members.clear();
    }

    /// Forgets the tickets that it gave.
    pub(crate) fn forget_tickets(&self) {
        self.state.lock().ticket += 1;
    }

    fn check_ticket(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let ticket = self.state.lock().ticket;
        if decode_ticket(metadata) == Ok(Some([ticket; 16])) {
            Ok(())
        } else {
            Err(Status::from(&Refusal::Unauthenticated))
        }
    }

    /// Treats the next request of this kind so; several are queued.
    pub(crate) fn on(&self, kind: Kind, fault: Fault) {
        self.state
            .lock()
            .faults
            .entry(kind)
            .or_default()
            .push_back(fault);
    }

    /// Lets one held answer go.
    pub(crate) fn release(&self) {
        self.release.add_permits(1);
    }

    /// Names these segments as missing in every heartbeat's answer.
    pub(crate) fn miss_segments(&self, ids: Vec<u64>) {
        self.state.lock().missing = ids;
    }

    /// Sends a command on every open stream.
    pub(crate) async fn command(&self, command: Answer) {
        let (term, streams) = {
            let mut state = self.state.lock();
            state.streams.retain(|stream| !stream.is_closed());
            (state.nature.term, state.streams.clone())
        };
        for stream in streams {
            let frame = wire::MasterFrame {
                request_id: 0,
                term,
                response: Some(command.clone()),
            };
            // A stream that has just ended does not count.
            let _ = stream.send(Ok(frame)).await;
        }
    }

    /// What arrived of one kind.
    pub(crate) fn seen(&self, kind: Kind) -> Vec<Seen> {
        let state = self.state.lock();
        state
            .seen
            .iter()
            .filter(|seen| seen.kind == kind)
            .cloned()
            .collect()
    }

    /// How many members it knows.
    pub(crate) fn members(&self) -> usize {
        self.state.lock().members.len()
    }

    /// The kinds of what came from members that had left by then.
    pub(crate) fn seen_after_leaving(&self) -> Vec<Kind> {
        let mut left = HashSet::new();
        let state = self.state.lock();
        let late = state.seen.iter().filter(|seen| {
            let late = left.contains(&seen.context.client);
            if seen.kind == Kind::Leave {
                left.insert(seen.context.client);
            }
            late
        });
        late.map(|seen| seen.kind).collect()
    }

    pub(crate) fn greetings(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.hellos, state.authentications)
    }

    /// Makes an object.
    pub(crate) fn insert(&self, key: &str) {
        self.state.lock().objects.insert(key);
    }

    pub(crate) fn reservations(&self) -> usize {
        self.state.lock().objects.reservations()
    }

    /// Waits until what arrived fulfils a condition.
    pub(crate) async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let met = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if condition(self) {
                    return;
                }
                changed.await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), met).await;
        assert!(waited.is_ok(), "never happened: {what}");
    }
}

type Frames = mpsc::Sender<Result<wire::MasterFrame, Status>>;

impl FakeMaster {
    async fn serve_stream(self, mut requests: Streaming<wire::ClientFrame>, frames: Frames) {
        while let Some(Ok(frame)) = requests.next().await {
            let master = self.clone();
            let (Some(body), Some(context)) = (frame.request, frame.context) else {
                return;
            };
            let context = Context::try_from(context).expect("a context that makes sense");
            let (fault, answer, term) = master.handle(&context, body);
            let id = context.request.0;
            let frame = wire::MasterFrame {
                request_id: id,
                term,
                response: Some(answer),
            };
            match fault {
                None => {
                    if frames.send(Ok(frame)).await.is_err() {
                        return;
                    }
                }
                Some(Fault::Swallow) => {}
                Some(Fault::Drop | Fault::ApplyThenDrop) => {
                    let _ = frames
                        .send(Err(Status::unavailable("as the test wants")))
                        .await;
                    return;
                }
                Some(Fault::Hold) => {
                    let frames = frames.clone();
                    tokio::spawn(async move {
                        master
                            .release
                            .acquire()
                            .await
                            .expect("never closed")
                            .forget();
                        let _ = frames.send(Ok(frame)).await;
                    });
                }
                Some(Fault::Refuse(_)) => {
                    let _ = frames.send(Ok(frame)).await;
                }
            }
        }
    }

    fn handle(&self, context: &Context, body: Body) -> (Option<Fault>, Answer, u64) {
        let kind = Kind::of(&body);
        let mut state = self.state.lock();
        let fault = state.faults.get_mut(&kind).and_then(VecDeque::pop_front);
        state.seen.push(Seen {
            kind,
            context: context.clone(),
            body: body.clone(),
        });
        let answer = match &fault {
            Some(Fault::Drop) => Answer::Done(wire::Done {}),
            Some(Fault::Refuse(refusal)) => Answer::Error(refusal.into()),
            _ => state.apply(context, body),
        };
        let term = state.nature.term;
        drop(state);
        self.changed.notify_waiters();
        (fault, answer, term)
    }
}

impl State {
    fn apply(&mut self, context: &Context, body: Body) -> Answer {
        let done = Answer::Done(wire::Done {});
        match body {
            Body::Join(_) => Answer::Join(wire::JoinResponse {
                shared_tenants: false,
                term: self.nature.term,
                heartbeat_every_ms: u64::try_from(self.nature.heartbeat_every.as_millis())
                    .expect("small"),
                client_ttl_ms: 10_000,
                fresh: self.members.insert(context.client.0),
            }),
            Body::Leave(_) => {
                self.members.remove(&context.client.0);
                done
            }
            Body::Heartbeat(_) => Answer::Heartbeat(wire::HeartbeatResponse {
                known: self.members.contains(&context.client.0),
                missing_segments: self.missing.clone(),
            }),
            Body::FenceDone(_) | Body::Unmount(_) => done,
            Body::Mount(_) => Answer::Mount(wire::MountResponse::default()),
            body => self.objects.apply(context, body),
        }
    }
}

type BoxStream = Pin<Box<dyn Stream<Item = Result<wire::MasterFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Master for FakeMaster {
    type OpenStream = BoxStream;

    async fn hello(
        &self,
        request: Request<wire::HelloRequest>,
    ) -> Result<Response<wire::HelloResponse>, Status> {
        let mut state = self.state.lock();
        state.hellos += 1;
        let theirs: Nonce = request
            .into_inner()
            .nonce
            .as_ref()
            .try_into()
            .expect("32 bytes");
        let ours = draw_nonce();
        let token = state.nature.token.as_ref();
        Ok(Response::new(wire::HelloResponse {
            version: Some(state.nature.version.into()),
            nonce: ours.to_vec().into(),
            proof: token.map_or_else(Default::default, |token| {
                token.prove(Side::Responder, &theirs, &ours).to_vec().into()
            }),
            token_required: token.is_some(),
            term: state.nature.term,
        }))
    }

    async fn authenticate(
        &self,
        request: Request<wire::AuthenticateRequest>,
    ) -> Result<Response<wire::AuthenticateResponse>, Status> {
        let mut state = self.state.lock();
        state.authentications += 1;
        let request = request.into_inner();
        let client: Nonce = request.client_nonce.as_ref().try_into().expect("32 bytes");
        let master: Nonce = request.master_nonce.as_ref().try_into().expect("32 bytes");
        let fits = state.nature.token.as_ref().is_none_or(|token| {
            token
                .check(Side::Initiator, &client, &master, &request.proof)
                .is_ok()
        });
        if !fits || state.nature.turns_away {
            return Err(Status::from(&Refusal::Unauthenticated));
        }
        Ok(Response::new(wire::AuthenticateResponse {
            ticket: vec![state.ticket; 16].into(),
        }))
    }

    async fn open(
        &self,
        request: Request<Streaming<wire::ClientFrame>>,
    ) -> Result<Response<BoxStream>, Status> {
        self.check_ticket(request.metadata())?;
        let (frames, receiver) = mpsc::channel(16);
        self.state.lock().streams.push(frames.clone());
        tokio::spawn(self.clone().serve_stream(request.into_inner(), frames));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn call(
        &self,
        _: Request<wire::ClientFrame>,
    ) -> Result<Response<wire::MasterFrame>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn list_objects(
        &self,
        _: Request<wire::ListObjectsRequest>,
    ) -> Result<Response<wire::ListObjectsResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn stat_object(
        &self,
        request: Request<wire::StatObjectRequest>,
    ) -> Result<Response<wire::StatObjectResponse>, Status> {
        self.check_ticket(request.metadata())?;
        Ok(Response::new(wire::StatObjectResponse {
            refusal: wire::Refusal::NotFound.into(),
            ..Default::default()
        }))
    }

    async fn list_segments(
        &self,
        _: Request<wire::ListSegmentsRequest>,
    ) -> Result<Response<wire::ListSegmentsResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn status(
        &self,
        _: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }
}
