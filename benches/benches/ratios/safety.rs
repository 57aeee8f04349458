//! What safety costs.
//!
//! Checksums and generation checks are switched off one at a time; the others stay on, as does the way in
//! which the bytes are copied. Capabilities can't be switched off anywhere. What they cost is the time of
//! comparing one, which is done once for each region of a frame (tcp), of 256 KiB (local) or of a batch, and
//! there once more for each piece (shm): it is shown as if each piece had one to itself.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use layercake_benches::driver::Safety;
use layercake_benches::table::{Table, median};
use layercake_protocol::ids::Capability;
use layercake_transport::Direction;

use crate::shape::Shape;
use crate::{KINDS, Machine, PLACEMENTS, percent, shuffled};

/// Rounds on the same memory.
const ROUNDS: usize = 12;

/// With everything, then without one of both.
const SETTINGS: [Safety; 3] = [
    Safety::ON,
    Safety {
        generation: false,
        ..Safety::ON
    },
    Safety {
        checksum: false,
        ..Safety::ON
    },
];

pub(crate) fn run() -> Result<()> {
    let shape = Shape::new(64 << 10, true);
    let mut costs = vec![[Vec::new(), Vec::new()]; KINDS.len()];
    let mut piece = vec![Vec::new(); KINDS.len()];
    for placement in 0..PLACEMENTS {
        let machine = Machine::start()?;
        for (at, driver) in machine.drivers.iter().enumerate() {
            for round in 0..ROUNDS {
                let mut times = [0.0; SETTINGS.len()];
                for turn in shuffled(SETTINGS.len() * 2, placement * ROUNDS + round) {
                    let (setting, direction) = (turn / 2, Direction::ALL[turn % 2]);
                    times[setting] += 1.0 / shape.measure(driver, direction, SETTINGS[setting])?;
                }
                let [with, without @ ..] = times;
                for (costs, without) in costs[at].iter_mut().zip(without) {
                    costs.push(with / without - 1.0);
                }
                // Nanoseconds for each byte, both directions together.
                piece[at].push(with / 2.0 * shape.len as f64);
            }
        }
    }
    let look = capability_look();
    println!(
        "\ncost of safety at {} (time with, over time without, both directions together); comparing a capability takes {look:.1} ns",
        shape.name()
    );
    let columns = [
        "transport",
        "generation checks",
        "checksums",
        "capabilities",
    ];
    let mut table = Table::new(&columns);
    for ((kind, costs), piece) in KINDS.iter().zip(costs).zip(piece) {
        let [generation, checksum] = costs.map(median);
        table.row(vec![
            kind.to_string(),
            percent(generation),
            percent(checksum),
            format!("{:.2} %", look / median(piece) * 100.0),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

/// Nanoseconds to compare a capability with the right one.
fn capability_look() -> f64 {
    const LOOKS: u32 = 1_000_000;
    let known = Capability::draw();
    let rounds = (0..9).map(|_| {
        let start = Instant::now();
        for _ in 0..LOOKS {
            black_box(black_box(&known).matches(black_box(&known)));
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(LOOKS)
    });
    median(rounds.collect())
}
