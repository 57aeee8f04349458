//! Putting whole objects, made of sessions.
//!
//! A put follows the same placement policy as a session. Its bytes are cut at fixed units, so that a
//! later reader of ranges can verify whole ones. Small objects go into places that the client has in advance, where it
//! has any (see `slots`). A put that fails because a node is out of reach is tried
//! once more, elsewhere.

use std::num::NonZeroU64;

use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_transport::{Access, LocalSlice};

use super::StoreClient;
use super::put_start::Kind;
use super::slots::{are_small, is_plain};
use super::write::{Range, RangeWrite};
use crate::error::StoreError;
use crate::session::PutSession;

/// The length at which a put cuts its bytes: one checksum for each.
const UNIT: NonZeroU64 = NonZeroU64::new(1 << 20).expect("not zero");

/// Bytes that [`StoreClient::put_bytes`] copies and has under way at a time, unless one object is larger.
const WAVE: usize = 64 << 20;

/// Bytes that are copied before other tasks have a turn.
const TURN: usize = 256 << 10;

/// One object to put.
#[derive(Clone, Debug)]
pub struct PutRequest {
    /// Its key.
    pub key: ObjectKey,
    /// Its bytes, piece after piece; at least one byte in all. Empty pieces are skipped.
    pub pieces: Vec<LocalSlice>,
    /// Objects of one group id are evicted together.
    pub group: Option<String>,
    /// Whose bytes these are.
    pub fingerprint: Option<Fingerprint>,
}

impl PutRequest {
    /// An object of these pieces, all else by default.
    pub fn new(key: ObjectKey, pieces: Vec<LocalSlice>) -> Self {
        Self {
            key,
            pieces,
            group: None,
            fingerprint: None,
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.pieces
            .iter()
            .fold(0, |size, piece| size.saturating_add(piece.len()))
    }

    /// The pieces as ranges of at most [`UNIT`] bytes.
    pub(super) fn ranges(&self) -> Vec<Range> {
        let mut ranges = Vec::with_capacity(self.pieces.len());
        let mut at = 0;
        for piece in &self.pieces {
            for cut in ByteRange::to(piece.len()).split_every(UNIT) {
                let local = piece.part(cut.start(), cut.len());
                ranges.push(Range {
                    offset: at + cut.start(),
                    local: local.expect("a cut lies inside its piece"),
                });
            }
            at += piece.len();
        }
        ranges
    }
}

/// How a put ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PutOutcome {
    /// The object is readable.
    Stored,
    /// The key had a complete object, which stays as it is.
    Existed,
    /// Another session is writing the key; nothing was stored.
    InProgress,
}

impl StoreClient {
    /// Stores objects whose keys are free. The answers align with `requests`.
    pub async fn put(
        &self,
        requests: Vec<PutRequest>,
        config: &ReplicateConfig,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        self.store(requests, config, false).await
    }

    /// Stores objects and replaces those that are there; readers see the old bytes until the new ones
    /// are whole. An open put of the key is taken over.
    pub async fn upsert(
        &self,
        requests: Vec<PutRequest>,
        config: &ReplicateConfig,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        self.store(requests, config, true).await
    }

