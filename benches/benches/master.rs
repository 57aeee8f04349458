//! The master: cost per key as its table grows, memory per object, and the same through gRPC.
//!
//! Each table size is measured in a process of its own, since memory that one table frees would not count
//! for the next. Times of the state machine are those of one thread.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use layercake_benches::table::{Table, median};
use layercake_master::state::{
    Caller, Exists, GetStart, Moment, Probe, PutBatch, State, StateConfig,
};
use layercake_master::{Master, MasterConfig};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};
use layercake_store::link::{self, LinkConfig, MasterLink, StartOptions};
use layercake_store::{Node, NodeConfig};
use layercake_transport::{Engine, EngineConfig};

const OBJECTS: &str = "LAYERCAKE_BENCH_OBJECTS";
const SIZES: [usize; 3] = [10_000, 1_000_000, 5_000_000];
const BATCH: usize = 256;
const SAMPLES: usize = 200;

fn main() -> Result<()> {
    if let Ok(objects) = std::env::var(OBJECTS) {
        return measure_state(objects.parse()?);
    }
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
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
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(through_grpc())
}

/// A key as a connector makes them.
fn key(number: usize) -> Result<ObjectKey> {
    let spread = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    Ok(ObjectKey::new(&format!(
        "llama-3.1-70b@{spread:016x}{number:016x}@tp:00000003@p"
    ))?)
}

fn keys(from: usize, count: usize) -> Result<Vec<ObjectKey>> {
    (from..from + count).map(key).collect()
}

struct Bench {
    state: State,
    caller: Caller,
    now: Moment,
    config: ReplicateConfig,
}

impl Bench {
    /// A pool with room for so many objects of 60,000 bytes.
    fn new(objects: usize) -> Result<Self> {
        let state = State::new(StateConfig {
            high_watermark: 1.0,
            ..StateConfig::default()
        })?;
        let now = Moment::from_micros(1);
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let client = ClientId(1);
        state.join(now, client, "bench", Some(endpoint.clone()));
        for id in 1..=8 {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint.clone(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: (objects as u64 / 8 + 2 * (SAMPLES * BATCH) as u64) * 61_440,
                kind: MemoryKind::Host,
            };
            state.mount(now, client, segment, Generation::NONE)?;
        }
        Ok(Self {
            state,
            caller: Caller {
                client,
                tenant: Tenant::default(),
                location: None,
            },
            now,
            config: ReplicateConfig::default(),
        })
    }

    fn put_start(&self, keys: &[ObjectKey]) -> Result<Vec<ObjectRef>> {
        let batch = PutBatch {
            puts: keys
                .iter()
                .map(|key| PutStart::new(key.clone(), 60_000))
                .collect(),
            config: &self.config,
            recency: Recency::default(),
            unreachable: &[],
            upsert: false,
        };
        let (answers, _) = self.state.put_start(self.now, &self.caller, batch);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| {
                Ok(ObjectRef {
                    key: key.clone(),
                    generation: answer?.generation,
                })
            })
            .collect()
    }

    fn put_end(&self, objects: &[ObjectRef]) -> Result<()> {
        for answer in self.state.put_end(self.now, &self.caller, objects) {
            answer?;
        }
        Ok(())
    }

    fn exists(&self, keys: &[ObjectKey]) -> Result<()> {
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency: Recency::default(),
            stop_at_first_miss: true,
            unreachable: &[],
            peek: false,
        };
        let (found, _) = self.state.exists(self.now, &self.caller, &query);
        ensure!(found.len() == keys.len(), "a stored object is missing");
        Ok(())
    }

    fn get_start(&self, keys: &[ObjectKey]) -> Result<Vec<ObjectRef>> {
        let query = GetStart {
            keys,
            recency: Recency::default(),
            session: true,
            unreachable: &[],
        };
        let (answers, _) = self.state.get_start(self.now, &self.caller, &query);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| {
                Ok(ObjectRef {
                    key: key.clone(),
                    generation: answer?.generation(),
                })
            })
            .collect()
    }
}

fn resident_bytes() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).context("statm is short")?.parse()?;
    Ok(pages * 4096)
}

