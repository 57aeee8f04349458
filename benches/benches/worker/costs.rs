//! What a layer call takes: the connector beside the store's sessions and the transport it stands on, in turns.
//!
//! A step has starts and ends, too. So each way moves a model of few layers and one of many, and what more layers take
//! more is what layers take; the rest is what the step takes besides. Requests for memory and processor time are those of
//! the whole process, in which master and node have little to do between starts and ends.

use std::future::poll_fn;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use layercake_benches::report::{Report, rounded};
use layercake_benches::table::median;
use layercake_connector::contract::{
    BlockHash, Event, HostEvent, METADATA_VERSION, RequestStep, Span, StepMetadata, TableUpdate,
    WorkerSide as _,
};
use layercake_connector::options::Options;
use layercake_connector::worker::StoreWorker;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::{GetOptions, RangeRead, RangeWrite, StoreClient};
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Engine, EngineConfig, Memory, Piece, RemoteSlice,
};
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;

use crate::allocations;
use crate::setup::{Cache, Cluster, runtime};

/// Layers of the two models.
const LAYERS: [u32; 2] = [8, 32];
const BLOCKS: u64 = 64;
/// Bytes of an entry.
const ENTRIES: [u64; 2] = [512, 32 << 10];
const ROUNDS: u64 = 40;
/// Rounds before which nothing is counted.
const WARM_UP: u64 = 10;
/// Steps whose blocks the store has room for, about: memory of one is used again so many later.
const PLACES: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(30);

const WAYS: [&str; 6] = [
    "transport, write",
    "sessions, save",
    "connector, save",
    "transport, read",
    "sessions, load",
    "connector, load",
];

/// Measures all in turns: a table for each size of entries.
pub(crate) fn measure() -> Result<Vec<Report>> {
    ENTRIES.into_iter().map(with_entries).collect()
}

fn with_entries(entry: u64) -> Result<Report> {
    Ok(report(entry, &costs(entry, WARM_UP..ROUNDS)?))
}

/// What each way asks for memory in a layer call: all threads, and the one that computes. The least of some steps, since
/// others may ask for memory, too.
pub(crate) fn requests(rounds: Range<u64>) -> Result<[(f64, f64); 6]> {
    let costs = costs(ENTRIES[0], rounds)?;
    Ok(costs.map(|[short, long]| {
        let layer = |of: fn(&Cost) -> f64| {
            let least = |costs: &[Cost]| costs.iter().map(of).fold(f64::INFINITY, f64::min);
            (least(&long) - least(&short)) / f64::from(LAYERS[1] - LAYERS[0])
        };
        (layer(|cost| cost.requests), layer(|cost| cost.own_requests))
    }))
}

/// By way, then by model.
type Costs = [[Vec<Cost>; 2]; 6];

/// Measures these rounds, and as many before as their start says that don't count.
fn costs(entry: u64, rounds: Range<u64>) -> Result<Costs> {
    let longest = u64::from(LAYERS[1]) * 2 * entry * BLOCKS;
    let cluster = Cluster::start(2 * PLACES * longest + (64 << 20))?;
    let mut benches = Vec::new();
    for layers in LAYERS {
        benches.push(Bench::new(&cluster, layers, entry)?);
    }
    let mut costs = Costs::default();
    for round in 0..rounds.end {
        for (model, bench) in benches.iter_mut().enumerate() {
            let measured = bench.round(round)?;
            if round >= rounds.start {
                for (all, cost) in costs.iter_mut().zip(measured) {
                    all[model].push(cost);
                }
            }
        }
    }
    Ok(costs)
}

fn report(entry: u64, costs: &Costs) -> Report {
    let title = format!(
        "a layer call of {BLOCKS} blocks and 2 entries of {entry} bytes, medians of {} steps",
        ROUNDS - WARM_UP
    );
    let columns = [
        "",
        "us",
        "of transport",
        "cpu us",
        "of transport",
        "requests for memory",
        "of the computing thread",
        "starts and ends: cpu us",
        "requests for memory",
    ];
    let mut report = Report::new(title, &columns);
    let [few, many] = LAYERS.map(f64::from);
    let layer = |way: usize, of: fn(&Cost) -> f64| {
        let [short, long] = &costs[way];
        let middle = |costs: &[Cost]| median(costs.iter().map(of).collect());
        let layer = (middle(long) - middle(short)) / (many - few);
        (layer, middle(short) - layer * few)
    };
    for (way, name) in WAYS.into_iter().enumerate() {
        let transport = way / 3 * 3;
        let ratio = |of| rounded(layer(way, of).0 / layer(transport, of).0, 2);
        let (micros, _) = layer(way, |cost| cost.micros);
        let (cpu, cpu_besides) = layer(way, |cost| cost.cpu);
        let (requests, requests_besides) = layer(way, |cost| cost.requests);
        let (own, _) = layer(way, |cost| cost.own_requests);
        report.row(vec![
            name.into(),
            rounded(micros, 1),
            ratio(|cost| cost.micros),
            rounded(cpu, 1),
            ratio(|cost| cost.cpu),
            rounded(requests, 2),
            rounded(own, 2),
            rounded(cpu_besides, 0),
            rounded(requests_besides, 0),
        ]);
    }
    report
}

