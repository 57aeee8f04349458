//! Links over framed lanes: many callers at once, masters that stall, vanish or come back, and how a link
//! gets on where there is no lane.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{Presence, PutStart, ReplicateConfig};
use layercake_store::StoreError;
use layercake_store::link::{Backoff, Exists, LinkConfig, LinkState, MasterLink, StartOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::common::proxy::{Flow, Proxy};
use crate::common::{
    Cluster, MIB, OneKey as _, PATIENCE, RunningMaster, Spec, Via, eventually, eventually_async,
    key,
};

pub(crate) fn config(master: SocketAddr) -> LinkConfig {
    LinkConfig {
        backoff: Backoff {
            first: Duration::from_millis(5),
            most: Duration::from_millis(20),
        },
        ..LinkConfig::new(master.to_string(), "by lane")
    }
}

pub(crate) async fn connected(config: LinkConfig) -> MasterLink {
    MasterLink::connect(config).await.expect("the master is up")
}

async fn start() -> Cluster {
    Spec::new(Via::Local).nodes(&[64 * MIB]).start().await
}

/// Asks for keys of which every third is there.
pub(crate) async fn ask(link: &MasterLink, there: &[ObjectKey], name: &str, count: usize) {
    let keys: Vec<_> = (0..count)
        .map(|n| match n % 3 {
            0 => there[n % there.len()].clone(),
            _ => key(format!("{name}-{n}")),
        })
        .collect();
    let found = link.exists(&Exists::readable(&keys)).await;
    let states = found.expect("the master answers").states;
    assert_eq!(states.len(), count);
    for (n, state) in states.into_iter().enumerate() {
        let complete = state == Presence::Complete;
        assert_eq!(complete, n % 3 == 0, "{name}: key {n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_caller_of_a_shared_link_gets_its_own_answers_whole() {
    let cluster = start().await;
    let client = cluster.client().await;
    let there: Vec<_> = (0..30).map(|n| key(format!("there-{n}"))).collect();
    for key in &there {
        client.store(key, &[7; 100]).await;
    }
    let link = connected(config(cluster.master.address)).await;
    assert!(link.uses_lane());
    let there = Arc::new(there);
    let mut callers = JoinSet::new();
    for caller in 0..16 {
        let (link, there) = (link.clone(), Arc::clone(&there));
        callers.spawn(async move {
            for round in 0..40 {
                let count = match (caller % 4, round % 20) {
                    (0, 7) => 20_000,
                    (1, _) => 64,
                    _ => 1 + round % 3,
                };
                ask(&link, &there, &format!("{caller}-{round}"), count).await;
            }
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended.expect("no answer is wrong");
    }
}

#[tokio::test]
async fn callers_that_go_away_take_nothing_along() {
    let cluster = start().await;
    let link = connected(config(cluster.master.address)).await;
    let before = cluster.master.monitor.status().used_bytes;
    for round in 0..50 {
        let keys = [key(format!("{round}"))];
        let query = Exists::readable(&keys);
        let put = [PutStart::new(key(format!("put-{round}")), 100_000)];
        let replicas = ReplicateConfig::default();
        let asking = link.exists(&query);
        let putting = link.put_start(&put, &replicas, StartOptions::default());
        // Both are on their way when they are dropped.
        tokio::select! {
            biased;
            _ = asking => {}
            _ = putting => {}
            () = std::future::ready(()) => {}
        }
    }
    eventually("all reservations are given back", || {
        cluster.master.monitor.status().used_bytes == before
    })
    .await;
    assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
}

#[tokio::test]
async fn a_master_that_stops_reading_makes_callers_wait_until_their_deadlines() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    config.timeouts.call = Duration::from_secs(1);
    config.timeouts.ping = PATIENCE * 10;
    let link = connected(config).await;
    assert!(link.uses_lane());
    proxy.up(Flow::Held);
    let keys: Vec<_> = (0..10_000)
        .map(|n| key(format!("a rather long key {n:0>60}")))
        .collect();
    let keys = Arc::new(keys);
    let mut callers = JoinSet::new();
    // More than sockets and queue hold together.
    for _ in 0..64 {
        let (link, keys) = (link.clone(), Arc::clone(&keys));
        callers.spawn(async move { link.exists(&Exists::readable(&keys)).await });
    }
    while let Some(ended) = callers.join_next().await {
        let error = ended.expect("no panic").expect_err("nobody hears it");
        assert!(
            matches!(
                error,
                StoreError::MasterTimeout { .. } | StoreError::MasterUnreachable { .. }
            ),
            "{error}"
        );
    }
    proxy.up(Flow::Open);
    eventually_async("the link goes on", async || {
        link.exists(&Exists::readable(&keys[..1])).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_master_that_vanishes_is_noticed_at_once_and_found_again() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    config.timeouts.call = PATIENCE;
    config.timeouts.ping = PATIENCE;
    let link = connected(config).await;
    for round in 0..3 {
        assert!(link.uses_lane());
        proxy.down(Flow::Held);
        let waiting = link.remove_matching("nothing", false);
        let cut = async {
            eventually("the call is on its way", || {
                cluster.master.requests("remove_matching") > round
            })
            .await;
            proxy.cut();
        };
        let (answer, ()) = tokio::join!(waiting, cut);
        let error = answer.expect_err("not repeated, since it may have taken effect");
        assert!(
            matches!(error, StoreError::MasterUnreachable { .. }),
            "{error}"
        );
        eventually("the link is up again", || {
            matches!(link.state(), LinkState::Up { .. })
        })
        .await;
    }
}

#[tokio::test]
async fn a_silent_master_is_taken_for_dead_and_left() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    config.timeouts.ping_every = Duration::from_millis(50);
    config.timeouts.ping = Duration::from_millis(200);
    let link = connected(config).await;
    proxy.down(Flow::Held);
    eventually("it is given up", || {
        !matches!(link.state(), LinkState::Up { .. })
    })
    .await;
    proxy.cut();
    eventually("it is found again", || {
        matches!(link.state(), LinkState::Up { .. }) && link.uses_lane()
    })
    .await;
}

#[tokio::test]
async fn a_link_joins_the_master_that_comes_back() {
    let master = RunningMaster::start(Spec::new(Via::Local).master).await;
    let link = connected(config(master.address)).await;
    let LinkState::Up { life, .. } = link.state() else {
        panic!("it is up");
    };
    let port = master.stop().await;
    eventually("the loss is noticed", || {
        !matches!(link.state(), LinkState::Up { .. })
    })
    .await;
    let master = RunningMaster::start_at(port, Spec::new(Via::Local).master).await;
    eventually(
        "it is found again",
        || matches!(link.state(), LinkState::Up { life: new, .. } if new > life),
    )
    .await;
    assert!(link.uses_lane());
    assert_eq!(master.requests("join"), 1);
}

#[tokio::test]
async fn without_lanes_a_link_uses_grpc() {
    let cluster = start().await;
    let mut by_choice = config(cluster.master.address);
    by_choice.lane = false;
    let link = connected(by_choice).await;
    assert!(!link.uses_lane());
    assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());

    // In front of a master stands one that understands HTTP/2 only, and says so in some way.
    for answer in [
        &b""[..],
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xff\xff\xff",
    ] {
        let (front, _cut) = front(cluster.master.address, Some(answer)).await;
        let link = connected(config(front)).await;
        assert!(!link.uses_lane());
        assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
    }
}

#[tokio::test]
async fn tools_get_another_connection_when_theirs_has_gone_beside_the_lane() {
    let cluster = start().await;
    let (front, cut) = front(cluster.master.address, None).await;
    let link = connected(config(front)).await;
    assert!(link.uses_lane() && link.status().await.is_ok());
    cut.send_replace(());
    assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
    eventually_async("tools are served again", async || {
        link.status().await.is_ok()
    })
    .await;
    assert!(link.uses_lane());
}

/// Forwards connections to a master. What does not speak HTTP/2 is answered with something else, if so asked;
/// what does is cut by the sender.
async fn front(
    master: SocketAddr,
    others: Option<&'static [u8]>,
) -> (SocketAddr, watch::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (cut, cuts) = watch::channel(());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut cuts = cuts.clone();
            cuts.mark_unchanged();
            tokio::spawn(async move {
                let mut first = [0; 8];
                if client.read_exact(&mut first).await.is_err() {
                    return;
                }
                let http2 = first.starts_with(b"PRI");
                if let (false, Some(answer)) = (http2, others) {
                    drop(client.write_all(answer).await);
                    return;
                }
                let mut master = TcpStream::connect(master).await.expect("it is up");
                drop((client.set_nodelay(true), master.set_nodelay(true)));
                master.write_all(&first).await.expect("it listens");
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut client, &mut master) => {}
                    Ok(()) = cuts.changed(), if http2 => {}
                }
            });
        }
    });
    (address, cut)
}
