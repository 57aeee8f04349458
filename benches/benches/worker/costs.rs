//! Processor time and requests for memory of a layer call: the connector beside the store's sessions and
//! the transport it stands on, in turns.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use layercake_benches::report::Report;
use layercake_benches::table::median;
use layercake_connector::contract::{
    BlockHash, HostEvent, METADATA_VERSION, RequestStep, Span, StepMetadata, TableUpdate,
    WorkerSide as _,
};
use layercake_connector::options::Options;
use layercake_connector::worker::StoreWorker;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::{GetOptions, Range, RangeRead, RangeWrite, StoreClient};
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Engine, EngineConfig, Memory, Piece, RemoteSlice,
};
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;

use crate::allocations;
use crate::setup::{Cache, Cluster, runtime};

const LAYERS: u32 = 8;
const BLOCKS: u64 = 64;
const ENTRY: u64 = 512;
const ROUNDS: u64 = 60;
/// Rounds before which nothing is counted.
const WARM_UP: u64 = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// Measures all in turns.
pub(crate) fn measure() -> Result<Report> {
    let cluster = Cluster::start(512 << 20)?;
    let mut bench = Bench::new(&cluster)?;
    let mut costs: [Vec<Cost>; 6] = Default::default();
    for round in 0..ROUNDS {
        let measured = [
            bench.transport(Direction::Write)?,
            bench.sessions_save(round)?,
            bench.connector_save(round)?,
            bench.transport(Direction::Read)?,
            bench.sessions_load(round)?,
            bench.connector_load(round)?,
        ];
        if round >= WARM_UP {
            for (all, cost) in costs.iter_mut().zip(measured) {
                all.push(cost);
            }
        }
    }
    Ok(report(&costs))
}

fn report(costs: &[Vec<Cost>; 6]) -> Report {
    let title = format!(
        "a layer call of {BLOCKS} blocks and 2 entries, medians of {} steps of {LAYERS} layers; starts and ends shared out",
        ROUNDS - WARM_UP
    );
    let columns = [
        "",
        "cpu µs",
        "of transport",
        "of sessions",
        "requests for memory",
        "of the computing thread",
    ];
    let mut report = Report::new(title, &columns);
    let middle = |row: usize, of: fn(&Cost) -> f64| {
        median(costs[row].iter().map(of).collect()) / f64::from(LAYERS)
    };
    let rounded = |value: f64| (value * 100.0).round() / 100.0;
    let names = [
        "transport, write",
        "sessions, save",
        "connector, save",
        "transport, read",
        "sessions, load",
        "connector, load",
    ];
    for (row, name) in names.into_iter().enumerate() {
        let first = row / 3 * 3;
        let cpu = |row| middle(row, |cost: &Cost| cost.cpu);
        let ratio = |to: usize| rounded(cpu(row) / cpu(to)).into();
        report.row(vec![
            name.into(),
            rounded(cpu(row)).into(),
            ratio(first),
            if row > first {
                ratio(first + 1)
            } else {
                serde_json::Value::Null
            },
            rounded(middle(row, |cost| cost.requests)).into(),
            rounded(middle(row, |cost| cost.own_requests)).into(),
        ]);
    }
    report
}

/// What a step took, of both threads.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Microseconds.
    cpu: f64,
    requests: f64,
    /// Of the thread that computes.
    own_requests: f64,
}

#[derive(Clone, Copy)]
struct Reading {
    micros: f64,
    requests: u64,
}

fn read() -> Reading {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Reading {
        micros: time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3,
        requests: allocations::so_far(),
    }
}

struct Bench {
    runtime: Runtime,
    store: StoreClient,
    worker: StoreWorker,
    cache: Cache,
    remote: (Engine, Memory),
    step: u64,
}

impl Bench {
    fn new(cluster: &Cluster) -> Result<Self> {
        let runtime = runtime(1)?;
        let store = cluster.client(&runtime)?;
        let cache = Cache::new(&store, LAYERS, ENTRY, BLOCKS)?;
        let options = Options {
            decline_slow_loads: false,
            ..Options::default()
        };
        let worker = cache.worker(&store, &runtime, options)?;
        let peer = Engine::start(EngineConfig::default())?;
        let shared = AllocateOptions {
            access: Access::RemoteReadWrite,
            ..AllocateOptions::default()
        };
        let remote = peer.allocate(cache.memory.len(), shared)?;
        Ok(Self {
            runtime,
            store,
            worker,
            cache,
            remote: (peer, remote),
            step: 0,
        })
    }

