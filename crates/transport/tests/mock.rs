//! The made-up network: virtual time, and failures when they are asked for.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::ids::Generation;
use layercake_transport::mock::{Conditions, MockNetwork, Pace};
use layercake_transport::testing::pattern;
use layercake_transport::{
    Access, AllocateOptions, Batch, Deadlines, Direction, Engine, EngineConfig, Memory, Outcome,
    Piece, PieceError, Refusal, RemoteSlice, Transfer,
};

const MS: Duration = Duration::from_millis(1);

fn manual(seed: u64) -> MockNetwork {
    let network = MockNetwork::new(seed, Pace::Manual);
    network.set_conditions(Conditions {
        latency: MS..=2 * MS,
        ..Conditions::default()
    });
    network
}

fn start(network: &MockNetwork) -> Engine {
    network.start(EngineConfig::default()).expect("an engine")
}

fn memory(engine: &Engine, len: u64) -> Memory {
    let options = AllocateOptions {
        access: Access::RemoteReadWrite,
        generation_tags: true,
        ..AllocateOptions::default()
    };
    engine.allocate(len, options).expect("some memory")
}

fn write(
    from: &Engine,
    local: &Memory,
    to: &Engine,
    remote: &Memory,
    generation: Option<u64>,
) -> Transfer {
    let (region, len) = (remote.region(), local.len());
    let remote = RemoteSlice {
        region: region.region,
        capability: region.capability,
        offset: 0,
        len,
        generation: generation.map(Generation),
    };
    let pieces = vec![Piece {
        local: local.slice(0, len).expect("inside"),
        remote,
    }];
    let peer = Arc::new(to.endpoint().clone());
    from.submit(Batch {
        peer,
        direction: Direction::Write,
        pieces,
        checksum: true,
        deadline: None,
    })
}

fn error(transfer: &Transfer) -> Option<PieceError> {
    transfer.poll().as_ref().and_then(Outcome::first_error)
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let history = |seed| {
        let network = manual(seed);
        network.set_conditions(Conditions {
            failures: 0.3,
            latency: MS..=50 * MS,
            ..Conditions::default()
        });
        let (a, b) = (start(&network), start(&network));
        let (local, remote) = (memory(&a, 1000), memory(&b, 1000));
        let transfers: Vec<_> = (0..20)
            .map(|_| write(&a, &local, &b, &remote, None))
            .collect();
        let mut history = Vec::new();
        while !network.is_idle() {
            network.advance(MS);
            history.push(
                transfers
                    .iter()
                    .map(|it| it.poll().map(|it| it.pieces))
                    .collect::<Vec<_>>(),
            );
        }
        history
    };
    assert_eq!(history(1), history(1));
    assert_ne!(history(1), history(2));
}

#[test]
fn nothing_happens_before_its_time_and_a_large_piece_may_be_half_there() {
    let network = manual(3);
    network.set_conditions(Conditions {
        latency: MS..=9 * MS,
        part_bytes: 1000,
        ..Conditions::default()
    });
    let (a, b) = (start(&network), start(&network));
    let (local, remote) = (memory(&a, 64_000), memory(&b, 64_000));
    let before = pattern::fill(&remote, 1);
    let after = pattern::fill(&local, 2);
    let transfer = write(&a, &local, &b, &remote, None);
    pattern::assert_same(&pattern::read(&remote), &before, "before its time");
    network.advance(5 * MS);
    assert!(!transfer.is_done());
    let between = pattern::read(&remote);
    assert!(
        between != before && between != after,
        "some parts have been applied"
    );
    network.advance(5 * MS);
    assert!(transfer.poll().is_some_and(|outcome| outcome.is_ok()));
    pattern::assert_same(&pattern::read(&remote), &after, "in the end");
    assert_eq!(network.now(), 10 * MS);
}

#[test]
fn a_writer_that_is_overtaken_is_stale_and_leaves_the_place_alone() {
    let network = manual(4);
    let (a, b) = (start(&network), start(&network));
    let (local, remote) = (memory(&a, 4096), memory(&b, 4096));
    let before = pattern::fill(&remote, 1);
    pattern::fill(&local, 2);
    let late = write(&a, &local, &b, &remote, Some(5));
    remote.fence(0, 4096, Generation(6)).expect("tagged");
    network.run_until_idle();
    assert_eq!(
        error(&late),
        Some(PieceError::Refused(Refusal::StaleGeneration))
    );
    pattern::assert_same(
        &pattern::read(&remote),
        &before,
        "a place that was given away",
    );
}

#[test]
fn a_stopped_peer_is_waited_for_until_the_progress_deadline() {
    let network = manual(5);
    let (a, b) = (start(&network), start(&network));
    let (local, remote) = (memory(&a, 100), memory(&b, 100));
    let progress = Deadlines::default().progress;
    network.stop(b.endpoint().engine);
    let waited = write(&a, &local, &b, &remote, None);
    network.advance(progress);
    assert!(!waited.is_done());
    network.resume(b.endpoint().engine);
    network.advance(MS);
    assert!(waited.poll().is_some_and(|outcome| outcome.is_ok()));
    network.stop(b.endpoint().engine);
    let given_up = write(&a, &local, &b, &remote, None);
    network.advance(progress + 2 * MS);
    assert_eq!(error(&given_up), Some(PieceError::Stalled));
    network.resume(b.endpoint().engine);
    network.run_until_idle();
    assert_eq!(error(&given_up), Some(PieceError::Stalled), "it stays so");
}

