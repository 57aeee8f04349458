//! What a stream answers, and what a broken one leaves behind.

use layercake_protocol::convert::MAX_KEYS_PER_REQUEST;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Generation};
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;
use layercake_protocol::wire::{self, ClientFrame};

use crate::common::{
    Client, Cluster, TERM, config, exists, object, put_start, refused, results, with_ticket,
};

const NODE: ClientId = ClientId(1);
const WRITER: ClientId = ClientId(2);
const READER: ClientId = ClientId(3);
const MIB: u64 = 1 << 20;

#[tokio::test(start_paused = true)]
async fn an_object_is_written_found_and_read() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let mut reader = cluster.member(READER, "reader").await;
    let begun = writer.put_start(&["k"], 10_000).await;
    let put = begun[0].as_ref().expect("there is room");
    assert_eq!(put.replicas.len(), 1);
    assert_eq!(reader.exists(&["k", "other"]).await, [2, 0]);
    let end = Request::PutEnd(wire::PutEndRequest {
        objects: vec![object("k", put.generation)],
    });
    let ended = writer.call(end.clone()).await;
    assert_eq!(results(ended, 1), [Ok(())]);
    let again = writer.call(end).await;
    assert_eq!(results(again, 1), [Ok(())], "a commit can be repeated");
    assert_eq!(reader.exists(&["k", "other"]).await, [1, 0]);
    let get = Request::GetStart(wire::GetStartRequest {
        keys: vec!["k".into(), "other".into()],
        session: true,
        ..Default::default()
    });
    let Response::GetStart(got) = reader.call(get).await else {
        panic!("not the answer to a get start");
    };
    assert_eq!(got.results[0].size, 10_000);
    assert_eq!(got.results[0].replicas[0].generation, put.generation.0);
    assert_eq!(got.results[1].refusal, i32::from(wire::Refusal::NotFound));
    assert_eq!(got.segments.len(), 1);
    assert_eq!(got.segments[0].name, "node-1");
    assert!(got.lease_ms > 0 && got.epoch > 0);
    let remove = |force| {
        Request::Remove(wire::RemoveRequest {
            keys: vec!["k".into()],
            force,
        })
    };
    let leased = writer.call(remove(false)).await;
    assert_eq!(results(leased, 1), [Err(Refusal::Leased)]);
    let forced = writer.call(remove(true)).await;
    assert_eq!(results(forced, 1), [Ok(())]);
    assert_eq!(reader.exists(&["k"]).await, [0]);
}

