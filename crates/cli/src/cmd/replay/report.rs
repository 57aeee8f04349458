//! What a replay found, for people and for programs.

use std::time::Duration;

use serde::Serialize;

use super::histogram::Histogram;
use super::messages::{Done, Measured, Moved};
use crate::output::{Table, bytes, rate, thousands};

/// Percentiles of a duration, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Latency {
    pub(crate) count: u64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl From<&Histogram> for Latency {
    fn from(histogram: &Histogram) -> Self {
        // Tenths of a microsecond: more digits would be noise.
        let micros = |duration: Duration| (duration.as_secs_f64() * 1e7).round() / 10.0;
        Self {
            count: histogram.count(),
            p50: micros(histogram.quantile(0.5)),
            p90: micros(histogram.quantile(0.9)),
            p99: micros(histogram.quantile(0.99)),
            max: micros(histogram.max()),
        }
    }
}

/// What the master counted while the replay ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MasterCounts {
    pub(crate) evicted_objects: u64,
    pub(crate) refused_puts: u64,
    pub(crate) lost_nodes: u64,
}

/// What was run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Conditions {
    pub(crate) trace: String,
    pub(crate) geometry: String,
    pub(crate) block_bytes: u64,
    pub(crate) workers: u64,
    /// Nodes at the start.
    pub(crate) nodes: u64,
    pub(crate) capacity_bytes: u64,
    pub(crate) distinct_blocks: u64,
    pub(crate) skipped_lines: u64,
}

/// The sums over all requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) requests: u64,
    pub(crate) failed_requests: u64,
    pub(crate) sum: Done,
    /// The first failure of a request and the first trouble with a block.
    pub(crate) first_failure: Option<String>,
    pub(crate) first_trouble: Option<String>,
}

impl Totals {
    pub(crate) fn add(&mut self, done: &Done) {
        self.requests += 1;
        if let Some(reason) = &done.failed {
            self.failed_requests += 1;
            self.first_failure
                .get_or_insert_with(|| format!("request {}: {reason}", done.index));
        }
        if let Some(reason) = &done.trouble {
            self.first_trouble
                .get_or_insert_with(|| format!("request {}: {reason}", done.index));
        }
        let sum = &mut self.sum;
        sum.blocks += done.blocks;
        sum.found_blocks += done.found_blocks;
        sum.hit_blocks += done.hit_blocks;
        sum.mismatched_blocks += done.mismatched_blocks;
        sum.saved_blocks += done.saved_blocks;
        sum.skipped_blocks += done.skipped_blocks;
        sum.refused_blocks += done.refused_blocks;
        sum.unsaved_blocks += done.unsaved_blocks;
        sum.bytes_saved += done.bytes_saved;
        sum.bytes_loaded += done.bytes_loaded;
    }
}

/// The last line of `layercake replay --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    pub(crate) requests: u64,
    pub(crate) blocks: u64,
    pub(crate) distinct_blocks: u64,
    /// Prefix blocks that were loaded and held every byte they must.
    pub(crate) hit_blocks: u64,
    pub(crate) hit_ratio: f64,
    /// Blocks that were served with a wrong byte: always 0, or the store is broken.
    pub(crate) mismatches: u64,
    pub(crate) failed_requests: u64,
    pub(crate) saved_blocks: u64,
    /// Blocks that others had stored, or were storing, in the meantime.
    pub(crate) skipped_blocks: u64,
    /// Blocks whose save failed for another reason than want of room.
    pub(crate) unsaved_blocks: u64,
    /// Blocks that the look-up promised, and that were gone when they were to be loaded.
    pub(crate) lost_after_lookup: u64,
    pub(crate) evicted_blocks: u64,
    pub(crate) refused_puts: u64,
    pub(crate) lost_nodes: u64,
    pub(crate) bytes_saved: u64,
    pub(crate) bytes_loaded: u64,
    pub(crate) seconds: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) saved_bytes_per_second: f64,
    pub(crate) loaded_bytes_per_second: f64,
    /// Microseconds.
    pub(crate) lookup_us: Latency,
    /// Microseconds.
    pub(crate) save_layer_us: Latency,
    /// Microseconds.
    pub(crate) load_layer_us: Latency,
    /// Names of the transports that moved bytes.
    pub(crate) transport: String,
    pub(crate) transports: Vec<Moved>,
    #[serde(flatten)]
    pub(crate) conditions: RestOfConditions,
}

/// [`Conditions`] without what stands among the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RestOfConditions {
    pub(crate) trace: String,
    pub(crate) geometry: String,
    pub(crate) block_bytes: u64,
    pub(crate) workers: u64,
    pub(crate) nodes: u64,
    pub(crate) capacity_bytes: u64,
    pub(crate) skipped_lines: u64,
}

fn per_second(amount: u64, elapsed: Duration) -> f64 {
    let seconds = elapsed.as_secs_f64();
    if seconds > 0.0 {
        (amount as f64 / seconds).round()
    } else {
        0.0
    }
}

