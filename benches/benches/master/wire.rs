//! The calls by each way to the master, by a client in this process over loopback.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use layercake_benches::keys::keys;
use layercake_benches::table::{Table, median};
use layercake_master::{Master, MasterConfig};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig};
use layercake_store::link::{self, LinkConfig, MasterLink, StartOptions};
use layercake_store::{Node, NodeConfig};
use layercake_transport::{Engine, EngineConfig};
use tokio::runtime::Handle;

/// Names; whether over a lane; whether the caller's thread blocks for the answer, and so reads it itself.
const WAYS: [(&str, bool, bool); 3] = [
    ("gRPC", false, false),
    ("lane", true, false),
    ("lane, blocking", true, true),
];

/// More than the keys that one way takes.
const KEYS_PER_WAY: usize = 1_000_000;

/// See the module's description.
pub(crate) async fn print_table() -> Result<()> {
    let config = MasterConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        ..MasterConfig::default()
    };
    let mut registry = prometheus_client::registry::Registry::default();
    let master = Master::bind(config, &mut registry).await?;
    let address = master.local_addr().to_string();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(master.serve(async {
        // The sender going away stops the master as well.
        let _stopped = stopped.await;
    }));
    let engine = Engine::start(EngineConfig::default())?;
    let connect = |name: &str, lane: bool| {
        MasterLink::connect(LinkConfig {
            endpoint: Some(engine.endpoint().clone()),
            lane,
            ..LinkConfig::new(address.clone(), name)
        })
    };
    let node = Node::start(
        NodeConfig::lending(WAYS.len() as u64 * (512 << 20), false),
        engine.clone(),
        connect("bench-node", true).await?,
    )
    .await?;
    println!("\nover loopback, client and master in one process");
    let mut table = Table::new(&[
        "way",
        "keys",
        "exists us/call",
        "keys/s",
        "put start us/call",
        "put end us/call",
    ]);
    for (turn, (way, lane, blocks)) in WAYS.into_iter().enumerate() {
        let link = connect("bench", lane).await?;
        ensure!(link.uses_lane() == lane, "the link went another way");
        let first = turn * KEYS_PER_WAY;
        let rows = if blocks {
            let (link, runtime) = (link.clone(), Handle::current());
            let calls = move || link.block_on(&runtime, rows(&link, first));
            tokio::task::spawn_blocking(calls).await??
        } else {
            rows(&link, first).await?
        };
        for row in rows {
            table.row([vec![way.to_owned()], row].concat());
        }
        link.close(Duration::from_secs(1)).await?;
    }
    print!("{}", table.render());
    // It takes all of its objects out of the master first.
    node.shutdown(Duration::from_mins(1)).await?;
    drop(stop);
    serving.await??;
    Ok(())
}

fn probe(keys: &[ObjectKey]) -> link::Exists<'_> {
    link::Exists {
        keys,
        readable: false,
        recency: Recency::default(),
        stop_at_first_miss: false,
        unreachable: &[],
        peek: false,
    }
}

/// A row for each size of batch. Keys from number `next` on are new.
async fn rows(link: &MasterLink, mut next: usize) -> Result<Vec<Vec<String>>> {
    let config = ReplicateConfig::default();
    let mut rows = Vec::new();
    for (count, rounds) in [(1_usize, 2000), (64, 300), (2048, 20), (20_000, 1)] {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..rounds {
            let keys = keys(next, count)?;
            next += count;
            let puts: Vec<_> = keys
                .iter()
                .map(|key| PutStart::new(key.clone(), 1000))
                .collect();
            let start = Instant::now();
            let started = link
                .put_start(&puts, &config, StartOptions::default())
                .await?
                .results;
            times[1].push(start.elapsed().as_secs_f64() * 1e6);
            let objects = keys
                .iter()
                .zip(started)
                .map(|(key, started)| {
                    Ok(ObjectRef {
                        key: key.clone(),
                        generation: started?.generation,
                    })
                })
                .collect::<Result<Vec<_>>>()?;
            let start = Instant::now();
            link.put_end(&objects).await?;
            times[2].push(start.elapsed().as_secs_f64() * 1e6);
            for _ in 0..20_usize.div_ceil(rounds) {
                let start = Instant::now();
                link.exists(&probe(&keys)).await?;
                times[0].push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let [exists, start, end] = times.map(median);
        rows.push(vec![
            count.to_string(),
            format!("{exists:.1}"),
            format!("{:.0}", count as f64 / exists * 1e6),
            format!("{start:.1}"),
            format!("{end:.1}"),
        ]);
    }
    Ok(rows)
}
