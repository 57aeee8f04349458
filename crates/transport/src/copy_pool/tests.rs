use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use layercake_protocol::ids::{Capability, EngineId, RegionId};

use super::cut::{UNIT_BYTES, UNIT_PARTS};
use super::*;
use crate::batch::{Batch, Direction, Piece, RemoteSlice};
use crate::endpoint::{Endpoint, HostId};
use crate::error::PieceError;
use crate::job::{Caller, Job, PieceSet};
use crate::memory::{Access, HostBuffer, Memory, Registry};
use crate::racy;
use crate::stats::StatsTable;
use crate::transfer::PieceDone;

mod small;

const LIMIT: Duration = Duration::from_secs(20);

fn pool(threads: u8) -> CopyPool {
    CopyPool::start(NonZero::new(threads).expect("not zero")).expect("threads start")
}

fn soon() -> Instant {
    Instant::now() + LIMIT
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 7 + i / 251).to_le_bytes()[0])
        .collect()
}

/// A job over one buffer, with pieces of these lengths one after the other.
fn job(content: &[u8], lengths: &[u64], deadline: Duration) -> Arc<Job> {
    job_of(Caller::GoesOn, content, lengths, deadline)
}

fn job_of(caller: Caller, content: &[u8], lengths: &[u64], deadline: Duration) -> Arc<Job> {
    let registry = Arc::new(Registry::new());
    let entry = registry
        .register(HostBuffer::from(content.to_vec()), Access::LocalOnly)
        .expect("registers");
    let memory = Memory::new(entry, registry);
    let mut offset = 0;
    let pieces = lengths.iter().map(|len| {
        let local = memory.slice(offset, *len).expect("inside");
        let remote = RemoteSlice {
            region: RegionId(1),
            capability: Capability([0; 16]),
            offset,
            len: *len,
            generation: None,
        };
        offset += len;
        Piece { local, remote }
    });
    let batch = Batch {
        peer: Arc::new(Endpoint {
            engine: EngineId(1),
            tcp: String::new(),
            host: HostId([0; 16]),
            shm: None,
            pid: 0,
        }),
        direction: Direction::Write,
        pieces: pieces.collect(),
        checksum: true,
        deadline: Some(deadline),
    };
    Job::new(batch, LIMIT, Arc::new(StatsTable::default()), caller)
}

/// Sums parts of a buffer as if it had moved them; misbehaves where told to.
#[derive(Clone, Default)]
struct FakeMover {
    content: Arc<Vec<u8>>,
    fail: HashSet<usize>,
    hand_back: HashSet<usize>,
    gone: bool,
    panic: bool,
    /// Says that there is more to do than to copy.
    slow: bool,
    handed_back: Arc<Mutex<Vec<u32>>>,
    units: Arc<AtomicUsize>,
    concluded: Arc<AtomicUsize>,
    gate: Option<Arc<Gate>>,
    /// Units of another batch, and how many there were when this one ended.
    other: Option<Arc<AtomicUsize>>,
    other_at_end: Arc<AtomicUsize>,
}

/// Holds movers until it is opened, and tells that one has come.
struct Gate {
    arrived: Mutex<mpsc::Sender<()>>,
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn new() -> (Arc<Self>, mpsc::Receiver<()>) {
        let (sender, receiver) = mpsc::channel();
        let gate = Self {
            arrived: Mutex::new(sender),
            open: Mutex::new(false),
            opened: Condvar::new(),
        };
        (Arc::new(gate), receiver)
    }

    fn pass(&self) {
        // The test may have what it waited for already.
        let _unheard = self.arrived.lock().send(());
        let mut open = self.open.lock();
        while !*open {
            assert!(!self.opened.wait_until(&mut open, soon()).timed_out());
        }
    }

    fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }
}

