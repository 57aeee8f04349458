//! Latency and throughput of each transport between two processes, as criterion sees them.
//!
//! The ratios to the machine's limits are in the bench `ratios`, which measures both in turns.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput};
use layercake_benches::driver::{Driver, Safety};
use layercake_benches::limits::scatter;
use layercake_benches::peer::{Peer, serve_if_child};
use layercake_transport::{Direction, TransportKind};

const MEMORY: u64 = 64 << 20;

fn main() -> anyhow::Result<()> {
    serve_if_child();
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    let peer = Arc::new(Peer::start(MEMORY)?);
    for kind in [TransportKind::Local, TransportKind::Shm, TransportKind::Tcp] {
        let driver = Driver::start(kind, &peer)?;
        small(&mut criterion, &driver, kind);
        large(&mut criterion, &driver, kind);
    }
    criterion.final_summary();
    Ok(())
}

fn small(criterion: &mut Criterion, driver: &Driver, kind: TransportKind) {
    let mut group = criterion.benchmark_group(format!("{kind}/4 KiB"));
    let place = scatter(1, 4096);
    for direction in Direction::ALL {
        group.bench_function(direction.name(), |bencher| {
            bencher.iter(|| {
                driver
                    .run(direction, black_box(&place), 4096, Safety::ON)
                    .expect("the peer is there");
            });
        });
    }
    group.finish();
}

fn large(criterion: &mut Criterion, driver: &Driver, kind: TransportKind) {
    let len = 64 << 10;
    let places = scatter(256, len);
    let mut group = criterion.benchmark_group(format!("{kind}/256 x 64 KiB"));
    group.throughput(Throughput::Bytes(256 * len as u64));
    for direction in Direction::ALL {
        group.bench_function(direction.name(), |bencher| {
            bencher.iter(|| {
                driver
                    .run(direction, black_box(&places), len as u64, Safety::ON)
                    .expect("the peer is there");
            });
        });
    }
    group.finish();
}
