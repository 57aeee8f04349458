//! Every transport beside the machine's own limit, in turns in one run, and what safety costs.
//!
//! Local and shm stand beside a plain copy of the same scattered pieces with as many threads. Batches of
//! many pieces over tcp stand beside raw loopback sockets with as many streams and writes of the same
//! size, single pieces beside a raw socket that sends one and waits for its answer. A round measures each
//! once; the table has the medians.
//!
//! Raw sockets are measured twice: as the system makes them, and without the pacing that some congestion
//! controls impose, which is the more they could do.
//!
//! Words after `--` choose parts: `single` and `many` pieces in a batch, `safety`, `dead-peer`.

use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use layercake_benches::driver::{Driver, Safety};
use layercake_benches::limits::{Pace, RawSockets, Scatter, copy_scattered, scatter};
use layercake_benches::peer::{Peer, serve_if_child};
use layercake_benches::table::{Table, gigabytes_per_second, median};
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::ids::EngineId;
use layercake_transport::{Direction, EngineConfig, TransportKind};

const MEMORY: u64 = 256 << 20;
const ROUNDS: usize = 7;
const KINDS: [TransportKind; 3] = [TransportKind::Local, TransportKind::Shm, TransportKind::Tcp];
const PARTS: [&str; 4] = ["single", "many", "safety", "dead-peer"];
const SIZES: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];

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
    let peer = Arc::new(Peer::start(MEMORY)?);
    let drivers = KINDS
        .iter()
        .map(|kind| Driver::start(*kind, &peer))
        .collect::<Result<Vec<_>>>()?;
    let shapes: Vec<bool> = [("single", false), ("many", true)]
        .into_iter()
        .filter_map(|(part, many)| wanted(part).then_some(many))
        .collect();
    if !shapes.is_empty() {
        throughput(&drivers, &shapes)?;
    }
    if wanted("safety") {
        safety(&drivers)?;
    }
    if wanted("dead-peer") {
        dead_peer(&drivers[2], &peer)?;
    }
    Ok(())
}

/// The calls of one measured round: all pieces in one batch, or a batch for each.
struct Shape {
    len: u64,
    places: Vec<Scatter>,
    many: bool,
}

impl Shape {
    fn new(len: u64, many: bool) -> Self {
        let count = (MEMORY / len).min(1024);
        Self {
            len,
            places: scatter(as_usize(count), as_usize(len)),
            many,
        }
    }

    fn bytes(&self) -> u64 {
        self.len * self.places.len() as u64
    }

    fn calls(&self) -> std::slice::Chunks<'_, Scatter> {
        self.places
            .chunks(if self.many { self.places.len() } else { 1 })
    }

    /// What of all is sent on each raw stream, and answered.
    fn answered(&self, streams: usize) -> u64 {
        if self.many {
            self.bytes() / streams as u64
        } else {
            self.len
        }
    }

    fn sockets(&self, pace: Pace) -> std::io::Result<RawSockets> {
        let streams = streams();
        let chunk = as_usize(self.len.min(1 << 20));
        RawSockets::connect(streams, chunk, self.answered(streams), pace)
    }

    fn send(&self, raw: &mut RawSockets, data: &[u8]) -> std::io::Result<()> {
        if self.many {
            raw.send(data, self.answered(streams())).map(drop)
        } else {
            raw.round_trips(data, &self.places, as_usize(self.len))
        }
    }

    fn name(&self) -> String {
        let size = match self.len >> 20 {
            0 => format!("{} KiB", self.len >> 10),
            mebibytes => format!("{mebibytes} MiB"),
        };
        format!("{} x {size}", if self.many { self.places.len() } else { 1 })
    }
}

/// Connections of a tcp transport to its peer.
fn streams() -> usize {
    usize::from(EngineConfig::default().lanes.get())
}

fn as_usize(value: u64) -> usize {
    usize::try_from(value).expect("benches run where 256 MiB can be addressed")
}

