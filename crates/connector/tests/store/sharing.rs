//! Engines that find out in the pool whether they can share blocks.

use std::time::Duration;

use layercake_connector::ConnectorError;
use layercake_connector::checks::Deployment;
use layercake_connector::contract::{
    Matched, RequestId, RequestView, SchedulerSide as _, StepPlan,
};
use layercake_connector::scheduler::StoreScheduler;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_transport::PieceError;
use layercake_transport::mock::{MockNetwork, Pace};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::cluster::{Cluster, deployment, hashes};
use crate::rig::options;

/// An engine that starts, on a client of its own.
async fn starts(
    cluster: &Cluster,
    deployment: &Deployment,
    with: &Value,
) -> Result<(), ConnectorError> {
    let store = cluster.client().await;
    let scheduler = StoreScheduler::new(deployment, options(with), store, Handle::current());
    scheduler.expect("covered").agree().await
}

fn record(group: &str) -> ObjectKey {
    ObjectKey::new(&format!("layercake/sharing-group/{group}")).expect("a key")
}

/// An engine that does not ask is not let off.
// contract: connector-2
#[tokio::test]
async fn an_engine_of_a_group_plans_nothing_before_it_has_asked() {
    let cluster = Cluster::start().await;
    let (store, chat) = (cluster.client().await, json!({"sharing_group": "chat"}));
    let deployment = deployment(1);
    let scheduler = StoreScheduler::new(&deployment, options(&chat), store, Handle::current());
    let mut scheduler = scheduler.expect("covered");
    let (request, hashes) = (RequestId::from("r"), hashes(1, 2));
    let view = RequestView {
        request: &request,
        tokens: 9,
        hashes: &hashes,
        computed: 0,
    };
    let nothing = StepPlan {
        requests: &[],
        preempted: &[],
    };
    assert_eq!(scheduler.matched_tokens(&view), Matched::Tokens(0));
    scheduler
        .after_allocation(&request, 0)
        .expect("it loads nothing");
    let more = scheduler.after_allocation(&request, 4);
    more.expect_err("nothing was offered");
    let refused = scheduler.build_metadata(&nothing);
    let refused = refused.expect_err("nobody asked").to_string();
    assert!(
        refused.contains("agree") && refused.contains("sharing_group"),
        "{refused}"
    );
    scheduler.agree().await.expect("the first of its group");
    assert_eq!(scheduler.matched_tokens(&view), Matched::NotKnownYet);
    let metadata = scheduler.build_metadata(&nothing);
    assert_eq!(metadata.expect("a plan").step, 1);
}

/// An engine that was lost while it recorded holds others up for no longer than the master keeps its reservation.
// contract: connector-2
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_record_that_is_never_ended_is_replaced() {
    let soon = Duration::from_secs(1);
    let cluster = Cluster::configured(16 << 20, |config| config.state.discard_after = soon).await;
    let lost = cluster.client().await;
    let puts = vec![PutStart::new(record("chat"), 64)];
    let config = ReplicateConfig::default();
    let started = lost.start_puts(puts, &config, Recency::default()).await;
    assert!(started[0].is_ok(), "{started:?}");
    let chat = json!({"sharing_group": "chat"});
    let second = starts(&cluster, &deployment(1), &chat).await;
    second.expect("it records in the other's place");
    let other = starts(&cluster, &deployment(2), &chat).await;
    let other = other.expect_err("it differs").to_string();
    assert!(other.contains("tensor_parallel_size"), "{other}");
}