/// What a step took.
#[derive(Clone, Copy, Debug)]
struct Cost {
    micros: f64,
    /// Microseconds of all threads.
    cpu: f64,
    requests: f64,
    /// Of the thread that computes.
    own_requests: f64,
}

struct Reading {
    time: Instant,
    cpu: f64,
    requests: u64,
    own_requests: u64,
}

fn read() -> Reading {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    Reading {
        time: Instant::now(),
        cpu: cpu.tv_sec as f64 * 1e6 + cpu.tv_nsec as f64 / 1e3,
        requests: allocations::of_all(),
        own_requests: allocations::so_far(),
    }
}

/// What happens on the way from one to the other.
fn between(before: &Reading, after: &Reading) -> Cost {
    Cost {
        micros: (after.time - before.time).as_secs_f64() * 1e6,
        cpu: after.cpu - before.cpu,
        requests: (after.requests - before.requests) as f64,
        own_requests: (after.own_requests - before.own_requests) as f64,
    }
}

struct Bench {
    runtime: Runtime,
    store: StoreClient,
    worker: StoreWorker,
    cache: Cache,
    remote: (Engine, Memory),
    layers: u32,
    /// An event that has been reached: the engine's.
    done: Event,
    step: u64,
}

impl Bench {
    fn new(cluster: &Cluster, layers: u32, entry: u64) -> Result<Self> {
        let runtime = runtime(1)?;
        let store = cluster.client(&runtime)?;
        let cache = Cache::new(&store, layers, entry, BLOCKS)?;
        // A layer is one call: only calls that fill more than half of the limit are cut where they take long.
        let rows = NonZeroUsize::new(usize::try_from(4 * BLOCKS)?).context("there are blocks")?;
        let options = Options {
            decline_slow_loads: false,
            max_transfer_blocks: rows,
            ..Options::default()
        };
        let worker = cache.worker(&store, &runtime, options)?;
        let peer = Engine::start(EngineConfig::default())?;
        let shared = AllocateOptions {
            access: Access::RemoteReadWrite,
            generation_tags: true,
            ..AllocateOptions::default()
        };
        let remote = peer.allocate(PLACES * cache.memory.len(), shared)?;
        Ok(Self {
            runtime,
            store,
            worker,
            cache,
            remote: (peer, remote),
            layers,
            done: HostEvent::done(),
            step: 0,
        })
    }

    /// Every way once.
    fn round(&mut self, round: u64) -> Result<[Cost; 6]> {
        Ok([
            self.transport(Direction::Write, round)?,
            self.sessions_save(round)?,
            self.connector_save(round)?,
            self.transport(Direction::Read, round)?,
            self.sessions_load(round)?,
            self.connector_load(round)?,
        ])
    }

