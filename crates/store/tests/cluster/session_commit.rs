//! Ends and revokes whose answers are lost, and a master that comes and goes (cases 4.12, R5, R6).
//!
//! The client's connection to the master goes through a proxy that holds bytes back or cuts.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_store::link::{Exists, LinkState, MasterLink};
use layercake_store::{ClientConfig, EndError, PutSession, StoreClient, StoreError};

use crate::common;
use crate::common::proxy::{Flow, Proxy};
use crate::common::{
    Cluster, KIB, OneKey as _, PATIENCE, Spec, Via, eventually, eventually_async, fresh_key, one,
    pattern, refusal,
};

/// How long the client waits for an answer: so long that a busy machine gives it in time.
const CALL: Duration = Duration::from_secs(3);

/// A client behind a proxy, and another one beside it to look at the master.
struct Scene {
    cluster: Cluster,
    proxy: Proxy,
    client: StoreClient,
    observer: StoreClient,
}

async fn scene(lease: Duration) -> Scene {
    let cluster = Spec::new(Via::Shm).lease(lease).start().await;
    let proxy = Proxy::start(cluster.master.address).await;
    let engine = Via::Shm.engine();
    let mut config = common::link_config(proxy.address, "behind the proxy", &engine);
    config.timeouts.call = CALL;
    config.timeouts.ping = PATIENCE;
    let link = MasterLink::connect(config)
        .await
        .expect("the proxy is open");
    let client = StoreClient::new(&link, engine.clone(), ClientConfig::default());
    let client = client.expect("a link of its own");
    let second = StoreClient::new(&link, engine, ClientConfig::default());
    assert!(
        second
            .expect_err("one client a link")
            .to_string()
            .contains("link")
    );
    let observer = cluster.client().await;
    Scene {
        cluster,
        proxy,
        client,
        observer,
    }
}

impl Scene {
    async fn written(&self, seed: u64) -> PutSession {
        let session = self
            .client
            .start_put(&fresh_key(), 4 * KIB)
            .await
            .expect("there is room");
        self.client
            .write(&session, 0, &pattern(seed, 4 * KIB))
            .await
            .expect("the node is up");
        session
    }

    /// Waits until calls go through: a cut is noticed, and its doubts are over, a moment later.
    async fn up_again(&self) {
        let query = [fresh_key()];
        eventually_async("calls go through", async || {
            let query = Exists::readable(&query);
            self.client.link().exists(&query).await.is_ok()
        })
        .await;
    }
}

fn sealed(failed: EndError) -> PutSession {
    assert!(
        matches!(
            failed.error,
            StoreError::MasterUnreachable { .. } | StoreError::MasterTimeout { .. }
        ),
        "{}",
        failed.error
    );
    failed.session.expect("the call can be repeated")
}

// contract: session-6, session-7
#[tokio::test]
async fn a_commit_whose_answer_is_lost_can_be_repeated() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(1).await;
    let key = session.key().clone();
    scene.proxy.down(Flow::Held);
    let failed = one(scene.client.end_puts(vec![session]).await).expect_err("no answer comes");
    eventually_async("the commit is applied", async || {
        scene.observer.has(&key).await
    })
    .await;
    let session = sealed(failed);
    scene.proxy.cut();
    scene.up_again().await;
    scene
        .client
        .end(session)
        .await
        .expect("applied already, which is fine");
    assert_eq!(
        scene.observer.load(&key).await.expect("complete"),
        pattern(1, 4 * KIB)
    );
    assert_eq!(scene.cluster.master.monitor.status().objects, 1);
}

// contract: session-5, session-7
#[tokio::test]
async fn a_commit_that_never_arrived_can_be_repeated_and_takes_no_ranges_meanwhile() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(2).await;
    let key = session.key().clone();
    scene.proxy.up(Flow::Held);
    let failed = one(scene.client.end_puts(vec![session]).await).expect_err("it does not arrive");
    let session = sealed(failed);
    let refused = scene
        .client
        .write(&session, 0, &[0; 16])
        .await
        .expect_err("sealed");
    assert!(matches!(refused, StoreError::SessionEnded), "{refused}");
    assert!(!scene.observer.has(&key).await);
    scene.proxy.cut();
    scene.up_again().await;
    scene.client.end(session).await.expect("repeated");
    assert_eq!(
        scene.observer.load(&key).await.expect("complete"),
        pattern(2, 4 * KIB)
    );
}

// contract: session-6
#[tokio::test]
async fn a_revoke_whose_answer_is_lost_can_be_repeated() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(3).await;
    let key = session.key().clone();
    scene.proxy.down(Flow::Held);
    let failed = one(scene.client.revoke_puts(vec![session]).await).expect_err("no answer comes");
    let session = sealed(failed);
    scene.proxy.cut();
    scene.up_again().await;
    one(scene.client.revoke_puts(vec![session]).await).expect("revoked, once or twice");
    assert_eq!(scene.cluster.master.monitor.status().reserved_objects, 0);
    scene.observer.store(&key, &pattern(4, KIB)).await;
}