// contract: connector-2
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn engines_of_one_group_that_differ_are_refused_by_name_at_start_up() {
    let cluster = Cluster::start().await;
    let (first, chat) = (deployment(2), json!({"sharing_group": "chat"}));
    starts(&cluster, &first, &chat).await.expect("the first");
    let again = json!({"sharing_group": "chat", "kv_role": "kv_consumer"});
    starts(&cluster, &first, &again).await.expect("the same");

    let mut other = deployment(2);
    other.block_size = 8;
    let refused = starts(&cluster, &other, &chat).await;
    let refused = refused.expect_err("it differs").to_string();
    for part in [
        "\"chat\"",
        "block_size differs: 8 here, 4 there",
        "layercake/sharing-group/chat",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    let refused = starts(&cluster, &deployment(1), &chat).await;
    let refused = refused.expect_err("it differs").to_string();
    assert!(
        refused.contains("tensor_parallel_size differs: 1 here, 2 there"),
        "{refused}"
    );
    // Who is of another group, or of none, is nobody's matter.
    let code = json!({"sharing_group": "code"});
    starts(&cluster, &other, &code)
        .await
        .expect("the first of its group");
    starts(&cluster, &other, &json!({})).await.expect("of none");

    // What is no identity is not taken for one, nor one of another release.
    let store = cluster.client().await;
    for (text, reason) in [("{}", "no record"), (r#"{"version": 7}"#, "of version 7")] {
        store.remove(&[record("odd")], true).await;
        let put = [(record("odd"), text.as_bytes())];
        let put = store.put_bytes(&put, &ReplicateConfig::default()).await;
        assert!(put[0].is_ok());
        let odd = starts(&cluster, &first, &json!({"sharing_group": "odd"})).await;
        let odd = odd.expect_err("not an identity").to_string();
        for part in ["sharing-group/odd", reason] {
            assert!(odd.contains(part), "{odd}");
        }
    }
}

/// A store that can't say is asked again, and in the end told of, not ignored.
// contract: connector-2
#[tokio::test]
async fn a_store_that_can_not_say_is_asked_again_for_as_long_as_an_engine_waits() {
    let network = MockNetwork::new(3, Pace::Immediate);
    let mut cluster = Cluster::on(&network).await;
    let chat = json!({"sharing_group": "chat"});
    // The first engine's record does not arrive, then the second one does not get it.
    for _ in 0..2 {
        let store = cluster.client().await;
        let scheduler =
            StoreScheduler::new(&deployment(1), options(&chat), store, Handle::current());
        let agreeing = scheduler.expect("covered").agree();
        network.fail_next([PieceError::PeerGone]);
        agreeing.await.expect("it passes");
    }
    let other = starts(&cluster, &deployment(2), &chat).await;
    let other = other.expect_err("it differs").to_string();
    assert!(other.contains("tensor_parallel_size"), "{other}");

    let store = cluster.client().await;
    let scheduler = StoreScheduler::new(&deployment(1), options(&chat), store, Handle::current());
    cluster.stop_master().await;
    // From here on nothing but time is waited for.
    tokio::time::pause();
    let gone = scheduler.expect("covered").agree().await;
    let gone = gone.expect_err("it never comes back").to_string();
    for part in ["\"chat\"", "within 45s", "can't be reached"] {
        assert!(gone.contains(part), "{gone}");
    }
}

/// However many start at once, they agree on the first of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_engines_that_start_at_once_those_that_are_alike_go_on() {
    let cluster = Cluster::start().await;
    for round in 0..4 {
        let name = json!({"sharing_group": format!("chat-{round}")});
        let mut starting = JoinSet::new();
        for engine in 0..6 {
            let store = cluster.client().await;
            let (ranks, options) = (1 + engine % 2, options(&name));
            starting.spawn(async move {
                let runtime = Handle::current();
                let scheduler = StoreScheduler::new(&deployment(ranks), options, store, runtime);
                (ranks, scheduler.expect("covered").agree().await.is_ok())
            });
        }
        let mut ends = starting.join_all().await;
        ends.sort_unstable();
        let first = ends[0].1;
        let expected = [(1, first); 3].into_iter().chain([(2, !first); 3]);
        assert!(ends.iter().copied().eq(expected), "{ends:?}");
    }
}