    /// [`put`](Self::put) of bytes that are not registered: they are copied once more, and stored in waves of
    /// bounded size.
    pub async fn put_bytes(
        &self,
        objects: &[(ObjectKey, &[u8])],
        config: &ReplicateConfig,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        let mut answers = Vec::with_capacity(objects.len());
        let mut rest = objects;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fitting = rest.iter().take_while(|(_, object)| {
                bytes += object.len();
                bytes <= WAVE
            });
            let (wave, later) = rest.split_at(fitting.count().max(1));
            answers.extend(self.put_wave(wave, config).await);
            rest = later;
        }
        answers
    }

    async fn put_wave(
        &self,
        wave: &[(ObjectKey, &[u8])],
        config: &ReplicateConfig,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        let mut requests = Vec::with_capacity(wave.len());
        for (key, bytes) in wave {
            match self.registered(bytes).await {
                Ok(piece) => {
                    let pieces = piece.into_iter().collect();
                    requests.push(PutRequest::new(key.clone(), pieces));
                }
                Err(error) => return wave.iter().map(|_| Err(error.clone())).collect(),
            }
        }
        self.put(requests, config).await
    }

    /// A registered copy of bytes; `None` if there are none. Other tasks have their turn meanwhile.
    async fn registered(&self, bytes: &[u8]) -> Result<Option<LocalSlice>, StoreError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let mut copy = Vec::with_capacity(bytes.len());
        for part in bytes.chunks(TURN) {
            copy.extend_from_slice(part);
            if copy.len() < bytes.len() {
                tokio::task::yield_now().await;
            }
        }
        let memory = self.engine().register(copy.into(), Access::LocalOnly)?;
        Ok(Some(memory.slice(0, memory.len())?))
    }

    async fn store(
        &self,
        requests: Vec<PutRequest>,
        config: &ReplicateConfig,
        replace: bool,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        let mut answers: Vec<Option<Result<PutOutcome, StoreError>>> = Vec::new();
        let mut open = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            if request.size() == 0 {
                let refusal = Refusal::invalid("an object of 0 bytes: at least 1 byte is needed");
                answers.push(Some(Err(refusal.into())));
            } else {
                answers.push(None);
                open.push(index);
            }
        }
        let small = !replace && is_plain(config) && are_small(&requests);
        if small && open.len() == requests.len() {
            for (index, answer) in self.put_in_slots(&requests).await.into_iter().enumerate() {
                answers[index] = answer;
            }
            open.retain(|index| answers[*index].is_none());
        }
        let kind = match (replace, small) {
            (true, _) => Kind::Replacing,
            (false, true) => Kind::Small,
            (false, false) => Kind::New,
        };
        for last in [false, true] {
            if open.is_empty() {
                break;
            }
            let batch: Vec<&PutRequest> = open.iter().map(|&index| &requests[index]).collect();
            let results = self.store_once(&batch, config, kind).await;
            let tried = std::mem::take(&mut open);
            for (index, result) in tried.into_iter().zip(results) {
                match &result {
                    // The node is known to be out of reach now, and the next try goes elsewhere.
                    Err(StoreError::Transfer { source, .. }) if source.is_retryable() && !last => {
                        open.push(index);
                    }
                    _ => answers[index] = Some(result),
                }
            }
        }
        let answers = answers.into_iter();
        answers
            .map(|answer| answer.unwrap_or(Err(StoreError::UnknownSession)))
            .collect()
    }

    async fn store_once(
        &self,
        requests: &[&PutRequest],
        config: &ReplicateConfig,
        kind: Kind,
    ) -> Vec<Result<PutOutcome, StoreError>> {
        let ranges: Vec<Vec<Range>> = requests.iter().map(|request| request.ranges()).collect();
        let entries = requests
            .iter()
            .zip(&ranges)
            .map(|(request, ranges)| PutStart {
                header_rows: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
                group: request.group.clone(),
                fingerprint: request.fingerprint,
                ..PutStart::new(request.key.clone(), request.size())
            });
        let started = self
            .start_writing(entries.collect(), config, Recency::default(), kind)
            .await;
        let mut answers: Vec<Result<PutOutcome, StoreError>> = Vec::with_capacity(requests.len());
        let mut sessions: Vec<(usize, PutSession)> = Vec::with_capacity(requests.len());
        let mut writes = Vec::with_capacity(requests.len());
        for (index, (result, ranges)) in started.into_iter().zip(ranges).enumerate() {
            answers.push(match result {
                Ok(session) => {
                    sessions.push((index, session));
                    writes.push(ranges);
                    Ok(PutOutcome::Stored)
                }
                Err(StoreError::Refused(Refusal::AlreadyExists)) => Ok(PutOutcome::Existed),
                Err(StoreError::Refused(Refusal::InProgress)) => Ok(PutOutcome::InProgress),
                Err(error) => Err(error),
            });
        }
        let writes = sessions.iter().zip(writes);
        let writes = writes.map(|((_, session), ranges)| RangeWrite { session, ranges });
        let written = self.write_ranges(writes).await;
        let mut whole = Vec::with_capacity(sessions.len());
        let mut failed = Vec::new();
        for ((index, session), result) in sessions.into_iter().zip(written) {
            match result {
                Ok(_) => whole.push((index, session)),
                Err(error) => {
                    answers[index] = Err(error);
                    failed.push(session);
                }
            }
        }
        // What a revoke can't do now, the background does.
        drop(self.revoke_puts(failed).await);
        let (indices, whole): (Vec<usize>, Vec<PutSession>) = whole.into_iter().unzip();
        for (index, ended) in indices.into_iter().zip(self.end_puts(whole).await) {
            if let Err(failure) = ended {
                answers[index] = Err(failure.error);
            }
        }
        answers
    }
}
