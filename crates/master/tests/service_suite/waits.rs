//! Calls that wait: woken by what they wait for, and by nothing else for longer than they may.

use std::time::Duration;

use layercake_master::MasterConfig;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Generation};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;
use tokio::time::Instant;

use crate::common::{Client, Cluster, config, object, refused, results, segment, wait_complete};

const NODE: ClientId = ClientId(1);
const WRITER: ClientId = ClientId(2);
const FOLLOWER: ClientId = ClientId(3);
const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(100);

/// A node, a writer with open reservations of these keys, and a follower.
async fn scene(
    config: MasterConfig,
    keys: &[&str],
) -> (Cluster, Client, Client, Client, Vec<Generation>) {
    let cluster = Cluster::start(config);
    let node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let follower = cluster.member(FOLLOWER, "follower").await;
    let started = writer.put_start(keys, 1000).await;
    let generations = started
        .into_iter()
        .map(|put| put.expect("there is room").generation)
        .collect();
    (cluster, node, writer, follower, generations)
}

async fn end(writer: &mut Client, key: &str, generation: Generation) {
    let ended = writer
        .call(Request::PutEnd(wire::PutEndRequest {
            objects: vec![object(key, generation)],
        }))
        .await;
    assert_eq!(results(ended, 1), [Ok(())]);
}

async fn revoke(writer: &mut Client, key: &str, generation: Generation) {
    let revoked = writer
        .call(Request::PutRevoke(wire::PutRevokeRequest {
            objects: vec![object(key, generation)],
            unconfirmed: Vec::new(),
        }))
        .await;
    assert_eq!(results(revoked, 1), [Ok(())]);
}

