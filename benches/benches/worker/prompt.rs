//! A prompt of 100,000 tokens: how many sessions are open at once while it is loaded, and how many objects it makes.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use layercake_benches::report::{Report, rounded};
use layercake_connector::contract::{Event, HostEvent, WorkerSide as _};
use layercake_connector::options::Options;
use layercake_connector::worker::{LayerTransfer, StoreWorker, TransferObserver};
use layercake_store::StoreClient;

use crate::setup::{self, Cache, Cluster, PATIENCE, runtime};

const LAYERS: u32 = 32;
/// Of 16 tokens each.
const BLOCKS: u64 = 100_000 / 16;
const ENTRY: u64 = 256;
const RANKS: [u32; 3] = [1, 2, 4];

/// Sessions with the window and without.
pub(crate) fn sessions() -> Result<Report> {
    let cluster = Cluster::start(1 << 30)?;
    let runtime = runtime(2)?;
    let columns = ["session_window_blocks", "open at once", "ms to load"];
    let title = format!("get sessions for a prompt of {BLOCKS} blocks and {LAYERS} layers");
    let mut report = Report::new(title, &columns);
    let default = Options::default().session_window_blocks;
    let without = NonZeroUsize::new(usize::try_from(BLOCKS)?).unwrap_or(default);
    for window in [default, without] {
        let store = cluster.client(&runtime)?;
        let cache = Cache::new(&store, LAYERS, ENTRY, BLOCKS)?;
        let options = Options {
            session_window_blocks: window,
            save_stall: PATIENCE,
            decline_slow_loads: false,
            ..Options::default()
        };
        let mut worker = cache.worker(&store, &runtime, options)?;
        if cluster.monitor.status().objects == 0 {
            step(&mut worker, 1, false)?;
        }
        let most = Arc::new(MostOpen(store, AtomicU64::new(0)));
        worker.observe(Arc::clone(&most) as Arc<dyn TransferObserver>);
        let took = step(&mut worker, 3, true)?;
        report.row(vec![
            window.get().into(),
            most.1.load(Ordering::Relaxed).into(),
            rounded(took.as_secs_f64() * 1e3, 0),
        ]);
    }
    Ok(report)
}

/// Looks at each transfer how many sessions are open.
#[derive(Debug)]
struct MostOpen(StoreClient, AtomicU64);

impl TransferObserver for MostOpen {
    fn transferred(&self, _transfer: &LayerTransfer) {
        self.1
            .fetch_max(self.0.stats().open_gets, Ordering::Relaxed);
    }
}

/// Objects that the master counts, for one and for several ranks.
pub(crate) fn objects() -> Result<Report> {
    let columns = [
        "ranks",
        "objects",
        "blocks x ranks",
        "blocks x layers x ranks",
    ];
    let title = format!("objects of a prompt of {BLOCKS} blocks and {LAYERS} layers at the master");
    let mut report = Report::new(title, &columns);
    for ranks in RANKS {
        let cluster = Cluster::start(1 << 30)?;
        let runtime = runtime(2)?;
        let store = cluster.client(&runtime)?;
        let cache = Cache::new(&store, LAYERS, ENTRY, BLOCKS)?;
        for rank in 0..ranks {
            let options = Options {
                save_stall: PATIENCE,
                ..Options::default()
            };
            let mut worker = cache.worker_of((rank, ranks), &store, &runtime, options)?;
            step(&mut worker, 1, false)?;
        }
        let all = BLOCKS * u64::from(ranks);
        report.row(vec![
            ranks.into(),
            cluster.monitor.status().objects.into(),
            all.into(),
            (all * u64::from(LAYERS)).into(),
        ]);
    }
    Ok(report)
}

/// Saves or loads the prompt in a step, and ends the request in the next. How long the first took.
fn step(worker: &mut StoreWorker, number: u64, load: bool) -> Result<Duration> {
    let [now, ending] = setup::steps(number, BLOCKS, load);
    let done: Event = HostEvent::done();
    let begun = Instant::now();
    worker.start_load(&now, Arc::clone(&done))?;
    for layer in 0..LAYERS {
        let ready = worker.wait_for_layer(layer)?;
        ensure!(ready.invalid_blocks.is_empty(), "a load failed");
        worker.save_layer(layer, Arc::clone(&done))?;
    }
    worker.wait_for_save(done)?;
    let took = begun.elapsed();
    setup::end(worker, &ending)?;
    Ok(took)
}
