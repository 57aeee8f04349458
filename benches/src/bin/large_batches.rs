//! The extremes of a batch on every transport: 100,000 pieces of 64 bytes, and 3 pieces of 1 GiB.
//!
//! Bytes go to the peer's memory and back, and are compared in full. Needs about 12 GiB of memory.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use layercake_benches::driver::{Driver, Safety};
use layercake_benches::limits::scatter;
use layercake_benches::peer::{Peer, serve_if_child};
use layercake_transport::{Direction, TransportKind};

fn main() -> Result<()> {
    serve_if_child();
    for kind in [TransportKind::Local, TransportKind::Shm, TransportKind::Tcp] {
        round_trip(kind, 100_000, 64)?;
        round_trip(kind, 3, 1 << 30)?;
    }
    Ok(())
}

fn round_trip(kind: TransportKind, count: usize, len: usize) -> Result<()> {
    let bytes = (count * len) as u64;
    let peer = Arc::new(Peer::start(bytes)?);
    let driver = Driver::start(kind, &peer)?;
    let places = scatter(count, len);
    driver.fill(1)?;
    let start = Instant::now();
    driver.run(Direction::Write, &places, len as u64, Safety::ON)?;
    let written = start.elapsed();
    driver.fill(2)?;
    let start = Instant::now();
    driver.run(Direction::Read, &places, len as u64, Safety::ON)?;
    let read = start.elapsed();
    driver.check(1, bytes)?;
    println!(
        "{kind}: {count} pieces of {len} bytes, written in {written:?}, read in {read:?}, equal"
    );
    Ok(())
}
