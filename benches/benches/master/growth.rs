//! What a key costs as the table grows, and what an object takes of memory.
//!
//! Every call's keys are new ones in a random order over all objects, and sessions end long after they
//! began, so that no cache close to the processor holds what is asked for; what a key costs is then what
//! the way to its entry costs. Times are those of one thread.

use std::collections::VecDeque;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use layercake_benches::keys::{key, keys};
use layercake_benches::pool::Pool;
use layercake_benches::table::{Table, median};
use layercake_master::state::{Exists, Probe};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Recency;

const OBJECTS: &str = "LAYERCAKE_BENCH_OBJECTS";
const SIZES: [usize; 3] = [10_000, 1_000_000, 5_000_000];
const BATCH: usize = 256;
const SAMPLES: usize = 400;

/// Nodes, and what one of an object's size takes there with its header.
const NODES: u64 = 8;
const OBJECT: u64 = 60_000;
const PLACE: u64 = 61_440;

/// Batches between a session's start and its end.
const OPEN: usize = 32;

/// If this process was started to measure one size: prints its row.
pub(crate) fn measure_if_child() -> Result<bool> {
    let Ok(objects) = std::env::var(OBJECTS) else {
        return Ok(false);
    };
    measure(objects.parse()?)?;
    Ok(true)
}

/// Each table size is measured in a process of its own, since memory that one table frees would not count
/// for the next.
pub(crate) fn print_table() -> Result<()> {
    println!(
        "state machine, microseconds per key in batches of {BATCH}, one thread; keys of 60 bytes"
    );
    let header = [
        "objects",
        "exists",
        "get start",
        "get end",
        "put start",
        "put end",
        "bytes/object",
    ];
    let mut table = Table::new(&header);
    for objects in SIZES {
        let output = Command::new(std::env::current_exe()?)
            .env(OBJECTS, objects.to_string())
            .output()
            .context("start a process for one size")?;
        if !output.status.success() {
            bail!(
                "{objects} objects: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let line = String::from_utf8(output.stdout)?;
        table.row(line.split_whitespace().map(str::to_owned).collect());
    }
    print!("{}", table.render());
    Ok(())
}

fn resident_bytes() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).context("statm is short")?.parse()?;
    Ok(pages * 4096)
}

/// The numbers below `bound`, each once before any comes again, in an order that looks random.
struct Shuffled {
    bound: usize,
    stride: usize,
    next: usize,
}

impl Shuffled {
    fn new(bound: usize) -> Self {
        let mut stride = bound * 618 / 1000 + 1;
        while gcd(stride, bound) != 1 {
            stride += 1;
        }
        Self {
            bound,
            stride,
            next: 0,
        }
    }
}

impl Iterator for Shuffled {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.next = (self.next + self.stride) % self.bound;
        Some(self.next)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn probe(pool: &Pool, keys: &[ObjectKey]) -> Result<()> {
    let query = Exists {
        probe: Probe::Readable,
        keys,
        recency: Recency::default(),
        stop_at_first_miss: true,
        unreachable: &[],
        peek: false,
    };
    let (found, _) = pool.state.exists(Pool::NOW, &pool.caller, &query);
    ensure!(found.len() == keys.len(), "a stored object is missing");
    Ok(())
}

fn measure(objects: usize) -> Result<()> {
    let room = (objects + SAMPLES * BATCH) as u64;
    let pool = Pool::new(NODES, (room / NODES + 4096) * PLACE)?;
    let before = resident_bytes()?;
    for first in (0..objects).step_by(BATCH) {
        let count = BATCH.min(objects - first);
        let started = pool.put_start(&keys(first, count)?, OBJECT)?;
        pool.put_end(&started)?;
    }
    let bytes = (resident_bytes()? - before) as f64 / objects as f64;

    let mut old = Shuffled::new(objects);
    let mut batch = || {
        old.by_ref()
            .take(BATCH)
            .map(key)
            .collect::<Result<Vec<_>>>()
    };
    let mut reads = VecDeque::new();
    let mut writes = VecDeque::new();
    let mut times = [const { Vec::new() }; 5];
    for sample in 0..SAMPLES {
        let (probed, read) = (batch()?, batch()?);
        let new = keys(objects + sample * BATCH, BATCH)?;
        let mut time = |slot: usize, start: Instant| {
            times[slot].push(start.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
        };
        let start = Instant::now();
        probe(&pool, &probed)?;
        time(0, start);
        let start = Instant::now();
        reads.push_back(pool.get_start(&read)?);
        time(1, start);
        let start = Instant::now();
        writes.push_back(pool.put_start(&new, OBJECT)?);
        time(3, start);
        if reads.len() > OPEN
            && let (Some(read), Some(written)) = (reads.pop_front(), writes.pop_front())
        {
            let start = Instant::now();
            pool.state.get_end(Pool::NOW, &pool.caller, &read);
            time(2, start);
            let start = Instant::now();
            pool.put_end(&written)?;
            time(4, start);
        }
    }
    let row = times.map(|times| format!("{:.3}", median(times))).join(" ");
    println!("{objects} {row} {bytes:.0}");
    Ok(())
}