#[tokio::test(start_paused = true)]
async fn a_bad_key_fails_alone() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let long = "x".repeat(65_536);
    let begun = writer.put_start(&["a", "", "b", &long, "c"], 100).await;
    for (index, result) in begun.iter().enumerate() {
        match (index, result) {
            (1 | 3, Err(Refusal::InvalidArgument { detail })) => {
                assert!(detail.contains("key"), "{detail}");
            }
            (0 | 2 | 4, Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        writer.exists(&["a", "", "b", &long, "c"]).await,
        [2, 0, 2, 0, 2]
    );
    let generation = begun[4].as_ref().expect("it is good").generation;
    let ended = writer
        .call(Request::PutEnd(wire::PutEndRequest {
            objects: vec![
                object("", generation),
                object("c", generation),
                object("c", Generation(0)),
            ],
        }))
        .await;
    let ended = results(ended, 3);
    assert_eq!(ended[1], Ok(()));
    for bad in [0, 2] {
        assert!(
            matches!(ended[bad], Err(Refusal::InvalidArgument { .. })),
            "{ended:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_can_stop_at_the_first_miss() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let keys: Vec<String> = (0..3000).map(|index| format!("k{index}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // The miss lies in the second of three chunks.
    let present: Vec<&str> = [&keys[..1500], &keys[1501..]].concat();
    writer.put(&present, 100).await;
    let Request::Exists(mut query) = exists(&keys) else {
        panic!("an existence query");
    };
    query.stop_at_first_miss = true;
    let Response::Exists(found) = writer.call(Request::Exists(query)).await else {
        panic!("not an existence answer");
    };
    assert_eq!(found.states[..1500], vec![1; 1500]);
    assert!(found.states[1500..].iter().all(|state| *state == 0));
    assert!(
        found.states.len() <= 1501,
        "it stopped: {}",
        found.states.len()
    );
}

#[tokio::test(start_paused = true)]
async fn large_batches_are_answered_key_by_key_while_small_calls_pass() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 256 * MIB).await;
    let mut client = cluster.member(WRITER, "writer").await;
    let keys: Vec<String> = (0..20_000).map(|index| format!("key-{index}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let odd: Vec<&str> = keys.iter().skip(1).step_by(2).copied().collect();
    client.put(&odd, 100).await;
    // More large batches than the stream works on at a time, and a small call behind them.
    let mut open: Vec<u64> = Vec::new();
    for _ in 0..8 {
        open.push(client.send(exists(&keys)).await);
    }
    open.push(client.send(exists(&["key-1", "key-2"])).await);
    while !open.is_empty() {
        let frame = client.next().await.expect("the stream goes on");
        let place = open.iter().position(|id| *id == frame.request_id);
        open.remove(place.expect("an answer to one of the calls"));
        let Some(Response::Exists(found)) = frame.response else {
            panic!("not an existence answer");
        };
        for (index, state) in found.states.iter().enumerate() {
            let expected = if found.states.len() == 2 {
                1 - index
            } else {
                index % 2
            };
            assert_eq!(usize::from(*state), expected, "key {index}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_with_enough_batches_under_way_is_not_read() {
    let mut config = config();
    config.limits.batches_per_stream = 1;
    let cluster = Cluster::start(config);
    let mut client = cluster.client(READER).await;
    let keys = vec!["k"; 5000];
    let mut sent = Vec::new();
    for _ in 0..4 {
        sent.push(client.send(exists(&keys)).await);
        sent.push(client.send(exists(&["k"])).await);
    }
    let mut answered = Vec::new();
    while answered.len() < sent.len() {
        answered.push(client.next().await.expect("the stream goes on").request_id);
    }
    assert_eq!(answered, sent, "one after the other, nothing overtakes");
}

/// Epoch and prefix index of an object.
async fn recency(client: &mut Client, key: &str) -> (u64, u32) {
    let request = wire::StatObjectRequest {
        tenant: String::new(),
        key: key.into(),
    };
    let ticket = client.ticket.clone();
    let stat = client.grpc.stat_object(with_ticket(request, &ticket)).await;
    let object = stat.expect("the ticket is good").into_inner().object;
    let object = object.expect("it is there");
    (object.epoch, object.prefix_index)
}

#[tokio::test(start_paused = true)]
async fn a_long_prefix_keeps_its_order_and_one_epoch_through_all_chunks() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 256 * MIB).await;
    let mut client = cluster.member(WRITER, "writer").await;
    let mut keys: Vec<String> = (0..3000).map(|index| format!("k{index}")).collect();
    // A bad key has its place in the prefix, too.
    keys[7].clear();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let started = client.put_start(&keys, 100).await;
    let objects: Vec<_> = keys
        .iter()
        .zip(&started)
        .filter_map(|(key, put)| Some(object(key, put.as_ref().ok()?.generation)))
        .collect();
    let count = objects.len();
    assert_eq!(count, 2999);
    let ended = client
        .call(Request::PutEnd(wire::PutEndRequest { objects }))
        .await;
    assert_eq!(results(ended, count), vec![Ok(()); count]);
    let (put_epoch, _) = recency(&mut client, "k0").await;
    for index in [6, 8, 1500, 2999] {
        let found = recency(&mut client, &format!("k{index}")).await;
        assert_eq!(found, (put_epoch, index), "k{index} after the put");
    }
    let Request::Exists(mut query) = exists(&keys) else {
        panic!("an existence query");
    };
    query.peek = false;
    query.recency = Some(wire::Recency {
        epoch: 0,
        first_index: 10_000,
    });
    let Response::Exists(found) = client.call(Request::Exists(query)).await else {
        panic!("not an existence answer");
    };
    assert!(found.epoch > put_epoch, "a later call has a later epoch");
    for index in [0, 6, 8, 1500, 2999] {
        let (epoch, place) = recency(&mut client, &format!("k{index}")).await;
        assert_eq!((epoch, place), (found.epoch, 10_000 + index), "k{index}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_beyond_one_message_is_refused_with_the_limit() {
    let cluster = Cluster::start(config());
    let mut client = cluster.client(READER).await;
    let keys = vec!["k"; MAX_KEYS_PER_REQUEST + 1];
    let Refusal::TooLarge { detail } = refused(client.call(exists(&keys)).await) else {
        panic!("not refused for its size");
    };
    assert!(
        detail.contains(&MAX_KEYS_PER_REQUEST.to_string()),
        "{detail}"
    );
    let found = client.exists(&keys[1..]).await;
    assert_eq!(found, vec![0; MAX_KEYS_PER_REQUEST], "the stream lives on");
}

#[tokio::test(start_paused = true)]
async fn what_makes_no_sense_is_refused_and_the_stream_lives_on() {
    let cluster = Cluster::start(config());
    let mut client = cluster.client(READER).await;
    client.send_frame(ClientFrame::default()).await;
    let text = refused(client.answer(0).await).to_string();
    assert!(text.contains("context"), "{text}");
    let mut frame = client.frame(7, exists(&["k"]));
    frame.request = None;
    client.send_frame(frame).await;
    let text = refused(client.answer(7).await).to_string();
    assert!(text.contains("request"), "{text}");
    let mut frame = client.frame(8, exists(&["k"]));
    frame.context.as_mut().expect("it has one").term = TERM - 1;
    client.send_frame(frame).await;
    assert_eq!(refused(client.answer(8).await), Refusal::WrongTerm);
    let mut frame = client.frame(9, exists(&["k"]));
    frame.context.as_mut().expect("it has one").client_id = Some(WRITER.into());
    client.send_frame(frame).await;
    let text = refused(client.answer(9).await).to_string();
    assert!(
        text.contains(&WRITER.to_string()) && text.contains(&READER.to_string()),
        "{text}"
    );
    let mut frame = client.frame(10, put_start(&["k"], 1));
    if let Some(Request::PutStart(start)) = &mut frame.request {
        start.config.as_mut().expect("it has one").replicas = 0;
    }
    client.send_frame(frame).await;
    let text = refused(client.answer(10).await).to_string();
    assert!(text.contains("replicas"), "{text}");
    assert_eq!(client.exists(&["k"]).await, [0]);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_stream_is_not_the_end_of_its_member() {
    let cluster = Cluster::start(config());
    let node = cluster.node(NODE, 64 * MIB).await;
    drop(node);
    let mut node = cluster.client(NODE).await;
    let segment = crate::common::segment(NODE, 64 * MIB);
    let beat = node.heartbeat(&[segment.id]).await;
    assert!(beat.known && beat.missing_segments.is_empty(), "{beat:?}");
    match node.call(Request::Leave(wire::LeaveRequest {})).await {
        Response::Done(_) => {}
        other => panic!("not done: {other:?}"),
    }
    let beat = node.heartbeat(&[segment.id]).await;
    assert!(!beat.known, "it left");
    assert_eq!(cluster.monitor.status().segments, 0);
}

#[tokio::test(start_paused = true)]
async fn unary_calls_do_the_same_and_tools_see_what_there_is() {
    let cluster = Cluster::start(config());
    let _node = cluster.node(NODE, 64 * MIB).await;
    let mut client = cluster.member(WRITER, "writer").await;
    client.put(&["pre/a", "pre/b", "other"], 5000).await;
    let frame = client.frame(0, exists(&["pre/a", "nothing"]));
    let ticket = client.ticket.clone();
    let answer = client
        .grpc
        .call(with_ticket(frame, &ticket))
        .await
        .expect("the ticket is good")
        .into_inner();
    match answer.response {
        Some(Response::Exists(found)) => assert_eq!(found.states.as_ref(), [1, 0]),
        other => panic!("not an existence answer: {other:?}"),
    }
    let listed = client
        .grpc
        .list_objects(with_ticket(
            wire::ListObjectsRequest {
                prefix: "pre/".into(),
                limit: 1,
                ..Default::default()
            },
            &ticket,
        ))
        .await
        .expect("the ticket is good")
        .into_inner();
    assert_eq!(listed.objects.len(), 1);
    assert_eq!(listed.objects[0].key, "pre/a");
    assert!(listed.more);
    let stat = |key: &str| wire::StatObjectRequest {
        tenant: String::new(),
        key: key.into(),
    };
    let found = client
        .grpc
        .stat_object(with_ticket(stat("other"), &ticket))
        .await
        .expect("the ticket is good")
        .into_inner();
    assert_eq!(found.object.expect("it is there").size, 5000);
    assert_eq!(found.segments[0].name, "node-1");
    let missing = client
        .grpc
        .stat_object(with_ticket(stat("missing"), &ticket))
        .await
        .expect("the ticket is good")
        .into_inner();
    assert_eq!(missing.refusal, i32::from(wire::Refusal::NotFound));
    let segments = client
        .grpc
        .list_segments(with_ticket(wire::ListSegmentsRequest {}, &ticket))
        .await
        .expect("the ticket is good")
        .into_inner()
        .segments;
    assert_eq!(segments.len(), 1);
    assert_eq!(segments[0].objects, 3);
    assert!(segments[0].used_bytes >= 15_000);
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_stream_broke_has_nothing_to_promise() {
    let cluster = Cluster::start(config());
    let node = cluster.node(NODE, 64 * MIB).await;
    let mut writer = cluster.member(WRITER, "writer").await;
    let begun = writer.put_start(&["k"], 10_000).await;
    let put = begun[0].as_ref().expect("there is room");
    let end = Request::PutEnd(wire::PutEndRequest {
        objects: vec![object("k", put.generation)],
    });
    assert_eq!(results(writer.call(end).await, 1), [Ok(())]);
    assert_eq!(writer.exists(&["k"]).await, [1]);
    drop(node);
    let lost = async {
        while writer.exists(&["k"]).await != [0] {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), lost)
        .await
        .expect("what only that node holds is not promised any more");
    assert!(writer.put_start(&["l"], 10_000).await[0].is_err());
}