// contract: session-7, session-10
#[tokio::test]
async fn an_end_that_was_let_go_is_finished_before_the_key_is_started_again() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(5).await;
    let key = session.key().clone();
    scene.proxy.up(Flow::Held);
    let failed = one(scene.client.end_puts(vec![session]).await).expect_err("it does not arrive");
    drop(sealed(failed));
    scene.proxy.cut();
    scene.up_again().await;
    assert_eq!(
        refusal(scene.client.start_put(&key, KIB).await),
        Refusal::AlreadyExists
    );
    assert_eq!(
        scene.observer.load(&key).await.expect("complete"),
        pattern(5, 4 * KIB)
    );
}

// contract: session-7
#[tokio::test]
async fn a_start_finishes_an_end_that_its_owner_still_holds() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(6).await;
    let key = session.key().clone();
    scene.proxy.up(Flow::Held);
    let failed = one(scene.client.end_puts(vec![session]).await).expect_err("it does not arrive");
    let held = sealed(failed);
    scene.proxy.cut();
    scene.up_again().await;
    assert_eq!(
        refusal(scene.client.start_put(&key, KIB).await),
        Refusal::AlreadyExists
    );
    assert_eq!(
        scene.observer.load(&key).await.expect("complete"),
        pattern(6, 4 * KIB)
    );
    let over = scene.client.end(held).await.expect_err("finished already");
    assert!(matches!(over, StoreError::SessionEnded), "{over}");
}

// contract: session-10
#[tokio::test]
async fn a_dropped_session_is_revoked_even_if_the_master_is_away_at_that_moment() {
    let scene = scene(Duration::from_secs(10)).await;
    let session = scene.written(6).await;
    let key = session.key().clone();
    scene.proxy.up(Flow::Held);
    drop(session);
    scene.proxy.cut();
    eventually("the reservation is given back", || {
        scene.cluster.master.monitor.status().reserved_objects == 0
    })
    .await;
    scene.observer.store(&key, &pattern(7, KIB)).await;
    eventually("the client knows", || {
        scene.client.stats().puts_revoked == 1
    })
    .await;
}

// contract: lease-3
#[tokio::test]
async fn an_end_of_reads_waits_for_what_is_being_given_back() {
    let scene = scene(Duration::from_secs(10)).await;
    let key = fresh_key();
    scene.client.store(&key, &pattern(8, KIB)).await;
    let session = scene.client.start_get(&key).await.expect("complete");
    scene.proxy.up(Flow::Held);
    // What another call gives back, whose answer can't come yet.
    let other = scene.client.end_gets(vec![session]);
    let end = async {
        scene.client.end_gets(Vec::new()).await;
        assert_eq!(scene.client.stats().leases_returned, 1);
    };
    tokio::join!(biased; other, end, async { scene.proxy.up(Flow::Open) });
    one(scene
        .observer
        .remove(std::slice::from_ref(&key), false)
        .await)
    .expect("nobody reads it");
}

// contract: lease-2
#[tokio::test]
async fn a_session_whose_lease_can_not_be_renewed_reads_no_further() {
    // So long that a busy machine renews it in time.
    let scene = scene(Duration::from_secs(3)).await;
    let key = fresh_key();
    scene.client.store(&key, &pattern(8, 4 * KIB)).await;
    let session = scene.client.start_get(&key).await.expect("complete");
    eventually_async("the lease is renewed past its first end", async || {
        let (_, bytes) = scene
            .client
            .read(&session, 0, 4 * KIB)
            .await
            .expect("renewed");
        assert_eq!(bytes, pattern(8, 4 * KIB));
        scene.client.stats().leases_renewed >= 4
    })
    .await;
    scene.proxy.up(Flow::Held);
    eventually_async("reads are refused", async || {
        match scene.client.read(&session, 0, 4 * KIB).await {
            Ok((_, bytes)) => {
                assert_eq!(bytes, pattern(8, 4 * KIB));
                false
            }
            Err(error) => {
                assert_eq!(refusal::<()>(Err(error)), Refusal::LeaseExpired);
                true
            }
        }
    })
    .await;
    scene.proxy.cut();
    scene.up_again().await;
    assert_eq!(
        refusal(scene.client.read(&session, 0, 4 * KIB).await),
        Refusal::LeaseExpired,
        "what was over stays over"
    );
    let again = scene.client.start_get(&key).await.expect("complete");
    scene
        .client
        .read(&again, 0, 4 * KIB)
        .await
        .expect("a new session has a new lease");
}

// contract: session-17
#[tokio::test]
async fn while_the_master_is_gone_open_sessions_read_on_and_calls_fail_at_once() {
    let Scene {
        cluster,
        proxy,
        client,
        observer,
    } = scene(Duration::from_secs(10)).await;
    let key = fresh_key();
    client.store(&key, &pattern(9, 4 * KIB)).await;
    let session = client.start_get(&key).await.expect("complete");
    drop(observer);
    let _port = cluster.master.stop().await;
    proxy.cut();
    eventually("the loss is noticed", || {
        matches!(client.link().state(), LinkState::Down(_))
    })
    .await;
    let asked = tokio::time::Instant::now();
    for _ in 0..20 {
        let error = client.start_get(&key).await.expect_err("nobody answers");
        assert!(
            matches!(error, StoreError::MasterUnreachable { .. }),
            "{error}"
        );
    }
    let took = asked.elapsed();
    assert!(took < CALL, "{took:?} for 20 calls");
    let (_, bytes) = client
        .read(&session, 0, 4 * KIB)
        .await
        .expect("no call is needed");
    assert_eq!(bytes, pattern(9, 4 * KIB));
}
