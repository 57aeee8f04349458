//! Keeping late writers out.

use layercake_protocol::ids::{Generation, SegmentId};
use layercake_protocol::replica::Segment;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_protocol::wire::master_frame::Response as Answer;
use layercake_store::node::Node;
use layercake_transport::{
    Access, Batch, Direction, Engine, EngineConfig, Piece, PieceError, Refusal, RemoteSlice,
    TransportKind, TransportSet,
};

use super::{MIB, engine, lending, link, until};
use crate::fake::{FakeMaster, Kind, PATIENCE};

fn fence(id: u64, segment: SegmentId, writer: Option<&Engine>) -> Answer {
    let place = |offset| wire::FencedPlace {
        offset,
        len: 8192,
        generation: 50,
    };
    Answer::Fence(wire::FenceCommand {
        fence_id: id,
        segment_id: segment.0,
        // The last one makes no sense and must not stand in the way of the others.
        places: vec![place(4096), place(16_384), place(MIB)],
        client_id: Some(1_u128.into()),
        engine: writer.map(|engine| engine.endpoint().engine.into()),
    })
}

/// Writes at an offset with a generation.
async fn write(from: &Engine, to: &Segment, offset: u64, generation: u64) -> Option<PieceError> {
    let memory = from
        .register(vec![9_u8; 100].into(), Access::LocalOnly)
        .expect("a buffer");
    let batch = Batch {
        peer: to.endpoint.clone().into(),
        direction: Direction::Write,
        pieces: vec![Piece {
            local: memory.slice(0, 100).expect("all of it"),
            remote: RemoteSlice {
                region: to.region,
                capability: to.capability,
                offset,
                len: 100,
                generation: Some(Generation(generation)),
            },
        }],
        checksum: false,
        deadline: None,
    };
    from.submit(batch).await.first_error()
}

fn answers(master: &FakeMaster) -> Vec<(u64, bool)> {
    master
        .seen(Kind::FenceDone)
        .into_iter()
        .map(|seen| match seen.body {
            Body::FenceDone(done) => (done.fence_id, done.writer_attached),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[tokio::test]
// contract: lease-7
async fn a_fenced_place_refuses_its_late_writer_over_every_transport() {
    for kind in [TransportKind::Tcp, TransportKind::Shm] {
        let master = FakeMaster::default();
        let served = master.serve();
        let engine = engine();
        let link = link(&served, "n", &engine).await;
        let node = Node::start(lending(&[MIB]), engine, link)
            .await
            .expect("small");
        let segment = node.segments().remove(0);
        let writer = Engine::start(EngineConfig {
            transports: TransportSet::only(kind),
            ..EngineConfig::default()
        })
        .expect("an engine");
        assert_eq!(write(&writer, &segment, 4096, 40).await, None);
        master.command(fence(1, segment.id, Some(&writer))).await;
        master
            .until("it is answered", |master| !answers(master).is_empty())
            .await;
        // Still attached, but with no copy under way: no late write can land.
        assert_eq!(answers(&master), [(1, false)]);
        let stale = Some(PieceError::Refused(Refusal::StaleGeneration));
        assert_eq!(write(&writer, &segment, 4096, 40).await, stale, "{kind}");
        assert_eq!(write(&writer, &segment, 8192, 49).await, stale, "{kind}");
        // Its neighbours and its successor are not concerned.
        assert_eq!(write(&writer, &segment, 12_288, 40).await, None, "{kind}");
        assert_eq!(write(&writer, &segment, 4096, 51).await, None, "{kind}");
        until("it counts", || node.stats().fences_done == 1).await;
    }
}

#[tokio::test]
async fn a_fence_that_is_repeated_is_answered_again() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
    let id = node.segments()[0].id;
    for round in 1..=3 {
        master.command(fence(7, id, None)).await;
        master
            .until("it is answered", |master| answers(master).len() == round)
            .await;
    }
    assert!(answers(&master).iter().all(|answer| *answer == (7, false)));
}

#[tokio::test]
async fn a_fence_on_a_segment_that_is_gone_is_done() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
    master.command(fence(3, SegmentId(12345), None)).await;
    master
        .until("it is answered", |master| answers(master) == [(3, false)])
        .await;
    node.shutdown(PATIENCE).await.expect("in time");
}
