//! Whether one peer that never answers slows transfers to others down.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use layercake_benches::driver::Safety;
use layercake_benches::limits::scatter;
use layercake_benches::table::{Table, median};
use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::ids::EngineId;
use layercake_transport::Direction;

use crate::{Machine, number};

/// Small writes to a healthy peer over TCP, alone and while a tenth as many are asked for of a peer that
/// takes connections and never answers. All on one processor: see [`Peer::share_one_processor`].
pub(crate) fn run(machine: &Machine) -> Result<()> {
    const WRITES: usize = 3000;
    const ROUNDS: usize = 7;
    let (healthy, driver) = (&machine.peer, &machine.drivers[2]);
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