impl PartMover for FakeMover {
    fn move_unit(&self, job: &Job, parts: &[Part], moved: &mut Results) {
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        assert!(!self.panic, "asked to panic");
        self.units.fetch_add(1, Ordering::Relaxed);
        for part in parts {
            let start =
                usize::try_from(job.pieces()[part.piece].remote.offset + part.offset).unwrap();
            let len = usize::try_from(part.len).unwrap();
            moved.push(if self.fail.contains(&part.piece) {
                Moved::Failed(PieceError::Protocol)
            } else if self.hand_back.contains(&part.piece) {
                Moved::HandBack
            } else {
                let source = racy::Source::from_slice(&self.content[start..start + len]);
                Moved::Done(racy::crc(source, 0))
            });
        }
    }

    fn is_mere_copy(&self, _job: &Job, _parts: &[Part]) -> bool {
        !self.slow
    }

    fn conclude(&self, _job: &Job) -> Result<(), PieceError> {
        self.concluded.fetch_add(1, Ordering::Relaxed);
        if let Some(other) = &self.other {
            let units = other.load(Ordering::Relaxed);
            self.other_at_end.store(units, Ordering::Relaxed);
        }
        if self.gone {
            Err(PieceError::PeerGone)
        } else {
            Ok(())
        }
    }

    fn hand_back(&self, job: Arc<Job>, pieces: PieceSet) {
        let PieceSet::Some(indices) = pieces else {
            panic!("only some were handed back");
        };
        for index in &indices {
            job.finish(*index as usize, Err(PieceError::NoTransport));
        }
        self.handed_back.lock().extend(indices);
    }
}

#[test]
fn every_piece_is_moved_and_summed_whether_split_gathered_or_small() {
    let pool = pool(3);
    let lengths: Vec<u64> = (0..2000)
        .map(|i| match i % 400 {
            0 => 3 * UNIT_BYTES + 17,
            1 => UNIT_BYTES,
            i => i,
        })
        .collect();
    let content = bytes(usize::try_from(lengths.iter().sum::<u64>()).unwrap());
    let job = job(&content, &lengths, LIMIT);
    let mover = FakeMover {
        content: Arc::new(content.clone()),
        ..FakeMover::default()
    };
    PieceRun::start(Arc::clone(&job), PieceSet::All, mover.clone(), &pool);
    assert!(job.wait(Some(soon())));
    let mut offset = 0;
    for (len, result) in lengths.iter().zip(job.outcome().pieces) {
        let len = usize::try_from(*len).unwrap();
        let expected = crc32c::crc32c(&content[offset..offset + len]);
        assert_eq!(result.expect("moved").crc32c, Some(expected));
        offset += len;
    }
    assert_eq!(mover.concluded.load(Ordering::Relaxed), 1);
}

#[test]
fn a_failed_piece_fails_alone_and_what_is_handed_back_goes_on() {
    let pool = pool(2);
    for large in [10, 2 * UNIT_BYTES] {
        let lengths = [10, large, 10, large, 10];
        let content = bytes(usize::try_from(lengths.iter().sum::<u64>()).unwrap());
        let job = job(&content, &lengths, LIMIT);
        let mover = FakeMover {
            content: Arc::new(content),
            fail: HashSet::from([1]),
            hand_back: HashSet::from([2, 3]),
            ..FakeMover::default()
        };
        PieceRun::start(Arc::clone(&job), PieceSet::All, mover.clone(), &pool);
        assert!(job.wait(Some(soon())));
        let results = job.outcome().pieces;
        assert!(results[0].is_ok() && results[4].is_ok());
        assert_eq!(results[1], Err(PieceError::Protocol));
        assert_eq!(*mover.handed_back.lock(), [2, 3]);
    }
}

#[test]
fn the_last_word_overrides_every_success() {
    let pool = pool(1);
    for small in [true, false] {
        let lengths = if small { [8, 8] } else { [8, 3 * UNIT_BYTES] };
        let content = bytes(usize::try_from(lengths.iter().sum::<u64>()).unwrap());
        let job = job(&content, &lengths, LIMIT);
        let mover = FakeMover {
            content: Arc::new(content),
            gone: true,
            hand_back: HashSet::from([0]),
            ..FakeMover::default()
        };
        PieceRun::start(Arc::clone(&job), PieceSet::All, mover.clone(), &pool);
        assert!(job.wait(Some(soon())));
        assert_eq!(job.outcome().pieces, [Err(PieceError::PeerGone); 2]);
        assert!(mover.handed_back.lock().is_empty());
    }
}