// contract: transport-9
#[test]
fn dev_09_in_virtual_time_nobody_waits_for_a_dead_peer() {
    let network = manual(6);
    let (a, x, y) = (start(&network), start(&network), start(&network));
    let local = memory(&a, 4096);
    let (to_x, to_y) = (memory(&x, 4096), memory(&y, 4096));
    network.stop(x.endpoint().engine);
    let mut dead = Vec::new();
    for round in 0..1000_u32 {
        dead.push((network.now(), write(&a, &local, &x, &to_x, None)));
        let healthy = write(&a, &local, &y, &to_y, None);
        network.advance(2 * MS);
        assert!(
            healthy.poll().is_some_and(|outcome| outcome.is_ok()),
            "round {round}: Y as if alone"
        );
        let limit = Deadlines::default().progress + 4 * MS;
        for (since, transfer) in &dead {
            let late = network.now() > *since + limit;
            assert!(
                !late || error(transfer) == Some(PieceError::Stalled),
                "X fails in its time"
            );
        }
        dead.retain(|(_, transfer)| !transfer.is_done());
    }
}

#[test]
fn killed_cut_off_and_failing_peers_say_so() {
    let network = manual(7);
    let (a, b, c) = (start(&network), start(&network), start(&network));
    let local = memory(&a, 4096);
    let (to_b, to_c) = (memory(&b, 4096), memory(&c, 4096));
    let run = |to: &Engine, remote: &Memory| {
        let transfer = write(&a, &local, to, remote, None);
        network.run_until_idle();
        error(&transfer)
    };
    network.fail_next([PieceError::Timeout, PieceError::Unreachable]);
    assert_eq!(run(&b, &to_b), Some(PieceError::Timeout));
    assert_eq!(run(&b, &to_b), Some(PieceError::Unreachable));
    assert_eq!(run(&b, &to_b), None);
    let (here, there) = (a.endpoint().engine, b.endpoint().engine);
    network.cut(here, there);
    assert_eq!(run(&b, &to_b), Some(PieceError::Unreachable));
    assert_eq!(run(&c, &to_c), None);
    network.heal(here, there);
    assert_eq!(run(&b, &to_b), None);
    let under_way = write(&a, &local, &b, &to_b, None);
    network.kill(there);
    assert_eq!(error(&under_way), Some(PieceError::PeerGone));
    assert_eq!(run(&b, &to_b), Some(PieceError::PeerGone));
    assert_eq!(run(&c, &to_c), None);
}

#[test]
fn the_batch_deadline_runs_in_virtual_time() {
    let network = manual(8);
    network.set_conditions(Conditions {
        latency: 10 * MS..=10 * MS,
        ..Conditions::default()
    });
    let (a, b) = (start(&network), start(&network));
    let (local, remote) = (memory(&a, 64), memory(&b, 64));
    let region = remote.region();
    let slice = RemoteSlice {
        region: region.region,
        capability: region.capability,
        offset: 0,
        len: 64,
        generation: None,
    };
    let submit = |deadline| {
        a.submit(Batch {
            peer: Arc::new(b.endpoint().clone()),
            direction: Direction::Read,
            pieces: vec![Piece {
                local: local.slice(0, 64).expect("inside"),
                remote: slice,
            }],
            checksum: false,
            deadline: Some(deadline),
        })
    };
    let (short, long) = (submit(9 * MS), submit(11 * MS));
    network.advance(9 * MS);
    assert_eq!(
        (error(&short), long.is_done()),
        (Some(PieceError::Timeout), false)
    );
    network.run_until_idle();
    assert!(long.poll().is_some_and(|outcome| outcome.is_ok()));
}

#[test]
fn what_a_transfer_keeps_lives_until_its_bytes_have_moved_also_if_nobody_waits() {
    let network = manual(9);
    let (a, b) = (start(&network), start(&network));
    let (local, remote) = (memory(&a, 64), memory(&b, 64));
    let region = remote.region();
    let submit = |len: u64, kept: Arc<()>| {
        let slice = RemoteSlice {
            region: region.region,
            capability: region.capability,
            offset: 0,
            len,
            generation: None,
        };
        let batch = Batch {
            peer: Arc::new(b.endpoint().clone()),
            direction: Direction::Read,
            pieces: vec![Piece {
                local: local.slice(0, 64).expect("inside"),
                remote: slice,
            }],
            checksum: false,
            deadline: None,
        };
        a.submit_keeping(batch, Some(kept))
    };
    remote.copy_in(0, &[7; 64]).expect("inside");
    let kept = Arc::new(());
    let transfer = submit(64, Arc::clone(&kept));
    drop(submit(64, Arc::clone(&kept)));
    assert_eq!(Arc::strong_count(&kept), 3);
    network.run_until_idle();
    let mut bytes = [0; 64];
    local.copy_out(0, &mut bytes).expect("inside");
    assert_eq!(bytes, [7; 64]);
    assert_eq!(Arc::strong_count(&kept), 1, "a handle keeps nothing");
    assert!(transfer.is_done());
    // One that is over at once.
    let refused = submit(63, Arc::clone(&kept));
    assert_eq!(error(&refused), Some(PieceError::LengthMismatch));
    assert_eq!(Arc::strong_count(&kept), 1);
}
