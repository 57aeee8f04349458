//! The end of a master: what is under way is answered, nothing outlives the grace time.

use std::time::Duration;

use layercake_master::Error;
use layercake_protocol::convert::decode_status;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::wire;
use tokio::time::Instant;

use crate::common::{Cluster, config, exists, refused, wait_complete, with_ticket};

const NODE: ClientId = ClientId(1);
const CLIENT: ClientId = ClientId(2);
const MIB: u64 = 1 << 20;

#[tokio::test(start_paused = true)]
async fn an_idle_master_stops_at_once() {
    let mut cluster = Cluster::start(config());
    assert!(cluster.monitor.health().serving);
    let monitor = cluster.monitor.clone();
    let begun = Instant::now();
    cluster.stop();
    cluster.ended().await.expect("a clean end");
    assert!(!monitor.health().serving);
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_answers_what_waits_and_ends_the_streams() {
    let mut cluster = Cluster::start(config());
    let mut node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    assert!(client.put_start(&["k"], 100).await[0].is_ok());
    let waiting = client
        .send(wait_complete(&["k"], Duration::from_secs(100)))
        .await;
    assert_eq!(client.exists(&["k"]).await, [2]);
    let keys = vec!["x"; 50_000];
    let batch = client.send(exists(&keys)).await;
    let begun = Instant::now();
    cluster.stop();
    let mut answers = Vec::new();
    while let Some(frame) = client.next().await {
        answers.push(frame);
    }
    for frame in answers {
        let response = frame.response.expect("a frame holds something");
        if frame.request_id == waiting {
            assert_eq!(refused(response), Refusal::ShuttingDown);
        } else {
            assert_eq!(frame.request_id, batch);
            match response {
                wire::master_frame::Response::Exists(found) => {
                    assert_eq!(found.states.len(), 50_000);
                }
                other => assert_eq!(refused(other), Refusal::ShuttingDown),
            }
        }
    }
    assert!(node.next().await.is_none(), "its stream ends too");
    cluster.ended().await.expect("a clean end");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_go_is_cut_off_when_the_grace_is_over() {
    let mut config = config();
    config.shutdown_grace = Duration::from_secs(2);
    let mut cluster = Cluster::start(config);
    let client = cluster.member(CLIENT, "client").await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(cluster.channel().await);
    // A watch that the library never ends on its own.
    let mut watch = health
        .watch(tonic_health::pb::HealthCheckRequest {
            service: "layercake.v1.Master".into(),
        })
        .await
        .expect("health needs no ticket")
        .into_inner();
    let first = watch.message().await.expect("a state").expect("a state");
    assert_eq!(
        first.status(),
        tonic_health::pb::health_check_response::ServingStatus::Serving
    );
    let begun = Instant::now();
    cluster.stop();
    let second = watch.message().await.expect("a state").expect("a state");
    assert_eq!(
        second.status(),
        tonic_health::pb::health_check_response::ServingStatus::NotServing
    );
    match cluster.ended().await {
        Err(Error::CutOff { grace }) => assert_eq!(grace, Duration::from_secs(2)),
        other => panic!("not cut off: {other:?}"),
    }
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_secs(2) && took < Duration::from_secs(3),
        "{took:?}"
    );
    assert!(watch.message().await.is_err(), "the connection is gone");
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn new_work_is_refused_as_soon_as_the_shutdown_begins() {
    let mut cluster = Cluster::start(config());
    let mut client = cluster.member(CLIENT, "client").await;
    // An open call keeps the connection there while the master shuts down.
    let mut grpc = client.grpc.clone();
    let ticket = client.ticket.clone();
    cluster.stop();
    while client.next().await.is_some() {}
    let status = grpc
        .status(with_ticket(wire::StatusRequest {}, &ticket))
        .await
        .expect_err("the master is going down");
    // Refused in words, or the connection is gone already.
    assert!(
        matches!(decode_status(&status), None | Some(Refusal::ShuttingDown)),
        "{status}"
    );
    cluster.ended().await.expect("a clean end");
}

#[tokio::test(start_paused = true)]
async fn metrics_tell_what_was_asked_and_what_there_is() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    client.put(&["a", "b"], 1000).await;
    assert_eq!(client.exists(&["a"]).await, [1]);
    let text = cluster.metrics();
    for line in [
        "layercake_master_requests_total{method=\"exists\",code=\"ok\"} 1",
        "layercake_master_requests_total{method=\"mount\",code=\"ok\"} 1",
        "layercake_master_objects 2",
        "layercake_master_members 2",
        "layercake_master_streams 2",
        "layercake_master_connections 2",
        "layercake_master_segment_capacity_bytes 67108864",
        "layercake_master_puts_committed_total 2",
        "layercake_master_evictions_total{reason=\"watermark\"} 0",
        "layercake_master_sessions_active{kind=\"put\"} 0",
        "layercake_master_term 77",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}