#[test]
fn only_the_pieces_that_were_given_are_touched() {
    let pool = pool(1);
    let content = bytes(40);
    let job = job(&content, &[10; 4], LIMIT);
    let mover = FakeMover {
        content: Arc::new(content),
        ..FakeMover::default()
    };
    job.finish(3, Err(PieceError::Cancelled));
    PieceRun::start(Arc::clone(&job), PieceSet::Some(vec![1, 3]), mover, &pool);
    let terminal: Vec<_> = (0..4).map(|piece| job.is_terminal(piece)).collect();
    assert_eq!(terminal, [false, true, false, true]);
    assert_eq!(job.outcome().pieces[3], Err(PieceError::Cancelled));
}

#[test]
fn a_large_batch_does_not_keep_a_later_one_waiting() {
    let pool = pool(1);
    let large = vec![UNIT_BYTES; 64];
    let content = Arc::new(bytes(usize::try_from(64 * UNIT_BYTES).unwrap()));
    let (gate, arrived) = Gate::new();
    let first = FakeMover {
        content: Arc::clone(&content),
        gate: Some(Arc::clone(&gate)),
        ..FakeMover::default()
    };
    let units_of_first = Arc::clone(&first.units);
    let job_1 = job(&content, &large, LIMIT);
    PieceRun::start(Arc::clone(&job_1), PieceSet::All, first, &pool);
    arrived.recv_timeout(LIMIT).expect("its first unit runs");
    let second = FakeMover {
        content: Arc::clone(&content),
        other: Some(units_of_first),
        ..FakeMover::default()
    };
    let other_at_end = Arc::clone(&second.other_at_end);
    let job_2 = job(&content, &vec![1; UNIT_PARTS + 1], LIMIT);
    PieceRun::start(Arc::clone(&job_2), PieceSet::All, second, &pool);
    gate.open();
    assert!(job_2.wait(Some(soon())) && job_2.outcome().is_ok());
    let before_second = other_at_end.load(Ordering::Relaxed);
    assert!(before_second < 8, "{before_second} units came first");
    assert!(job_1.wait(Some(soon())) && job_1.outcome().is_ok());
}

#[test]
fn a_waiting_thread_does_the_work_when_the_pool_is_busy() {
    let pool = pool(1);
    let content = Arc::new(bytes(usize::try_from(4 * UNIT_BYTES).unwrap()));
    let (gate, arrived) = Gate::new();
    let blocked = FakeMover {
        content: Arc::clone(&content),
        gate: Some(Arc::clone(&gate)),
        ..FakeMover::default()
    };
    let job_1 = job(&content, &[2 * UNIT_BYTES], LIMIT);
    PieceRun::start(Arc::clone(&job_1), PieceSet::All, blocked, &pool);
    arrived
        .recv_timeout(LIMIT)
        .expect("the only thread is busy");
    let free = FakeMover {
        content: Arc::clone(&content),
        ..FakeMover::default()
    };
    let job_2 = job(&content, &[4 * UNIT_BYTES], LIMIT);
    PieceRun::start(Arc::clone(&job_2), PieceSet::All, free, &pool);
    assert!(job_2.wait(Some(soon())) && job_2.outcome().is_ok());
    assert!(!job_1.is_done());
    gate.open();
    assert!(job_1.wait(Some(soon())) && job_1.outcome().is_ok());
}

#[test]
fn cancelling_and_deadlines_stop_what_is_not_moved_yet() {
    let pool = pool(1);
    let content = Arc::new(bytes(usize::try_from(8 * UNIT_BYTES).unwrap()));
    for (deadline, reason) in [
        (LIMIT, PieceError::Cancelled),
        (Duration::from_millis(700), PieceError::Timeout),
    ] {
        let (gate, arrived) = Gate::new();
        let mover = FakeMover {
            content: Arc::clone(&content),
            gate: Some(Arc::clone(&gate)),
            ..FakeMover::default()
        };
        let job = job(&content, &[UNIT_BYTES; 8], deadline);
        PieceRun::start(Arc::clone(&job), PieceSet::All, mover, &pool);
        arrived.recv_timeout(LIMIT).expect("the first unit runs");
        if reason == PieceError::Cancelled {
            job.cancel();
        }
        while job.stop_reason(Instant::now()).is_none() {
            std::thread::yield_now();
        }
        gate.open();
        assert!(job.wait(Some(soon())));
        let results = job.outcome().pieces;
        assert!(results[0].is_ok(), "it was under way");
        assert_eq!(results[1..], [Err(reason); 7]);
    }
}

