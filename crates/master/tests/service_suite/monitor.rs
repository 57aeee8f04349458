//! A running master as consoles in its process see it, and what it tells members about tenants.

use layercake_master::state::Tenancy;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;

use crate::common::{Cluster, config};

const NODE: ClientId = ClientId(1);
const CLIENT: ClientId = ClientId(2);
const MIB: u64 = 1 << 20;

fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text).expect("a key")
}

#[tokio::test(start_paused = true)]
async fn it_lists_queries_and_removes_objects_and_counts_payload_bytes() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    client.put(&["a", "b"], 1000).await;
    let open = client.put_start(&["open"], 500).await;
    assert!(open[0].is_ok(), "{open:?}");
    let (monitor, tenant) = (&cluster.monitor, Tenant::default());

    let mut keys = monitor.keys(None).await;
    keys.sort();
    assert_eq!(keys, [key("a"), key("b")]);
    assert_eq!(
        monitor.keys(Some(&Tenant::new("t").expect("a name"))).await,
        []
    );
    let payload: u64 = monitor.payloads().iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(payload, 2500);

    let found = monitor.query(&tenant, &[key("a"), key("open"), key("none")]);
    assert_eq!(found[0].as_ref().map(|found| found.size), Ok(1000));
    assert_eq!(found[1..], [Err(Refusal::NotReady), Err(Refusal::NotFound)]);
    assert_eq!(monitor.remove_all(&tenant, false).await, 1, "one is leased");
    assert_eq!(monitor.remove_all(&tenant, true).await, 1);

    let calls = monitor.calls();
    assert_eq!((calls.put_start.single, calls.put_start.batches), (1, 1));
    assert_eq!((calls.put_start.items, calls.put_end.items), (2, 2));
    assert_eq!(calls.mount.single, 1);
}

#[tokio::test(start_paused = true)]
async fn a_member_whose_stream_broke_is_not_connected_until_it_comes_back() {
    let cluster = Cluster::start(config());
    assert!(!cluster.monitor.is_connected(NODE));
    let node = cluster.node(NODE, MIB).await;
    assert!(cluster.monitor.is_connected(NODE));
    drop(node);
    while cluster.monitor.is_connected(NODE) {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        cluster.monitor.segments().len(),
        1,
        "its memory is not given up yet"
    );
    let _back = cluster.member(NODE, "node-1").await;
    assert!(cluster.monitor.is_connected(NODE));
}

async fn join(tenancy: Tenancy) -> (Cluster, wire::JoinResponse) {
    let mut config = config();
    config.state.tenancy = tenancy;
    let cluster = Cluster::start(config);
    let mut client = cluster.client(CLIENT).await;
    let join = Request::Join(wire::JoinRequest {
        name: "client".into(),
        endpoint: None,
    });
    match client.call(join).await {
        Response::Join(joined) => (cluster, joined),
        other => panic!("not joined: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn members_are_told_whether_tenants_share_one_key_space() {
    for (tenancy, shared) in [
        (Tenancy::Apart, false),
        (Tenancy::Shared, true),
        (Tenancy::Strict([].into()), false),
    ] {
        let (cluster, joined) = join(tenancy).await;
        assert_eq!(joined.shared_tenants, shared);
        assert_eq!(joined.lease_ms, 10_000, "as configured");
        assert_eq!(cluster.monitor.shares_tenants(), shared);
    }
}

#[tokio::test(start_paused = true)]
async fn a_tenant_without_a_quota_is_refused_by_name_where_quotas_rule() {
    let mut config = config();
    config.state.tenancy = Tenancy::Strict([].into());
    let cluster = Cluster::start(config);
    let _node = cluster.node(NODE, MIB).await;
    let mut client = cluster.member(CLIENT, "client").await;
    let started = client.put_start(&["k"], 10).await;
    assert_eq!(started, [Err(Refusal::UnknownTenant)]);
    let tenant = Tenant::default();
    assert_eq!(cluster.monitor.set_quota(&tenant, 9), Ok(()));
    let started = client.put_start(&["k"], 10).await;
    assert_eq!(started, [Err(Refusal::QuotaExceeded)]);
    assert_eq!(cluster.monitor.set_quota(&tenant, 10), Ok(()));
    client.put(&["k"], 10).await;
}
