//! Which figures are shown, in which order, and what they are called.

use super::results::Place;

/// A figure and the name it is shown under.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    scenario: &'static str,
    row: &'static str,
    figure: &'static str,
    pub(crate) label: &'static str,
}

const fn line(
    scenario: &'static str,
    row: &'static str,
    figure: &'static str,
    label: &'static str,
) -> Line {
    Line {
        scenario,
        row,
        figure,
        label,
    }
}

impl Line {
    pub(crate) fn place(&self) -> Place<'static> {
        self.of(self.figure)
    }

    /// Another figure of the same work.
    pub(crate) fn of(&self, figure: &'static str) -> Place<'static> {
        Place {
            scenario: self.scenario,
            row: self.row,
            figure,
        }
    }
}

/// Lines of one unit.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    /// What it costs the processors, and the unit of that.
    pub(crate) cost: Option<(&'static str, &'static str)>,
    pub(crate) lines: &'static [Line],
}

pub(crate) const BANDWIDTH: Group = Group {
    title: "Bandwidth",
    unit: "GB/s",
    cost: Some(("cpu_s_per_GB", "processor seconds per GB")),
    lines: &[
        line("ranges", "put", "GBps", "ranges of sessions, write"),
        line("ranges", "get", "GBps", "ranges of sessions, read"),
        line("embedded", "put", "GBps", "the same in one process, write"),
        line("embedded", "get", "GBps", "the same in one process, read"),
        line("multi buffers", "put", "GBps", "whole objects, write"),
        line("multi buffers", "get", "GBps", "whole objects, read"),
        line("engine", "write", "GBps", "transfer engine, write"),
        line("engine", "read", "GBps", "transfer engine, read"),
    ],
};

pub(crate) const LATENCY: Group = Group {
    title: "Single calls",
    unit: "µs, median",
    cost: Some(("cpu_us", "processor µs per call")),
    lines: &[
        line("small", "put", "p50_us", "put of 4 KiB"),
        line("small", "get", "p50_us", "get of 4 KiB"),
        line("exist", "single", "p50_us", "look-up of one key"),
        line(
            "engine",
            "write 4 KiB",
            "p50_us",
            "transfer engine, write of 4 KiB",
        ),
    ],
};

pub(crate) const TAIL: Group = Group {
    title: "The slowest hundredth of calls",
    unit: "µs, 99th percentile",
    cost: None,
    lines: &[
        line("ranges", "put", "p99_us", "a layer's ranges, write"),
        line("ranges", "get", "p99_us", "a layer's ranges, read"),
        line("small", "put", "p99_us", "put of 4 KiB"),
        line("small", "get", "p99_us", "get of 4 KiB"),
        line("exist", "single", "p99_us", "look-up of one key"),
        line(
            "engine",
            "write 4 KiB",
            "p99_us",
            "transfer engine, write of 4 KiB",
        ),
    ],
};

pub(crate) const KEYS: Group = Group {
    title: "Batches of keys",
    unit: "µs per key",
    cost: Some(("cpu_us", "processor µs per key")),
    lines: &[
        line("ranges", "put start", "us", "start of put sessions"),
        line("ranges", "put end", "us", "end of put sessions"),
        line("ranges", "get start", "us", "start of get sessions"),
        line("ranges", "get end", "us", "end of get sessions"),
        line("batches", "put", "us", "put of 32 × 4 KiB"),
        line("batches", "get", "us", "get of 32 × 4 KiB"),
        line("lanes", "put", "us", "the same from 32 threads, put"),
        line("lanes", "get", "us", "the same from 32 threads, get"),
        line("exist", "batch", "us", "look-up of 20,000 keys"),
    ],
};

pub(crate) const MEMORY: Group = Group {
    title: "A client that is connected and idle",
    unit: "",
    cost: None,
    lines: &[
        line("connections", "client", "KiB", "its own memory, KiB"),
        line("connections", "client threads", "count", "its own threads"),
        line("connections", "master", "KiB", "memory at the master, KiB"),
    ],
};

pub(crate) const GROUPS: [&Group; 5] = [&BANDWIDTH, &LATENCY, &TAIL, &KEYS, &MEMORY];

/// A figure with as many digits as it deserves.
pub(crate) fn show(figure: f64) -> String {
    match figure.abs() {
        at_least if at_least >= 100.0 => format!("{figure:.0}"),
        at_least if at_least >= 10.0 => format!("{figure:.1}"),
        at_least if at_least >= 0.1 => format!("{figure:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{figure:.3}"),
    }
}