#[tokio::test(start_paused = true)]
async fn a_follower_is_answered_at_the_commit() {
    let (_cluster, _node, mut writer, mut follower, generations) =
        scene(config(), &["a", "b"]).await;
    let begun = Instant::now();
    let waiting = follower.send(wait_complete(&["a", "b"], LONG)).await;
    // While it waits the stream answers other things.
    assert_eq!(follower.exists(&["a"]).await, [2]);
    end(&mut writer, "a", generations[0]).await;
    end(&mut writer, "b", generations[1]).await;
    let answer = follower.answer(waiting).await;
    assert_eq!(results(answer, 2), [Ok(()), Ok(())]);
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_decided_is_answered_at_once() {
    let (_cluster, _node, mut writer, mut follower, generations) = scene(config(), &["a"]).await;
    end(&mut writer, "a", generations[0]).await;
    let answer = follower
        .call(wait_complete(&["a", "missing", ""], LONG))
        .await;
    let results = results(answer, 3);
    assert_eq!(results[0], Ok(()));
    assert_eq!(results[1], Err(Refusal::NotFound));
    assert!(matches!(results[2], Err(Refusal::InvalidArgument { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_follower_learns_that_the_writer_gave_up() {
    let (_cluster, _node, mut writer, mut follower, generations) = scene(config(), &["a"]).await;
    let waiting = follower.send(wait_complete(&["a"], LONG)).await;
    assert_eq!(follower.exists(&["a"]).await, [2]);
    revoke(&mut writer, "a", generations[0]).await;
    let answer = follower.answer(waiting).await;
    assert_eq!(results(answer, 1), [Err(Refusal::NotFound)]);
}

#[tokio::test(start_paused = true)]
async fn a_follower_learns_that_the_writer_died() {
    let (cluster, mut node, writer, mut follower, _) = scene(config(), &["a"]).await;
    let ttl = config().state.client_ttl;
    let begun = Instant::now();
    let waiting = follower.send(wait_complete(&["a"], LONG)).await;
    drop(writer);
    let id = segment(NODE, 0).id;
    // The others stay alive.
    while begun.elapsed() < ttl * 2 {
        tokio::time::sleep(ttl / 5).await;
        assert!(node.heartbeat(&[id]).await.known);
        let beat = follower
            .send(Request::Heartbeat(wire::HeartbeatRequest::default()))
            .await;
        loop {
            let frame = follower.next().await.expect("the stream goes on");
            if frame.request_id == waiting {
                let answer = frame.response.expect("a frame holds something");
                assert_eq!(results(answer, 1), [Err(Refusal::NotFound)]);
                assert!(begun.elapsed() >= ttl, "not before the writer is gone");
                drop(cluster);
                return;
            }
            if frame.request_id == beat {
                break;
            }
        }
    }
    panic!("the follower was not told within twice the time to live");
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_when_its_time_is_over() {
    let (cluster, mut node, _writer, mut follower, _) = scene(config(), &["a"]).await;
    let begun = Instant::now();
    let timeout = Duration::from_secs(3);
    let answer = follower
        .call(wait_complete(&["a", "missing"], timeout))
        .await;
    assert_eq!(
        results(answer, 2),
        [Err(Refusal::NotReady), Err(Refusal::NotFound)]
    );
    let took = begun.elapsed();
    assert!(
        took >= timeout && took < timeout + Duration::from_secs(1),
        "{took:?}"
    );
    assert!(node.heartbeat(&[]).await.known);
    assert!(
        cluster
            .metrics()
            .contains("layercake_master_topics_watched 0"),
        "nothing is left behind"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_follows_the_writer_that_takes_over() {
    let mut config = config();
    config.state.discard_after = Duration::from_secs(2);
    let (_cluster, _node, _writer, mut follower, _) = scene(config, &["a"]).await;
    let waiting = follower.send(wait_complete(&["a"], LONG)).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let taken = follower.put_start_while_waiting(&["a"]).await;
    end_while_waiting(&mut follower, waiting, "a", taken).await;
}

/// Commits, and expects the answer to the wait as well, in either order.
async fn end_while_waiting(client: &mut Client, waiting: u64, key: &str, generation: Generation) {
    let end = client
        .send(Request::PutEnd(wire::PutEndRequest {
            objects: vec![object(key, generation)],
        }))
        .await;
    let mut open = vec![waiting, end];
    while !open.is_empty() {
        let frame = client.next().await.expect("the stream goes on");
        if frame.request_id == 0 {
            continue;
        }
        let place = open.iter().position(|id| *id == frame.request_id);
        open.remove(place.expect("an answer to one of the calls"));
        let answer = frame.response.expect("a frame holds something");
        assert_eq!(results(answer, 1), [Ok(())]);
    }
}

impl Client {
    async fn put_start_while_waiting(&mut self, keys: &[&str]) -> Generation {
        let started = self.put_start(keys, 1000).await;
        started[0]
            .as_ref()
            .expect("the former writer is overdue")
            .generation
    }
}

#[tokio::test(start_paused = true)]
async fn one_wait_too_many_is_answered_at_once() {
    let mut config = config();
    config.limits.waits_per_stream = 2;
    let (_cluster, _node, _writer, mut follower, _) = scene(config, &["a"]).await;
    for _ in 0..2 {
        follower.send(wait_complete(&["a"], LONG)).await;
    }
    let begun = Instant::now();
    let answer = follower.call(wait_complete(&["a"], LONG)).await;
    assert_eq!(results(answer, 1), [Err(Refusal::NotReady)]);
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_readers_and_says_so_when_it_takes_too_long() {
    let (_cluster, mut node, mut writer, mut reader, generations) = scene(config(), &["a"]).await;
    end(&mut writer, "a", generations[0]).await;
    let get = Request::GetStart(wire::GetStartRequest {
        keys: vec!["a".into()],
        session: true,
        ..Default::default()
    });
    let Response::GetStart(_) = reader.call(get).await else {
        panic!("not the answer to a get start");
    };
    let id = segment(NODE, 0).id;
    let drain = |timeout: Duration| {
        Request::Unmount(wire::UnmountRequest {
            segment_id: id.0,
            drain: true,
            drain_timeout_ms: u64::try_from(timeout.as_millis()).expect("a short time"),
        })
    };
    let answer = node.call(drain(Duration::from_secs(1))).await;
    assert_eq!(refused(answer), Refusal::Leased);
    let waiting = node.send(drain(Duration::from_secs(5))).await;
    assert!(node.heartbeat(&[id]).await.known);
    let ended = reader
        .call(Request::GetEnd(wire::GetEndRequest {
            objects: vec![object("a", generations[0])],
        }))
        .await;
    assert!(matches!(ended, Response::GetEnd(_)));
    let answer = node.answer(waiting).await;
    assert!(matches!(answer, Response::Done(_)), "{answer:?}");
}
