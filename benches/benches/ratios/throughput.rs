//! Every transport beside the machine's own limit.
//!
//! Local and shm stand beside a plain copy of the same scattered pieces, in the same direction, with as
//! many threads. Batches of many pieces over tcp stand beside raw loopback sockets with as many streams
//! and writes of the same size, single pieces beside a raw socket that sends one and waits for its answer.
//!
//! Raw sockets are measured twice: as the system makes them, and without the pacing that some congestion
//! controls impose, which is the more they could do.
//!
//! Of copies and sockets only the work itself is timed: their threads are awake before the clock starts. Copies are
//! measured a second time, *woken*: by threads that sleep until they are wanted, as those of a transfer do.

use std::hint::black_box;
use std::num::NonZero;

use anyhow::Result;
use layercake_benches::driver::Safety;
use layercake_benches::limits::{Pace, RawSockets, at_once};
use layercake_benches::table::{Table, gigabytes_per_second, median};
use layercake_transport::Direction;

use crate::shape::{Shape, copy_threads, streams};
use crate::{MEMORY, Machine, PLACEMENTS, as_usize, number, percent, shuffled};

const SIZES: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// More than the caches of a machine that this is measured on.
const SWEEP: usize = 128 << 20;

/// Rounds on the same memory, in each of which everything is measured once.
const ROUNDS: usize = 3;

/// Who is measured, in the order of the table's columns. Drivers are in the order of `KINDS`.
const MEASURED: [(&str, Measured); 12] = [
    ("copy w", Measured::Copy(Direction::Write)),
    ("copy r", Measured::Copy(Direction::Read)),
    ("woken w", Measured::WokenCopy(Direction::Write)),
    ("woken r", Measured::WokenCopy(Direction::Read)),
    ("local w", Measured::Driver(0, Direction::Write)),
    ("local r", Measured::Driver(0, Direction::Read)),
    ("shm w", Measured::Driver(1, Direction::Write)),
    ("shm r", Measured::Driver(1, Direction::Read)),
    ("socket", Measured::Socket(0)),
    ("unpaced", Measured::Socket(1)),
    ("tcp w", Measured::Driver(2, Direction::Write)),
    ("tcp r", Measured::Driver(2, Direction::Read)),
];

/// The ratios: of which columns, and beside which, the lower one of both.
const RATIOS: [(&str, [(usize, usize); 2]); 6] = [
    ("local/copy", [(4, 0), (5, 1)]),
    ("local/woken", [(4, 2), (5, 3)]),
    ("shm/copy", [(6, 0), (7, 1)]),
    ("shm/woken", [(6, 2), (7, 3)]),
    ("tcp/socket", [(10, 8), (11, 8)]),
    ("tcp/unpaced", [(10, 9), (11, 9)]),
];

#[derive(Clone, Copy)]
enum Measured {
    Copy(Direction),
    WokenCopy(Direction),
    Socket(usize),
    Driver(usize, Direction),
}

/// The memory of plain copies, and the engines.
struct Place {
    machine: Machine,
    source: Vec<u8>,
    target: Vec<u8>,
    neutral: Vec<u8>,
}

impl Place {
    fn new() -> Result<Self> {
        Ok(Self {
            machine: Machine::start()?,
            source: vec![7; as_usize(MEMORY)],
            // Written once, so that its pages are there.
            target: vec![1; as_usize(MEMORY)],
            neutral: vec![1; SWEEP],
        })
    }

    /// GB/s.
    fn measure(&mut self, what: Measured, shape: &Shape, raw: &mut [RawSockets; 2]) -> Result<f64> {
        let time = match what {
            Measured::Copy(direction) => shape.copy(&self.source, &mut self.target, direction),
            Measured::WokenCopy(direction) => {
                let Self {
                    source,
                    target,
                    neutral,
                    ..
                } = self;
                shape.copy_woken(source, target, direction, || sweep(neutral))
            }
            Measured::Socket(pace) => shape.send(&mut raw[pace], &self.source)?,
            Measured::Driver(driver, direction) => {
                return shape.measure(&self.machine.drivers[driver], direction, Safety::ON);
            }
        };
        Ok(gigabytes_per_second(shape.bytes(), time))
    }
}

/// Has all processors fill their caches with what is nobody's, so that everybody's bytes come from memory, also
/// if all of a shape would fit there, and finds the processors awake.
fn sweep(neutral: &[u8]) {
    const LINE: usize = 64;
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let works = (0..cores).map(|_| {
        || {
            let lines = neutral.iter().step_by(LINE);
            black_box(lines.map(|byte| u64::from(*byte)).sum::<u64>());
        }
    });
    at_once(works.collect());
}

/// Measures batches of many pieces, where `shapes` says so, and single ones, where it says the opposite.
pub(crate) fn run(shapes: &[bool]) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    println!(
        "GB/s, medians of {ROUNDS} rounds on each of {PLACEMENTS} sets of memory; {cores} cores, {} copy threads, {} streams",
        copy_threads(),
        streams()
    );
    let shapes: Vec<Shape> = SIZES
        .iter()
        .flat_map(|len| shapes.iter().map(|many| Shape::new(*len, *many)))
        .collect();
    let mut speeds = vec![vec![Vec::new(); MEASURED.len()]; shapes.len()];
    for placement in 0..PLACEMENTS {
        let mut place = Place::new()?;
        for (shape, speeds) in shapes.iter().zip(&mut speeds) {
            let mut raw = [shape.sockets(Pace::System)?, shape.sockets(Pace::None)?];
            for raw in &mut raw {
                shape.warm(raw, &place.source)?;
            }
            for round in 0..ROUNDS {
                for at in shuffled(MEASURED.len(), placement * ROUNDS + round) {
                    let (_, what) = MEASURED[at];
                    sweep(&place.neutral);
                    speeds[at].push(place.measure(what, shape, &mut raw)?);
                }
            }
        }
    }

    let names = MEASURED.iter().map(|(name, _)| *name);
    let columns: Vec<&str> = std::iter::once("pieces")
        .chain(names)
        .chain(RATIOS.iter().map(|(name, _)| *name))
        .collect();
    let mut table = Table::new(&columns);
    for (shape, speeds) in shapes.iter().zip(speeds) {
        let speeds: Vec<f64> = speeds.into_iter().map(median).collect();
        let mut cells = vec![shape.name()];
        cells.extend(speeds.iter().map(|speed| number(*speed)));
        for (_, beside) in RATIOS {
            let [one, other] = beside.map(|(of, beside)| speeds[of] / speeds[beside]);
            cells.push(percent(one.min(other)));
        }
        table.row(cells);
    }
    print!("{}", table.render());
    Ok(())
}
