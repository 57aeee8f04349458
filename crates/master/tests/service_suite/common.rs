//! A master in this process and clients that talk to it over in-memory connections, so that tests can
//! pause the clock: nothing waits for a real socket.

use std::sync::Arc;
use std::time::Duration;

use layercake_master::{Error, Master, MasterConfig, Monitor};
use layercake_protocol::auth::draw_nonce;
use layercake_protocol::convert::{
    MAX_MESSAGE_BYTES, PutStartAnswer, TICKET_METADATA, decode_key_results, encode_ticket,
};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId, Term,
};
use layercake_protocol::replica::{PutStarted, Segment};
use layercake_protocol::version;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_client::MasterClient;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{self, ClientFrame, MasterFrame};
use prometheus_client::registry::Registry;
use tokio::io::DuplexStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// The term of the masters of these tests.
pub(crate) const TERM: u64 = 77;

/// How long anything may take before a test gives up on it, on the test's clock.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

pub(crate) fn config() -> MasterConfig {
    MasterConfig {
        term: Some(Term(TERM)),
        ..Default::default()
    }
}

/// A running master.
pub(crate) struct Cluster {
    connections: mpsc::Sender<std::io::Result<DuplexStream>>,
    shutdown: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Result<(), Error>>,
    pub(crate) monitor: Monitor,
    pub(crate) registry: Arc<Registry>,
}

impl Cluster {
    pub(crate) fn start(config: MasterConfig) -> Self {
        let mut registry = Registry::default();
        let master = Master::new(config, &mut registry).expect("the settings are good");
        let monitor = master.monitor();
        let (connections, incoming) = mpsc::channel(16);
        let (shutdown, stopped) = oneshot::channel();
        let serving = tokio::spawn(master.serve(ReceiverStream::new(incoming), async {
            let _ = stopped.await;
        }));
        Self {
            connections,
            shutdown: Some(shutdown),
            serving,
            monitor,
            registry: Arc::new(registry),
        }
    }

    /// A new connection, on which nothing was said.
    pub(crate) async fn connection(&self) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 20);
        self.connections
            .send(Ok(far))
            .await
            .expect("the master takes connections");
        near
    }

    /// A new connection that has not said hello.
    pub(crate) async fn channel(&self) -> Channel {
        let near = self.connection().await;
        let mut near = Some(hyper_util::rt::TokioIo::new(near));
        tonic::transport::Endpoint::from_static("http://master")
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(8 << 20)
            .connect_with_connector(tower::service_fn(move |_| {
                let near = near.take();
                async move { near.ok_or_else(|| std::io::Error::other("one connection only")) }
            }))
            .await
            .expect("the other end is there")
    }

    /// A client with a stream of its own.
    pub(crate) async fn client(&self, id: ClientId) -> Client {
        Client::open(self.channel().await, id).await
    }

    /// A client that has joined.
    pub(crate) async fn member(&self, id: ClientId, name: &str) -> Client {
        let mut client = self.client(id).await;
        let join = Request::Join(wire::JoinRequest {
            name: name.into(),
            endpoint: Some((&endpoint(id)).into()),
        });
        match client.call(join).await {
            Response::Join(_) => client,
            other => panic!("not joined: {other:?}"),
        }
    }

    /// A node that lends `len` bytes.
    pub(crate) async fn node(&self, id: ClientId, len: u64) -> Client {
        let name = format!("node-{}", id.0);
        let mut node = self.member(id, &name).await;
        let mount = Request::Mount(wire::MountRequest {
            segment: Some((&segment(id, len)).into()),
            max_generation: 0,
        });
        match node.call(mount).await {
            Response::Mount(mounted) => assert!(!mounted.already_mounted),
            other => panic!("not mounted: {other:?}"),
        }
        node
    }

    /// Asks the master to stop.
    pub(crate) fn stop(&mut self) {
        let shutdown = self.shutdown.take().expect("stopped once");
        shutdown.send(()).expect("the master runs");
    }

    /// How serving ended.
    pub(crate) async fn ended(self) -> Result<(), Error> {
        self.serving.await.expect("it does not panic")
    }

    /// The metrics as a scrape would see them.
    pub(crate) fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)
            .expect("writing to a string");
        text
    }
}

