//! Reading the records in front of objects, with the objects themselves where they are small.
//!
//! The header decides whether the bytes behind it are what was asked for, so it comes first. A small
//! object's payload comes in the same piece, into memory of the client's own, and is looked at only
//! once its header fits: one trip instead of two.
//!
//! Of a header alone only as much is read as it has if its rows have one length, which is little of what was reserved
//! for it. One that has more is read again.

use bytes::Bytes;
use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{HeaderError, HeaderSpec, HeaderView, Row, Rows};
use layercake_protocol::key::ObjectKey;
use layercake_transport::{Direction, PieceError};

use super::core::{Core, now};
use super::fanout::Fanout;
use super::get_start::Candidate;
use super::headers::{check_header, mismatch};
use super::places::Place;
use super::scratch::Scratch;
use crate::error::StoreError;
use crate::session::Payload;

/// What a reader wants of a header that fits, and the payload if it is small.
pub(super) struct Record {
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) layout_id: u64,
    pub(super) rows: Rows,
    pub(super) payload: Option<Payload>,
}

/// `None`: the header has more bytes than were read.
pub(super) type Answer = Result<Option<Record>, StoreError>;

/// Bytes of records that are under way at a time, unless one is larger.
const WAVE: u64 = 4 << 20;

/// Bytes that are copied and checked before other tasks have a turn.
const TURN: u64 = 256 << 10;

/// What is read, and how much of it.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) core: &'a Core,
    pub(super) fingerprint: Option<Fingerprint>,
    /// The greatest payload that comes along with its header, in bytes.
    pub(super) eager: Eager,
}

/// The greatest payload that comes along with its header, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Eager {
    /// In any case.
    Always(u64),
    /// Where that saves a round trip.
    IfFar(u64),
}

impl Eager {
    /// Whether nothing but headers is read.
    fn is_none(self) -> bool {
        matches!(self, Self::Always(0) | Self::IfFar(0))
    }
}

