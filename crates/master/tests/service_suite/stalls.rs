//! A master that stood still (stopped, suspended, starved) can't have heard anybody meanwhile.

use std::time::Duration;

use layercake_protocol::ids::ClientId;

use crate::common::{Cluster, config, segment};

const NODE: ClientId = ClientId(1);
const CLIENT: ClientId = ClientId(2);
const MIB: u64 = 1 << 20;

#[tokio::test(start_paused = true)]
async fn nothing_is_lost_when_the_master_itself_stood_still() {
    let cluster = Cluster::start(config());
    let mut node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    client.put(&["k"], 10_000).await;
    // The clock jumps; no task runs in between.
    tokio::time::advance(Duration::from_secs(25)).await;
    let heard = node.heartbeat(&[segment(NODE, 0).id]).await;
    assert!(
        heard.known && heard.missing_segments.is_empty(),
        "{heard:?}"
    );
    assert!(client.heartbeat(&[]).await.known);
    assert_eq!(cluster.monitor.status().lost_nodes, 0);
    assert_eq!(client.put_start(&["k"], 10_000).await.len(), 1);
    assert!(
        client.put_start(&["k"], 10_000).await[0].is_err(),
        "it is there"
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_silent_after_the_stall_is_lost_all_the_same() {
    let config = config();
    let ttl = config.state.client_ttl;
    let cluster = Cluster::start(config);
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    tokio::time::advance(Duration::from_secs(25)).await;
    // Its clock goes on as it should.
    for _ in 0..=ttl.as_secs() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(client.heartbeat(&[]).await.known);
    }
    assert_eq!(cluster.monitor.status().lost_nodes, 1);
}
