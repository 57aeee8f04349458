//! Calls that come again after a broken stream, and starts that their callers have given up.

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::ClientId;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;

use crate::common::{Cluster, config, object, put_start, refused, results, started};

const NODE: ClientId = ClientId(1);
const WRITER: ClientId = ClientId(2);
const READER: ClientId = ClientId(3);
const MIB: u64 = 1 << 20;

#[tokio::test(start_paused = true)]
async fn a_put_start_repeated_on_a_new_stream_gets_the_same_reservation() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let request = || put_start(&["a", "b"], 5000);
    writer.send_as(1000, request()).await;
    let answer = writer.answer(1000).await;
    let first = started(answer, 2);
    // As if that answer had been lost on the way.
    drop(writer);
    let mut writer = cluster.client(WRITER).await;
    writer.send_as(1000, request()).await;
    let answer = writer.answer(1000).await;
    let second = started(answer, 2);
    assert_eq!(first, second);
    assert!(first.iter().all(Result::is_ok));
    let another = writer.put_start(&["a", "b"], 5000).await;
    assert_eq!(another, vec![Err(Refusal::InProgress); 2]);
    // The same id from another client is another call.
    let mut other = cluster.member(READER, "other").await;
    other.send_as(1000, request()).await;
    let answer = other.answer(1000).await;
    assert_eq!(started(answer, 2), vec![Err(Refusal::InProgress); 2]);
    let ended = writer
        .call(Request::PutEnd(wire::PutEndRequest {
            objects: vec![object(
                "a",
                second[0].as_ref().expect("it is good").generation,
            )],
        }))
        .await;
    assert_eq!(results(ended, 1), [Ok(())]);
}

#[tokio::test(start_paused = true)]
async fn a_start_whose_answer_was_lost_is_taken_back_by_its_id() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut other = cluster.member(READER, "other").await;
    other.put(&["there"], 100).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let keys = ["a", "there", "b"];
    let take_back = |start, keys: &[&str]| {
        Request::TakeBack(wire::TakeBackRequest {
            start,
            keys: keys.iter().copied().map(str::to_owned).collect(),
        })
    };
    writer.send_as(1000, put_start(&keys, 5000)).await;
    let granted = started(writer.answer(1000).await, 3);
    assert_eq!(granted[1], Err(Refusal::AlreadyExists));
    assert!(granted[0].is_ok() && granted[2].is_ok());

    for (start, keys, why) in [(0, &keys[..], "id 0"), (1000, &keys[..2], "1000")] {
        let refusal = refused(writer.call(take_back(start, keys)).await);
        assert!(refusal.to_string().contains(why), "{refusal}");
    }
    // Another client's start of that id is another start.
    let answer = other.call(take_back(1000, &keys)).await;
    assert!(matches!(answer, Response::Done(_)), "{answer:?}");
    let busy = other.put_start(&["a", "b"], 5000).await;
    assert_eq!(busy, vec![Err(Refusal::InProgress); 2]);

    for _ in 0..2 {
        let answer = writer.call(take_back(1000, &keys)).await;
        assert!(matches!(answer, Response::Done(_)), "{answer:?}");
    }
    let free = other.put_start(&["a", "b"], 5000).await;
    assert!(free.iter().all(Result::is_ok), "{free:?}");
    let kept = other.put_start(&["there"], 100).await;
    assert_eq!(kept, [Err(Refusal::AlreadyExists)]);
}