    fn cost(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Cost> {
        let both = |bench: &Self| -> Result<(Reading, Reading)> {
            let task = bench.runtime.spawn(async { read() });
            Ok((bench.runtime.block_on(task)?, read()))
        };
        let before = both(self)?;
        work(self)?;
        let own = read();
        let after = both(self)?;
        let own_requests = (own.requests - before.1.requests) as f64;
        Ok(Cost {
            cpu: after.0.micros - before.0.micros + own.micros - before.1.micros,
            requests: (after.0.requests - before.0.requests) as f64 + own_requests,
            own_requests,
        })
    }

    fn transport(&mut self, direction: Direction) -> Result<Cost> {
        self.cost(|bench| {
            let peer = Arc::new(bench.remote.0.endpoint().clone());
            let region = bench.remote.1.region();
            for layer in 0..bench.cache.layout.layer_count() {
                let mut pieces = Vec::new();
                for block in 0..BLOCKS {
                    for entry in 0..2 {
                        let (offset, len) = bench.cache.place(layer, entry, block)?;
                        pieces.push(Piece {
                            local: bench.cache.memory.slice(offset, len)?,
                            remote: RemoteSlice {
                                region: region.region,
                                capability: region.capability,
                                offset,
                                len,
                                generation: None,
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
                let outcome = bench.runtime.block_on(transfer);
                ensure!(outcome.is_ok(), "a batch failed");
            }
            Ok(())
        })
    }

    fn ranges(&self, layer: usize, block: u64) -> Result<Vec<Range>> {
        let cache = &self.cache;
        let entries = (0..2).map(|entry| {
            let range = cache
                .layout
                .entry_range(layer, entry)
                .context("it has two")?;
            let (offset, len) = cache.place(layer, entry, block)?;
            Ok(Range {
                offset: range.start(),
                local: cache.memory.slice(offset, len)?,
            })
        });
        entries.collect()
    }

    fn keys(round: u64) -> Result<Vec<ObjectKey>> {
        let keys = (0..BLOCKS).map(|block| {
            let text = format!("bench@{round:032x}{block:032x}@0");
            ObjectKey::new(&text).context("a short key")
        });
        keys.collect()
    }

    fn sessions_save(&mut self, round: u64) -> Result<Cost> {
        let keys = Self::keys(round)?;
        let len = self.cache.layout.object_len();
        self.cost(|bench| {
            bench.runtime.block_on(async {
                let puts = keys.into_iter().map(|key| PutStart {
                    header_rows: 2 * LAYERS,
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
                    let mut writes = Vec::with_capacity(sessions.len());
                    for (session, block) in sessions.iter().zip(0..) {
                        let ranges = bench.ranges(layer, block)?;
                        writes.push(RangeWrite { session, ranges });
                    }
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
        let keys = Self::keys(round)?;
        self.cost(|bench| {
            bench.runtime.block_on(async {
                let started = bench.store.start_gets(&keys, GetOptions::default()).await;
                let sessions = started.into_iter().collect::<Result<Vec<_>, _>>()?;
                for layer in 0..bench.cache.layout.layer_count() {
                    let mut reads = Vec::with_capacity(sessions.len());
                    for (session, block) in sessions.iter().zip(0..) {
                        let ranges = bench.ranges(layer, block)?;
                        reads.push(RangeRead { session, ranges });
                    }
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
            let worker = &mut bench.worker;
            worker.start_load(&step, HostEvent::done())?;
            for layer in 0..LAYERS {
                let ready = worker.wait_for_layer(layer)?;
                ensure!(ready.invalid_blocks.is_empty(), "a load failed");
                worker.save_layer(layer, HostEvent::done())?;
            }
            worker.wait_for_save(HostEvent::done())?;
            worker.take_results();
            worker.clear_metadata();
            worker.start_load(&ending, HostEvent::done())?;
            worker.wait_for_ends(PATIENCE);
            worker.wait_for_save(HostEvent::done())?;
            ensure!(worker.take_results().finished.len() == 1, "the saves end");
            worker.clear_metadata();
            Ok(())
        })
    }

    fn span(round: u64) -> Span {
        let hash =
            |block: u64| BlockHash::new(&[round.to_be_bytes(), block.to_be_bytes()].concat());
        Span {
            first: 0,
            hashes: (0..BLOCKS).map(hash).collect(),
        }
    }

    fn connector_save(&mut self, round: u64) -> Result<Cost> {
        let cost = self.step(&format!("save-{round}"), None, Some(Self::span(round)))?;
        let saved = self.worker.stats().saved_blocks;
        ensure!(saved == (round + 1) * BLOCKS, "all blocks are saved");
        Ok(cost)
    }

    fn connector_load(&mut self, round: u64) -> Result<Cost> {
        self.step(&format!("load-{round}"), Some(Self::span(round)), None)
    }
}
