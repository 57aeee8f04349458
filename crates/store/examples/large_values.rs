//! Two writers of one key, as in case DEV-02, with values of any size.
//!
//! ```text
//! cargo run --release -p layercake-store --example large_values -- [ROUNDS] [BYTES] [shm|tcp]
//! ```
//!
//! By default 3 rounds of 2.1 GiB over shm. In each round two clients put the same key at the same time,
//! each with bytes of its own, while a third asks for it; exactly one must win, and what exists must be
//! one of the two values, whole. Ends with an error otherwise. Needs room for four values.

#[path = "../tests/common/mod.rs"]
#[expect(
    unused_imports,
    reason = "the tests' short-hands on one key are not needed here"
)]
mod common;

use std::time::{Duration, Instant};

use common::{Spec, Via, fresh_key, one, one_replica};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Recency;
use layercake_store::{GetOptions, PutOutcome, PutRequest, Range, RangeRead, StoreClient};
use layercake_transport::{AllocateOptions, Memory};

const DEFAULT_ROUNDS: u64 = 3;
const DEFAULT_BYTES: u64 = 2_254_857_830;

/// Bytes that are written or compared at a time.
const STEP: u64 = 8 << 20;

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| {
        args.next()
            .map_or(default, |arg| arg.parse().expect("a number"))
    };
    let (rounds, bytes) = (number(DEFAULT_ROUNDS), number(DEFAULT_BYTES));
    let via = match args.next().as_deref() {
        None | Some("shm") => Via::Shm,
        Some("tcp") => Via::Tcp,
        Some(other) => panic!("no transport \"{other}\": shm and tcp are accepted"),
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run(rounds, bytes, via));
}

async fn run(rounds: u64, bytes: u64, via: Via) {
    // One value that stays while the loser's reservation is taken back.
    let segment = bytes + bytes / 4;
    let lease = Duration::from_millis(500);
    let cluster = Spec::new(via).nodes(&[segment]).lease(lease).start().await;
    let clients = [
        cluster.client().await,
        cluster.client().await,
        cluster.client().await,
    ];
    let sources = [value(&clients[0], bytes, 1), value(&clients[1], bytes, 2)];
    let target = allocate(&clients[2], bytes);
    for round in 0..rounds {
        let key = fresh_key();
        let start = Instant::now();
        let first = put(&clients[0], &key, &sources[0]);
        let second = put(&clients[1], &key, &sources[1]);
        let both = async { tokio::join!(first, second) };
        tokio::pin!(both);
        let mut polls = 0_u64;
        let outcomes = loop {
            tokio::select! {
                biased;
                outcomes = &mut both => break outcomes,
                found = found(&clients[2], &key, &target) => {
                    polls += 1;
                    assert!(found.is_none_or(|seed| seed == 1 || seed == 2), "a value that nobody wrote");
                }
            }
        };
        let winner = match outcomes {
            (PutOutcome::Stored, PutOutcome::Existed | PutOutcome::InProgress) => 1,
            (PutOutcome::Existed | PutOutcome::InProgress, PutOutcome::Stored) => 2,
            other => panic!("exactly one wins, not {other:?}"),
        };
        let stored = start.elapsed();
        let clock = Instant::now();
        assert_eq!(found(&clients[2], &key, &target).await, Some(winner));
        println!(
            "round {round}: writer {winner} of {bytes} bytes won in {stored:.2?}, read back and compared \
             in {:.2?}, {polls} looks meanwhile",
            clock.elapsed()
        );
        one(clients[0].remove(std::slice::from_ref(&key), true).await).expect("the master is up");
        common::eventually("the value's last lease is over", || {
            cluster.master.monitor.status().quarantined_bytes == 0
        })
        .await;
    }
    println!("{rounds} rounds over {}: every value whole", via.kind());
}

async fn put(client: &StoreClient, key: &ObjectKey, source: &Memory) -> PutOutcome {
    let request = PutRequest::new(key.clone(), vec![common::whole(source)]);
    one(client.put(vec![request], &one_replica()).await).expect("losing is an ordinary outcome")
}

/// Which value the key has, after comparing all of it; `None`: it does not exist.
async fn found(client: &StoreClient, key: &ObjectKey, target: &Memory) -> Option<u64> {
    let keys = std::slice::from_ref(key);
    let exists = one(client.exists(keys, Recency::default()).await).expect("the master is up");
    if !exists {
        tokio::task::yield_now().await;
        return None;
    }
    let session = one(client.start_gets(keys, GetOptions::default()).await).expect("it exists");
    assert_eq!(session.size(), target.len());
    let ranges = vec![Range {
        offset: 0,
        local: common::whole(target),
    }];
    let read = RangeRead {
        session: &session,
        ranges,
    };
    let done = one(client.read_ranges(vec![read]).await).expect("it exists");
    assert_eq!(done.verified, target.len());
    client.end_gets(vec![session]).await;
    let target = target.clone();
    let compared = tokio::task::spawn_blocking(move || compare(&target)).await;
    Some(compared.expect("no panic"))
}

fn allocate(client: &StoreClient, bytes: u64) -> Memory {
    client
        .engine()
        .allocate(bytes, AllocateOptions::default())
        .expect("there is memory")
}

fn value(client: &StoreClient, bytes: u64, seed: u64) -> Memory {
    let memory = allocate(client, bytes);
    for at in (0..bytes).step_by(usize::try_from(STEP).expect("small")) {
        let len = STEP.min(bytes - at);
        memory.copy_in(at, &block(seed, at, len)).expect("inside");
    }
    memory
}

/// Words that tell the seed and their own place. `at` is a multiple of 8.
fn block(seed: u64, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).expect("small")];
    for (word, place) in (at / 8..).zip(bytes.chunks_mut(8)) {
        place.copy_from_slice(&((seed << 56) | word).to_le_bytes()[..place.len()]);
    }
    bytes
}

/// The seed that all bytes come from.
fn compare(memory: &Memory) -> u64 {
    let mut head = [0; 8];
    memory.copy_out(0, &mut head).expect("inside");
    let seed = u64::from_le_bytes(head) >> 56;
    let mut bytes = vec![0; usize::try_from(STEP).expect("small")];
    for at in (0..memory.len()).step_by(bytes.len()) {
        let len = STEP.min(memory.len() - at);
        let part = &mut bytes[..usize::try_from(len).expect("small")];
        memory.copy_out(at, part).expect("inside");
        assert!(
            part == block(seed, at, len),
            "bytes from {at} on are not those of writer {seed}"
        );
    }
    seed
}
