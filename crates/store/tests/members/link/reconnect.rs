//! Losing the master and having it back.

use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Term;
use layercake_protocol::replica::{ObjectRef, ReplicateConfig};
use layercake_store::StoreError;
use layercake_store::link::{Exists, Life, LinkState, MasterLink, StartOptions};

use super::{config, down, key, put, state, up};
use crate::fake::{FakeMaster, Fault, Kind, Nature, PATIENCE, Served};
use crate::port::Port;

async fn connected(master: &FakeMaster) -> (MasterLink, Served) {
    let served = master.serve();
    let link = MasterLink::connect(config(served.address))
        .await
        .expect("it is there");
    (link, served)
}

/// Starts a put.
async fn reserve(link: &MasterLink, name: &str) -> ObjectRef {
    let config = ReplicateConfig::default();
    let started = link
        .put_start(&[put(name)], &config, StartOptions::default())
        .await
        .expect("up");
    ObjectRef {
        key: key(name),
        generation: started.results[0].as_ref().expect("free").generation,
    }
}

#[tokio::test]
// contract: session-17
async fn calls_fail_at_once_while_the_master_is_down_and_work_when_it_is_back() {
    let master = FakeMaster::default();
    master.insert("a");
    let (link, served) = connected(&master).await;
    let address = served.address;
    let port = served.kill();
    down(&link).await;
    let start = Instant::now();
    for _ in 0..100 {
        let error = link
            .exists(&Exists::readable(&[key("a")]))
            .await
            .expect_err("it is down");
        assert!(
            matches!(error, StoreError::MasterUnreachable { .. }),
            "{error}"
        );
    }
    let took = start.elapsed();
    assert!(
        took < config(address).timeouts.connect,
        "100 calls in less than one connect would take to fail: {took:?}"
    );
    let _served = master.serve_at(port);
    up(&link).await;
    assert!(link.exists(&Exists::readable(&[key("a")])).await.is_ok());
}

#[tokio::test]
async fn a_start_whose_answer_was_lost_is_repeated_and_made_once() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    master.on(Kind::PutStart, Fault::ApplyThenDrop);
    let started = link
        .put_start(
            &[put("k")],
            &ReplicateConfig::default(),
            StartOptions::default(),
        )
        .await
        .expect("it is repeated");
    assert!(started.results[0].is_ok(), "not in progress: it is our own");
    let seen = master.seen(Kind::PutStart);
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].context.request, seen[1].context.request);
    assert_eq!(master.reservations(), 1);
}

#[tokio::test]
// contract: session-6
async fn an_end_is_repeated_whether_it_was_applied_or_not() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    for (name, fault) in [("a", Fault::Drop), ("b", Fault::ApplyThenDrop)] {
        let object = reserve(&link, name).await;
        master.on(Kind::PutEnd, fault);
        let ended = link.put_end(&[object]).await.expect("it is repeated");
        assert_eq!(ended, [Ok(())]);
    }
    assert_eq!(master.seen(Kind::PutEnd).len(), 4);
}

