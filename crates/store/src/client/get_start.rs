//! Starting and ending get sessions.
//!
//! A start is one call to the master, which leases the objects, and then one batch per peer that reads
//! the headers. A header that does not fit what the master promised, or the caller expects, refuses
//! its key before a byte of the object moves; a replica whose header can't be had is passed over for
//! the next one.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{Expected, ObjectHeader};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GetStarted, Recency};
use layercake_transport::{Direction, PieceError};

use super::StoreClient;
use super::core::{Core, now};
use super::fanout::Fanout;
use super::headers::check_header;
use super::leases::Leases;
use super::places::{Place, Targets};
use crate::error::StoreError;
use crate::link::StartOptions;
use crate::session::lease::Grant;
use crate::session::{GetSession, GetShared, LeaseHold};

/// How get sessions are started.
#[derive(Clone, Copy, Debug, Default)]
pub struct GetOptions {
    /// When the request touched the keys.
    pub recency: Recency,
    /// Refuse objects of another deployment.
    pub fingerprint: Option<Fingerprint>,
    /// Leave the leases to run out after the sessions' end instead of giving them back: whoever asks next
    /// finds the object protected for as long as a lease lasts, and the end costs no message.
    pub keep_lease: bool,
}

impl From<Recency> for GetOptions {
    fn from(recency: Recency) -> Self {
        Self {
            recency,
            ..Self::default()
        }
    }
}

/// A key on its way to a session.
pub(super) struct Candidate {
    pub(super) size: u64,
    pub(super) places: Vec<Place>,
    pub(super) lease: LeaseHold,
    /// The replica to try.
    pub(super) place: usize,
}

impl StoreClient {
    /// Opens a session on each object, in one call to the master. The answers align with `keys`; a key
    /// may be there more than once.
    ///
    /// The leases are renewed in the background for as long as the sessions are in use
    /// ([`ClientConfig::session_idle`](super::ClientConfig::session_idle)).
    pub async fn start_gets(
        &self,
        keys: &[ObjectKey],
        options: impl Into<GetOptions>,
    ) -> Vec<Result<GetSession, StoreError>> {
        let options = options.into();
        let (core, keys) = (Arc::clone(self.core()), keys.to_vec());
        self.core()
            .see_through(async move { start(&core, &keys, options).await })
            .await
    }

    /// Ends sessions. Leases whose last session this was are given back in one call; one that still has
    /// reads under way follows when they are done.
    pub async fn end_gets(&self, sessions: Vec<GetSession>) {
        drop(sessions);
        let core = Arc::clone(self.core());
        self.core()
            .see_through(async move { core.leases.give_back(&core).await })
            .await;
    }
}

async fn start(
    core: &Arc<Core>,
    keys: &[ObjectKey],
    options: GetOptions,
) -> Vec<Result<GetSession, StoreError>> {
    let mut answers: Vec<Option<Result<GetSession, StoreError>>> = Vec::new();
    let mut open = Vec::with_capacity(keys.len());
    for (index, lease) in lease_keys(core, keys, options.recency, options.keep_lease)
        .await
        .into_iter()
        .enumerate()
    {
        match lease {
            Ok(candidate) => {
                answers.push(None);
                open.push((index, candidate));
            }
            Err(error) => answers.push(Some(Err(error))),
        }
    }
    while !open.is_empty() {
        let headers = read_headers(core, &open, options.fingerprint).await;
        let round = std::mem::take(&mut open);
        for ((index, mut candidate), header) in round.into_iter().zip(headers) {
            match header {
                Ok(header) => answers[index] = Some(Ok(candidate.into_session(core, header))),
                Err(error) => {
                    let is_final = matches!(error, StoreError::FingerprintMismatch { .. });
                    if !is_final && candidate.next_place(core) {
                        open.push((index, candidate));
                    } else {
                        answers[index] = Some(Err(error));
                    }
                }
            }
        }
    }
    let answers = answers.into_iter();
    answers
        .map(|answer| answer.unwrap_or(Err(StoreError::UnknownSession)))
        .collect()
}

impl Candidate {
    /// Goes on to the next replica. `false`: there is none.
    pub(super) fn next_place(&mut self, core: &Core) -> bool {
        self.place += 1;
        let more = self.place < self.places.len();
        if more {
            core.counters.failovers.one();
        }
        more
    }

    pub(super) fn into_session(self, core: &Core, header: ObjectHeader) -> GetSession {
        core.counters.gets_started.one();
        GetSession::new(GetShared {
            size: self.size,
            fingerprint: header.fingerprint,
            layout_id: header.layout_id,
            places: self.places,
            rows: header.rows,
            preferred: AtomicUsize::new(self.place),
            lease: self.lease,
        })
    }

