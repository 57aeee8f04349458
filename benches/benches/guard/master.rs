//! The master's state machine: batches of 256 keys on a table of 19,200 objects.

use anyhow::{Result, ensure};
use layercake_benches::pool::{self, puts};
use layercake_master::state::{Exists, Probe};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{Presence, Recency};

use crate::{BATCH, Path, count, keys};

pub(crate) const PATHS: &[Path] = &[
    ("master: exists, 256 keys that are there", exists),
    ("master: exists, 256 keys that are not there", absent),
    ("master: get start, 256 keys", get_start),
    ("master: get end, 256 objects", get_end),
    ("master: put start, 256 keys", put_start),
    ("master: put end, 256 objects", put_end),
    ("master: put start of 256 keys that evicts as many", evict),
];

/// As many as keep every shard of the table, by the laws of chance, away from where it grows.
const BATCHES: usize = 75;
const OBJECT: u64 = 60_000;
/// Nodes, and what each needs for one object with its header.
const NODES: u64 = 8;
const PLACE: u64 = 61_440;

struct Pool(pool::Pool);

impl Pool {
    /// A pool in which the objects lie and `room` more fit in.
    fn filled(room: usize) -> Result<Self> {
        let objects = (BATCHES * BATCH + room) as u64;
        let pool = pool::Pool::new(NODES, objects.div_ceil(NODES) * PLACE)?;
        for batch in 0..BATCHES {
            let objects = pool.put_start(&keys(batch * BATCH)?, OBJECT)?;
            pool.put_end(&objects)?;
        }
        Ok(Self(pool))
    }

    fn count_put_start(&self, keys: &[ObjectKey]) -> Result<()> {
        let Self(pool) = self;
        let batch = pool.batch(puts(keys, OBJECT));
        let answers = count(|| pool.state.put_start(pool::Pool::NOW, &pool.caller, batch))?.0;
        ensure!(answers.iter().all(Result::is_ok), "a put was refused");
        Ok(())
    }

    fn count_exists(&self, keys: &[ObjectKey], there: usize) -> Result<()> {
        let Self(pool) = self;
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &[],
            peek: false,
        };
        let (found, _) = count(|| pool.state.exists(pool::Pool::NOW, &pool.caller, &query))?;
        let readable = Presence::Complete;
        let found = found.iter().filter(|state| **state == readable).count();
        ensure!(found == there, "{found} keys are there instead of {there}");
        Ok(())
    }
}

fn exists() -> Result<()> {
    Pool::filled(BATCH)?.count_exists(&keys(BATCH * 7)?, BATCH)
}

fn absent() -> Result<()> {
    Pool::filled(BATCH)?.count_exists(&keys(BATCH * BATCHES)?, 0)
}

fn get_start() -> Result<()> {
    let (Pool(pool), keys) = (Pool::filled(BATCH)?, keys(BATCH * 7)?);
    let query = pool.gets(&keys);
    let (answers, _) = count(|| pool.state.get_start(pool::Pool::NOW, &pool.caller, &query))?;
    ensure!(answers.iter().all(Result::is_ok), "a get was refused");
    Ok(())
}

fn get_end() -> Result<()> {
    let (Pool(pool), keys) = (Pool::filled(BATCH)?, keys(BATCH * 7)?);
    let objects = pool.get_start(&keys)?;
    count(|| pool.state.get_end(pool::Pool::NOW, &pool.caller, &objects))
}

fn put_start() -> Result<()> {
    Pool::filled(2 * BATCH)?.count_put_start(&keys(BATCH * BATCHES)?)
}

fn put_end() -> Result<()> {
    let Pool(pool) = Pool::filled(2 * BATCH)?;
    let objects = pool.put_start(&keys(BATCH * BATCHES)?, OBJECT)?;
    let (now, epoch) = (pool::Pool::NOW, pool.state.draw_epoch());
    let answers = count(|| pool.state.put_end(now, &pool.caller, &objects, epoch))?;
    ensure!(answers.iter().all(Result::is_ok), "an end was refused");
    Ok(())
}

fn evict() -> Result<()> {
    Pool::filled(0)?.count_put_start(&keys(BATCH * BATCHES)?)
}
