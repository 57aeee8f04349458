//! Links to a master on the same host, which go over its unix socket where nothing stands in between.

use layercake_protocol::auth::SharedToken;
use layercake_store::StoreError;
use layercake_store::link::{Exists, LinkCarrier, LinkState, MasterLink};
use tokio::runtime::Handle;

use crate::common::proxy::Proxy;
use crate::common::{MIB, OneKey as _, RunningMaster, Spec, Via, eventually, key};
use crate::lanes::{ask, config, connected};

fn spec() -> Spec {
    Spec::new(Via::Local).nodes(&[64 * MIB])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_to_a_master_on_this_host_goes_over_its_socket() {
    let cluster = spec().start().await;
    let client = cluster.client().await;
    let there: Vec<_> = (0..30).map(|n| key(format!("there-{n}"))).collect();
    for key in &there {
        client.store(key, &[7; 100]).await;
    }
    let before = cluster.master.lanes("unix");
    let link = connected(config(cluster.master.address)).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::UnixLane));
    assert!(link.uses_lane());
    assert_eq!(
        (cluster.master.lanes("unix"), cluster.master.lanes("tcp")),
        (before + 1, 0)
    );
    for count in [1, 64, 20_000] {
        ask(&link, &there, "task", count).await;
    }
    // From a thread that reads the answers itself.
    let (blocked, runtime) = (link.clone(), Handle::current());
    let working = tokio::task::spawn_blocking(move || {
        blocked.block_on(&runtime, ask(&blocked, &there, "thread", 20_000));
    });
    working.await.expect("no answer is wrong");
    // Tools' calls go over the connection beside it.
    assert!(link.status().await.is_ok());
    drop(link);
    eventually("the lane ends", || cluster.master.lanes("unix") == before).await;
}

#[tokio::test]
async fn a_proxy_is_not_bypassed_and_what_is_switched_off_is_not_used() {
    let cluster = spec().start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let link = connected(config(proxy.address)).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::TcpLane));

    let mut by_choice = config(cluster.master.address);
    by_choice.local_lane = false;
    let link = connected(by_choice).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::TcpLane));
    let mut by_choice = config(cluster.master.address);
    by_choice.lane = false;
    let link = connected(by_choice).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::Grpc));

    let mut spec = spec();
    spec.master.local_lane = false;
    let cluster = spec.start().await;
    let link = connected(config(cluster.master.address)).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::TcpLane));
    assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
}

#[tokio::test]
async fn a_master_that_comes_back_is_joined_over_its_new_socket() {
    let master = RunningMaster::start(spec().master).await;
    let link = connected(config(master.address)).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::UnixLane));
    let LinkState::Up { life, .. } = link.state() else {
        panic!("it is up");
    };
    let port = master.stop().await;
    eventually("the loss is noticed", || {
        !matches!(link.state(), LinkState::Up { .. })
    })
    .await;
    assert_eq!(link.carrier(), None);
    let _master = RunningMaster::start_at(port, spec().master).await;
    eventually(
        "it is found again",
        || matches!(link.state(), LinkState::Up { life: new, .. } if new > life),
    )
    .await;
    assert_eq!(link.carrier(), Some(LinkCarrier::UnixLane));
}

#[tokio::test]
async fn the_token_is_proven_on_the_socket_as_well() {
    let token = |text: &str| SharedToken::new(text).expect("long enough");
    let mut spec = spec();
    spec.master.token = Some(token("the token of this cluster"));
    let master = RunningMaster::start(spec.master).await;
    let mut member = config(master.address);
    member.token = Some(token("the token of this cluster"));
    let link = connected(member).await;
    assert_eq!(link.carrier(), Some(LinkCarrier::UnixLane));
    let mut stranger = config(master.address);
    stranger.token = Some(token("the token of another one"));
    let refused = MasterLink::connect(stranger).await;
    assert!(
        matches!(refused, Err(StoreError::MasterUnproven { .. })),
        "{refused:?}"
    );
}
