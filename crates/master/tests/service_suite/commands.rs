//! The master's own commands: they reach their member, however often its stream breaks.

use std::time::Duration;

use layercake_protocol::ids::ClientId;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{self, DropSessionsCommand, FenceCommand};

use crate::common::{Client, Cluster, config, object, refused, results, segment};

const NODE: ClientId = ClientId(1);
const SLOW: ClientId = ClientId(2);
const NEXT: ClientId = ClientId(3);
const OTHER: ClientId = ClientId(4);
const MIB: u64 = 1 << 20;

fn fence(command: Response) -> FenceCommand {
    match command {
        Response::Fence(fence) => fence,
        other => panic!("not a fence: {other:?}"),
    }
}

fn dropped(command: Response) -> DropSessionsCommand {
    match command {
        Response::DropSessions(drop) => drop,
        other => panic!("not dropped sessions: {other:?}"),
    }
}

/// A writer that was overtaken: its key belongs to another by now, and fences are due.
async fn overtaken() -> (Cluster, Client, Client, Client) {
    let mut config = config();
    config.state.discard_after = Duration::from_secs(2);
    let cluster = Cluster::start(config);
    let node = cluster.node(NODE, 64 * MIB).await;
    let mut slow = cluster.member(SLOW, "slow").await;
    let mut next = cluster.member(NEXT, "next").await;
    let old = slow.put_start(&["k"], 10_000).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let new = next.put_start(&["k"], 10_000).await;
    let (old, new) = (&old[0], &new[0]);
    assert!(old.is_ok() && new.is_ok(), "{old:?} {new:?}");
    (cluster, node, slow, next)
}

#[tokio::test(start_paused = true)]
async fn an_overtaken_writer_is_fenced_at_the_node_and_told_itself() {
    let (cluster, mut node, mut slow, _next) = overtaken().await;
    let fence = fence(node.command().await);
    assert_eq!(fence.segment_id, segment(NODE, 0).id.0);
    assert_eq!(fence.client_id.map(ClientId::from), Some(SLOW));
    assert_eq!(fence.places.len(), 1);
    let drop = dropped(slow.command().await);
    assert_eq!(drop.objects.len(), 1);
    assert_eq!(drop.objects[0].key, "k");
    assert!(cluster.monitor.status().quarantined_bytes > 0);
    node.fence_done(fence.fence_id, false).await;
    slow.fence_done(drop.fence_id, false).await;
    assert_eq!(cluster.monitor.status().quarantined_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_command_that_was_not_answered_comes_again_on_a_new_stream() {
    let (cluster, mut node, _slow, _next) = overtaken().await;
    let first = fence(node.command().await);
    drop(node);
    let mut node = cluster.client(NODE).await;
    assert!(node.heartbeat(&[segment(NODE, 0).id]).await.known);
    let second = fence(node.command().await);
    assert_eq!(first, second);
    node.fence_done(second.fence_id, false).await;
    drop(node);
    let mut node = cluster.client(NODE).await;
    assert!(node.heartbeat(&[segment(NODE, 0).id]).await.known);
    assert_eq!(node.commands, [], "an answered command does not come again");
}

#[tokio::test(start_paused = true)]
async fn a_command_without_an_answer_is_repeated_on_the_same_stream() {
    let (_cluster, mut node, _slow, _next) = overtaken().await;
    let first = fence(node.command().await);
    tokio::time::sleep(Duration::from_secs(6)).await;
    let second = fence(node.command().await);
    assert_eq!(first, second);
}

#[tokio::test(start_paused = true)]
async fn a_command_waits_for_a_member_that_is_away() {
    let mut config = config();
    config.state.discard_after = Duration::from_secs(2);
    let cluster = Cluster::start(config);
    let node = cluster.node(NODE, 64 * MIB).await;
    let mut slow = cluster.member(SLOW, "slow").await;
    let mut next = cluster.member(NEXT, "next").await;
    assert!(slow.put_start(&["k"], 10_000).await[0].is_ok());
    drop(node);
    // Nothing is placed on a node that is away.
    let _other = cluster.node(OTHER, 64 * MIB).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(next.put_start(&["k"], 10_000).await[0].is_ok());
    let mut node = cluster.client(NODE).await;
    let join = Request::Join(wire::JoinRequest {
        name: "node-1".into(),
        endpoint: Some((&crate::common::endpoint(NODE)).into()),
    });
    match node.call(join).await {
        Response::Join(joined) => assert!(!joined.fresh, "it was away for a short time only"),
        other => panic!("not joined: {other:?}"),
    }
    let fence = fence(node.command().await);
    node.fence_done(fence.fence_id, false).await;
}

// contract: session-14
#[tokio::test(start_paused = true)]
async fn a_revoke_says_of_each_object_whether_its_writer_is_in_doubt() {
    let cluster = Cluster::start(config());
    let mut node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(SLOW, "writer").await;
    let keys = ["a", "b", "c"];
    let started = writer.put_start(&keys, 1000).await;
    let started = started.into_iter().map(|put| put.expect("there is room"));
    let objects: Vec<_> = keys
        .iter()
        .zip(started)
        .map(|(key, put)| object(key, put.generation))
        .collect();
    let revoke = |unconfirmed: &[bool]| {
        Request::PutRevoke(wire::PutRevokeRequest {
            objects: objects.clone(),
            unconfirmed: unconfirmed.to_vec(),
        })
    };
    let refusal = refused(writer.call(revoke(&[true, false])).await);
    assert!(refusal.to_string().contains("2 marks for 3"), "{refusal}");
    assert_eq!(cluster.monitor.status().reserved_objects, 3);
    for _ in 0..2 {
        let revoked = writer.call(revoke(&[false, true, false])).await;
        assert_eq!(results(revoked, 3), [Ok(()), Ok(()), Ok(())]);
    }
    let fence = fence(node.command().await);
    assert_eq!(fence.places.len(), 1, "of the one in doubt");
    let held = cluster.monitor.status().quarantined_bytes;
    assert_eq!(held, cluster.monitor.status().used_bytes);
    assert!(held > 0);
    node.fence_done(fence.fence_id, false).await;
    assert_eq!(cluster.monitor.status().quarantined_bytes, 0);
}
