//! The master's state machine: batches of 256 keys on a table of 19,200 objects.

use anyhow::{Result, ensure};
use layercake_master::state::{
    Caller, Exists, GetStart, Moment, Probe, PutBatch, State, StateConfig,
};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

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

struct Pool {
    state: State,
    caller: Caller,
    now: Moment,
    config: ReplicateConfig,
}

impl Pool {
    /// A pool in which the objects lie and `room` more fit in.
    fn filled(room: usize) -> Result<Self> {
        let state = State::new(StateConfig {
            high_watermark: 1.0,
            ..StateConfig::default()
        })?;
        let now = Moment::from_micros(1);
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let client = ClientId(1);
        state.join(now, client, "guard", Some(endpoint.clone()));
        for id in 1..=NODES {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint.clone(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: ((BATCHES * BATCH + room) as u64).div_ceil(NODES) * PLACE,
                kind: MemoryKind::Host,
            };
            state.mount(now, client, segment, Generation::NONE)?;
        }
        let pool = Self {
            state,
            caller: Caller {
                client,
                tenant: Tenant::default(),
                location: None,
            },
            now,
            config: ReplicateConfig::default(),
        };
        for batch in 0..BATCHES {
            let objects = pool.put_start(&puts(&keys(batch * BATCH)?))?;
            pool.put_end(&objects)?;
        }
        Ok(pool)
    }

    fn batch(&self, puts: Vec<PutStart>) -> PutBatch<'_> {
        PutBatch {
            puts,
            config: &self.config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        }
    }

    fn put_start(&self, puts: &[PutStart]) -> Result<Vec<ObjectRef>> {
        let batch = self.batch(puts.to_vec());
        let (answers, _) = self.state.put_start(self.now, &self.caller, batch);
        puts.iter()
            .zip(answers)
            .map(|(put, answer)| {
                Ok(ObjectRef {
                    key: put.key.clone(),
                    generation: answer?.generation,
                })
            })
            .collect()
    }

    fn put_end(&self, objects: &[ObjectRef]) -> Result<()> {
        let epoch = self.state.draw_epoch();
        for answer in self.state.put_end(self.now, &self.caller, objects, epoch) {
            answer?;
        }
        Ok(())
    }

    fn count_put_start(&self, keys: &[ObjectKey]) -> Result<()> {
        let batch = self.batch(puts(keys));
        let answers = count(|| self.state.put_start(self.now, &self.caller, batch))?.0;
        ensure!(answers.iter().all(Result::is_ok), "a put was refused");
        Ok(())
    }

    fn count_exists(&self, keys: &[ObjectKey], there: usize) -> Result<()> {
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &[],
            peek: false,
        };
        let (found, _) = count(|| self.state.exists(self.now, &self.caller, &query))?;
        let readable = layercake_protocol::replica::Presence::Complete;
        let found = found.iter().filter(|state| **state == readable).count();
        ensure!(found == there, "{found} keys are there instead of {there}");
        Ok(())
    }
}

fn puts(keys: &[ObjectKey]) -> Vec<PutStart> {
    let keys = keys.iter();
    keys.map(|key| PutStart::new(key.clone(), OBJECT)).collect()
}

fn exists() -> Result<()> {
    Pool::filled(BATCH)?.count_exists(&keys(BATCH * 7)?, BATCH)
}

fn absent() -> Result<()> {
    Pool::filled(BATCH)?.count_exists(&keys(BATCH * BATCHES)?, 0)
}

fn get_start() -> Result<()> {
    let (pool, keys) = (Pool::filled(BATCH)?, keys(BATCH * 7)?);
    let query = GetStart {
        keys: &keys,
        recency: Recency::default(),
        session: true,
        unreachable: &[],
    };
    let (answers, _) = count(|| pool.state.get_start(pool.now, &pool.caller, &query))?;
    ensure!(answers.iter().all(Result::is_ok), "a get was refused");
    Ok(())
}

fn get_end() -> Result<()> {
    let (pool, keys) = (Pool::filled(BATCH)?, keys(BATCH * 7)?);
    let query = GetStart {
        keys: &keys,
        recency: Recency::default(),
        session: true,
        unreachable: &[],
    };
    let (answers, _) = pool.state.get_start(pool.now, &pool.caller, &query);
    let objects = keys.iter().zip(answers).map(|(key, answer)| {
        Ok(ObjectRef {
            key: key.clone(),
            generation: answer?.generation(),
        })
    });
    let objects = objects.collect::<Result<Vec<_>>>()?;
    count(|| pool.state.get_end(pool.now, &pool.caller, &objects))
}

fn put_start() -> Result<()> {
    Pool::filled(2 * BATCH)?.count_put_start(&keys(BATCH * BATCHES)?)
}

fn put_end() -> Result<()> {
    let pool = Pool::filled(2 * BATCH)?;
    let objects = pool.put_start(&puts(&keys(BATCH * BATCHES)?))?;
    let epoch = pool.state.draw_epoch();
    let answers = count(|| pool.state.put_end(pool.now, &pool.caller, &objects, epoch))?;
    ensure!(answers.iter().all(Result::is_ok), "an end was refused");
    Ok(())
}

fn evict() -> Result<()> {
    Pool::filled(0)?.count_put_start(&keys(BATCH * BATCHES)?)
}