impl Wanted<'_> {
    /// Reads and checks the records of all candidates, each at its replica; those of small objects with their
    /// payload. Each candidate is taken with what that brought.
    pub(super) async fn read_all(
        &self,
        mut candidates: Vec<(usize, Candidate)>,
        mut take: impl FnMut(usize, Candidate, Answer),
    ) {
        while !candidates.is_empty() {
            let mut bytes = 0;
            let fitting = candidates.iter().take_while(|(_, candidate)| {
                bytes += self.len_of(candidate);
                bytes <= WAVE
            });
            let later = candidates.split_off(fitting.count().max(1));
            self.read(candidates, &mut take).await;
            candidates = later;
        }
    }

    /// Whether a payload comes along with its header.
    fn comes_along(&self, place: &Place, size: u64) -> bool {
        match self.eager {
            Eager::Always(most) => size <= most,
            Eager::IfFar(most) => size <= most && place.target.reads_ask(&self.core.engine),
        }
    }

    fn len_of(&self, candidate: &Candidate) -> u64 {
        let (place, size) = (candidate.here(), candidate.size);
        if candidate.whole_header && !self.comes_along(place, size) {
            return place.replica.header_len.into();
        }
        self.first_len(place, size, &candidate.lease().object().key)
    }

    /// How much is read at first of an object of this key and size.
    pub(super) fn first_len(&self, place: &Place, size: u64, key: &ObjectKey) -> u64 {
        let header_len = place.replica.header_len;
        if self.comes_along(place, size) {
            return u64::from(header_len) + size;
        }
        let spec = HeaderSpec {
            tenant_len: self.core.config.tenant.as_str().len(),
            key_len: key.as_str().len(),
            group_len: 0,
            rows: 0,
        };
        spec.likely_len(header_len).into()
    }

    /// Reads one wave.
    async fn read(
        &self,
        wave: Vec<(usize, Candidate)>,
        take: &mut impl FnMut(usize, Candidate, Answer),
    ) {
        let core = self.core;
        let lens = wave.iter().map(|(_, candidate)| self.len_of(candidate));
        let total = lens.sum();
        let scratch = match core.scratch.take(total) {
            Ok(scratch) => scratch,
            Err(error) => return refuse(wave, &error, take),
        };
        let mut fanout = Fanout::new(Direction::Read, false);
        let mut at = 0;
        // Of whose records nothing came: nearly always none.
        let mut failed: Vec<(usize, StoreError)> = Vec::new();
        for (number, (_, candidate)) in wave.iter().enumerate() {
            let place = candidate.here();
            let mut remote = place.header();
            remote.len = self.len_of(candidate);
            let len = remote.len;
            match scratch.slice(at, len) {
                Ok(local) => fanout.push(&place.target, local, remote, number),
                Err(error) => failed.push((number, error)),
            }
            at += len;
        }
        let flight = fanout.submit(&core.engine);
        flight
            .land(|number, result| {
                if let Err(error) = result {
                    failed.push((number, lost(core, wave[number].1.here(), error)));
                }
            })
            .await;
        failed.sort_unstable_by_key(|(number, _)| *number);
        let shared = match self.shared(&scratch, at) {
            Ok(shared) => shared,
            Err(error) => return refuse(wave, &error, take),
        };
        let mut failed = failed.into_iter().peekable();
        let (mut at, mut turn) = (0, 0);
        for (number, (index, candidate)) in wave.into_iter().enumerate() {
            let len = self.len_of(&candidate);
            let record = match failed.next_if(|(failed, _)| *failed == number) {
                Some((_, error)) => Err(error),
                None => match &shared {
                    Some(shared) => self.record(&candidate, &part(shared, at, len)),
                    None => scratch
                        .bytes(at, len)
                        .and_then(|bytes| self.record(&candidate, &bytes)),
                },
            };
            if let Err(StoreError::HeaderMismatch { .. } | StoreError::ChecksumMismatch { .. }) =
                record
            {
                core.counters.mismatches.one();
            }
            take(index, candidate, record);
            at += len;
            turn += len;
            if turn >= TURN {
                turn = 0;
                tokio::task::yield_now().await;
            }
        }
        scratch.recycle();
    }

    /// The bytes of a whole wave in one piece, if they are headers alone: sessions keep them for their rows, and
    /// no more than the headers of sessions that were started together. A payload goes to a user, who
    /// may keep it for long.
    fn shared(&self, scratch: &Scratch, len: u64) -> Result<Option<Bytes>, StoreError> {
        let headers = self.eager.is_none();
        headers.then(|| scratch.bytes(0, len)).transpose()
    }

    /// Checks one record.
    pub(super) fn record(&self, candidate: &Candidate, bytes: &Bytes) -> Answer {
        let Self {
            core, fingerprint, ..
        } = *self;
        let place = candidate.here();
        core.suspects.clear(place.target.segment);
        let header_len = place.replica.header_len as usize;
        let header = match HeaderView::parse(bytes) {
            Ok(header) => header,
            Err(HeaderError::Truncated { need, .. })
                if bytes.len() < need && need <= header_len && !candidate.whole_header =>
            {
                return Ok(None);
            }
            Err(error) => return Err(mismatch(place, &error)),
        };
        check_header(place, &header, &candidate.expected(core, fingerprint))?;
        let mut record = Record {
            fingerprint: header.fingerprint(),
            layout_id: header.layout_id(),
            rows: header.into_rows(bytes),
            payload: None,
        };
        if !self.comes_along(place, candidate.size) {
            return Ok(Some(record));
        }
        let payload = bytes.slice(header_len..);
        let verified = if core.config.checksums {
            verify(&record.rows, &payload)?
        } else {
            0
        };
        let lease = candidate.lease();
        let in_time = lease.begin_read(now()).and_then(|()| lease.end_read(now()));
        in_time.map_err(|_| StoreError::Refused(Refusal::LeaseExpired))?;
        let len = payload.len() as u64;
        core.counters.bytes_read.add(len);
        core.counters.bytes_verified.add(verified);
        core.counters.bytes_unverified.add(len - verified);
        record.payload = Some(Payload {
            bytes: payload,
            verified,
        });
        Ok(Some(record))
    }
}

/// Answers a wave of which nothing can be read.
fn refuse(
    wave: Vec<(usize, Candidate)>,
    error: &StoreError,
    take: &mut impl FnMut(usize, Candidate, Answer),
) {
    for (index, candidate) in wave {
        take(index, candidate, Err(error.clone()));
    }
}

/// A part of a buffer that holds it.
fn part(bytes: &Bytes, at: u64, len: u64) -> Bytes {
    let index = |at| usize::try_from(at).expect("an offset inside memory fits");
    bytes.slice(index(at)..index(at + len))
}

/// Compares a whole payload with its rows. Gives the bytes that have a checksum.
fn verify(rows: &Rows, payload: &[u8]) -> Result<u64, StoreError> {
    let mut verified = 0;
    for Row { range, crc32c } in rows.iter() {
        let Some(expected) = crc32c else { continue };
        let bounds = usize::try_from(range.start())
            .ok()
            .zip(usize::try_from(range.end()).ok());
        let bytes = bounds.and_then(|(start, end)| payload.get(start..end));
        if bytes.map(crc32c::crc32c) != Some(expected) {
            return Err(StoreError::ChecksumMismatch {
                offset: range.start(),
                len: range.len(),
            });
        }
        verified += range.len();
    }
    Ok(verified)
}

pub(super) fn lost(core: &Core, place: &Place, error: PieceError) -> StoreError {
    if error == PieceError::Refused(layercake_transport::Refusal::StaleGeneration) {
        // The place was reused: the object is gone, and with it the lease.
        return Refusal::LeaseExpired.into();
    }
    core.suspects.failed(&place.target, error);
    StoreError::Transfer {
        offset: 0,
        len: 0,
        source: error,
    }
}
