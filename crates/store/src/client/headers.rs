//! Writing the headers in front of objects, and checking those that were read.

use layercake_protocol::error::Refusal;
use layercake_protocol::header::{
    Checksums, Expected, HeaderError, HeaderFields, HeaderView, WrittenRanges,
};
use layercake_transport::{Direction, PieceError};

use super::core::Core;
use super::fanout::{Failure, Fanout};
use super::places::Place;
use super::scratch::Scratch;
use crate::error::StoreError;
use crate::session::PutShared;
use crate::session::put_state::Phase;

/// Bytes of headers that are under way at a time, unless one object has more.
const WAVE: u64 = 4 << 20;

/// Writes the header of every object to all of its replicas, in parallel up to a bounded number of bytes.
/// One answer for each object. While its header is under way an object is not idle; one that was settled
/// meanwhile gets none.
pub(super) async fn write_headers(core: &Core, puts: &[&PutShared]) -> Vec<Result<(), StoreError>> {
    let mut results = Vec::with_capacity(puts.len());
    let mut rest = puts;
    while !rest.is_empty() {
        let (wave, later) = rest.split_at(wave_of(rest));
        results.extend(write_wave(core, wave).await);
        rest = later;
    }
    results
}

/// How many of the first objects make one wave: at least one.
fn wave_of(puts: &[&PutShared]) -> usize {
    let mut bytes = 0;
    let fitting = puts.iter().take_while(|put| {
        bytes += header_bytes(put);
        bytes <= WAVE
    });
    fitting.count().max(1)
}

fn header_bytes(put: &PutShared) -> u64 {
    let lens = put.places.iter().map(|place| place.replica.header_len);
    lens.map(u64::from).sum()
}

async fn write_wave(core: &Core, puts: &[&PutShared]) -> Vec<Result<(), StoreError>> {
    let total = puts.iter().map(|put| header_bytes(put)).sum();
    let mut wave = match core.scratch.take(total) {
        Ok(scratch) => Wave {
            scratch,
            at: 0,
            fanout: Fanout::new(Direction::Write, false),
        },
        Err(error) => return puts.iter().map(|_| Err(error.clone())).collect(),
    };
    let checksums = if core.config.checksums {
        Checksums::Crc32c
    } else {
        Checksums::None
    };
    let mut held = Vec::with_capacity(puts.len());
    let mut results = Vec::with_capacity(puts.len());
    for (index, put) in puts.iter().enumerate() {
        let begun = put.begin_header(checksums, |fields, written| {
            wave.push((index, put), fields, written)
        });
        held.push(begun.is_ok());
        results.push(begun.flatten());
    }
    let Wave {
        scratch,
        at,
        fanout,
    } = wave;
    if let Err(error) = scratch.copy_staged(at) {
        results.fill(Err(error));
    } else {
        let flight = fanout.submit(&core.engine);
        flight
            .land_writes(|(index, place), result| {
                if let Err(failure) = result {
                    results[index] = Err(header_failed(core, puts[index], place, failure));
                }
            })
            .await;
    }
    for ((put, held), result) in puts.iter().zip(held).zip(&results) {
        if held {
            put.end_header(result.is_ok());
        }
    }
    scratch.recycle();
    results
}

/// Headers that are about to be written, one behind the other.
struct Wave {
    scratch: Scratch,
    /// Bytes of it that are used.
    at: usize,
    fanout: Fanout<(usize, usize)>,
}

impl Wave {
    /// Encodes one object's header once per replica, since their places may differ in length.
    fn push(
        &mut self,
        (index, put): (usize, &PutShared),
        fields: &HeaderFields<'_>,
        written: &WrittenRanges,
    ) -> Result<(), StoreError> {
        for (place_at, place) in put.places.iter().enumerate() {
            let len = place.replica.header_len;
            let staged = self.scratch.stage(self.at, len as usize);
            let used = fields.encode_into(written.runs(), len, staged);
            let used = used.map_err(|error| mismatch(place, &error))?;
            // What lies behind the rows is not looked at: there is no need to move it.
            let mut remote = place.header();
            remote.len = used.into();
            let local = self.scratch.slice(self.at as u64, remote.len)?;
            self.at += used as usize;
            self.fanout
                .push(&place.target, local, remote, (index, place_at));
        }
        Ok(())
    }
}

fn header_failed(core: &Core, put: &PutShared, place: usize, failure: Failure) -> StoreError {
    let Failure { error, in_doubt } = failure;
    if in_doubt {
        core.in_doubt(put);
    }
    if error == PieceError::Refused(layercake_transport::Refusal::StaleGeneration) {
        core.settled(put, Phase::Superseded);
        return Refusal::Superseded.into();
    }
    core.suspects.failed(&put.places[place].target, error);
    StoreError::Transfer {
        offset: 0,
        len: 0,
        source: error,
    }
}

/// Checks that a header that was read is what the master promised.
pub(super) fn check_header(
    place: &Place,
    header: &HeaderView<'_>,
    expected: &Expected<'_>,
) -> Result<(), StoreError> {
    let fits = header.check(expected).and_then(|()| header.check_sealed());
    fits.map_err(|error| match error {
        HeaderError::WrongFingerprint { expected, found } => {
            StoreError::FingerprintMismatch { expected, found }
        }
        error => mismatch(place, &error),
    })
}

pub(super) fn mismatch(place: &Place, error: &HeaderError) -> StoreError {
    StoreError::HeaderMismatch {
        segment: place.replica.segment,
        generation: place.replica.generation,
        detail: error.to_string(),
    }
}