    pub(super) fn here(&self) -> &Place {
        &self.places[self.place]
    }

    /// What the header must say.
    pub(super) fn expected<'a>(
        &'a self,
        core: &'a Core,
        fingerprint: Option<Fingerprint>,
    ) -> Expected<'a> {
        let object = self.lease.lease().object();
        Expected {
            tenant: &core.config.tenant,
            key: &object.key,
            generation: object.generation,
            payload_len: self.size,
            fingerprint,
        }
    }
}

/// Asks the master for the objects and their leases.
pub(super) async fn lease_keys(
    core: &Arc<Core>,
    keys: &[ObjectKey],
    recency: Recency,
    keep_lease: bool,
) -> Vec<Result<Candidate, StoreError>> {
    if keys.is_empty() {
        return Vec::new();
    }
    let mut starting = Leases::start(core, keys).await;
    let unreachable = core.unreachable();
    let options = StartOptions {
        recency,
        unreachable: &unreachable,
    };
    let sent = now();
    let started = match core.link.get_start(keys, options, true).await {
        Ok(started) => started,
        Err(error) => return keys.iter().map(|_| Err(error.clone())).collect(),
    };
    let targets = Targets::new(&started.segments);
    let grant = Grant {
        sent,
        lease: started.lease,
    };
    let candidates = started.results.into_iter().map(|result| {
        let granted = result
            .as_ref()
            .ok()
            .map(|found| (found.generation(), grant));
        let lease = starting.answer(granted);
        if keep_lease && let Some(lease) = &lease {
            lease.lease().keep();
        }
        if result.is_ok() {
            core.counters.hits.one()
        } else {
            core.counters.misses.one()
        }
        candidate(&targets, result?, lease)
    });
    candidates.collect()
}

fn candidate(
    targets: &Targets,
    found: GetStarted,
    lease: Option<LeaseHold>,
) -> Result<Candidate, StoreError> {
    let lease = lease.ok_or(StoreError::UnknownSession)?;
    let places = targets.places(&found.replicas, found.size);
    if places.is_empty() {
        return Err(Refusal::Unreachable.into());
    }
    Ok(Candidate {
        size: found.size,
        places,
        lease,
        place: 0,
    })
}

/// Reads and checks the headers of all candidates, each at its replica.
async fn read_headers(
    core: &Core,
    candidates: &[(usize, Candidate)],
    fingerprint: Option<Fingerprint>,
) -> Vec<Result<ObjectHeader, StoreError>> {
    let here = candidates.iter().map(|(_, candidate)| candidate.here());
    let total = here
        .clone()
        .map(|place| u64::from(place.replica.header_len))
        .sum();
    let scratch = match core.scratch.take(total) {
        Ok(scratch) => scratch,
        Err(error) => return candidates.iter().map(|_| Err(error.clone())).collect(),
    };
    let mut fanout = Fanout::new(Direction::Read, false);
    let mut at = 0;
    let mut offsets = Vec::with_capacity(candidates.len());
    for (index, place) in here.enumerate() {
        let remote = place.header();
        offsets.push(at);
        match scratch.slice(at, remote.len) {
            Ok(local) => fanout.push(&place.target, local, remote, index),
            Err(error) => return candidates.iter().map(|_| Err(error.clone())).collect(),
        }
        at += remote.len;
    }
    let mut arrived = vec![Ok(()); candidates.len()];
    let mut flight = fanout.submit(&core.engine);
    flight
        .land(|index, result| arrived[index] = result.map(|_| ()))
        .await;
    let mut bytes = Vec::new();
    let headers =
        candidates
            .iter()
            .zip(arrived)
            .zip(offsets)
            .map(|(((_, candidate), arrived), at)| {
                let place = candidate.here();
                arrived.map_err(|error| header_lost(core, place, error))?;
                core.suspects.clear(place.target.segment);
                bytes.resize(place.replica.header_len as usize, 0);
                scratch.copy_out(at, &mut bytes)?;
                let checked = check_header(place, &bytes, &candidate.expected(core, fingerprint));
                if let Err(StoreError::HeaderMismatch { .. }) = checked {
                    core.counters.mismatches.one();
                }
                checked
            });
    let headers = headers.collect();
    scratch.recycle();
    headers
}

pub(super) fn header_lost(core: &Core, place: &Place, error: PieceError) -> StoreError {
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