#[tokio::test(start_paused = true)]
async fn any_number_of_starts_is_taken_back_as_far_as_their_answers_are_kept() {
    const KEPT: usize = 5;
    let mut config = config();
    config.limits.replays_per_client = KEPT;
    let cluster = Cluster::start(config);
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let mut other = cluster.member(READER, "other").await;
    let keys: Vec<String> = (0..=KEPT).map(|n| format!("k{n}")).collect();
    for (start, key) in (1000..).zip(&keys) {
        let request = if start % 2 == 0 {
            put_start(&[key], 5000)
        } else {
            Request::UpsertStart(wire::UpsertStartRequest {
                start: match put_start(&[key], 5000) {
                    Request::PutStart(start) => Some(start),
                    other => panic!("not a start: {other:?}"),
                },
            })
        };
        writer.send_as(start, request).await;
        assert!(started(writer.answer(start).await, 1)[0].is_ok());
    }
    for (start, key) in (1000..).zip(&keys) {
        let keys = vec![key.clone()];
        let take_back = Request::TakeBack(wire::TakeBackRequest { start, keys });
        let answer = writer.call(take_back).await;
        assert!(matches!(answer, Response::Done(_)), "{answer:?}");
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let free = other.put_start(&keys, 5000).await;
    assert_eq!(free[0], Err(Refusal::InProgress), "its answer is forgotten");
    assert!(free[1..].iter().all(Result::is_ok), "{free:?}");
}

#[tokio::test(start_paused = true)]
async fn the_hold_of_a_start_that_is_taken_back_is_given_back() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let Request::PutStart(mut start) = put_start(&["a"], 5000) else {
        panic!("not a start");
    };
    start.hold = true;
    writer.send_as(1000, Request::PutStart(start)).await;
    let Response::PutStart(answer) = writer.answer(1000).await else {
        panic!("not the answer to a start");
    };
    assert!(answer.hold.is_some(), "there is room");
    assert_eq!(cluster.monitor.gauges().holds, 1);
    let keys = vec!["a".to_owned()];
    let take_back = Request::TakeBack(wire::TakeBackRequest { start: 1000, keys });
    let answer = writer.call(take_back).await;
    assert!(matches!(answer, Response::Done(_)), "{answer:?}");
    assert_eq!(cluster.monitor.gauges().holds, 0);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_comes_after_it_was_taken_back_reserves_nothing() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let keys = vec!["late".to_owned()];
    let early = Request::TakeBack(wire::TakeBackRequest { start: 1000, keys });
    let answer = writer.call(early).await;
    assert!(matches!(answer, Response::Done(_)), "{answer:?}");
    writer.send_as(1000, put_start(&["late"], 5000)).await;
    let refusal = refused(writer.answer(1000).await);
    assert!(refusal.to_string().contains("1000"), "{refusal}");
    let free = writer.put_start(&["late"], 5000).await;
    assert!(free[0].is_ok(), "{free:?}");
}

#[tokio::test(start_paused = true)]
async fn a_repeated_remove_gets_the_first_answer() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(WRITER, "writer").await;
    client.put(&["a", "b", "c"], 100).await;
    let remove = || {
        Request::Remove(wire::RemoveRequest {
            keys: vec!["a".into(), "missing".into()],
            force: true,
        })
    };
    let matching = || {
        Request::RemoveMatching(wire::RemoveMatchingRequest {
            pattern: "^[bc]$".into(),
            force: true,
        })
    };
    for round in 0..2 {
        client.send_as(500, remove()).await;
        let answer = client.answer(500).await;
        assert_eq!(
            results(answer, 2),
            [Ok(()), Err(Refusal::NotFound)],
            "round {round}"
        );
        client.send_as(501, matching()).await;
        match client.answer(501).await {
            Response::RemoveMatching(answer) => assert_eq!(answer.removed, 2, "round {round}"),
            other => panic!("not the answer to a remove: {other:?}"),
        }
    }
    client.send_as(501, remove()).await;
    let answer = refused(client.answer(501).await);
    assert!(answer.to_string().contains("501"), "{answer}");
    let bad = client
        .call(Request::RemoveMatching(wire::RemoveMatchingRequest {
            pattern: "(".into(),
            force: false,
        }))
        .await;
    assert!(matches!(refused(bad), Refusal::InvalidArgument { .. }));
}
