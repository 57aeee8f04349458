//! Batches of gigabytes. Ignored, as they need some 7 GiB of memory and a build with optimisation:
//! `cargo test --release -p layercake-transport --test large -- --ignored --test-threads=1`.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::ids::Generation;
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Engine, EngineConfig, Memory, Piece, RemoteSlice,
    TransportKind, TransportSet,
};

const PIECE: u64 = 1 << 30;

fn three_pieces_of_a_gigabyte(kind: TransportKind) {
    let transports = TransportSet::only(kind);
    let start = || {
        Engine::start(EngineConfig {
            transports,
            ..EngineConfig::default()
        })
        .expect("an engine")
    };
    let near = start();
    let far = if kind == TransportKind::Local {
        near.clone()
    } else {
        start()
    };
    let allocate = |engine: &Engine, access| {
        let options = AllocateOptions {
            access,
            generation_tags: true,
            ..AllocateOptions::default()
        };
        engine.allocate(3 * PIECE, options).expect("memory")
    };
    let (local, remote) = (
        allocate(&near, Access::LocalOnly),
        allocate(&far, Access::RemoteReadWrite),
    );
    let stripe = |index: u64| {
        let mut bytes = vec![0; 1 << 20];
        blake3::Hasher::new()
            .update(&index.to_le_bytes())
            .finalize_xof()
            .fill(&mut bytes);
        bytes
    };
    for index in 0..3 << 10 {
        local.copy_in(index << 20, &stripe(index)).expect("inside");
    }
    let region = remote.region();
    let run = |direction| {
        let piece = |index: u64| Piece {
            local: local.slice(index * PIECE, PIECE).expect("inside"),
            remote: RemoteSlice {
                region: region.region,
                capability: region.capability,
                offset: index * PIECE,
                len: PIECE,
                generation: Some(Generation(1)),
            },
        };
        let outcome = near
            .submit(Batch {
                peer: Arc::new(far.endpoint().clone()),
                direction,
                pieces: (0..3).map(piece).collect(),
                checksum: true,
                deadline: Some(Duration::from_secs(120)),
            })
            .wait();
        assert_eq!(outcome.first_error(), None, "{kind}");
        outcome.pieces
    };
    let check = |memory: &Memory, what: &str| {
        let mut bytes = vec![0; 1 << 20];
        for index in 0..3 << 10 {
            memory.copy_out(index << 20, &mut bytes).expect("inside");
            assert!(bytes == stripe(index), "{what}: MiB {index}");
        }
    };
    let written = run(Direction::Write);
    check(&remote, "remote memory");
    let zeros = vec![0; 1 << 20];
    for index in 0..3 << 10 {
        local.copy_in(index << 20, &zeros).expect("inside");
    }
    assert_eq!(
        run(Direction::Read),
        written,
        "the checksums are the same both ways"
    );
    check(&local, "local memory");
}

#[test]
#[ignore = "gigabytes"]
fn three_pieces_of_a_gigabyte_over_tcp() {
    three_pieces_of_a_gigabyte(TransportKind::Tcp);
}

#[test]
#[ignore = "gigabytes"]
fn three_pieces_of_a_gigabyte_over_shm() {
    three_pieces_of_a_gigabyte(TransportKind::Shm);
}

#[test]
#[ignore = "gigabytes"]
fn three_pieces_of_a_gigabyte_locally() {
    three_pieces_of_a_gigabyte(TransportKind::Local);
}
