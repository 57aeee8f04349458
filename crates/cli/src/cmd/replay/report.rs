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
        sum.keys_queried += done.keys_queried;
        sum.keys_bound += done.keys_bound;
        sum.found_blocks += done.found_blocks;
        sum.hit_blocks += done.hit_blocks;
        sum.mismatched_blocks += done.mismatched_blocks;
        sum.corrupt_blocks += done.corrupt_blocks;
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
    /// Keys that the master was asked for by look-ups.
    pub(crate) keys_queried: u64,
    /// What the look-ups may have asked for at most: the hits and one window a request.
    pub(crate) keys_queried_bound: u64,
    /// Blocks that were served with a wrong byte: always 0, or the store is broken.
    pub(crate) mismatches: u64,
    /// Blocks that the store refused to serve because their bytes were damaged: always 0, too.
    pub(crate) corrupt_blocks: u64,
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
            keys_queried: sum.keys_queried,
            keys_queried_bound: sum.keys_bound,
            mismatches: sum.mismatched_blocks,
            corrupt_blocks: sum.corrupt_blocks,
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

    /// Why the replay as a whole is a failure: one line a reason; none if it is not.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.mismatches > 0 {
            let blocks = plural(self.mismatches, "block was", "blocks were");
            faults.push(format!("{blocks} served with wrong bytes"));
        }
        if self.corrupt_blocks > 0 {
            let blocks = plural(self.corrupt_blocks, "block was", "blocks were");
            faults.push(format!("{blocks} found damaged by the store"));
        }
        if self.requests > 0 && self.failed_requests == self.requests {
            let requests = plural(self.requests, "request", "requests");
            faults.push(format!("no request succeeded, of {requests}"));
        }
        faults
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
        row("  asked for by look-ups", thousands(self.keys_queried));
        row("    at most", thousands(self.keys_queried_bound));
        row("  with a wrong byte", thousands(self.mismatches));
        if self.corrupt_blocks > 0 {
            row("  found damaged", thousands(self.corrupt_blocks));
        }
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
        let rows = [
            ("look-up of a request", &self.lookup_us),
            ("load of a layer", &self.load_layer_us),
            ("save of a layer", &self.save_layer_us),
        ];
        // One unit for all, so that they compare at a glance.
        let millis = rows.iter().any(|(_, latency)| latency.max >= 10_000.0);
        let time = |micros: f64| {
            if millis {
                format!("{:.2} ms", micros / 1000.0)
            } else {
                format!("{micros:.0} µs")
            }
        };
        for (name, latency) in rows {
            latencies.row([
                name.to_owned(),
                time(latency.p50),
                time(latency.p90),
                time(latency.p99),
                time(latency.max),
                thousands(latency.count),
            ]);
        }
        format!("{results}\n{latencies}")
    }
}

fn plural(count: u64, one: &str, many: &str) -> String {
    let noun = if count == 1 { one } else { many };
    format!("{} {noun}", thousands(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(requests: &[Done]) -> Report {
        let conditions = Conditions {
            trace: "t".to_owned(),
            geometry: "0:8".to_owned(),
            block_bytes: 8,
            workers: 1,
            nodes: 1,
            capacity_bytes: 1 << 20,
            distinct_blocks: 1,
            skipped_lines: 0,
        };
        let mut totals = Totals::default();
        for done in requests {
            totals.add(done);
        }
        let (measured, counts) = (Measured::default(), MasterCounts::default());
        Report::new(conditions, &totals, &measured, counts, Duration::ZERO)
    }

    fn failed() -> Done {
        Done {
            failed: Some("the look-up failed".to_owned()),
            ..Done::default()
        }
    }

    #[test]
    fn wrong_and_damaged_blocks_are_faults_and_lost_ones_are_not() {
        let lost = Done {
            blocks: 3,
            found_blocks: 3,
            ..Done::default()
        };
        let said = report(std::slice::from_ref(&lost));
        assert_eq!((said.lost_after_lookup, said.faults().len()), (3, 0));
        let bad = Done {
            mismatched_blocks: 1,
            corrupt_blocks: 2,
            ..lost
        };
        let said = report(&[bad, Done::default()]);
        assert_eq!((said.mismatches, said.corrupt_blocks), (1, 2));
        assert_eq!(
            said.faults(),
            [
                "1 block was served with wrong bytes",
                "2 blocks were found damaged by the store"
            ]
        );
        assert!(said.tables().contains("found damaged"));
    }

    #[test]
    fn a_table_has_one_unit_for_times_and_one_family_for_bytes() {
        let mut said = report(&[Done::default()]);
        (said.bytes_saved, said.saved_bytes_per_second) = (3 << 20, 1024.0 * 512.0);
        (said.lookup_us.p50, said.lookup_us.max) = (90.0, 200.0);
        let table = said.tables();
        assert!(table.contains("3.0 MiB at 512 KiB/s"), "{table}");
        assert!(table.contains("90 µs") && !table.contains("ms"), "{table}");
        said.save_layer_us.max = 12_345.0;
        let table = said.tables();
        assert!(
            table.contains("0.09 ms") && table.contains("12.35 ms"),
            "{table}"
        );
        assert!(!table.contains("µs"), "{table}");
    }

    #[test]
    fn only_a_replay_whose_requests_all_failed_is_a_failure() {
        assert_eq!(report(&[]).faults().len(), 0);
        assert_eq!(report(&[failed(), Done::default()]).faults().len(), 0);
        assert_eq!(report(&[failed(), failed()]).faults().len(), 1);
    }
}
