//! Takes the checksums of rows that a rewrite cut in two from the stored bytes (L5).
//!
//! The transport computes them while it reads the bytes back, in waves of bounded size over all
//! sessions of a call.

use layercake_protocol::checksum::combine;
use layercake_protocol::range::ByteRange;
use layercake_transport::Direction;
use std::num::NonZeroU64;

use super::core::Core;
use super::fanout::Fanout;
use crate::error::StoreError;
use crate::session::PutShared;

/// Bytes that are read back at a time.
const WAVE: NonZeroU64 = NonZeroU64::new(4 << 20).expect("not zero");

/// A row without a checksum.
struct Stale {
    /// Index of its session.
    put: usize,
    range: ByteRange,
    /// Of its bytes so far; `None`: the transport gave none.
    sum: Option<u32>,
}

/// Sessions whose rows are read back, and how it went.
struct Refresh<'a> {
    core: &'a Core,
    puts: &'a [&'a PutShared],
    rows: Vec<Stale>,
    results: Vec<Result<(), StoreError>>,
}

/// Gives every stale row its checksum. One answer for each session. With checksums switched off the rows
/// stay without one.
pub(super) async fn refresh_stale(core: &Core, puts: &[&PutShared]) -> Vec<Result<(), StoreError>> {
    let mut refresh = Refresh {
        core,
        puts,
        rows: Vec::new(),
        results: vec![Ok(()); puts.len()],
    };
    if core.config.checksums {
        for (index, put) in puts.iter().enumerate() {
            put.with(|state| {
                let stale = state.written().stale().map(|range| Stale {
                    put: index,
                    range,
                    sum: Some(0),
                });
                refresh.rows.extend(stale);
            });
        }
    }
    refresh.run().await
}

impl Refresh<'_> {
    async fn run(mut self) -> Vec<Result<(), StoreError>> {
        let mut wave: Vec<(usize, ByteRange)> = Vec::new();
        let mut bytes = 0;
        for row in 0..self.rows.len() {
            for piece in self.rows[row].range.split_every(WAVE) {
                if bytes + piece.len() > WAVE.get() {
                    self.read(&wave).await;
                    wave.clear();
                    bytes = 0;
                }
                bytes += piece.len();
                wave.push((row, piece));
            }
        }
        self.read(&wave).await;
        for row in &self.rows {
            if let (Ok(()), Some(sum)) = (&self.results[row.put], row.sum) {
                self.puts[row.put].with(|state| state.written_mut().set_crc(row.range, sum));
            }
        }
        self.results
    }

    /// Reads pieces of rows, in ascending order, and adds their checksums to those of the rows so far.
    async fn read(&mut self, wave: &[(usize, ByteRange)]) {
        if wave.is_empty() {
            return;
        }
        if let Err(error) = self.try_read(wave).await {
            for (row, _) in wave {
                self.results[self.rows[*row].put] = Err(error.clone());
            }
        }
    }

    async fn try_read(&mut self, wave: &[(usize, ByteRange)]) -> Result<(), StoreError> {
        let core = self.core;
        let len = wave.iter().map(|(_, piece)| piece.len()).sum();
        let scratch = core.scratch.take(len)?;
        let mut fanout = Fanout::new(Direction::Read, true);
        let mut at = 0;
        for (index, (row, piece)) in wave.iter().enumerate() {
            let local = scratch.slice(at, piece.len())?;
            at += piece.len();
            // Every session has a replica, and all have the same bytes.
            let put = &self.puts[self.rows[*row].put];
            if let Some(place) = put.places.first() {
                fanout.push(&place.target, local, place.payload(*piece), (index, place));
            }
        }
        let mut crcs = vec![None; wave.len()];
        let (rows, results) = (&self.rows, &mut self.results);
        let flight = fanout.submit(&core.engine);
        flight
            .land(|(index, place), result| match result {
                Ok(done) => crcs[index] = done.crc32c,
                Err(source) => {
                    let (row, piece) = wave[index];
                    core.suspects.failed(&place.target, source);
                    results[rows[row].put] = Err(StoreError::Transfer {
                        offset: piece.start(),
                        len: piece.len(),
                        source,
                    });
                }
            })
            .await;
        scratch.recycle();
        for ((row, piece), crc) in wave.iter().zip(crcs) {
            let row = &mut self.rows[*row];
            let sums = row.sum.zip(crc);
            row.sum = sums.map(|(sum, crc)| combine(sum, crc, piece.len()));
        }
        Ok(())
    }
}
