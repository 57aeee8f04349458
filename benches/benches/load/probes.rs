//! Probes of 20,000 keys each, on a quiet table and while objects are written and evicted without pause.
//!
//! The keys are random ones of the table's size, so nothing that the processor remembers helps. Leases are
//! short, since at this rate probes would otherwise lease the whole table, and nothing could be evicted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use layercake_benches::keys::{Random, key, keys};
use layercake_benches::report::{Report, rounded};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, Presence, PutStart, Recency, ReplicateConfig};
use layercake_store::link::{Exists, MasterLink, StartOptions};

use crate::master::Process;

const SIZES: [usize; 3] = [10_000, 1_000_000, 5_000_000];
const PROBED: usize = 20_000;
const ROUNDS: usize = 60;
/// Before those: the first ones also pay for memory that both ends ask the system for.
const WARM_UP: usize = 10;
const LEASE: Duration = Duration::from_millis(100);

/// Objects in one put of the writer.
const WRITTEN: usize = 1024;
const OBJECT: u64 = 4096;
/// Granules of an object with its header.
const PLACE: u64 = 8192;

/// Share of the pool that is in use when eviction begins.
const WATERMARK: f64 = 0.90;

pub(crate) async fn measure() -> Result<Report> {
    let mut report = Report::new(
        format!("probes of {PROBED} random keys each, over loopback; master in its own process"),
        &[
            "objects",
            "load",
            "median ms",
            "p99 ms",
            "keys/s",
            "found %",
            "evicted/s",
            "master us/key",
            "one key us",
            "bytes/object",
        ],
    );
    for objects in SIZES {
        measure_size(objects, &mut report).await?;
    }
    Ok(report)
}

async fn measure_size(objects: usize, report: &mut Report) -> Result<()> {
    let master = Process::start(LEASE)?;
    let empty = master.resident_bytes()?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a size, and not a large one for a float"
    )]
    let room = (objects as f64 * PLACE as f64 / WATERMARK) as u64 + (64 << 20);
    let node = master.lend(room).await?;
    let link = master.join("prober").await?;
    for first in (0..objects).step_by(WRITTEN) {
        write(&link, first, WRITTEN.min(objects - first)).await?;
    }
    let bytes = (master.resident_bytes()? - empty) as f64 / objects as f64;

    let writer = Writer::new(master.join("writer").await?, objects);
    for load in ["none", "eviction"] {
        let writing = (load == "eviction").then(|| tokio::spawn(Arc::clone(&writer).run()));
        if writing.is_some() {
            writer.until_evicting(&link, objects).await?;
        }
        probe(&link, &writer, objects, WARM_UP).await?;
        let before = link.status().await?;
        let start = (Instant::now(), master.processor_time()?);
        let (times, found) = probe(&link, &writer, objects, ROUNDS).await?;
        let seconds = start.0.elapsed().as_secs_f64();
        let processor = master.processor_time()? - start.1;
        let evicted = link.status().await?.evicted_objects - before.evicted_objects;
        let single = single(&link, objects).await?;
        if let Some(writing) = writing {
            writer.stop.store(true, Ordering::Relaxed);
            writing.await??;
        }
        let keys = (times.len() * PROBED) as f64;
        let busy: f64 = times.iter().sum();
        report.row(vec![
            objects.into(),
            load.into(),
            rounded(quantile(&times, 0.5) * 1e3, 2),
            rounded(quantile(&times, 0.99) * 1e3, 2),
            rounded(keys / busy, 0),
            rounded(found as f64 / keys * 100.0, 1),
            rounded(evicted as f64 / seconds, 0),
            if load == "none" {
                rounded(processor / keys * 1e6, 3)
            } else {
                serde_json::Value::Null
            },
            rounded(single * 1e6, 1),
            rounded(bytes, 0),
        ]);
    }
    drop(node);
    Ok(())
}

/// Writes objects of these numbers.
async fn write(link: &MasterLink, first: usize, count: usize) -> Result<()> {
    let keys = keys(first, count)?;
    let puts: Vec<_> = keys
        .iter()
        .map(|key| PutStart::new(key.clone(), OBJECT))
        .collect();
    let config = ReplicateConfig::default();
    let started = link
        .put_start(&puts, &config, StartOptions::default())
        .await?
        .results;
    let objects: Vec<_> = keys
        .into_iter()
        .zip(started)
        .filter_map(|(key, started)| {
            let generation = started.ok()?.generation;
            Some(ObjectRef { key, generation })
        })
        .collect();
    link.put_end(&objects).await?;
    Ok(())
}

/// Writes new objects until it is stopped.
struct Writer {
    link: MasterLink,
    /// Number of the next object.
    next: AtomicU64,
    stop: AtomicBool,
}

impl Writer {
    fn new(link: MasterLink, next: usize) -> Arc<Self> {
        Arc::new(Self {
            link,
            next: AtomicU64::new(next as u64),
            stop: AtomicBool::new(false),
        })
    }

    fn next(&self) -> usize {
        usize::try_from(self.next.load(Ordering::Relaxed)).unwrap_or(usize::MAX)
    }

    async fn run(self: Arc<Self>) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            write(&self.link, self.next(), WRITTEN).await?;
            self.next.fetch_add(WRITTEN as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits until the pool is full and objects go.
    async fn until_evicting(&self, link: &MasterLink, objects: usize) -> Result<()> {
        while link.status().await?.evicted_objects == 0 {
            ensure!(
                self.next() < 4 * objects + 1_000_000,
                "nothing is evicted though the pool must be full"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

fn query(keys: &[ObjectKey]) -> Exists<'_> {
    Exists {
        keys,
        readable: false,
        recency: Recency::default(),
        stop_at_first_miss: false,
        unreachable: &[],
        peek: false,
    }
}

/// Probes random ones of the objects that were written last. Returns seconds for each batch, and how many
/// keys were found.
async fn probe(
    link: &MasterLink,
    writer: &Writer,
    objects: usize,
    rounds: usize,
) -> Result<(Vec<f64>, u64)> {
    let mut random = Random::new(1);
    let mut times = Vec::with_capacity(rounds);
    let mut found = 0;
    for _ in 0..rounds {
        let first = writer.next() - objects;
        let keys = (0..PROBED)
            .map(|_| key(first + random.below(objects)))
            .collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        let answer = link.exists(&query(&keys)).await?;
        times.push(start.elapsed().as_secs_f64());
        let complete = |state: &&Presence| **state == Presence::Complete;
        found += answer.states.iter().filter(complete).count() as u64;
    }
    Ok((times, found))
}

/// Median seconds of a probe of one key.
async fn single(link: &MasterLink, objects: usize) -> Result<f64> {
    let mut random = Random::new(2);
    let mut times = Vec::new();
    for _ in 0..2000 {
        let keys = [key(random.below(objects))?];
        let start = Instant::now();
        link.exists(&query(&keys)).await?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(quantile(&times, 0.5))
}

/// The value below which this share of them lies.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index of a short list"
)]
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 * share) as usize;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}
