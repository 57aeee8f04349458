//! Every transport beside the machine's own limit, in one run, and what safety costs.
//!
//! Words after `--` choose parts: `single` and `many` pieces in a batch, `safety`, `dead-peer`.

use std::sync::Arc;

use anyhow::Result;
use layercake_benches::driver::Driver;
use layercake_benches::peer::{Peer, serve_if_child};
use layercake_transport::TransportKind;

mod dead_peer;
mod safety;
mod shape;
mod throughput;

const MEMORY: u64 = 256 << 20;
const KINDS: [TransportKind; 3] = [TransportKind::Local, TransportKind::Shm, TransportKind::Tcp];
const PARTS: [&str; 4] = ["single", "many", "safety", "dead-peer"];

/// How often all memory is made anew. Which pages a process is given makes a difference of a quarter and
/// stays the same for as long as it has them, so what is measured on one set says little.
const PLACEMENTS: usize = 5;

/// A peer, and an engine for each transport to it.
struct Machine {
    peer: Arc<Peer>,
    drivers: Vec<Driver>,
}

impl Machine {
    fn start() -> Result<Self> {
        let peer = Arc::new(Peer::start(MEMORY)?);
        let drivers = KINDS.iter().map(|kind| Driver::start(*kind, &peer));
        let drivers = drivers.collect::<Result<_>>()?;
        Ok(Self { peer, drivers })
    }
}

fn main() -> Result<()> {
    serve_if_child();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` only wants to know that it starts.
    if arguments.iter().any(|argument| argument == "--test") {
        return Ok(());
    }
    let named = |part: &&str| arguments.iter().any(|argument| argument == *part);
    let chosen: Vec<&str> = PARTS.into_iter().filter(named).collect();
    let wanted = |part| chosen.is_empty() || chosen.contains(&part);
    let shapes: Vec<bool> = [("single", false), ("many", true)]
        .into_iter()
        .filter_map(|(part, many)| wanted(part).then_some(many))
        .collect();
    if !shapes.is_empty() {
        throughput::run(&shapes)?;
    }
    if wanted("safety") {
        safety::run()?;
    }
    if wanted("dead-peer") {
        dead_peer::run(&Machine::start()?)?;
    }
    Ok(())
}

fn as_usize(value: u64) -> usize {
    usize::try_from(value).expect("benches run where 256 MiB can be addressed")
}

/// The numbers below `count`, in an order that depends on `seed`. Whoever is measured finds caches
/// and sleeping threads as the one before left them, so nobody may always come after the same one.
fn shuffled(count: usize, seed: usize) -> Vec<usize> {
    let mut state = seed as u64 + 1;
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, as_usize(state >> 33) % (last + 1));
    }
    order
}

fn number(value: f64) -> String {
    format!("{value:.2}")
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}