impl Report {
    pub(crate) fn new(
        conditions: Conditions,
        totals: &Totals,
        measured: &Measured,
        master: MasterCounts,
        elapsed: Duration,
    ) -> Self {
        let sum = &totals.sum;
        let names: Vec<&str> = measured
            .transports
            .iter()
            .map(|moved| moved.transport.as_str())
            .collect();
        let hit_ratio = sum.hit_blocks as f64 / (sum.blocks.max(1)) as f64;
        Self {
            requests: totals.requests,
            blocks: sum.blocks,
            distinct_blocks: conditions.distinct_blocks,
            hit_blocks: sum.hit_blocks,
            hit_ratio: (hit_ratio * 1e4).round() / 1e4,
            mismatches: sum.mismatched_blocks,
            failed_requests: totals.failed_requests,
            saved_blocks: sum.saved_blocks,
            skipped_blocks: sum.skipped_blocks,
            unsaved_blocks: sum.unsaved_blocks,
            lost_after_lookup: sum.found_blocks - sum.hit_blocks.min(sum.found_blocks),
            evicted_blocks: master.evicted_objects,
            refused_puts: master.refused_puts,
            lost_nodes: master.lost_nodes,
            bytes_saved: sum.bytes_saved,
            bytes_loaded: sum.bytes_loaded,
            seconds: (elapsed.as_secs_f64() * 1e3).round() / 1e3,
            requests_per_second: per_second(totals.requests, elapsed),
            saved_bytes_per_second: per_second(sum.bytes_saved, elapsed),
            loaded_bytes_per_second: per_second(sum.bytes_loaded, elapsed),
            lookup_us: (&measured.lookup).into(),
            save_layer_us: (&measured.save_layer).into(),
            load_layer_us: (&measured.load_layer).into(),
            transport: names.join(","),
            transports: measured.transports.clone(),
            conditions: RestOfConditions {
                trace: conditions.trace,
                geometry: conditions.geometry,
                block_bytes: conditions.block_bytes,
                workers: conditions.workers,
                nodes: conditions.nodes,
                capacity_bytes: conditions.capacity_bytes,
                skipped_lines: conditions.skipped_lines,
            },
        }
    }

    /// The tables that people see.
    pub(crate) fn tables(&self) -> String {
        let mut results = Table::new(&["", ""]).right(1);
        let mut row = |name: &str, value: String| results.row([name.to_owned(), value]);
        row("requests", thousands(self.requests));
        row("  failed", thousands(self.failed_requests));
        row("blocks", thousands(self.blocks));
        row("  distinct", thousands(self.distinct_blocks));
        row("  served from the store", thousands(self.hit_blocks));
        row("  hit ratio", format!("{:.1} %", self.hit_ratio * 100.0));
        row("  with a wrong byte", thousands(self.mismatches));
        row("  saved", thousands(self.saved_blocks));
        if self.skipped_blocks > 0 {
            row("  stored by another worker", thousands(self.skipped_blocks));
        }
        if self.lost_after_lookup > 0 {
            row(
                "  found, but gone at load",
                thousands(self.lost_after_lookup),
            );
        }
        if self.unsaved_blocks > 0 {
            row("  save failed", thousands(self.unsaved_blocks));
        }
        row("  evicted", thousands(self.evicted_blocks));
        row("  refused for want of room", thousands(self.refused_puts));
        row("nodes lost", thousands(self.lost_nodes));
        row(
            "saved",
            format!(
                "{} at {}",
                bytes(self.bytes_saved),
                rate(self.saved_bytes_per_second)
            ),
        );
        row(
            "loaded",
            format!(
                "{} at {}",
                bytes(self.bytes_loaded),
                rate(self.loaded_bytes_per_second)
            ),
        );
        row(
            "transport",
            if self.transport.is_empty() {
                "none used".to_owned()
            } else {
                self.transport.clone()
            },
        );
        row(
            "time",
            format!(
                "{:.1} s, {:.0} requests/s",
                self.seconds, self.requests_per_second
            ),
        );

        let mut latencies = Table::new(&["latency", "p50", "p90", "p99", "max", "count"])
            .right(1)
            .right(2)
            .right(3)
            .right(4)
            .right(5);
        for (name, latency) in [
            ("look-up of a request", &self.lookup_us),
            ("load of a layer", &self.load_layer_us),
            ("save of a layer", &self.save_layer_us),
        ] {
            latencies.row([
                name.to_owned(),
                micros(latency.p50),
                micros(latency.p90),
                micros(latency.p99),
                micros(latency.max),
                thousands(latency.count),
            ]);
        }
        format!("{results}\n{latencies}")
    }
}

fn micros(value: f64) -> String {
    if value < 10_000.0 {
        format!("{value:.0} µs")
    } else {
        format!("{:.1} ms", value / 1000.0)
    }
}
