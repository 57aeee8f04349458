//! Batches of any size, and many calls at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::replica::{Presence, Recency, ReplicateConfig};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_store::StoreError;
use layercake_store::link::{Exists, MasterLink, StartOptions};

use super::{config, key, put};
use crate::fake::{FakeMaster, Fault, Kind, Served};

async fn connected(master: &FakeMaster) -> (MasterLink, Served) {
    let served = master.serve();
    let link = MasterLink::connect(config(served.address))
        .await
        .expect("it is there");
    (link, served)
}

fn recencies(master: &FakeMaster, kind: Kind) -> Vec<wire::Recency> {
    master
        .seen(kind)
        .into_iter()
        .map(|seen| match seen.body {
            Body::Exists(request) => request.recency,
            Body::GetStart(request) => request.recency,
            Body::PutStart(request) => request.recency,
            other => panic!("{other:?} has no recency"),
        })
        .map(|recency| recency.expect("it is always sent"))
        .collect()
}

#[tokio::test]
async fn a_large_query_goes_in_parts_and_its_answers_are_joined_in_order() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let keys: Vec<_> = (0..40_000).map(key).collect();
    for n in (0..40_000).filter(|n| n % 3 == 0) {
        master.insert(&n.to_string());
    }
    let query = Exists {
        recency: Recency {
            epoch: Epoch::UNSET,
            first_index: 7,
        },
        ..Exists::readable(&keys)
    };
    let existence = link.exists(&query).await.expect("any size");
    assert_eq!(existence.states.len(), keys.len());
    for (n, state) in existence.states.iter().enumerate() {
        let expected = if n % 3 == 0 {
            Presence::Complete
        } else {
            Presence::Absent
        };
        assert_eq!(*state, expected, "key {n}");
    }
    assert_eq!(existence.keys_queried, 40_000);
    // The epoch that the first part drew is that of all, and indices count on.
    let recencies = recencies(&master, Kind::Exists);
    assert!(recencies.len() > 2, "{} parts", recencies.len());
    assert_eq!(recencies[0].epoch, 0);
    assert!(
        recencies[1..]
            .iter()
            .all(|recency| recency.epoch == existence.epoch.0)
    );
    assert_eq!(recencies[0].first_index, 7);
    assert_eq!(recencies[1].first_index, 7 + 16_384);
}

#[tokio::test]
async fn a_query_that_stops_at_a_miss_asks_for_nothing_behind_it() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let keys: Vec<_> = (0..60_000).map(key).collect();
    for n in 0..20_000 {
        master.insert(&n.to_string());
    }
    let query = Exists {
        stop_at_first_miss: true,
        ..Exists::readable(&keys)
    };
    let existence = link.exists(&query).await.expect("any size");
    let hits = existence
        .states
        .iter()
        .take_while(|state| **state == Presence::Complete);
    assert_eq!(hits.count(), 20_000);
    assert_eq!(existence.states.len(), keys.len());
    assert_eq!(existence.keys_queried, 2 * 16_384);
    assert_eq!(master.seen(Kind::Exists).len(), 2);
}

#[tokio::test]
async fn large_starts_are_joined_and_bad_keys_fail_alone() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    master.insert("100");
    master.insert("29999");
    let entries: Vec<_> = (0..30_000).map(put).collect();
    let config = ReplicateConfig::default();
    let started = link
        .put_start(&entries, &config, StartOptions::default())
        .await
        .expect("any size");
    assert_eq!(started.results.len(), entries.len());
    for (n, result) in started.results.iter().enumerate() {
        match result {
            Ok(_) => assert!(n != 100 && n != 29_999),
            Err(refusal) => {
                assert!(n == 100 || n == 29_999, "key {n}");
                assert_eq!(*refusal, Refusal::AlreadyExists);
            }
        }
    }
    assert_eq!(started.segments.len(), 1, "each segment once");
    let keys: Vec<_> = (0..30_000).map(key).collect();
    let got = link
        .get_start(&keys, StartOptions::default(), true)
        .await
        .expect("any size");
    let found: Vec<_> = (0..keys.len())
        .filter(|n| got.results[*n].is_ok())
        .collect();
    assert_eq!(found, [100, 29_999]);
}

#[tokio::test]
async fn keys_of_the_greatest_length_are_split_by_bytes() {
    let master = FakeMaster::default();
    let (link, _served) = connected(&master).await;
    let keys: Vec<_> = (0..300).map(|n| key(format!("{n:065535}"))).collect();
    master.insert(keys[299].as_str());
    let existence = link
        .exists(&Exists::readable(&keys))
        .await
        .expect("any size");
    assert_eq!(existence.states[299], Presence::Complete);
    assert_eq!(
        existence
            .states
            .iter()
            .filter(|s| **s == Presence::Absent)
            .count(),
        299
    );
    assert!(master.seen(Kind::Exists).len() > 2);
}

#[tokio::test]
async fn a_long_start_that_fails_half_way_gives_its_first_part_back() {
    let master = FakeMaster::default();
    let (link, served) = connected(&master).await;
    master.on(Kind::PutStart, Fault::ApplyThenDrop);
    master.on(Kind::PutStart, Fault::ApplyThenDrop);
    let entries: Vec<_> = (0..20_000).map(put).collect();
    let config = ReplicateConfig::default();
    // Broken twice, repeated twice: all there.
    let started = link
        .put_start(&entries, &config, StartOptions::default())
        .await
        .expect("repeated");
    assert!(started.results.iter().all(Result::is_ok));
    assert_eq!(master.reservations(), 20_000);
    // The second part is refused as a whole.
    let entries: Vec<_> = (20_000..40_000).map(put).collect();
    let held = MasterLink::connect(super::config(served.address))
        .await
        .expect("up");
    master.on(Kind::PutStart, Fault::Hold);
    let call = tokio::spawn({
        let held = held.clone();
        async move {
            held.put_start(&entries, &config, StartOptions::default())
                .await
        }
    });
    let before = master.seen(Kind::PutStart).len();
    master
        .until("the first part arrives", |master| {
            master.seen(Kind::PutStart).len() > before
        })
        .await;
    master.on(Kind::PutStart, Fault::Refuse(Refusal::ShuttingDown));
    master.release();
    let error = call.await.expect("no panic").expect_err("refused");
    assert!(
        matches!(error, StoreError::Refused(Refusal::ShuttingDown)),
        "{error}"
    );
    master
        .until("the first part is given back", |master| {
            master.reservations() == 20_000
        })
        .await;
}

#[tokio::test]
async fn more_calls_than_the_queue_holds_wait_and_all_come_back() {
    let master = FakeMaster::default();
    let (link, served) = connected(&master).await;
    let guard = served.freeze();
    let done = Arc::new(AtomicUsize::new(0));
    let calls: Vec<_> = (0..2_000)
        .map(|n| {
            let (link, done) = (link.clone(), Arc::clone(&done));
            tokio::spawn(async move {
                let keys: Vec<_> = (0..50)
                    .map(|k| key(format!("{n}-{k}-{:0200}", 0)))
                    .collect();
                let existence = link.exists(&Exists::readable(&keys)).await;
                done.fetch_add(1, Ordering::Relaxed);
                existence.map(|existence| existence.states.len())
            })
        })
        .collect();
    // Every task has had its turn, and none has an answer.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(done.load(Ordering::Relaxed), 0);
    drop(guard);
    for call in calls {
        assert_eq!(call.await.expect("no panic").expect("answered"), 50);
    }
}