/// Prints one row: all figures at a table of this size.
fn measure_state(objects: usize) -> Result<()> {
    let bench = Bench::new(objects)?;
    let before = resident_bytes()?;
    let mut stored = 0;
    while stored < objects {
        let count = BATCH.min(objects - stored);
        let started = bench.put_start(&keys(stored, count)?)?;
        bench.put_end(&started)?;
        stored += count;
    }
    let bytes = (resident_bytes()? - before) as f64 / objects as f64;

    let mut times = [const { Vec::new() }; 5];
    for sample in 0..SAMPLES {
        // Spread over the table, so that no cache holds what is asked for.
        let old = keys(sample * 7919 * BATCH % (objects - BATCH).max(1), BATCH)?;
        let new = keys(objects + sample * BATCH, BATCH)?;
        let mut time = |slot: usize, start: Instant| {
            times[slot].push(start.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
        };
        let start = Instant::now();
        bench.exists(&old)?;
        time(0, start);
        let start = Instant::now();
        let open = bench.get_start(&old)?;
        time(1, start);
        let start = Instant::now();
        bench.state.get_end(bench.now, &bench.caller, &open);
        time(2, start);
        let start = Instant::now();
        let open = bench.put_start(&new)?;
        time(3, start);
        let start = Instant::now();
        bench.put_end(&open)?;
        time(4, start);
    }
    let row = times.map(|times| format!("{:.2}", median(times))).join(" ");
    println!("{objects} {row} {bytes:.0}");
    Ok(())
}

/// The same calls by a client in this process, over loopback.
async fn through_grpc() -> Result<()> {
    let config = MasterConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        ..MasterConfig::default()
    };
    let mut registry = prometheus_client::registry::Registry::default();
    let master = Master::bind(config, &mut registry).await?;
    let address = master.local_addr().to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(master.serve(async {
        // The sender going away stops the master as well.
        let _stopped = stopped.await;
    }));
    let engine = Engine::start(EngineConfig::default())?;
    let connect = |name: &str| {
        MasterLink::connect(LinkConfig {
            endpoint: Some(engine.endpoint().clone()),
            ..LinkConfig::new(address.clone(), name)
        })
    };
    let node = Node::start(
        NodeConfig::lending(512 << 20, false),
        engine.clone(),
        connect("bench-node").await?,
    )
    .await?;
    let link = connect("bench").await?;
    grpc_table(&link).await?;
    node.shutdown(Duration::from_secs(3)).await?;
    link.close(Duration::from_secs(1)).await?;
    drop(stop);
    serving.await??;
    Ok(())
}

fn probe(keys: &[ObjectKey]) -> link::Exists<'_> {
    link::Exists {
        keys,
        readable: false,
        recency: Recency::default(),
        stop_at_first_miss: false,
        unreachable: &[],
        peek: false,
    }
}

async fn grpc_table(link: &MasterLink) -> Result<()> {
    println!("\nthrough gRPC on loopback, client and master in one process");
    let mut table = Table::new(&[
        "keys",
        "exists us/call",
        "keys/s",
        "put start us/call",
        "put end us/call",
    ]);
    let config = ReplicateConfig::default();
    let mut next = 0;
    for (count, rounds) in [(1_usize, 2000), (64, 300), (2048, 20), (20_000, 1)] {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..rounds {
            let keys = keys(next, count)?;
            next += count;
            let puts: Vec<_> = keys
                .iter()
                .map(|key| PutStart::new(key.clone(), 1000))
                .collect();
            let start = Instant::now();
            let started = link
                .put_start(&puts, &config, StartOptions::default())
                .await?
                .results;
            times[1].push(start.elapsed().as_secs_f64() * 1e6);
            let objects = keys
                .iter()
                .zip(started)
                .map(|(key, started)| {
                    Ok(ObjectRef {
                        key: key.clone(),
                        generation: started?.generation,
                    })
                })
                .collect::<Result<Vec<_>>>()?;
            let start = Instant::now();
            link.put_end(&objects).await?;
            times[2].push(start.elapsed().as_secs_f64() * 1e6);
            for _ in 0..20_usize.div_ceil(rounds) {
                let start = Instant::now();
                link.exists(&probe(&keys)).await?;
                times[0].push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let [exists, start, end] = times.map(median);
        table.row(vec![
            count.to_string(),
            format!("{exists:.1}"),
            format!("{:.0}", count as f64 / exists * 1e6),
            format!("{start:.1}"),
            format!("{end:.1}"),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}
