//! What a node's segments hold, from their bytes alone.

use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{Checksums, HeaderState, ObjectHeader};
use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GRANULE, Segment};
use layercake_store::node::{HeldObject, Node};
use layercake_transport::{Access, Batch, Direction, Engine, Piece, RemoteSlice};

use super::{MIB, engine, lending, link};
use crate::fake::FakeMaster;

fn header(name: &str, generation: u64, payload_len: u64) -> ObjectHeader {
    ObjectHeader {
        state: HeaderState::Sealed,
        generation: Generation(generation),
        tenant: Tenant::new("t").expect("short"),
        key: ObjectKey::new(name).expect("short"),
        group: Some("g".to_owned()),
        payload_len,
        fingerprint: Some(Fingerprint([7; 16])),
        layout_id: 3,
        epoch: Epoch(11),
        prefix_index: 5,
        checksums: Checksums::Crc32c,
        rows: Vec::new(),
    }
}

/// Writes bytes as a client does.
async fn write(from: &Engine, to: &Segment, granule: u64, generation: u64, bytes: Vec<u8>) {
    let memory = from
        .register(bytes.into(), Access::LocalOnly)
        .expect("a buffer");
    let batch = Batch {
        peer: to.endpoint.clone().into(),
        direction: Direction::Write,
        pieces: vec![Piece {
            local: memory.slice(0, memory.len()).expect("all of it"),
            remote: RemoteSlice {
                region: to.region,
                capability: to.capability,
                offset: granule * GRANULE,
                len: memory.len(),
                generation: Some(Generation(generation)),
            },
        }],
        checksum: false,
        deadline: None,
    };
    assert!(from.submit(batch).await.is_ok());
}

/// An object's header and payload, as they lie in the segment.
fn place(header: &ObjectHeader) -> Vec<u8> {
    let mut bytes = header.encode().expect("it fits");
    bytes.resize(
        bytes.len() + usize::try_from(header.payload_len).expect("small"),
        0x5A,
    );
    bytes
}

fn names(objects: &[HeldObject]) -> Vec<(&str, u64)> {
    objects
        .iter()
        .map(|object| (object.key.as_str(), object.replica.offset / GRANULE))
        .collect()
}

#[tokio::test]
async fn complete_objects_are_found_and_nothing_else() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
    let segment = node.segments().remove(0);
    let client = super::engine();
    let put = async |granule, header: &ObjectHeader| {
        write(
            &client,
            &segment,
            granule,
            header.generation.0,
            place(header),
        )
        .await;
    };
    // Neighbours without a gap: 3 granules, then 1, then the last of the segment.
    let first = header("first", 10, 2 * GRANULE + 9);
    put(0, &first).await;
    put(3, &header("second", 11, 100)).await;
    put(255, &header("last", 12, 100)).await;
    // Never sealed.
    let open = ObjectHeader {
        state: HeaderState::Writing,
        ..header("open", 13, 5000)
    };
    put(10, &open).await;
    // Its tail was never written.
    let half = header("half", 14, 3 * GRANULE);
    write(&client, &segment, 20, 14, place(&half)[..2 * 4096].to_vec()).await;
    // Reused: a small object lies where the front of a large one was.
    put(30, &header("old", 15, 5 * GRANULE)).await;
    put(30, &header("new", 16, 10)).await;
    // Reused at its end.
    put(40, &header("cut", 17, 5 * GRANULE)).await;
    put(43, &header("cutter", 18, 10)).await;
    // A header of another reservation than the granules'.
    let stray = header("stray", 3, 10);
    write(&client, &segment, 50, 19, place(&stray)).await;
    // Bytes that are no header, and a torn one.
    write(&client, &segment, 60, 20, vec![0xFF; 5000]).await;
    let mut torn = place(&header("torn", 21, 10));
    torn[100] ^= 1;
    write(&client, &segment, 70, 21, torn).await;

    let inventories = node.inventory().await.expect("it can be read");
    assert_eq!(inventories.len(), 1);
    let inventory = &inventories[0];
    assert_eq!(
        names(&inventory.objects),
        [
            ("first", 0),
            ("second", 3),
            ("new", 30),
            ("cutter", 43),
            ("last", 255)
        ]
    );
    assert_eq!(inventory.segment, segment.id);
    assert_eq!(inventory.max_generation, Generation(21));
    let found = &inventory.objects[0];
    assert_eq!(found.tenant, first.tenant);
    assert_eq!((found.size, found.layout_id), (first.payload_len, 3));
    assert_eq!((found.epoch, found.prefix_index), (Epoch(11), 5));
    assert_eq!(found.group.as_deref(), Some("g"));
    assert_eq!(found.fingerprint, first.fingerprint);
    assert_eq!(found.replica.generation, Generation(10));
    let header_len = first.spec().encoded_len().expect("it fits");
    assert_eq!(found.replica.header_len, header_len);
}

#[tokio::test]
async fn a_fresh_segment_holds_nothing() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
    let inventory = node.inventory().await.expect("it can be read").remove(0);
    assert!(inventory.objects.is_empty());
    assert_eq!(inventory.max_generation, Generation::NONE);
}
