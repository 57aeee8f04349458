//! A step that loads a prompt and computes one token, layer by layer and in whole-object mode, in turns.
//!
//! Computing a layer takes a fixed time in which the thread sleeps, as it would wait for a device.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use layercake_benches::report::Report;
use layercake_benches::table::median;
use layercake_connector::contract::{HostEvent, WorkerSide as _};
use layercake_connector::options::Options;
use layercake_connector::worker::StoreWorker;

use crate::setup::{self, Cache, Cluster, runtime};

const LAYERS: u32 = 32;
const BLOCKS: u64 = 64;
const ENTRY: u64 = 32 << 10;
const ROUNDS: usize = 9;
/// Times that a layer takes to compute.
const COMPUTE: [Duration; 3] = [
    Duration::from_micros(500),
    Duration::from_millis(2),
    Duration::from_millis(6),
];

/// Measures both modes in turns.
pub(crate) fn measure() -> Result<Report> {
    let bytes = u64::from(LAYERS) * 2 * ENTRY * BLOCKS;
    let cluster = Cluster::start(2 * bytes + (64 << 20))?;
    let runtime = runtime(2)?;
    let store = cluster.client(&runtime)?;
    let cache = Cache::new(&store, LAYERS, ENTRY, BLOCKS)?;
    let modes = [true, false].map(|layerwise| Options {
        layerwise,
        decline_slow_loads: false,
        ..Options::default()
    });
    let mut workers = Vec::new();
    for options in modes {
        workers.push((cache.worker(&store, &runtime, options)?, 0));
    }
    let (worker, steps) = &mut workers[0];
    step(worker, steps, false, Duration::ZERO)?;
    let columns = [
        "a layer computes for",
        "layerwise, ms",
        "waited",
        "prompts/s",
        "whole objects, ms",
        "waited",
        "prompts/s",
        "layerwise of whole",
        "waited",
    ];
    let title = format!(
        "a step that loads {BLOCKS} blocks of {LAYERS} layers, {} MiB in all; medians of {ROUNDS}",
        bytes >> 20
    );
    let mut report = Report::new(title, &columns);
    let rounded = |value: f64| (value * 100.0).round() / 100.0;
    for compute in COMPUTE {
        let mut took = [Vec::new(), Vec::new()];
        let mut waited = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (mode, (worker, steps)) in workers.iter_mut().enumerate() {
                let (all, exposed) = step(worker, steps, true, compute)?;
                took[mode].push(all);
                waited[mode].push(exposed);
            }
        }
        let computing = compute.as_secs_f64() * 1e3;
        let ([layerwise, whole], [little, much]) = (took.map(median), waited.map(median));
        report.row(vec![
            format!("{computing} ms").into(),
            rounded(layerwise).into(),
            rounded(little).into(),
            rounded(1e3 / layerwise).into(),
            rounded(whole).into(),
            rounded(much).into(),
            rounded(1e3 / whole).into(),
            rounded(layerwise / whole).into(),
            rounded(little / much).into(),
        ]);
    }
    Ok(report)
}

/// Saves or loads the prompt in a step, and ends the request in another. The milliseconds of the first, and
/// those among them in which layers were waited for: however long the machine oversleeps, these are the load's.
fn step(
    worker: &mut StoreWorker,
    steps: &mut u64,
    load: bool,
    compute: Duration,
) -> Result<(f64, f64)> {
    *steps += 2;
    let [now, ending] = setup::steps(*steps, BLOCKS, load);
    let begun = Instant::now();
    let mut waited = Duration::ZERO;
    worker.start_load(&now, HostEvent::done())?;
    for layer in 0..LAYERS {
        let waiting = Instant::now();
        let ready = worker.wait_for_layer(layer)?;
        waited += waiting.elapsed();
        ensure!(ready.invalid_blocks.is_empty(), "a load failed");
        simulate(compute);
        worker.save_layer(layer, HostEvent::done())?;
    }
    let took = begun.elapsed();
    worker.wait_for_save(HostEvent::done())?;
    setup::end(worker, &ending)?;
    Ok((took.as_secs_f64() * 1e3, waited.as_secs_f64() * 1e3))
}

#[expect(
    clippy::disallowed_methods,
    reason = "simulated computation waits for nothing but time"
)]
fn simulate(compute: Duration) {
    thread::sleep(compute);
}
