//! Who is let in, over real sockets.

use std::net::SocketAddr;

use layercake_master::{Error, Master, MasterConfig};
use layercake_protocol::auth::{SharedToken, Side, draw_nonce};
use layercake_protocol::convert::decode_status;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::version::{self, Version};
use layercake_protocol::wire;
use layercake_protocol::wire::master_client::MasterClient;
use prometheus_client::registry::Registry;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;

use crate::common::{Client, config, with_ticket};

struct Listening {
    addr: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), Error>>,
}

impl Listening {
    async fn start(token: Option<SharedToken>) -> Self {
        let config = MasterConfig {
            listen: "127.0.0.1:0".parse().expect("an address"),
            token,
            ..config()
        };
        let master = Master::bind(config, &mut Registry::default())
            .await
            .expect("port 0 is free");
        let addr = master.local_addr();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(master.serve(async {
            let _ = stopped.await;
        }));
        Self {
            addr,
            stop,
            serving,
        }
    }

    async fn channel(&self) -> Channel {
        tonic::transport::Endpoint::from_shared(format!("http://{}", self.addr))
            .expect("an address")
            .connect()
            .await
            .expect("the master listens")
    }

    async fn stop(self) {
        self.stop.send(()).expect("the master runs");
        let ended = self.serving.await.expect("it does not panic");
        ended.expect("a clean end");
    }
}

fn token(text: &str) -> SharedToken {
    SharedToken::new(text).expect("long enough")
}

fn hello(version: Version) -> wire::HelloRequest {
    wire::HelloRequest {
        version: Some(version.into()),
        nonce: draw_nonce().to_vec().into(),
        program: "test".into(),
    }
}

/// What a client that knows `token` answers to the master's hello.
fn answer(
    token: &SharedToken,
    hello: &wire::HelloRequest,
    response: &wire::HelloResponse,
) -> wire::AuthenticateRequest {
    let client = hello.nonce.as_ref().try_into().expect("32 bytes");
    let master = response.nonce.as_ref().try_into().expect("32 bytes");
    wire::AuthenticateRequest {
        client_nonce: hello.nonce.clone(),
        master_nonce: response.nonce.clone(),
        proof: token
            .prove(Side::Initiator, &client, &master)
            .to_vec()
            .into(),
    }
}

#[tokio::test]
async fn a_version_too_far_away_is_refused_naming_both() {
    let master = Listening::start(None).await;
    let mut grpc = MasterClient::new(master.channel().await);
    let theirs = Version {
        protocol: version::CURRENT.protocol + 2,
        ..version::CURRENT
    };
    let status = grpc.hello(hello(theirs)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let Some(Refusal::Version { detail }) = decode_status(&status) else {
        panic!("not refused for its version: {status}");
    };
    for version in [theirs, version::CURRENT] {
        assert!(detail.contains(&version.to_string()), "{detail}");
    }
    drop(grpc);
    master.stop().await;
}

#[tokio::test]
async fn a_client_with_another_token_gets_no_ticket_and_can_tell_the_master_by_its_proof() {
    let (ours, theirs) = (token("the cluster's token"), token("some other token"));
    let master = Listening::start(Some(ours.clone())).await;
    let mut grpc = MasterClient::new(master.channel().await);
    let hello = hello(version::CURRENT);
    let response = grpc.hello(hello.clone()).await.expect("hello").into_inner();
    assert!(response.token_required);
    let nonces = (
        hello.nonce.as_ref().try_into().expect("32 bytes"),
        response.nonce.as_ref().try_into().expect("32 bytes"),
    );
    let check = |token: &SharedToken| {
        token
            .check(Side::Responder, &nonces.0, &nonces.1, &response.proof)
            .is_ok()
    };
    assert!(check(&ours) && !check(&theirs));
    let status = grpc
        .authenticate(answer(&theirs, &hello, &response))
        .await
        .unwrap_err();
    assert_eq!(decode_status(&status), Some(Refusal::Unauthenticated));
    // The nonce is used up: even the right proof comes too late now.
    let status = grpc
        .authenticate(answer(&ours, &hello, &response))
        .await
        .unwrap_err();
    assert_eq!(decode_status(&status), Some(Refusal::Unauthenticated));
    drop(grpc);
    master.stop().await;
}

#[tokio::test]
async fn a_master_without_the_token_proves_nothing() {
    let master = Listening::start(None).await;
    let mut grpc = MasterClient::new(master.channel().await);
    let response = grpc
        .hello(hello(version::CURRENT))
        .await
        .expect("hello")
        .into_inner();
    assert!(response.proof.is_empty() && !response.token_required);
    drop(grpc);
    master.stop().await;
}

#[tokio::test]
async fn with_the_token_a_ticket_opens_everything() {
    let ours = token("the cluster's token");
    let master = Listening::start(Some(ours.clone())).await;
    let mut grpc = MasterClient::new(master.channel().await);
    let hello = hello(version::CURRENT);
    let response = grpc.hello(hello.clone()).await.expect("hello").into_inner();
    let ticket = grpc
        .authenticate(answer(&ours, &hello, &response))
        .await
        .expect("the right proof")
        .into_inner()
        .ticket;
    let status = grpc
        .status(with_ticket(wire::StatusRequest {}, &ticket))
        .await
        .expect("the ticket is good")
        .into_inner();
    assert_eq!(status.term, crate::common::TERM);
    drop(grpc);
    master.stop().await;
}

#[tokio::test]
async fn without_a_ticket_nothing_is_answered() {
    let master = Listening::start(None).await;
    let mut grpc = MasterClient::new(master.channel().await);
    let frames = || tokio_stream::iter([wire::ClientFrame::default()]);
    let unknown = [9; 16];
    let statuses = [
        grpc.status(wire::StatusRequest {}).await.unwrap_err(),
        grpc.open(frames()).await.unwrap_err(),
        grpc.open(with_ticket(frames(), &unknown))
            .await
            .unwrap_err(),
        grpc.call(wire::ClientFrame::default()).await.unwrap_err(),
        grpc.list_objects(wire::ListObjectsRequest::default())
            .await
            .unwrap_err(),
        grpc.stat_object(wire::StatObjectRequest::default())
            .await
            .unwrap_err(),
        grpc.list_segments(with_ticket(wire::ListSegmentsRequest {}, &unknown))
            .await
            .unwrap_err(),
    ];
    for status in statuses {
        assert_eq!(status.code(), Code::Unauthenticated);
        assert_eq!(decode_status(&status), Some(Refusal::Unauthenticated));
    }
    drop(grpc);
    master.stop().await;
}

#[tokio::test]
async fn a_stream_over_a_socket_answers() {
    let master = Listening::start(None).await;
    let mut client = Client::open(master.channel().await, ClientId(1)).await;
    assert_eq!(client.exists(&["a", "b"]).await, [0, 0]);
    drop(client);
    master.stop().await;
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let master = Listening::start(None).await;
    let config = MasterConfig {
        listen: master.addr,
        ..config()
    };
    let error = Master::bind(config, &mut Registry::default())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains(&master.addr.to_string()),
        "{error}"
    );
    master.stop().await;
}