#[tokio::test]
async fn a_removal_whose_answer_was_lost_is_not_repeated() {
    let master = FakeMaster::default();
    master.insert("k");
    let (link, _served) = connected(&master).await;
    master.on(Kind::Remove, Fault::ApplyThenDrop);
    let error = link
        .remove(&[key("k")], false)
        .await
        .expect_err("unknown outcome");
    assert!(
        matches!(error, StoreError::MasterUnreachable { .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("may have taken effect"),
        "{error}"
    );
    up(&link).await;
    assert_eq!(master.seen(Kind::Remove).len(), 1);
}

/// Makes a call, and kills the master while the call is under way, which must end long before its time is over. Gives the
/// master's port.
async fn lose_under_way<T>(
    (master, link, served): (&FakeMaster, &MasterLink, Served),
    (kind, fault): (Kind, Fault),
    call: impl Future<Output = Result<T, StoreError>>,
) -> Port {
    master.on(kind, fault);
    let kill = async {
        let arrived = |master: &FakeMaster| master.seen(kind).len() == 1;
        master.until("the call arrives", arrived).await;
        served.kill()
    };
    let both = async { tokio::join!(call, kill) };
    let (answer, port) = tokio::time::timeout(PATIENCE, both)
        .await
        .expect("it does not wait for its deadline");
    let error = answer.err().expect("nobody answers");
    let gone = matches!(error, StoreError::MasterUnreachable { .. });
    assert!(gone, "{kind:?}: {error}");
    down(link).await;
    port
}

/// Connected, with more time for each call than a test may take.
async fn patiently_connected(master: &FakeMaster) -> (MasterLink, Served) {
    let served = master.serve();
    let mut config = config(served.address);
    config.timeouts.call = PATIENCE * 10;
    let link = MasterLink::connect(config).await.expect("it is there");
    (link, served)
}

#[tokio::test]
async fn a_look_up_under_way_fails_once_the_master_is_known_to_be_gone() {
    let master = FakeMaster::default();
    let (link, served) = patiently_connected(&master).await;
    let keys = [key("a")];
    let query = Exists::readable(&keys);
    let lost = (Kind::Exists, Fault::Swallow);
    lose_under_way((&master, &link, served), lost, link.exists(&query)).await;
}

#[tokio::test]
async fn a_commit_under_way_fails_once_the_master_is_known_to_be_gone_and_can_be_repeated() {
    for fault in [Fault::Swallow, Fault::Ignore] {
        let master = FakeMaster::default();
        let (link, served) = patiently_connected(&master).await;
        let objects = [reserve(&link, "a").await];
        let lost = (Kind::PutEnd, fault);
        let end = link.put_end(&objects);
        let port = lose_under_way((&master, &link, served), lost, end).await;
        let _served = master.serve_at(port);
        up(&link).await;
        let ended = link.put_end(&objects).await.expect("it is back");
        assert_eq!(ended, [Ok(())]);
    }
}

#[tokio::test]
async fn a_start_that_failed_under_way_is_taken_back_by_its_number() {
    let config = ReplicateConfig::default();
    let entries = [put("a"), put("b")];
    for (fault, made) in [(Fault::Swallow, 2), (Fault::Ignore, 0)] {
        let master = FakeMaster::default();
        let (link, served) = patiently_connected(&master).await;
        let start = link.put_start(&entries, &config, StartOptions::default());
        let lost = (Kind::PutStart, fault);
        let port = lose_under_way((&master, &link, served), lost, start).await;
        assert_eq!(master.reservations(), made);
        let _served = master.serve_at(port);
        let told = |master: &FakeMaster| master.seen(Kind::TakeBack).len() == 1;
        master.until("it is taken back", told).await;
        assert_eq!(master.reservations(), 0);
    }
}

#[tokio::test]
async fn a_start_is_taken_back_whose_caller_went_away_before_the_connection_broke() {
    let config = ReplicateConfig::default();
    let entries = [put("a")];
    let master = FakeMaster::default();
    let (link, served) = patiently_connected(&master).await;
    master.on(Kind::PutStart, Fault::Swallow);
    let start = link.put_start(&entries, &config, StartOptions::default());
    tokio::select! {
        answer = start => panic!("nobody answers: {answer:?}"),
        () = master.until("it is made", |master| master.reservations() == 1) => {}
    }
    let port = served.kill();
    down(&link).await;
    let _served = master.serve_at(port);
    master
        .until("it is taken back", |master| master.reservations() == 0)
        .await;
}

#[tokio::test]
async fn an_answer_that_does_not_come_is_a_time_out_and_the_link_stays_up() {
    let master = FakeMaster::default();
    let served = master.serve();
    let mut config = config(served.address);
    config.timeouts.call = Duration::from_secs(1);
    let link = MasterLink::connect(config).await.expect("it is there");
    master.on(Kind::Exists, Fault::Swallow);
    let error = link
        .exists(&Exists::readable(&[key("a")]))
        .await
        .expect_err("no answer");
    assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
    assert!(matches!(link.state(), LinkState::Up { .. }));
    // The heartbeat that is sent at once is answered: the master was only slow with that call.
    let again = async {
        while link.exists(&Exists::readable(&[key("a")])).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, again)
        .await
        .expect("it is asked again");
    assert!(matches!(link.state(), LinkState::Up { life: Life(1), .. }));
}

#[tokio::test]
async fn a_master_that_stands_still_costs_one_deadline_and_not_one_for_each_call() {
    let master = FakeMaster::default();
    let served = master.serve();
    let mut config = config(served.address);
    config.timeouts.call = Duration::from_secs(1);
    let link = MasterLink::connect(config).await.expect("it is there");
    let guard = served.freeze();
    let keys = [key("a")];
    let query = Exists::readable(&keys);
    let error = link.exists(&query).await.expect_err("no answer");
    assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
    // From the doubt over the heartbeat's deadline to attempts to connect anew.
    for _ in 0..100 {
        let error = link.exists(&query).await.expect_err("it stands still");
        assert!(
            matches!(error, StoreError::MasterUnreachable { .. }),
            "not sent: {error}"
        );
    }
    down(&link).await;
    let error = link.exists(&query).await.expect_err("it stands still");
    assert!(
        matches!(error, StoreError::MasterUnreachable { .. }),
        "{error}"
    );
    drop(guard);
    up(&link).await;
    assert!(link.exists(&query).await.is_ok());
    assert_eq!(
        master.seen(Kind::Exists).len(),
        2,
        "what was sent before it stood still, and since"
    );
}

#[tokio::test]
async fn a_master_that_stands_still_is_noticed_by_its_pings() {
    let master = FakeMaster::default();
    let served = master.serve();
    let mut config = config(served.address);
    config.timeouts.ping_every = Duration::from_millis(50);
    config.timeouts.ping = Duration::from_secs(1);
    let call = config.timeouts.call;
    let link = MasterLink::connect(config).await.expect("it is there");
    let guard = served.freeze();
    down(&link).await;
    let start = Instant::now();
    let error = link
        .exists(&Exists::readable(&[key("a")]))
        .await
        .expect_err("the master stands still");
    assert!(
        matches!(error, StoreError::MasterUnreachable { .. }),
        "known before the call: {error}"
    );
    assert!(start.elapsed() < call, "{:?}", start.elapsed());
    drop(guard);
    up(&link).await;
}

#[tokio::test]
async fn each_membership_is_a_life_of_its_own() {
    let master = FakeMaster::new(Nature {
        heartbeat_every: Duration::from_millis(10),
        ..Nature::default()
    });
    let (link, served) = connected(&master).await;
    let LinkState::Up { term, life } = link.state() else {
        panic!("not up");
    };
    assert_eq!((term, life), (Term(1), Life(1)));
    // The connection breaks, the master knows the member: the same life.
    master.on(Kind::Exists, Fault::Drop);
    assert!(link.exists(&Exists::readable(&[key("a")])).await.is_ok());
    assert!(matches!(
        up(&link).await,
        LinkState::Up { life: Life(1), .. }
    ));
    // The master forgets the member: a heartbeat tells.
    master.forget_members();
    state(&link, "in its second life", |state| {
        matches!(
            state,
            LinkState::Up {
                term: Term(1),
                life: Life(2)
            }
        )
    })
    .await;
    // Another master.
    let port = served.kill();
    master.restart();
    let _served = master.serve_at(port);
    state(&link, "in its third life", |state| {
        matches!(
            state,
            LinkState::Up {
                term: Term(2),
                life: Life(3)
            }
        )
    })
    .await;
    let context = master
        .seen(Kind::Heartbeat)
        .last()
        .expect("there were some")
        .context
        .clone();
    assert_eq!(context.client, link.client_id(), "it stays the same member");
}

#[tokio::test]
async fn a_call_refused_for_its_term_or_membership_is_repeated_after_joining_anew() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    for refusal in [Refusal::WrongTerm, Refusal::UnknownMember] {
        master.on(Kind::Exists, Fault::Refuse(refusal));
        assert!(link.exists(&Exists::readable(&[key("a")])).await.is_ok());
    }
    assert_eq!(master.seen(Kind::Join).len(), 3);
    // One that is refused again is not repeated for ever.
    for _ in 0..2 {
        master.on(Kind::Exists, Fault::Refuse(Refusal::WrongTerm));
    }
    let error = link
        .exists(&Exists::readable(&[key("a")]))
        .await
        .expect_err("twice");
    assert!(
        matches!(error, StoreError::Refused(Refusal::WrongTerm)),
        "{error}"
    );
}

#[tokio::test]
async fn a_put_start_whose_caller_went_away_is_taken_back_and_a_lease_is_not() {
    let master = FakeMaster::default();
    master.insert("there");
    let (link, _served) = connected(&master).await;
    // Somebody in this process reads the object already: giving a lease back would end his.
    let open = link
        .get_start(&[key("there")], StartOptions::default(), true)
        .await
        .expect("up");
    assert!(open.results[0].is_ok());
    master.on(Kind::PutStart, Fault::Hold);
    master.on(Kind::GetStart, Fault::Hold);
    let gets = tokio::spawn({
        let link = link.clone();
        async move {
            link.get_start(&[key("there")], StartOptions::default(), true)
                .await
        }
    });
    let puts = tokio::spawn({
        let link = link.clone();
        async move {
            let entries = [put("a"), put("there"), put("b")];
            link.put_start(
                &entries,
                &ReplicateConfig::default(),
                StartOptions::default(),
            )
            .await
        }
    });
    master
        .until("both starts arrive", |master| {
            master.seen(Kind::PutStart).len() + master.seen(Kind::GetStart).len() == 3
        })
        .await;
    puts.abort();
    gets.abort();
    assert!(puts.await.is_err() && gets.await.is_err());
    assert_eq!(master.reservations(), 2);
    master.release();
    master.release();
    master
        .until("the reservations are given back", |master| {
            master.reservations() == 0
        })
        .await;
    assert!(master.seen(Kind::GetEnd).is_empty());
}

#[tokio::test]
async fn a_start_that_timed_out_is_taken_back_when_it_is_answered() {
    let master = FakeMaster::default();
    let served = master.serve();
    let mut config = config(served.address);
    config.timeouts.call = Duration::from_millis(100);
    let link = MasterLink::connect(config).await.expect("it is there");
    master.on(Kind::PutStart, Fault::Hold);
    let error = link
        .put_start(
            &[put("a")],
            &ReplicateConfig::default(),
            StartOptions::default(),
        )
        .await
        .expect_err("held");
    assert!(matches!(error, StoreError::MasterTimeout { .. }), "{error}");
    master
        .until("it is made", |master| master.reservations() == 1)
        .await;
    master.release();
    master
        .until("it is given back", |master| master.reservations() == 0)
        .await;
}
