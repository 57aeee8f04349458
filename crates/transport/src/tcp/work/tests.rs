use std::collections::HashMap;
use std::time::Duration;

use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use proptest::prelude::*;

use super::*;
use crate::batch::{Batch, Direction, Piece, RemoteSlice};
use crate::job::Caller;
use crate::memory::LocalSlice;
use crate::stats::StatsTable;

/// Addresses are numbers here: nothing is copied.
#[expect(
    unsafe_code,
    reason = "a slice by address, of which no byte is touched"
)]
fn local(addr: usize, len: u64) -> LocalSlice {
    // SAFETY: nothing in these tests moves bytes.
    unsafe { LocalSlice::from_raw(addr, len) }
}

pub(in crate::tcp) fn job(lens: &[u64], deadline: Duration) -> Arc<Job> {
    let mut at = 0;
    let pieces = lens.iter().enumerate().map(|(index, len)| {
        let remote = RemoteSlice {
            region: RegionId(index as u64 % 3),
            capability: Capability([0; 16]),
            offset: at,
            len: *len,
            generation: None,
        };
        let place = usize::try_from(at).expect("small");
        at += len;
        Piece {
            local: local(0x1000 + place, *len),
            remote,
        }
    });
    let peer = Endpoint {
        engine: EngineId(1),
        tcp: String::new(),
        host: HostId([0; 16]),
        shm: None,
        pid: 0,
    };
    let batch = Batch {
        peer: Arc::new(peer),
        direction: Direction::Write,
        pieces: pieces.collect(),
        checksum: false,
        deadline: Some(deadline),
    };
    let stats = Arc::new(StatsTable::default());
    Job::new(batch, deadline, stats, Caller::GoesOn)
}

fn any_lens() -> impl Strategy<Value = Vec<u64>> {
    let len = prop_oneof![
        4 => 0_u64..200,
        2 => 3000_u64..70_000,
        1 => CHUNK - 2..CHUNK + 3,
        1 => 0_u64..5 * CHUNK,
    ];
    prop::collection::vec(len, 1..700)
}

const LONG: Duration = Duration::from_hours(1);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_byte_is_sent_once_in_frames_within_the_caps(lens in any_lens()) {
        let job = job(&lens, LONG);
        let mut queue = WorkQueue::default();
        queue.push(Run::new(Arc::clone(&job), PieceSet::All));
        let mut wire = WireScratch::default();
        let mut next = 0x1000;
        let mut sent = 0;
        while let Next::Send(mut frame) = queue.next(Instant::now(), &mut wire, Vec::new()) {
            prop_assert!((1..=MAX_OPS).contains(&frame.ops.len()) && frame.payload <= MAX_PAYLOAD);
            prop_assert_eq!(frame.ops.len(), wire.ops.len());
            prop_assert!(wire.regions.len() <= wire.ops.len());
            for (op, named) in frame.ops.iter().zip(&wire.ops) {
                prop_assert_eq!(op.local.addr, next, "in order, without a gap");
                prop_assert_eq!(op.local.len as u64, named.len);
                prop_assert_eq!(named.offset, (next - 0x1000) as u64);
                prop_assert!(usize::from(named.region) < wire.regions.len());
                next += op.local.len;
                sent += named.len;
            }
            frame.deliver(None);
        }
        prop_assert_eq!(sent, lens.iter().sum::<u64>());
        prop_assert!(job.is_done() && job.outcome().is_ok());
    }

    #[test]
    fn what_was_not_sent_fails_and_what_was_is_answered(lens in any_lens(), frames in 0_usize..6) {
        let job = job(&lens, LONG);
        let mut queue = WorkQueue::default();
        queue.push(Run::new(Arc::clone(&job), PieceSet::All));
        let mut wire = WireScratch::default();
        let mut in_flight = Vec::new();
        for _ in 0..frames {
            if let Next::Send(frame) = queue.next(Instant::now(), &mut wire, Vec::new()) {
                in_flight.push(frame);
            }
        }
        job.cancel();
        let stopped = queue.expired(Instant::now());
        prop_assert!(queue.is_empty());
        for (run, error) in stopped {
            run.fail(error);
        }
        prop_assert_eq!(job.is_done(), in_flight.is_empty());
        for frame in &mut in_flight {
            frame.deliver(None);
        }
        prop_assert!(job.is_done(), "every piece has its result");
        let wrong = |piece: &&Result<_, _>| !matches!(piece, Ok(_) | Err(PieceError::Cancelled));
        prop_assert_eq!(job.outcome().pieces.iter().filter(wrong).count(), 0);
    }
}

#[test]
fn runs_take_turns() {
    let large = job(&[40 * CHUNK], LONG);
    let small = job(&[64], LONG);
    let mut queue = WorkQueue::default();
    queue.push(Run::new(Arc::clone(&large), PieceSet::All));
    queue.push(Run::new(Arc::clone(&small), PieceSet::All));
    let mut wire = WireScratch::default();
    let mut order = HashMap::new();
    for turn in 0..4 {
        let Next::Send(mut frame) = queue.next(Instant::now(), &mut wire, Vec::new()) else {
            panic!("there is work");
        };
        order.entry(Arc::as_ptr(&frame.job)).or_insert(turn);
        frame.deliver(None);
    }
    assert_eq!(
        order[&Arc::as_ptr(&small)],
        1,
        "a small batch waits for one frame of a large one"
    );
    assert!(small.is_done() && !large.is_done());
}

#[test]
fn a_piece_in_chunks_fails_as_a_whole_and_once() {
    let job = job(&[3 * CHUNK + 1, 10], LONG);
    let mut queue = WorkQueue::default();
    queue.push(Run::new(Arc::clone(&job), PieceSet::All));
    let mut wire = WireScratch::default();
    let mut frames = Vec::new();
    while let Next::Send(frame) = queue.next(Instant::now(), &mut wire, Vec::new()) {
        frames.push(frame);
    }
    assert_eq!(
        frames.len(),
        4,
        "four chunks, the last one with the small piece"
    );
    frames[1].ops[0].result = Err(PieceError::Stalled);
    frames[2].ops[0].result = Err(PieceError::Timeout);
    for frame in frames.iter_mut().rev() {
        assert!(!job.is_done(), "not before its last chunk");
        frame.deliver(None);
    }
    let outcome = job.outcome();
    assert_eq!(
        outcome.pieces[0],
        Err(PieceError::Timeout),
        "the error that came first"
    );
    assert!(outcome.pieces[1].is_ok());
}

#[test]
fn a_run_whose_time_is_up_is_stopped() {
    let job = job(&[64], Duration::ZERO);
    let mut queue = WorkQueue::default();
    queue.push(Run::new(Arc::clone(&job), PieceSet::All));
    match queue.next(Instant::now(), &mut WireScratch::default(), Vec::new()) {
        Next::Stopped(run, error) => run.fail(error),
        other => panic!("{other:?}"),
    }
    assert_eq!(job.outcome().first_error(), Some(PieceError::Timeout));
}
