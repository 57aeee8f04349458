//! Thousands of members, each with a connection of its own that sends heartbeats: what they cost the
//! master, and what they do to a client that asks for something.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use layercake_benches::keys::keys;
use layercake_benches::report::{Report, rounded};
use layercake_benches::table::median;
use layercake_protocol::replica::Recency;
use layercake_store::link::{Exists, LinkState, MasterLink};
use tokio::task::JoinSet;

use crate::master::{Process, raise_file_limit};

const MEMBERS: [usize; 3] = [100, 1000, 4000];

/// Connections that are opened at a time.
const OPENING: usize = 32;

/// How long the members are watched: several heartbeats of each.
const WATCHED: Duration = Duration::from_secs(6);

pub(crate) async fn measure() -> Result<Report> {
    raise_file_limit()?;
    let mut report = Report::new(
        "members with a connection each, over loopback; all of them in one process beside the master's",
        &[
            "members",
            "joined/s",
            "lost",
            "master KiB/member",
            "master % of a core",
            "exists of 256 keys us",
            "p99 us",
        ],
    );
    for count in MEMBERS {
        measure_count(count, &mut report).await?;
    }
    Ok(report)
}

async fn measure_count(count: usize, report: &mut Report) -> Result<()> {
    let master = Arc::new(Process::start(Duration::from_secs(10))?);
    let asking = master.join("asking").await?;
    let before = master.resident_bytes()?;
    let start = Instant::now();
    let mut opening = JoinSet::new();
    let mut members: Vec<MasterLink> = Vec::with_capacity(count);
    for number in 0..count {
        if opening.len() >= OPENING
            && let Some(joined) = opening.join_next().await
        {
            members.push(joined??);
        }
        let master = Arc::clone(&master);
        opening.spawn(async move { master.join(&format!("member-{number}")).await });
    }
    while let Some(joined) = opening.join_next().await {
        members.push(joined??);
    }
    let joined = count as f64 / start.elapsed().as_secs_f64();
    let bytes = (master.resident_bytes()? - before) as f64 / count as f64;

    let start = (Instant::now(), master.processor_time()?);
    tokio::time::sleep(WATCHED).await;
    let processor = master.processor_time()? - start.1;
    let share = processor / start.0.elapsed().as_secs_f64();
    let (median, p99) = ask(&asking).await?;
    let is_up = |member: &&MasterLink| matches!(member.state(), LinkState::Up { .. });
    let lost = count - members.iter().filter(is_up).count();
    report.row(vec![
        count.into(),
        rounded(joined, 0),
        lost.into(),
        rounded(bytes / 1024.0, 1),
        rounded(share * 100.0, 1),
        rounded(median * 1e6, 0),
        rounded(p99 * 1e6, 0),
    ]);
    Ok(())
}

/// Median and 99th percentile of a probe's time, in seconds.
async fn ask(link: &MasterLink) -> Result<(f64, f64)> {
    let keys = keys(0, 256)?;
    let mut times = Vec::new();
    for _ in 0..1000 {
        let start = Instant::now();
        link.exists(&Exists {
            keys: &keys,
            readable: false,
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &[],
            peek: false,
        })
        .await?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let p99 = times[times.len() * 99 / 100];
    Ok((median(times), p99))
}
