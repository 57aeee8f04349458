//! Threads that block until the master has answered, and read the lane themselves meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::replica::{PutStart, ReplicateConfig};
use layercake_store::link::{Exists, LinkState, MasterLink, StartOptions, block_on};
use layercake_store::{ClientConfig, StoreClient, StoreError};
use tokio::runtime::Handle;
use tokio::time::sleep;

use crate::common::proxy::{Flow, Proxy};
use crate::common::{Cluster, MIB, OneKey as _, PATIENCE, Spec, Via, eventually, key, link_config};
use crate::lanes::{ask, config, connected};

async fn start() -> Cluster {
    Spec::new(Via::Local).nodes(&[64 * MIB]).start().await
}

/// Runs this on a thread of its own, which may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce(&Handle) -> T + Send + 'static) -> T {
    let runtime = Handle::current();
    let working = tokio::task::spawn_blocking(move || work(&runtime));
    let ended = tokio::time::timeout(PATIENCE, working).await;
    ended.expect("it does not hang").expect("no panic")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_that_block_and_tasks_that_do_not_share_a_lane() {
    let cluster = start().await;
    let client = cluster.client().await;
    let there: Vec<_> = (0..30).map(|n| key(format!("there-{n}"))).collect();
    for key in &there {
        client.store(key, &[7; 100]).await;
    }
    let there = Arc::new(there);
    let link = connected(config(cluster.master.address)).await;
    assert!(link.uses_lane());
    let rounds = |caller: usize, link: MasterLink| {
        let there = Arc::clone(&there);
        let count = move |round: usize| match (caller % 4, round % 20) {
            (0, 7) => 20_000,
            (1, _) => 64,
            _ => 1 + round % 3,
        };
        (0..60).map(move |round| {
            let (link, there) = (link.clone(), Arc::clone(&there));
            async move { ask(&link, &there, &format!("{caller}-{round}"), count(round)).await }
        })
    };
    let mut callers = Vec::new();
    for caller in 0..8 {
        let (blocked, calls) = (link.clone(), rounds(caller, link.clone()));
        callers.push(tokio::spawn(blocking(move |runtime| {
            for call in calls {
                blocked.block_on(runtime, call);
            }
        })));
        let calls = rounds(caller + 8, link.clone());
        callers.push(tokio::spawn(async move {
            for call in calls {
                call.await;
            }
        }));
    }
    for caller in callers {
        caller.await.expect("no answer is wrong");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_that_block_and_tasks_move_bytes_over_the_same_connections() {
    let cluster = Spec::new(Via::Tcp).nodes(&[64 * MIB]).start().await;
    let engine = Via::Tcp.engine();
    let link = MasterLink::connect(link_config(cluster.master.address, "client", &engine)).await;
    let link = link.expect("the master is up");
    let client = StoreClient::new(&link, engine, ClientConfig::default()).expect("on a runtime");
    let rounds = |caller: u8| {
        let client = client.clone();
        (0..30_u8).map(move |round| {
            let client = client.clone();
            async move {
                let key = key(format!("{caller}-{round}"));
                let size = [100, 4096, 70_000][usize::from(round % 3)];
                let bytes = (0..=250_u8).cycle().take(size);
                let bytes: Vec<u8> = bytes.map(|byte| byte ^ caller ^ round).collect();
                client.store(&key, &bytes).await;
                assert!(client.load(&key).await.expect("it is there") == bytes);
            }
        })
    };
    let mut callers = Vec::new();
    for caller in 0..4 {
        let (link, calls) = (link.clone(), rounds(caller));
        callers.push(tokio::spawn(blocking(move |runtime| {
            for call in calls {
                if caller % 2 == 0 {
                    link.block_on(runtime, call);
                } else {
                    // Looks after transfers only.
                    block_on(runtime, call);
                }
            }
        })));
        let calls = rounds(caller + 4);
        callers.push(tokio::spawn(async move {
            for call in calls {
                call.await;
            }
        }));
    }
    for caller in callers {
        caller.await.expect("no byte is wrong");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_blocking_thread_waits_for_need_not_be_the_master() {
    let cluster = start().await;
    let link = connected(config(cluster.master.address)).await;
    let waited = blocking(move |runtime| {
        let begun = Instant::now();
        let inner = link.clone();
        link.block_on(runtime, async {
            sleep(Duration::from_millis(20)).await;
            tokio::spawn(async { tokio::task::yield_now().await })
                .await
                .expect("no panic");
            // A call that is waited for by somebody else than its maker.
            let called =
                tokio::spawn(
                    async move { inner.exists(&Exists::readable(&[key("k")])).await.is_ok() },
                );
            assert!(called.await.expect("no panic"));
        });
        // Within one that waits, too.
        let nested = link.block_on(runtime, async {
            link.block_on(runtime, link.exists(&Exists::readable(&[key("k")])))
                .is_ok()
        });
        assert!(nested);
        begun.elapsed()
    })
    .await;
    assert!(waited >= Duration::from_millis(20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_gives_up_while_it_reads_for_others_leaves_nobody_behind() {
    let cluster = start().await;
    let link = connected(config(cluster.master.address)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut others = Vec::new();
    for n in 0..4 {
        let (link, stop) = (link.clone(), Arc::clone(&stop));
        others.push(tokio::spawn(blocking(move |runtime| {
            let keys = [key(format!("{n}"))];
            while !stop.load(Ordering::Relaxed) {
                let found = link.block_on(runtime, link.exists(&Exists::readable(&keys)));
                assert!(found.is_ok());
            }
        })));
    }
    // Nobody commits the key: this one leads until its own time is over.
    let (giver_up, keys) = (link.clone(), [key("never")]);
    let put = [PutStart::new(keys[0].clone(), 100)];
    let replicas = ReplicateConfig::default();
    let reserved = link.put_start(&put, &replicas, StartOptions::default());
    assert!(reserved.await.expect("there is room").results[0].is_ok());
    blocking(move |runtime| {
        for _ in 0..20 {
            let waiting = giver_up.wait_complete(&keys, PATIENCE);
            let waited = giver_up.block_on(runtime, async {
                tokio::time::timeout(Duration::from_millis(5), waiting).await
            });
            assert!(waited.is_err());
        }
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for other in others {
        other.await.expect("no panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn threads_that_block_learn_at_once_that_the_master_is_gone() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    config.timeouts.call = PATIENCE;
    config.timeouts.ping = PATIENCE;
    let link = connected(config).await;
    for round in 1..=3 {
        proxy.down(Flow::Held);
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let link = link.clone();
                tokio::spawn(blocking(move |runtime| {
                    link.block_on(runtime, link.remove_matching("nothing", false))
                }))
            })
            .collect();
        eventually("the calls are on their way", || {
            cluster.master.requests("remove_matching") == round * 4
        })
        .await;
        proxy.cut();
        for caller in callers {
            let error = caller.await.expect("no panic").expect_err("no answer");
            assert!(
                matches!(error, StoreError::MasterUnreachable { .. }),
                "{error}"
            );
        }
        eventually("the link is up again", || {
            matches!(link.state(), LinkState::Up { .. })
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocking_close_ends_at_its_deadline_though_the_master_says_nothing() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    // Nothing else finds out within the test.
    (config.timeouts.call, config.timeouts.ping) = (PATIENCE * 2, PATIENCE * 2);
    let link = connected(config).await;
    assert!(link.uses_lane());
    proxy.down(Flow::Held);
    let closing = link.clone();
    let closed = blocking(move |runtime| {
        closing.block_on(runtime, closing.close(Duration::from_millis(100)))
    });
    // Its tasks may end after it.
    let closed = closed.await;
    assert!(
        matches!(closed, Ok(()) | Err(StoreError::Timeout { .. })),
        "{closed:?}"
    );
    assert!(matches!(link.state(), LinkState::Closed));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocking_call_ends_at_its_deadline_and_over_grpc_it_works_as_well() {
    let cluster = start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    for lane in [true, false] {
        let mut config = config(proxy.address);
        config.timeouts.call = Duration::from_millis(300);
        config.timeouts.ping = PATIENCE;
        config.lane = lane;
        let link = connected(config).await;
        assert_eq!(link.uses_lane(), lane);
        let asking = link.clone();
        let answered = blocking(move |runtime| {
            asking.block_on(runtime, asking.exists(&Exists::readable(&[key("k")])))
        });
        assert!(answered.await.is_ok());
        proxy.up(Flow::Held);
        let answered = blocking(move |runtime| {
            link.block_on(runtime, link.exists(&Exists::readable(&[key("k")])))
        });
        let error = answered.await.expect_err("nobody hears it");
        assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
        proxy.up(Flow::Open);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocking_call_ends_at_its_deadline_however_often_its_thread_is_woken() {
    let cluster = Spec::new(Via::Local).ttl(PATIENCE * 10).start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let mut config = config(proxy.address);
    config.timeouts.call = Duration::from_millis(300);
    config.timeouts.ping = PATIENCE;
    let link = connected(config).await;
    // The first heartbeat is over by then, or would end the link before.
    let before = link.clone();
    let answered = blocking(move |runtime| {
        before.block_on(runtime, before.exists(&Exists::readable(&[key("k")])))
    });
    assert!(answered.await.is_ok());
    proxy.up(Flow::Held);
    let answered = blocking(move |runtime| {
        link.block_on(runtime, async {
            let keys = [key("k")];
            let mut ticks = tokio::time::interval(Duration::from_millis(5));
            let query = Exists::readable(&keys);
            let asking = link.exists(&query);
            tokio::pin!(asking);
            loop {
                tokio::select! {
                    answer = &mut asking => return answer,
                    _ = ticks.tick() => {}
                }
            }
        })
    });
    let error = answered.await.expect_err("nobody hears it");
    assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
}