#[test]
fn shutdown_ends_what_is_queued_and_what_comes_later() {
    let pool = pool(1);
    let content = Arc::new(bytes(usize::try_from(4 * UNIT_BYTES).unwrap()));
    let (gate, arrived) = Gate::new();
    let mover = FakeMover {
        content: Arc::clone(&content),
        gate: Some(Arc::clone(&gate)),
        ..FakeMover::default()
    };
    let job_1 = job(&content, &[UNIT_BYTES; 4], LIMIT);
    PieceRun::start(Arc::clone(&job_1), PieceSet::All, mover.clone(), &pool);
    arrived.recv_timeout(LIMIT).expect("the first unit runs");
    assert!(!pool.shutdown(Instant::now()), "a unit is still running");
    assert!(!job_1.is_done(), "a byte may still move");
    gate.open();
    assert!(job_1.wait(Some(soon())));
    assert_eq!(job_1.outcome().pieces[3], Err(PieceError::ShutDown));
    assert!(pool.shutdown(soon()));
    let job_2 = job(&content, &[UNIT_BYTES; 4], LIMIT);
    PieceRun::start(Arc::clone(&job_2), PieceSet::All, mover, &pool);
    assert!(job_2.is_done(), "nobody is left to move it");
    assert_eq!(job_2.outcome().pieces, [Err(PieceError::ShutDown); 4]);
}

#[test]
fn a_bug_in_a_mover_ends_its_batch_and_spares_the_others() {
    let pool = pool(1);
    let content = Arc::new(bytes(usize::try_from(2 * UNIT_BYTES).unwrap()));
    let broken = FakeMover {
        content: Arc::clone(&content),
        panic: true,
        ..FakeMover::default()
    };
    let sound = FakeMover {
        panic: false,
        ..broken.clone()
    };
    let job_1 = job(&content, &[UNIT_BYTES; 2], LIMIT);
    PieceRun::start(Arc::clone(&job_1), PieceSet::All, broken.clone(), &pool);
    // Not `wait`: that would run the broken mover on this thread.
    while !job_1.is_done() {
        assert!(Instant::now() < soon());
        std::thread::yield_now();
    }
    assert!(!job_1.outcome().is_ok());
    // A small one takes the submitting thread with it, and leaves no piece without a result.
    let small = job(&content, &[8; 2], LIMIT);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        PieceRun::start(Arc::clone(&small), PieceSet::All, broken, &pool);
    }));
    assert!(unwound.is_err() && small.is_done() && !small.outcome().is_ok());
    let job_2 = job(&content, &[UNIT_BYTES; 2], LIMIT);
    PieceRun::start(Arc::clone(&job_2), PieceSet::All, sound, &pool);
    assert!(job_2.wait(Some(soon())) && job_2.outcome().is_ok());
}

#[test]
fn threads_end_with_their_pool() {
    struct Witness(Arc<AtomicBool>);
    impl Drop for Witness {
        fn drop(&mut self) {
            self.0.store(false, Ordering::Release);
        }
    }
    struct Nothing(#[expect(dead_code, reason = "its drop is observed")] Witness);
    impl Work for Nothing {
        fn run_unit(&self) -> bool {
            false
        }
        fn is_exhausted(&self) -> bool {
            false
        }
        fn abandon(&self) {}
    }
    let alive = Arc::new(AtomicBool::new(true));
    let pool = pool(2);
    pool.submit(Arc::new(Nothing(Witness(Arc::clone(&alive)))), 1);
    assert!(pool.shutdown(soon()));
    assert!(!alive.load(Ordering::Acquire), "no thread holds work");
}