pub(crate) fn endpoint(id: ClientId) -> Endpoint {
    Endpoint {
        engine: EngineId(id.0),
        tcp: format!("127.0.0.1:{}", id.0),
        host: HostId([1; 16]),
        shm: None,
        pid: 1,
    }
}

/// The segment that a node lends.
pub(crate) fn segment(node: ClientId, len: u64) -> Segment {
    Segment {
        id: SegmentId(u64::try_from(node.0).expect("tests use small ids")),
        name: format!("node-{}", node.0),
        endpoint: endpoint(node),
        region: RegionId(1),
        capability: Capability([7; 16]),
        len,
        kind: MemoryKind::Host,
    }
}

/// A client's end of a stream, and unary calls beside it.
pub(crate) struct Client {
    pub(crate) id: ClientId,
    pub(crate) grpc: MasterClient<Channel>,
    pub(crate) ticket: Vec<u8>,
    requests: mpsc::Sender<ClientFrame>,
    answers: Streaming<MasterFrame>,
    next_request: u64,
    /// Commands that came while answers were waited for.
    pub(crate) commands: Vec<Response>,
}

/// Says hello and gets a ticket; no token.
pub(crate) async fn greet(grpc: &mut MasterClient<Channel>) -> Vec<u8> {
    let nonce = draw_nonce().to_vec();
    let hello = grpc
        .hello(wire::HelloRequest {
            version: Some(version::CURRENT.into()),
            nonce: nonce.clone().into(),
            program: "test".into(),
        })
        .await
        .expect("hello")
        .into_inner();
    let answer = grpc
        .authenticate(wire::AuthenticateRequest {
            client_nonce: nonce.into(),
            master_nonce: hello.nonce,
            proof: Vec::new().into(),
        })
        .await
        .expect("authenticate");
    answer.into_inner().ticket.to_vec()
}

/// A request that shows the ticket.
pub(crate) fn with_ticket<T>(message: T, ticket: &[u8]) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let ticket = ticket.try_into().expect("a ticket has 16 bytes");
    request
        .metadata_mut()
        .insert(TICKET_METADATA, encode_ticket(ticket));
    request
}

pub(crate) fn client_of(channel: Channel) -> MasterClient<Channel> {
    MasterClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

impl Client {
    pub(crate) async fn open(channel: Channel, id: ClientId) -> Self {
        let mut grpc = client_of(channel);
        let ticket = greet(&mut grpc).await;
        let (requests, frames) = mpsc::channel(64);
        let answers = grpc
            .open(with_ticket(ReceiverStream::new(frames), &ticket))
            .await
            .expect("the ticket is good")
            .into_inner();
        Self {
            id,
            grpc,
            ticket,
            requests,
            answers,
            next_request: 1,
            commands: Vec::new(),
        }
    }

    /// The request as a frame of this client.
    pub(crate) fn frame(&self, request_id: u64, request: Request) -> ClientFrame {
        ClientFrame {
            context: Some(wire::Context {
                term: TERM,
                client_id: Some(self.id.into()),
                request_id,
                tenant: String::new(),
            }),
            request: Some(request),
        }
    }

    /// Sends a request; its id.
    pub(crate) async fn send(&mut self, request: Request) -> u64 {
        let request_id = self.next_request;
        self.next_request += 1;
        self.send_as(request_id, request).await;
        request_id
    }

    /// Sends a request under an id of the test's.
    pub(crate) async fn send_as(&mut self, request_id: u64, request: Request) {
        self.send_frame(self.frame(request_id, request)).await;
    }

    pub(crate) async fn send_frame(&mut self, frame: ClientFrame) {
        self.requests.send(frame).await.expect("the stream is open");
    }

    /// The next frame, command or answer; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<MasterFrame> {
        tokio::time::timeout(PATIENCE, self.answers.message())
            .await
            .expect("an answer in time")
            .expect("the stream is whole")
    }

    /// The answer to this request; commands that come before it are kept.
    pub(crate) async fn answer(&mut self, request_id: u64) -> Response {
        loop {
            let frame = self.next().await.expect("the stream goes on");
            assert_eq!(frame.term, TERM);
            let response = frame.response.expect("a frame holds something");
            if frame.request_id == request_id {
                return response;
            }
            assert_eq!(frame.request_id, 0, "an answer to something else");
            self.commands.push(response);
        }
    }

    /// Sends a request and waits for its answer.
    pub(crate) async fn call(&mut self, request: Request) -> Response {
        let request_id = self.send(request).await;
        self.answer(request_id).await
    }

    /// The next command.
    pub(crate) async fn command(&mut self) -> Response {
        if !self.commands.is_empty() {
            return self.commands.remove(0);
        }
        let frame = self.next().await.expect("the stream goes on");
        assert_eq!(frame.request_id, 0, "an answer to something");
        frame.response.expect("a frame holds something")
    }

    pub(crate) async fn put_start(
        &mut self,
        keys: &[&str],
        size: u64,
    ) -> Vec<Result<PutStarted, Refusal>> {
        let answer = self.call(put_start(keys, size)).await;
        started(answer, keys.len())
    }

    /// Reserves and commits.
    pub(crate) async fn put(&mut self, keys: &[&str], size: u64) {
        let started = self.put_start(keys, size).await;
        let objects: Vec<_> = keys
            .iter()
            .zip(started)
            .map(|(key, started)| object(key, started.expect("there is room").generation))
            .collect();
        let count = objects.len();
        let ended = self
            .call(Request::PutEnd(wire::PutEndRequest { objects }))
            .await;
        assert_eq!(results(ended, count), vec![Ok(()); count]);
    }

    pub(crate) async fn heartbeat(&mut self, segments: &[SegmentId]) -> wire::HeartbeatResponse {
        let beat = Request::Heartbeat(wire::HeartbeatRequest {
            segment_ids: segments.iter().map(|id| id.0).collect(),
        });
        match self.call(beat).await {
            Response::Heartbeat(answer) => answer,
            other => panic!("not a heartbeat's answer: {other:?}"),
        }
    }

    /// One byte a key.
    pub(crate) async fn exists(&mut self, keys: &[&str]) -> Vec<u8> {
        match self.call(exists(keys)).await {
            Response::Exists(answer) => answer.states.to_vec(),
            other => panic!("not an existence answer: {other:?}"),
        }
    }

    pub(crate) async fn fence_done(&mut self, fence_id: u64, writer_attached: bool) {
        let done = Request::FenceDone(wire::FenceDoneRequest {
            fence_id,
            writer_attached,
        });
        match self.call(done).await {
            Response::Done(_) => {}
            other => panic!("not done: {other:?}"),
        }
    }
}

