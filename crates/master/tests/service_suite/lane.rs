//! Framed lanes: the greeting, what breaks one, and that they carry the same conversation as gRPC.

use std::time::Duration;

use layercake_master::MasterConfig;
use layercake_protocol::auth::{Nonce, SharedToken, Side, draw_nonce};
use layercake_protocol::convert::MAX_MESSAGE_BYTES;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::lane::{EMPTY, Frame, Inbox, MAGIC, SILENCE, put_frame};
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::lane_answer::Answer;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{self, ClientFrame, MasterFrame};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::time::Instant;

use crate::common::{Cluster, PATIENCE, TERM, config, exists, refused, wait_complete};

const CLIENT: ClientId = ClientId(7);
const MIB: u64 = 1 << 20;

/// The client's end of a lane, byte by byte.
struct Lane {
    io: DuplexStream,
    inbox: Inbox,
}

impl Lane {
    /// A connection on which the magic bytes were said.
    async fn begin(cluster: &Cluster) -> Self {
        let mut lane = Self {
            io: cluster.connection().await,
            inbox: Inbox::new(MAX_MESSAGE_BYTES),
        };
        lane.say(&MAGIC).await;
        lane
    }

    /// A lane that was greeted, at a master without a token.
    async fn open(cluster: &Cluster) -> Self {
        let mut lane = Self::begin(cluster).await;
        let (nonce, hello) = lane.hello(version::CURRENT).await;
        let Answer::Hello(hello) = hello else {
            panic!("turned away: {hello:?}");
        };
        assert!(hello.lane && hello.term == TERM);
        let admitted = lane.authenticate(None, nonce, &hello).await;
        assert!(matches!(admitted, Answer::Admitted(_)), "{admitted:?}");
        lane
    }

    async fn say(&mut self, bytes: &[u8]) {
        self.io.write_all(bytes).await.expect("the lane is open");
    }

    async fn send(&mut self, message: &impl Message) {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, message).expect("short enough");
        self.say(&bytes).await;
    }

    /// The next frame; `None` at the end.
    async fn next<M: Message + Default>(&mut self) -> Option<Frame<M>> {
        let reading = async {
            loop {
                if let Some(frame) = self.inbox.take().expect("the master keeps the rules") {
                    return Some(frame);
                }
                let count = self.io.read(self.inbox.room()).await.unwrap_or(0);
                if count == 0 {
                    self.inbox.ended().expect("whole frames");
                    return None;
                }
                self.inbox.filled(count);
            }
        };
        let next = tokio::time::timeout(PATIENCE, reading).await;
        next.expect("in time")
    }

    async fn message<M: Message + Default>(&mut self) -> M {
        match self.next().await {
            Some(Frame::Message(message)) => message,
            other => panic!("no message: {:?}", other.is_some()),
        }
    }

    async fn is_over(&mut self) -> bool {
        self.next::<MasterFrame>().await.is_none()
    }

    async fn hello(&mut self, version: Version) -> (Nonce, Answer) {
        let nonce = draw_nonce();
        self.send(&wire::HelloRequest {
            version: Some(version.into()),
            nonce: nonce.to_vec().into(),
            program: "test".into(),
        })
        .await;
        let answer: wire::LaneAnswer = self.message().await;
        (nonce, answer.answer.expect("an answer"))
    }

    async fn authenticate(
        &mut self,
        token: Option<&SharedToken>,
        nonce: Nonce,
        hello: &wire::HelloResponse,
    ) -> Answer {
        let theirs = hello.nonce.as_ref().try_into().expect("32 bytes");
        let proof = token.map_or_else(Vec::new, |token| {
            token.prove(Side::Initiator, &nonce, &theirs).to_vec()
        });
        self.send(&wire::AuthenticateRequest {
            client_nonce: nonce.to_vec().into(),
            master_nonce: hello.nonce.clone(),
            proof: proof.into(),
        })
        .await;
        let answer: wire::LaneAnswer = self.message().await;
        answer.answer.expect("an answer")
    }

    async fn call(&mut self, request_id: u64, request: Request) -> Response {
        self.send(&frame(request_id, request)).await;
        let answer: MasterFrame = self.message().await;
        assert_eq!((answer.request_id, answer.term), (request_id, TERM));
        answer.response.expect("an answer")
    }
}

fn frame(request_id: u64, request: Request) -> ClientFrame {
    ClientFrame {
        context: Some(wire::Context {
            term: TERM,
            client_id: Some(CLIENT.into()),
            request_id,
            tenant: String::new(),
        }),
        request: Some(request),
    }
}

fn join() -> Request {
    Request::Join(wire::JoinRequest {
        name: "by lane".into(),
        endpoint: None,
    })
}

fn with_token(token: &str) -> (MasterConfig, SharedToken) {
    let token = SharedToken::new(token).expect("long enough");
    let config = MasterConfig {
        token: Some(token.clone()),
        ..config()
    };
    (config, token)
}

