//! Takes the checksums of rows that a rewrite cut in two from the stored bytes (L5).
//!
//! The transport computes them while it reads the bytes back, in pieces of bounded size.

use std::num::NonZeroU64;

use layercake_protocol::range::ByteRange;
use layercake_transport::Direction;

use super::core::Core;
use super::fanout::Fanout;
use crate::error::StoreError;
use crate::session::PutShared;

/// Bytes that are read back at a time.
const WAVE: NonZeroU64 = NonZeroU64::new(4 << 20).expect("not zero");

/// Gives every stale row its checksum. With checksums switched off the rows stay without one.
pub(super) async fn refresh_stale(core: &Core, put: &PutShared) -> Result<(), StoreError> {
    let stale: Vec<ByteRange> = put.with(|state| state.written().stale().collect());
    if stale.is_empty() || !core.config.checksums {
        return Ok(());
    }
    let mut sums: Vec<Option<u32>> = vec![Some(0); stale.len()];
    let pieces = stale
        .iter()
        .enumerate()
        .flat_map(|(row, range)| range.split_every(WAVE).map(move |piece| (row, piece)));
    let mut wave: Vec<(usize, ByteRange)> = Vec::new();
    let mut bytes = 0;
    for (row, piece) in pieces {
        if bytes + piece.len() > WAVE.get() {
            read_wave(core, put, &wave, &mut sums).await?;
            wave.clear();
            bytes = 0;
        }
        bytes += piece.len();
        wave.push((row, piece));
    }
    read_wave(core, put, &wave, &mut sums).await?;
    put.with(|state| {
        for (range, sum) in stale.into_iter().zip(sums) {
            if let Some(sum) = sum {
                state.written_mut().set_crc(range, sum);
            }
        }
    });
    Ok(())
}

/// Reads pieces of rows, in ascending order, and adds their checksums to those of the rows so far.
async fn read_wave(
    core: &Core,
    put: &PutShared,
    wave: &[(usize, ByteRange)],
    sums: &mut [Option<u32>],
) -> Result<(), StoreError> {
    let Some(place) = put.places.first() else {
        return Ok(());
    };
    let scratch = core
        .scratch
        .take(wave.iter().map(|(_, piece)| piece.len()).sum())?;
    let mut fanout = Fanout::new(Direction::Read, true);
    let mut at = 0;
    for (index, (_, piece)) in wave.iter().enumerate() {
        let local = scratch.slice(at, piece.len())?;
        at += piece.len();
        fanout.push(&place.target, local, place.payload(*piece), index);
    }
    let mut results = vec![Ok(None); wave.len()];
    let flight = fanout.submit(&core.engine);
    flight
        .land(|index, result| results[index] = result.map(|done| done.crc32c))
        .await;
    scratch.recycle();
    for ((row, piece), result) in wave.iter().zip(results) {
        let crc = result.map_err(|source| {
            core.suspects.failed(&place.target, source);
            StoreError::Transfer {
                offset: piece.start(),
                len: piece.len(),
                source,
            }
        })?;
        let len = usize::try_from(piece.len()).unwrap_or(usize::MAX);
        sums[*row] = sums[*row]
            .zip(crc)
            .map(|(sum, crc)| crc32c::crc32c_combine(sum, crc, len));
    }
    Ok(())
}
