//! How full a pool gets before something has to be evicted or refused.
//!
//! *Fresh*: objects are written that nothing may evict, until one is refused. *Churned*: the same, after
//! random objects were removed and others written in their place, until the pool was turned over several
//! times: what is in use when the first is refused then. *Evicting*: the pool evicts for each object
//! that has no room; what is in use on average, from the second turnover on. In use are the granules of
//! objects and headers.

use anyhow::{Result, bail, ensure};
use layercake_benches::keys::{Random, key};
use layercake_benches::report::{Report, rounded};
use layercake_master::state::{Caller, Moment, PutBatch, State, StateConfig};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

const SEGMENTS: u64 = 8;
const SEGMENT: u64 = 512 << 20;
const TURNOVERS: u64 = 4;

/// Sizes of objects, each as often as the others: one size, and mixed pairs.
const SIZES: [(&str, &[u64]); 9] = [
    ("16 KiB", &[16 << 10]),
    ("60,000 B", &[60_000]),
    ("256 KiB", &[256 << 10]),
    ("1 MiB", &[1 << 20]),
    ("3,000,000 B", &[3_000_000]),
    ("16 KiB, 64 KiB", &[16 << 10, 64 << 10]),
    ("100,000 B, 1 MiB", &[100_000, 1 << 20]),
    ("256 KiB, 3 MiB", &[256 << 10, 3 << 20]),
    ("64 KiB, 4 MiB", &[64 << 10, 4 << 20]),
];

pub(crate) fn measure() -> Result<Report> {
    let mut report = Report::new(
        format!(
            "% of a pool of {SEGMENTS} segments of {} MiB in use when an object finds no room",
            SEGMENT >> 20
        ),
        &["sizes", "fresh", "churned", "evicting"],
    );
    for (name, sizes) in SIZES {
        let mut pinned = Pool::new(sizes, true)?;
        pinned.fill()?;
        let fresh = pinned.used();
        pinned.churn()?;
        let churned = pinned.used();
        let evicting = Pool::new(sizes, false)?.evict()?;
        report.row(vec![
            name.into(),
            rounded(fresh * 100.0, 2),
            rounded(churned * 100.0, 2),
            rounded(evicting * 100.0, 2),
        ]);
    }
    Ok(report)
}

struct Pool {
    state: State,
    caller: Caller,
    config: ReplicateConfig,
    sizes: &'static [u64],
    random: Random,
    next: usize,
    /// With the size of each.
    objects: Vec<(ObjectKey, u64)>,
}

const NOW: Moment = Moment::from_micros(1);

impl Pool {
    fn new(sizes: &'static [u64], pinned: bool) -> Result<Self> {
        let state = State::new(StateConfig {
            high_watermark: 1.0,
            ..StateConfig::default()
        })?;
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let client = ClientId(1);
        state.join(NOW, client, "bench", Some(endpoint.clone()));
        for id in 1..=SEGMENTS {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint.clone(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: SEGMENT,
                kind: MemoryKind::Host,
            };
            state.mount(NOW, client, segment, Generation::NONE)?;
        }
        Ok(Self {
            state,
            caller: Caller {
                client,
                tenant: Tenant::default(),
                location: None,
            },
            config: ReplicateConfig {
                hard_pin: pinned,
                ..ReplicateConfig::default()
            },
            sizes,
            random: Random::new(7),
            next: 0,
            objects: Vec::new(),
        })
    }

    /// Share of the pool's bytes in use.
    fn used(&self) -> f64 {
        let gauges = self.state.gauges();
        gauges.used_bytes as f64 / gauges.capacity_bytes as f64
    }

    /// Writes one more object of a random size; false: it was refused.
    fn put(&mut self) -> Result<bool> {
        let key = key(self.next)?;
        self.next += 1;
        let size = self.sizes[self.random.below(self.sizes.len())];
        let batch = PutBatch {
            puts: vec![PutStart::new(key.clone(), size)],
            config: &self.config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        };
        let (answers, _) = self.state.put_start(NOW, &self.caller, batch);
        let generation = match answers.into_iter().next() {
            Some(Ok(started)) => started.generation,
            Some(Err(Refusal::NoSpace { .. })) => return Ok(false),
            other => bail!("not the answer to a put: {other:?}"),
        };
        let object = ObjectRef {
            key: key.clone(),
            generation,
        };
        let epoch = self.state.draw_epoch();
        for ended in self.state.put_end(NOW, &self.caller, &[object], epoch) {
            ended?;
        }
        if self.config.hard_pin {
            self.objects.push((key, size));
        }
        Ok(true)
    }

    /// Writes objects until one is refused.
    fn fill(&mut self) -> Result<()> {
        while self.put()? {}
        Ok(())
    }

    /// Turns the pool over: a random tenth goes, and others come in its place until one is refused.
    fn churn(&mut self) -> Result<()> {
        let mut removed = 0;
        while removed < TURNOVERS * SEGMENTS * SEGMENT {
            for _ in 0..self.objects.len() / 10 {
                let at = self.random.below(self.objects.len());
                let (key, size) = self.objects.swap_remove(at);
                for gone in self.state.remove(NOW, &self.caller.tenant, &[key], true) {
                    gone?;
                }
                removed += size;
            }
            self.fill()?;
        }
        Ok(())
    }

    /// Writes objects, each at the cost of others, and returns the mean of what is in use.
    fn evict(&mut self) -> Result<f64> {
        let mean: u64 = self.sizes.iter().sum::<u64>() / self.sizes.len() as u64;
        let turnover = SEGMENTS * SEGMENT / mean;
        let mut sum = 0.0;
        let mut samples = 0;
        for number in 0..turnover * TURNOVERS {
            ensure!(self.put()?, "no room was made for an object");
            if number > turnover && number % 64 == 0 {
                sum += self.used();
                samples += 1;
            }
        }
        Ok(sum / f64::from(samples))
    }
}