fn refusal(answer: Answer) -> Refusal {
    match answer {
        Answer::Refused(error) => Refusal::try_from(error).expect("a refusal"),
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_lane_and_a_grpc_stream_see_the_same_master() {
    let cluster = Cluster::start(config());
    let mut node = cluster.node(ClientId(1), 64 * MIB).await;
    node.put(&["there"], 100).await;
    let mut lane = Lane::open(&cluster).await;
    assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
    let Response::Exists(found) = lane.call(2, exists(&["there", "not"])).await else {
        panic!("no answer to exists");
    };
    assert_eq!(found.states.as_ref(), [1, 0]);
    drop(lane);
    assert!(cluster.metrics().contains("layercake_master_streams"));
}

#[tokio::test(start_paused = true)]
async fn frames_that_come_in_pieces_or_together_are_each_answered() {
    let cluster = Cluster::start(config());
    let mut lane = Lane::open(&cluster).await;
    let mut bytes = Vec::new();
    for id in 1..=200 {
        let request = if id == 1 { join() } else { exists(&["k"]) };
        put_frame(&mut bytes, &frame(id, request)).expect("short");
    }
    let (together, apart) = bytes.split_at(bytes.len() - 200);
    lane.say(together).await;
    for byte in apart {
        lane.say(std::slice::from_ref(byte)).await;
        tokio::task::yield_now().await;
    }
    for id in 1..=200 {
        let answer: MasterFrame = lane.message().await;
        assert_eq!(answer.request_id, id);
    }
}

#[tokio::test(start_paused = true)]
async fn both_sides_prove_the_token_on_a_lane() {
    let (config, token) = with_token("the cluster's token");
    let cluster = Cluster::start(config);
    for (ours, admitted) in [
        (Some(token.clone()), true),
        (SharedToken::new("some other token").ok(), false),
        (None, false),
    ] {
        let mut lane = Lane::begin(&cluster).await;
        let (nonce, answer) = lane.hello(version::CURRENT).await;
        let Answer::Hello(hello) = answer else {
            panic!("turned away: {answer:?}");
        };
        let theirs = hello.nonce.as_ref().try_into().expect("32 bytes");
        token
            .check(Side::Responder, &nonce, &theirs, &hello.proof)
            .expect("the master proves that it knows the token");
        let answer = lane.authenticate(ours.as_ref(), nonce, &hello).await;
        if admitted {
            assert!(matches!(answer, Answer::Admitted(_)), "{answer:?}");
            assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
        } else {
            assert_eq!(refusal(answer), Refusal::Unauthenticated);
            assert!(lane.is_over().await);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_carried_out_before_the_proof() {
    let (config, _) = with_token("the cluster's token");
    let cluster = Cluster::start(config);
    let mut lane = Lane::begin(&cluster).await;
    let (_, hello) = lane.hello(version::CURRENT).await;
    assert!(matches!(hello, Answer::Hello(_)));
    lane.send(&frame(1, join())).await;
    match lane.next::<wire::LaneAnswer>().await {
        None => {}
        Some(Frame::Message(answer)) => {
            let refusal = refusal(answer.answer.expect("an answer"));
            assert!(
                matches!(
                    refusal,
                    Refusal::InvalidArgument { .. } | Refusal::Unauthenticated
                ),
                "{refusal}"
            );
        }
        Some(Frame::Empty) => panic!("no answer to a join"),
    }
    assert!(lane.is_over().await);
    assert_eq!(cluster.monitor.status().members, 0);
}

#[tokio::test(start_paused = true)]
async fn a_version_too_far_away_is_refused_on_a_lane_naming_both() {
    let cluster = Cluster::start(config());
    let mut lane = Lane::begin(&cluster).await;
    let theirs = Version {
        protocol: version::CURRENT.protocol + 2,
        ..version::CURRENT
    };
    let (_, answer) = lane.hello(theirs).await;
    let Refusal::Version { detail } = refusal(answer) else {
        panic!("refused for something else");
    };
    for version in [theirs, version::CURRENT] {
        assert!(detail.contains(&version.to_string()), "{detail}");
    }
    assert!(lane.is_over().await);
}

#[tokio::test(start_paused = true)]
async fn garbage_ends_its_connection_and_no_other() {
    let cluster = Cluster::start(config());
    let mut lane = Lane::open(&cluster).await;
    let mut magic_and_more = MAGIC.to_vec();
    magic_and_more.extend_from_slice(b"\xff\xff\xff\xffwhatever");
    let mut a_message = MAGIC.to_vec();
    a_message.extend_from_slice(b"\x04\0\0\0\xff\xff\xff\xff");
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        magic_and_more,
        a_message,
    ] {
        let mut io = cluster.connection().await;
        io.write_all(&garbage).await.expect("the master listens");
        let mut said = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, io.read_to_end(&mut said));
        drop(ended.await.expect("the master hangs up"));
    }
    assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_breaks_the_rules_is_named_and_ends_the_lane() {
    let cluster = Cluster::start(config());
    let too_long = u32::try_from(MAX_MESSAGE_BYTES + 1).expect("it fits");
    let too_long = too_long.to_le_bytes().to_vec();
    let no_message = b"\x04\0\0\0\xff\xff\xff\xff".to_vec();
    for (bytes, named) in [
        (too_long, (MAX_MESSAGE_BYTES + 1).to_string()),
        (no_message, "no message of the lane".to_owned()),
    ] {
        let mut lane = Lane::open(&cluster).await;
        assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
        lane.say(&bytes).await;
        let last: MasterFrame = lane.message().await;
        assert_eq!(last.request_id, 0);
        let Refusal::InvalidArgument { detail } = refused(last.response.expect("a refusal")) else {
            panic!("refused for something else");
        };
        assert!(detail.contains(&named), "{detail}");
        assert!(lane.is_over().await);
    }
}

#[tokio::test(start_paused = true)]
async fn half_a_frame_and_then_silence_is_cut_off_and_a_sign_of_life_keeps_the_lane() {
    let cluster = Cluster::start(config());
    let mut lane = Lane::open(&cluster).await;
    let begun = Instant::now();
    for _ in 0..20 {
        tokio::time::sleep(SILENCE / 3).await;
        lane.say(&EMPTY).await;
        let answer = lane.next::<MasterFrame>().await;
        assert!(matches!(answer, Some(Frame::Empty)), "it lives as well");
    }
    assert!(begun.elapsed() > SILENCE * 6);
    lane.say(&[100, 0, 0, 0, 1, 2, 3]).await;
    let silent = Instant::now();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, lane.io.read_to_end(&mut rest));
    drop(ended.await.expect("cut off"));
    assert!(silent.elapsed() <= SILENCE * 2, "{:?}", silent.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_sign_of_life_answers_however_many_were_asked_for() {
    const ASKED: usize = 1 << 16;
    let cluster = Cluster::start(config());
    let mut lane = Lane::open(&cluster).await;
    let mut bytes = EMPTY.repeat(ASKED);
    put_frame(&mut bytes, &frame(1, exists(&["k"]))).expect("short");
    lane.say(&bytes).await;
    let (mut signs, mut answered) = (0, false);
    while signs == 0 || !answered {
        match lane.next::<MasterFrame>().await {
            Some(Frame::Empty) => signs += 1,
            Some(Frame::Message(answer)) => answered = answer.request_id == 1,
            None => panic!("the lane has ended"),
        }
    }
    assert!(signs < ASKED / 16, "{signs} of {ASKED}");
}

#[tokio::test(start_paused = true)]
async fn one_that_does_not_finish_its_greeting_is_cut_off() {
    let cluster = Cluster::start(config());
    for said in [&MAGIC[..3], &MAGIC[..], b"LAYERCK1\x20\0"] {
        let mut io = cluster.connection().await;
        io.write_all(said).await.expect("the master listens");
        let begun = Instant::now();
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, io.read_to_end(&mut rest));
        drop(ended.await.expect("the master hangs up"));
        assert!(begun.elapsed() <= Duration::from_secs(21));
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_takes_no_answers_is_not_read() {
    let cluster = Cluster::start(config());
    let mut lane = Lane::open(&cluster).await;
    assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
    let keys = vec!["k"; 1000];
    let request = frame(2, exists(&keys));
    let mut bytes = Vec::new();
    put_frame(&mut bytes, &request).expect("short");
    // The connection holds a megabyte each way, and the master little more.
    let mut taken = 0;
    let stuck = async {
        loop {
            lane.io.write_all(&bytes).await.expect("it is open");
            taken += 1;
        }
    };
    let stuck = tokio::time::timeout(Duration::from_secs(5), stuck).await;
    assert!(stuck.is_err(), "the master reads on and on");
    assert!(taken > 100, "{taken}");
    let begun = Instant::now();
    let mut rest = Vec::new();
    // It does not answer for ever either: the silence of a lane that is not read counts.
    tokio::time::sleep(SILENCE * 2).await;
    let ended = tokio::time::timeout(PATIENCE, lane.io.read_to_end(&mut rest));
    drop(ended.await.expect("cut off"));
    assert!(begun.elapsed() <= SILENCE * 3);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_answers_what_waits_and_ends_the_lane() {
    let mut cluster = Cluster::start(config());
    let mut node = cluster.node(ClientId(1), 64 * MIB).await;
    assert!(node.put_start(&["k"], 100).await[0].is_ok());
    let mut lane = Lane::open(&cluster).await;
    assert!(matches!(lane.call(1, join()).await, Response::Join(_)));
    let wait = wait_complete(&["k"], Duration::from_secs(100));
    lane.send(&frame(2, wait)).await;
    assert!(matches!(
        lane.call(3, exists(&["k"])).await,
        Response::Exists(_)
    ));
    cluster.stop();
    let answer: MasterFrame = lane.message().await;
    assert_eq!(answer.request_id, 2);
    assert_eq!(
        refused(answer.response.expect("an answer")),
        Refusal::ShuttingDown
    );
    assert!(lane.is_over().await);
    cluster.ended().await.expect("a clean end");
}
