//! Commands from the master, heartbeats, leaving, and tasks that end.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{SegmentId, Term};
use layercake_protocol::key::Tenant;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_protocol::wire::master_frame::Response as Answer;
use layercake_store::StoreError;
use layercake_store::link::{CommandId, Exists, MasterLink, NodeEvent, SessionEvent};

use super::{config, key, up};
use crate::fake::{FakeMaster, Fault, Kind, Nature, PATIENCE, Served};
use crate::tasks;

async fn connected(master: &FakeMaster) -> (MasterLink, Served) {
    let served = master.serve();
    let link = MasterLink::connect(config(served.address))
        .await
        .expect("it is there");
    (link, served)
}

async fn next<T>(events: &mut tokio::sync::mpsc::Receiver<T>) -> T {
    tokio::time::timeout(PATIENCE, events.recv())
        .await
        .expect("an event comes")
        .expect("the link lives")
}

fn fence(id: u64) -> Answer {
    Answer::Fence(wire::FenceCommand {
        fence_id: id,
        segment_id: 5,
        places: vec![wire::FencedPlace {
            offset: 4096,
            len: 8192,
            generation: 3,
        }],
        client_id: Some(1_u128.into()),
        engine: None,
    })
}

#[tokio::test]
async fn commands_reach_their_handlers_and_answers_the_master() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let mut node = link.node_events().expect("taken once");
    let mut sessions = link.session_events().expect("taken once");
    assert!(link.node_events().is_none() && link.session_events().is_none());
    master.command(fence(11)).await;
    let drop = wire::DropSessionsCommand {
        fence_id: 12,
        tenant: "t".to_owned(),
        objects: vec![wire::ObjectRef {
            key: "k".to_owned(),
            generation: 4,
        }],
    };
    master.command(Answer::DropSessions(drop)).await;
    let NodeEvent::Fence { command, fence } = next(&mut node).await else {
        panic!("not a fence");
    };
    assert_eq!(
        (command.id, fence.segment, fence.places.len()),
        (11, SegmentId(5), 1)
    );
    link.fence_done(command, true);
    let SessionEvent::Drop { command, sessions } = next(&mut sessions).await else {
        panic!("not a drop");
    };
    assert_eq!(sessions.tenant, Tenant::new("t").expect("short"));
    link.fence_done(command, false);
    master
        .until("both are answered", |master| {
            master.seen(Kind::FenceDone).len() == 2
        })
        .await;
    let answers: Vec<_> = master
        .seen(Kind::FenceDone)
        .into_iter()
        .map(|seen| match seen.body {
            Body::FenceDone(done) => (done.fence_id, done.writer_attached),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(answers, [(11, true), (12, false)]);
}

#[tokio::test]
async fn an_answer_to_a_command_outlives_a_broken_connection_but_not_the_term() {
    let master = FakeMaster::default();
    let (link, served) = connected(&master).await;
    let in_term = |term, id| CommandId {
        term: Term(term),
        id,
    };
    master.on(Kind::FenceDone, Fault::Drop);
    link.fence_done(in_term(1, 1), false);
    master
        .until("it is repeated", |master| {
            master.seen(Kind::FenceDone).len() == 2
        })
        .await;
    let port = served.kill();
    super::down(&link).await;
    link.fence_done(in_term(1, 2), false);
    master.restart();
    let _served = master.serve_at(port);
    up(&link).await;
    link.fence_done(in_term(2, 3), false);
    master
        .until("the new one arrives", |master| {
            master.seen(Kind::FenceDone).len() == 3
        })
        .await;
    let ids: Vec<_> = master
        .seen(Kind::FenceDone)
        .into_iter()
        .map(|seen| match seen.body {
            Body::FenceDone(done) => done.fence_id,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ids, [1, 1, 3], "the answer of the old term is void");
}

#[tokio::test]
async fn heartbeats_name_what_is_mounted_and_tell_what_is_missing() {
    let master = FakeMaster::new(Nature {
        heartbeat_every: Duration::from_millis(10),
        ..Nature::default()
    });
    let (link, _served) = connected(&master).await;
    let mut node = link.node_events().expect("taken once");
    link.set_mounted(vec![SegmentId(3), SegmentId(4)]);
    let named = |master: &FakeMaster| {
        master.seen(Kind::Heartbeat).last().is_some_and(
            |seen| matches!(&seen.body, Body::Heartbeat(beat) if beat.segment_ids == [3, 4]),
        )
    };
    master.until("a heartbeat names them", named).await;
    master.miss_segments(vec![4]);
    assert_eq!(
        next(&mut node).await,
        NodeEvent::Missing(vec![SegmentId(4)])
    );
}

#[tokio::test]
async fn tools_get_their_refusals_as_such() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let error = link.stat(&key("k")).await.expect_err("not there");
    assert!(
        matches!(error, StoreError::Refused(Refusal::NotFound)),
        "{error}"
    );
}

#[tokio::test]
async fn a_ticket_that_the_master_forgot_is_replaced() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    master.forget_tickets();
    let error = link.stat(&key("k")).await.expect_err("not there");
    assert!(
        matches!(error, StoreError::Refused(Refusal::NotFound)),
        "{error}"
    );
    assert_eq!(master.seen(Kind::Join).len(), 2);
}