pub(crate) fn exists(keys: &[&str]) -> Request {
    Request::Exists(wire::ExistsRequest {
        probe: wire::Probe::Exists.into(),
        keys: keys.iter().copied().map(String::from).collect(),
        recency: None,
        stop_at_first_miss: false,
        unreachable_segments: Vec::new(),
        peek: true,
    })
}

pub(crate) fn put_start(keys: &[&str], size: u64) -> Request {
    Request::PutStart(wire::PutStartRequest {
        entries: keys
            .iter()
            .map(|key| wire::PutStart {
                key: (*key).into(),
                size,
                ..Default::default()
            })
            .collect(),
        config: Some(wire::ReplicateConfig {
            replicas: 1,
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub(crate) fn object(key: &str, generation: Generation) -> wire::ObjectRef {
    wire::ObjectRef {
        key: key.into(),
        generation: generation.0,
    }
}

pub(crate) fn wait_complete(keys: &[&str], timeout: Duration) -> Request {
    Request::WaitComplete(wire::WaitCompleteRequest {
        keys: keys.iter().copied().map(String::from).collect(),
        timeout_ms: u64::try_from(timeout.as_millis()).expect("a short time"),
    })
}

/// The answer to a put start.
pub(crate) fn started(answer: Response, keys: usize) -> Vec<Result<PutStarted, Refusal>> {
    match answer {
        Response::PutStart(answer) => {
            PutStartAnswer::decode(answer, keys)
                .expect("a good answer")
                .results
        }
        other => panic!("not the answer to a put start: {other:?}"),
    }
}

/// An answer that is one result per key.
pub(crate) fn results(answer: Response, keys: usize) -> Vec<Result<(), Refusal>> {
    match answer {
        Response::Results(results) => decode_key_results(results, keys).expect("a good answer"),
        other => panic!("not results: {other:?}"),
    }
}

/// Why the whole call was refused.
pub(crate) fn refused(answer: Response) -> Refusal {
    match answer {
        Response::Error(error) => error.try_into().expect("a good answer"),
        other => panic!("not refused: {other:?}"),
    }
}