    fn cost(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Cost> {
        let before = read();
        work(self)?;
        Ok(between(&before, &read()))
    }

    /// As much is moved as by the others, to places that change as theirs do.
    fn transport(&mut self, direction: Direction, round: u64) -> Result<Cost> {
        let peer = Arc::new(self.remote.0.endpoint().clone());
        let region = self.remote.1.region();
        let start = round % PLACES * self.cache.memory.len();
        let room = usize::try_from(2 * BLOCKS)?;
        self.cost(|bench| {
            for layer in 0..bench.cache.layout.layer_count() {
                let mut pieces = Vec::with_capacity(room);
                for block in 0..BLOCKS {
                    for entry in 0..2 {
                        let (offset, len) = bench.cache.place(layer, entry, block)?;
                        pieces.push(Piece {
                            local: bench.cache.memory.slice(offset, len)?,
                            remote: RemoteSlice {
                                region: region.region,
                                capability: region.capability,
                                offset: start + offset,
                                len,
                                generation: Some(Generation(round + 1)),
                            },
                        });
                    }
                }
                let transfer = bench.store.engine().submit(Batch {
                    peer: Arc::clone(&peer),
                    direction,
                    pieces,
                    checksum: true,
                    deadline: None,
                });
                let ended = bench.runtime.block_on(poll_fn(|cx| {
                    let ended = transfer.poll_ended(cx);
                    ended.map(|ended| ended.pieces().all(|piece| piece.is_ok()))
                }));
                ensure!(ended, "a batch failed");
            }
            Ok(())
        })
    }

    fn ranges(&self, layer: usize, block: u64) -> impl Iterator<Item = layercake_store::Range> {
        let cache = &self.cache;
        (0..2).filter_map(move |entry| {
            let range = cache.layout.entry_range(layer, entry)?;
            let (offset, len) = cache.place(layer, entry, block).ok()?;
            Some(layercake_store::Range {
                offset: range.start(),
                local: cache.memory.slice(offset, len).ok()?,
            })
        })
    }

    fn keys(&self, round: u64) -> Result<Vec<ObjectKey>> {
        let keys = (0..BLOCKS).map(|block| {
            let text = format!("bench-{}@{round:032x}{block:032x}@0", self.layers);
            ObjectKey::new(&text).context("a short key")
        });
        keys.collect()
    }

    fn sessions_save(&mut self, round: u64) -> Result<Cost> {
        let keys = self.keys(round)?;
        let len = self.cache.layout.object_len();
        self.cost(|bench| {
            bench.runtime.block_on(async {
                let puts = keys.into_iter().map(|key| PutStart {
                    header_rows: 2 * bench.layers,
                    ..PutStart::new(key, len)
                });
                let config = ReplicateConfig::default();
                let puts = puts.collect();
                let started = bench
                    .store
                    .start_puts(puts, &config, Recency::default())
                    .await;
                let sessions = started.into_iter().collect::<Result<Vec<_>, _>>()?;
                for layer in 0..bench.cache.layout.layer_count() {
                    let writes = sessions.iter().zip(0..).map(|(session, block)| RangeWrite {
                        session,
                        ranges: bench.ranges(layer, block),
                    });
                    for result in bench.store.write_ranges(writes).await {
                        result?;
                    }
                }
                let ended = bench.store.end_puts(sessions).await;
                ensure!(ended.iter().all(Result::is_ok), "all commit");
                Ok(())
            })
        })
    }

    fn sessions_load(&mut self, round: u64) -> Result<Cost> {
        let keys = self.keys(round)?;
        self.cost(|bench| {
            bench.runtime.block_on(async {
                let started = bench.store.start_gets(&keys, GetOptions::default()).await;
                let sessions = started.into_iter().collect::<Result<Vec<_>, _>>()?;
                for layer in 0..bench.cache.layout.layer_count() {
                    let reads = sessions.iter().zip(0..).map(|(session, block)| RangeRead {
                        session,
                        ranges: bench.ranges(layer, block),
                    });
                    for result in bench.store.read_ranges(reads).await {
                        result?;
                    }
                }
                bench.store.end_gets(sessions).await;
                Ok(())
            })
        })
    }

    /// A request's step, and one without requests in which it ends.
    fn step(&mut self, name: &str, load: Option<Span>, save: Option<Span>) -> Result<Cost> {
        let request = RequestStep {
            request: name.into(),
            attempt: 0,
            epoch: 0,
            table: TableUpdate {
                begins: true,
                replace: true,
                blocks: (0..BLOCKS).collect(),
            },
            load,
            save,
            restore: 0,
        };
        self.step += 2;
        let step = StepMetadata {
            version: METADATA_VERSION,
            step: self.step,
            requests: vec![request],
            ..StepMetadata::default()
        };
        let ending = StepMetadata {
            step: self.step + 1,
            requests: Vec::new(),
            finished: vec![name.into()],
            ..step.clone()
        };
        self.cost(|bench| {
            let (worker, done) = (&mut bench.worker, &bench.done);
            worker.start_load(&step, Arc::clone(done))?;
            for layer in 0..bench.layers {
                let ready = worker.wait_for_layer(layer)?;
                ensure!(ready.invalid_blocks.is_empty(), "a load failed");
                worker.save_layer(layer, Arc::clone(done))?;
            }
            worker.wait_for_save(Arc::clone(done))?;
            worker.take_results();
            worker.clear_metadata();
            worker.start_load(&ending, Arc::clone(done))?;
            worker.wait_for_ends(PATIENCE);
            worker.wait_for_save(Arc::clone(done))?;
            ensure!(worker.take_results().finished.len() == 1, "the saves end");
            worker.clear_metadata();
            Ok(())
        })
    }

    fn span(&self, round: u64) -> Span {
        let place = u64::from(self.layers) << 32 | round;
        let hash =
            |block: u64| BlockHash::new(&[place.to_be_bytes(), block.to_be_bytes()].concat());
        Span {
            first: 0,
            hashes: (0..BLOCKS).map(hash).collect(),
        }
    }

    fn connector_save(&mut self, round: u64) -> Result<Cost> {
        let span = self.span(round);
        let cost = self.step(&format!("save-{round}"), None, Some(span))?;
        let saved = self.worker.stats().saved_blocks;
        ensure!(saved == (round + 1) * BLOCKS, "all blocks are saved");
        Ok(cost)
    }

    fn connector_load(&mut self, round: u64) -> Result<Cost> {
        let span = self.span(round);
        self.step(&format!("load-{round}"), Some(span), None)
    }
}