#[tokio::test]
async fn calls_of_another_tenant_carry_its_name() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let other = link.with_tenant(Tenant::new("other").expect("short"));
    for link in [&link, &other] {
        assert!(link.exists(&Exists::readable(&[key("k")])).await.is_ok());
    }
    let tenants: Vec<_> = master
        .seen(Kind::Exists)
        .into_iter()
        .map(|seen| seen.context.tenant.as_str().to_owned())
        .collect();
    assert_eq!(tenants, ["default", "other"]);
}

/// Yields until the runtime has only this many tasks.
async fn tasks_become(count: usize) {
    let ended = async {
        while tasks() > count {
            tokio::task::yield_now().await;
        }
    };
    let ended = tokio::time::timeout(PATIENCE, ended).await;
    assert!(ended.is_ok(), "{} tasks are left", tasks() - count);
}

#[tokio::test]
async fn closing_leaves_the_master_and_no_task() {
    let master = FakeMaster::default();
    let before = tasks();
    let (link, _served) = connected(&master).await;
    let other = link.clone();
    assert!(tasks() > before);
    link.close(PATIENCE).await.expect("in time");
    assert_eq!(tasks(), before, "when it returns, every task has ended");
    assert_eq!(master.seen(Kind::Leave).len(), 1);
    let error = other
        .exists(&Exists::readable(&[key("k")]))
        .await
        .expect_err("closed");
    assert!(matches!(error, StoreError::Closed), "{error}");
}

#[tokio::test]
async fn closing_while_the_master_is_gone_does_not_wait_for_it() {
    let master = FakeMaster::default();
    let before = tasks();
    let (link, served) = connected(&master).await;
    let _port = served.kill();
    super::down(&link).await;
    link.close(PATIENCE).await.expect("in time");
    assert_eq!(tasks(), before);
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_tasks() {
    let master = FakeMaster::default();
    let before = tasks();
    let (link, _served) = connected(&master).await;
    let other = link.clone();
    drop(link);
    assert!(other.exists(&Exists::readable(&[key("k")])).await.is_ok());
    drop(other);
    tasks_become(before).await;
    assert!(
        master.seen(Kind::Leave).is_empty(),
        "only closing vouches for open puts"
    );
}

#[tokio::test]
async fn a_failed_connect_leaves_no_task() {
    let before = tasks();
    let nature = Nature {
        version: layercake_protocol::version::Version {
            protocol: 99,
            semantics: 1,
        },
        ..Nature::default()
    };
    let served = FakeMaster::new(nature).serve();
    assert!(MasterLink::connect(config(served.address)).await.is_err());
    tasks_become(before).await;
}

#[test]
fn calls_can_be_spawned() {
    fn sendable<T: Send>(_: &T) {}
    fn check(link: &MasterLink) {
        let (a, b) = (key("a"), [key("b")]);
        sendable(&link.stat(&a));
        sendable(&link.segments());
        sendable(&link.get_start(&b, layercake_store::link::StartOptions::default(), true));
        sendable(&link.close(Duration::ZERO));
    }
    let _ = check;
}

#[tokio::test]
async fn a_link_that_leaves_sends_nothing_behind_the_leave_and_does_not_join_again() {
    const LINKS: usize = 100;
    let master = FakeMaster::new(Nature {
        heartbeat_every: Duration::from_millis(10),
        ..Nature::default()
    });
    let served = master.serve();
    let stays = MasterLink::connect(config(served.address))
        .await
        .expect("it is there");
    let mut closing = tokio::task::JoinSet::new();
    for _ in 0..LINKS {
        let link = MasterLink::connect(config(served.address))
            .await
            .expect("it is there");
        // Carried out at once: from here on the master does not know the member.
        master.on(Kind::Leave, Fault::Hold);
        closing.spawn(async move { link.close(PATIENCE).await });
    }
    master
        .until("all have left", |master| {
            master.seen(Kind::Leave).len() == LINKS
        })
        .await;
    // Many heartbeats of the one that stays: those of the others would have come in between.
    let before = master.seen(Kind::Heartbeat).len();
    master
        .until("time has passed", |master| {
            master.seen(Kind::Heartbeat).len() >= before + 20
        })
        .await;
    for _ in 0..LINKS {
        master.release();
    }
    while let Some(closed) = closing.join_next().await {
        closed.expect("no panic").expect("the master answers");
    }
    assert_eq!(master.seen_after_leaving(), []);
    assert_eq!(master.seen(Kind::Join).len(), LINKS + 1);
    assert_eq!(master.members(), 1, "the one that stays");
    stays.close(PATIENCE).await.expect("it answers");
    assert_eq!(master.members(), 0);
}
