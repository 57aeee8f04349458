//! How full a pool gets before something has to be evicted or refused.
//!
//! *Fresh*: objects are written that nothing may evict, until one is refused. *Churned*: the same, after
//! random objects were removed and others written in their place, until the pool was turned over several
//! times: what is in use when the first is refused then. *Evicting*: the pool evicts for each object
//! that has no room; what is in use on average, from the second turnover on. In use are the granules of
//! objects and headers.

use anyhow::{Result, bail, ensure};
use layercake_benches::keys::{Random, key};
use layercake_benches::pool;
use layercake_benches::report::{Report, rounded};
use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, PutStart, ReplicateConfig};

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
    filling: pool::Pool,
    sizes: &'static [u64],
    random: Random,
    next: usize,
    /// With the size of each.
    objects: Vec<(ObjectKey, u64)>,
}

impl Pool {
    fn new(sizes: &'static [u64], pinned: bool) -> Result<Self> {
        let mut pool = pool::Pool::new(SEGMENTS, SEGMENT)?;
        pool.config = ReplicateConfig {
            hard_pin: pinned,
            ..ReplicateConfig::default()
        };
        Ok(Self {
            filling: pool,
            sizes,
            random: Random::new(7),
            next: 0,
            objects: Vec::new(),
        })
    }

    /// Share of the pool's bytes in use.
    fn used(&self) -> f64 {
        let gauges = self.filling.state.gauges();
        gauges.used_bytes as f64 / gauges.capacity_bytes as f64
    }

    /// Writes one more object of a random size; false: it was refused.
    fn put(&mut self) -> Result<bool> {
        let key = key(self.next)?;
        self.next += 1;
        let size = self.sizes[self.random.below(self.sizes.len())];
        let pool = &self.filling;
        let batch = pool.batch(vec![PutStart::new(key.clone(), size)]);
        let (answers, _) = pool.state.put_start(pool::Pool::NOW, &pool.caller, batch);
        let generation = match answers.into_iter().next() {
            Some(Ok(started)) => started.generation,
            Some(Err(Refusal::NoSpace { .. })) => return Ok(false),
            other => bail!("not the answer to a put: {other:?}"),
        };
        let object = ObjectRef {
            key: key.clone(),
            generation,
        };
        pool.put_end(&[object])?;
        if pool.config.hard_pin {
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
                let pool = &self.filling;
                let tenant = &pool.caller.tenant;
                for gone in pool.state.remove(pool::Pool::NOW, tenant, &[key], true) {
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
