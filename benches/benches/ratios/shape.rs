//! The work that is measured: pieces of one length, in one batch or one by one.

use std::num::NonZero;
use std::time::{Duration, Instant};

use anyhow::Result;
use layercake_benches::driver::{Driver, Safety};
use layercake_benches::limits::{Pace, PlainCopy, RawSockets, Scatter, scatter};
use layercake_benches::table::gigabytes_per_second;
use layercake_transport::{Direction, EngineConfig};

use crate::{MEMORY, as_usize};

/// The calls of one measured round: all pieces in one batch, or a batch for each.
pub(crate) struct Shape {
    pub(crate) len: u64,
    places: Vec<Scatter>,
    /// The same bytes, copied from where they come to where they go when they are written, and when they are read:
    /// what is written comes from all places in turn, what is read goes there.
    copy: [PlainCopy; 2],
    /// The same, cut as a transfer is, for threads that take what is next.
    copy_in_units: [PlainCopy; 2],
    threads: usize,
    many: bool,
}

/// Bytes that a thread takes at a time.
const UNIT: u64 = 256 << 10;

impl Shape {
    pub(crate) fn new(len: u64, many: bool) -> Self {
        let count = (MEMORY / len).min(1024);
        let places = scatter(as_usize(count), as_usize(len));
        let back = |place: &Scatter| Scatter {
            from: place.to,
            to: place.from,
        };
        let back: Vec<Scatter> = places.iter().map(back).collect();
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        // The caller of a transfer takes part in copying, beside the copy threads.
        let threads = if many {
            (copy_threads() + 1).min(cores)
        } else {
            1
        };
        let copy = |places: &[Scatter], cuts| PlainCopy::new(places, as_usize(len), cuts);
        let units = as_usize((len * count).div_ceil(UNIT)).max(threads);
        Self {
            len,
            copy: [copy(&places, threads), copy(&back, threads)],
            copy_in_units: [copy(&places, units), copy(&back, units)],
            threads,
            places,
            many,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.len * self.places.len() as u64
    }

    pub(crate) fn calls(&self) -> std::slice::Chunks<'_, Scatter> {
        self.places
            .chunks(if self.many { self.places.len() } else { 1 })
    }

    /// What of all is sent on each raw stream, and answered.
    fn answered(&self, streams: usize) -> u64 {
        if self.many {
            self.bytes() / streams as u64
        } else {
            self.len
        }
    }

    /// A plain copy by as many threads as a transfer has, awake when the clock starts.
    pub(crate) fn copy(&self, source: &[u8], target: &mut [u8], direction: Direction) -> Duration {
        of(&self.copy, direction).run(source, target)
    }

    /// The same by threads that sleep until then, as a transfer's do. `before` runs when they are asleep.
    pub(crate) fn copy_woken(
        &self,
        source: &[u8],
        target: &mut [u8],
        direction: Direction,
        before: impl FnOnce(),
    ) -> Duration {
        let copy = of(&self.copy_in_units, direction);
        copy.run_woken(self.threads, source, target, before)
    }

    pub(crate) fn sockets(&self, pace: Pace) -> std::io::Result<RawSockets> {
        let streams = streams();
        let chunk = as_usize(self.len.min(1 << 20));
        RawSockets::connect(streams, chunk, self.answered(streams), pace)
    }

    /// Uses new connections, for batches for as many bytes as a driver has moved when it was started.
    pub(crate) fn warm(&self, raw: &mut RawSockets, data: &[u8]) -> std::io::Result<()> {
        let mut left = if self.many { MEMORY } else { self.bytes() };
        while left > 0 {
            self.send(raw, data)?;
            left = left.saturating_sub(self.bytes());
        }
        Ok(())
    }

    pub(crate) fn send(&self, raw: &mut RawSockets, data: &[u8]) -> std::io::Result<Duration> {
        if self.many {
            raw.send(data, self.answered(streams()))
        } else {
            raw.round_trips(data, &self.places, as_usize(self.len))
        }
    }

    /// GB/s of this driver.
    pub(crate) fn measure(
        &self,
        driver: &Driver,
        direction: Direction,
        safety: Safety,
    ) -> Result<f64> {
        let batches = self
            .calls()
            .map(|places| driver.batch(direction, places, self.len, safety))
            .collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        for batch in batches {
            driver.finish(batch)?;
        }
        Ok(gigabytes_per_second(self.bytes(), start.elapsed()))
    }

    pub(crate) fn name(&self) -> String {
        let size = match self.len >> 20 {
            0 => format!("{} KiB", self.len >> 10),
            mebibytes => format!("{mebibytes} MiB"),
        };
        format!("{} x {size}", if self.many { self.places.len() } else { 1 })
    }
}

fn of([write, read]: &[PlainCopy; 2], direction: Direction) -> &PlainCopy {
    match direction {
        Direction::Write => write,
        Direction::Read => read,
    }
}

/// Connections of a tcp transport to its peer.
pub(crate) fn streams() -> usize {
    usize::from(EngineConfig::default().lanes.get())
}

/// Threads of a transport that copy, beside the caller's.
pub(crate) fn copy_threads() -> usize {
    usize::from(EngineConfig::default().copy_threads.get()).max(1)
}