fn throughput(drivers: &[Driver], shapes: &[bool]) -> Result<()> {
    let config = EngineConfig::default();
    let threads = usize::from(config.copy_threads.get()).max(1);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let streams = streams();
    println!(
        "GB/s, medians of {ROUNDS} rounds; {cores} cores, {threads} copy threads, {streams} streams"
    );

    let mut table = Table::new(&[
        "pieces",
        "copy",
        "local w",
        "local r",
        "shm w",
        "shm r",
        "socket",
        "unpaced",
        "tcp w",
        "tcp r",
        "local/copy",
        "shm/copy",
        "tcp/socket",
        "tcp/unpaced",
    ]);
    let source = vec![7; as_usize(MEMORY)];
    let mut target = vec![0; as_usize(MEMORY)];
    for len in SIZES {
        for many in shapes {
            let shape = Shape::new(len, *many);
            let mut copy = Vec::new();
            let mut sockets = [Vec::new(), Vec::new()];
            let mut moved = vec![Vec::new(); drivers.len() * 2];
            let mut raw = [shape.sockets(Pace::System)?, shape.sockets(Pace::None)?];
            for _ in 0..ROUNDS {
                // The caller of a transfer takes part in copying, beside the copy threads.
                let workers = if *many { (threads + 1).min(cores) } else { 1 };
                copy.push(gigabytes_per_second(shape.bytes(), || {
                    for places in shape.calls() {
                        copy_scattered(&source, &mut target, places, as_usize(len), workers);
                    }
                }));
                for (raw, speeds) in raw.iter_mut().zip(&mut sockets) {
                    let mut sent = Ok(());
                    speeds.push(gigabytes_per_second(shape.bytes(), || {
                        sent = shape.send(raw, &source);
                    }));
                    sent?;
                }
                for (index, driver) in drivers.iter().enumerate() {
                    for (side, direction) in [Direction::Write, Direction::Read].iter().enumerate()
                    {
                        moved[index * 2 + side].push(measure(
                            driver,
                            *direction,
                            &shape,
                            Safety::ON,
                        )?);
                    }
                }
            }
            let (copy, sockets) = (median(copy), sockets.map(median));
            let moved: Vec<f64> = moved.into_iter().map(median).collect();
            let mut cells = vec![shape.name(), number(copy)];
            cells.extend(moved[..4].iter().map(|value| number(*value)));
            cells.extend(sockets.map(number));
            cells.extend(moved[4..].iter().map(|value| number(*value)));
            cells.push(percent(moved[0].min(moved[1]) / copy));
            cells.push(percent(moved[2].min(moved[3]) / copy));
            cells.extend(sockets.map(|socket| percent(moved[4].min(moved[5]) / socket)));
            table.row(cells);
        }
    }
    print!("{}", table.render());
    Ok(())
}

fn measure(driver: &Driver, direction: Direction, shape: &Shape, safety: Safety) -> Result<f64> {
    let batches = shape
        .calls()
        .map(|places| driver.batch(direction, places, shape.len, safety))
        .collect::<Result<Vec<_>>>()?;
    let mut result = Ok(());
    let speed = gigabytes_per_second(shape.bytes(), || {
        result = batches
            .into_iter()
            .try_for_each(|batch| driver.finish(batch));
    });
    result.map(|()| speed)
}

fn safety(drivers: &[Driver]) -> Result<()> {
    println!(
        "\ncost of safety at 1024 x 64 KiB (time with, over time without, both directions together)"
    );
    let mut table = Table::new(&["transport", "generation checks", "checksums"]);
    let shape = Shape::new(64 << 10, true);
    for (kind, driver) in KINDS.iter().zip(drivers) {
        let generation = Safety {
            generation: true,
            ..Safety::OFF
        };
        let mut ratios = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS * 2 {
            for (safety, ratios) in [generation, Safety::ON].into_iter().zip(&mut ratios) {
                let base = if safety == Safety::ON {
                    generation
                } else {
                    Safety::OFF
                };
                let mut with = 0.0;
                let mut without = 0.0;
                for direction in Direction::ALL {
                    without += 1.0 / measure(driver, direction, &shape, base)?;
                    with += 1.0 / measure(driver, direction, &shape, safety)?;
                }
                ratios.push(with / without - 1.0);
            }
        }
        let [generation, checksum] = ratios.map(median);
        table.row(vec![
            kind.to_string(),
            percent(generation),
            percent(checksum),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

/// Small writes to a healthy peer over TCP, alone and while as many are asked for of a peer that takes
/// connections and never answers. All on one processor: see [`Peer::share_one_processor`].
fn dead_peer(driver: &Driver, healthy: &Arc<Peer>) -> Result<()> {
    const WRITES: usize = 3000;
    healthy.share_one_processor()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let dead = Arc::new(Endpoint {
        engine: EngineId::draw(),
        tcp: listener.local_addr()?.to_string(),
        ..Endpoint::clone(&healthy.endpoint)
    });
    let place = scatter(1, 4096);
    let mut medians = [Vec::new(), Vec::new()];
    let mut tails = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for beside in [false, true] {
            let mut times = Vec::with_capacity(WRITES);
            let mut pending = Vec::new();
            for write in 0..WRITES {
                if beside && write % 10 == 0 {
                    pending.push(driver.start_write_to(&dead)?);
                }
                let start = Instant::now();
                driver.run(Direction::Write, &place, 4096, Safety::ON)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            for transfer in pending {
                let outcome = transfer.wait();
                anyhow::ensure!(!outcome.is_ok(), "a peer that never answers took a write");
            }
            times.sort_by(f64::total_cmp);
            medians[usize::from(beside)].push(times[WRITES / 2]);
            tails[usize::from(beside)].push(times[WRITES * 99 / 100]);
        }
    }
    println!("\n4 KiB writes over tcp, microseconds: alone, and beside a peer that never answers");
    let mut table = Table::new(&["", "alone", "beside", "ratio"]);
    for (name, [alone, beside]) in [("median", medians), ("p99", tails)] {
        let (alone, beside) = (median(alone), median(beside));
        table.row(vec![
            name.to_owned(),
            number(alone),
            number(beside),
            number(beside / alone),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

fn number(value: f64) -> String {
    format!("{value:.2}")
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}
