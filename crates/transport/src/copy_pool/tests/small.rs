//! Batches that the thread that submits them moves.

use std::thread;

use super::*;

#[test]
fn a_small_batch_is_over_when_it_was_started() {
    let pool = pool(1);
    let content = bytes(64 << 10);
    let mover = FakeMover {
        content: Arc::new(content.clone()),
        ..FakeMover::default()
    };
    let start = |lengths: &[u64], stop: bool, mover: FakeMover| {
        let job = job(&content, lengths, LIMIT);
        if stop {
            job.cancel();
        }
        PieceRun::start(Arc::clone(&job), PieceSet::All, mover, &pool);
        job
    };
    for lengths in [&[64 << 10][..], &[128; UNIT_PARTS], &[1, 0, 9000]] {
        let job = start(lengths, false, mover.clone());
        assert!(job.is_done());
        let mut offset = 0;
        for (result, len) in job.outcome().pieces.iter().zip(lengths) {
            let end = offset + usize::try_from(*len).unwrap();
            let crc = Some(crc32c::crc32c(&content[offset..end]));
            assert_eq!(*result, Ok(PieceDone { crc32c: crc }));
            offset = end;
        }
    }
    let units = mover.units.load(Ordering::Relaxed);
    let stopped = start(&[8, 8], true, mover.clone());
    assert_eq!(stopped.outcome().pieces, [Err(PieceError::Cancelled); 2]);
    assert_eq!(mover.units.load(Ordering::Relaxed), units, "nothing moved");
}

#[test]
fn who_waits_moves_more_by_itself() {
    let lengths = [UNIT_BYTES, 3 * UNIT_BYTES];
    let content = bytes(usize::try_from(lengths.iter().sum::<u64>()).unwrap());
    let (first, second) = content.split_at(content.len() / 4);
    let sums = [first, second];
    let sums = sums.map(|part| {
        Ok(PieceDone {
            crc32c: Some(crc32c::crc32c(part)),
        })
    });
    let pool = pool(1);
    // With the pool's threads gone, what is left to them ends with an error.
    pool.shutdown(soon());
    let start = |caller| {
        let mover = FakeMover {
            content: Arc::new(content.clone()),
            ..FakeMover::default()
        };
        let job = job_of(caller, &content, &lengths, LIMIT);
        PieceRun::start(Arc::clone(&job), PieceSet::All, mover, &pool);
        job.outcome().pieces
    };
    let here = thread::current().id();
    assert_eq!(start(Caller::Waits(here)), sums);
    assert_eq!(start(Caller::GoesOn), [Err(PieceError::ShutDown); 2]);
    // A thread on which the batch merely begins is not the one that waits.
    let elsewhere = thread::scope(|scope| scope.spawn(|| start(Caller::Waits(here))).join());
    assert_eq!(elsewhere.unwrap(), [Err(PieceError::ShutDown); 2]);
}

#[test]
fn a_small_batch_that_takes_more_than_a_copy_does_not_keep_the_thread_that_submits_it() {
    let pool = pool(1);
    let content = bytes(64);
    let (gate, arrived) = Gate::new();
    let mover = FakeMover {
        content: Arc::new(content.clone()),
        gate: Some(Arc::clone(&gate)),
        slow: true,
        ..FakeMover::default()
    };
    let job = job(&content, &[8; 8], LIMIT);
    PieceRun::start(Arc::clone(&job), PieceSet::All, mover, &pool);
    // The gate is closed: on this thread, the batch could not be under way now.
    arrived.recv_timeout(LIMIT).expect("a copy thread took it");
    assert!(!job.is_done());
    gate.open();
    assert!(job.wait(Some(soon())) && job.outcome().is_ok());
}
