//! The composite answers: what a get or put start gives, and what an existence query found.

use std::time::Duration;

use bytes::Bytes;

use super::objects::{decode_fingerprint, encode_fingerprint, encode_millis};
use super::refusals::{Details, encode_details, encode_result};
use super::{aligned, invalid};
use crate::early::{EarlyTable, EarlyToken};
use crate::error::{Refusal, WireError};
use crate::ids::{Epoch, Generation};
use crate::replica::{GetStarted, Hold, Presence, PutStarted, Replicas, Segment};
use crate::wire;

/// The answer to a get start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetStartAnswer {
    /// One result per key, in order.
    pub results: Vec<Result<GetStarted, Refusal>>,
    /// Every segment that a replica lies in, once each.
    pub segments: Vec<Segment>,
    /// How long the leases last from the moment of the answer.
    pub lease: Duration,
    /// The epoch of the call: the caller's own, or the one drawn for it.
    pub epoch: Epoch,
}

/// The answer to a put or upsert start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutStartAnswer {
    /// One result per entry, in order.
    pub results: Vec<Result<PutStarted, Refusal>>,
    /// Every segment that a replica lies in, once each.
    pub segments: Vec<Segment>,
    /// The epoch of the call: the caller's own, or the one drawn for it.
    pub epoch: Epoch,
    /// After this long without an end, the reservations may be taken over.
    pub discard_after: Duration,
    /// If one was asked for and granted; its segment is among the above.
    pub hold: Option<Hold>,
}

fn encode_replicas(replicas: Replicas) -> wire::Replicas {
    replicas.into_iter().map(Into::into).collect()
}

/// The replicas of one key: at least one, and of one generation, as all replicas of a version are.
fn decode_replicas(replicas: wire::Replicas) -> Result<Replicas, WireError> {
    let replicas: Replicas = replicas
        .into_iter()
        .map(TryInto::try_into)
        .collect::<Result<_, _>>()?;
    let Some(first) = replicas.first() else {
        return Err(WireError::Missing { field: "replicas" });
    };
    if let Some(other) = replicas.iter().find(|r| r.generation != first.generation) {
        return Err(invalid(
            "replicas",
            format!(
                "generations {} and {} in one object",
                first.generation, other.generation
            ),
        ));
    }
    Ok(replicas)
}

/// The table for early readers of an object that is not complete.
fn decode_early(token: u64, slots: u32) -> Result<Option<EarlyTable>, WireError> {
    match EarlyToken::new(token) {
        Some(_) if slots == 0 => Err(WireError::Missing {
            field: "results.early_slots",
        }),
        token => Ok(token.map(|token| EarlyTable { token, slots })),
    }
}

fn encode_segments(segments: &[Segment]) -> Vec<wire::Segment> {
    segments.iter().map(Into::into).collect()
}

fn decode_segments(segments: Vec<wire::Segment>) -> Result<Vec<Segment>, WireError> {
    segments.into_iter().map(TryInto::try_into).collect()
}

impl From<GetStartAnswer> for wire::GetStartResponse {
    fn from(answer: GetStartAnswer) -> Self {
        let results = answer
            .results
            .into_iter()
            .map(|result| {
                let refusal = encode_result(&result);
                result.map_or_else(
                    |_| wire::GetStarted {
                        refusal,
                        ..Default::default()
                    },
                    |got| wire::GetStarted {
                        refusal,
                        size: got.size,
                        replicas: encode_replicas(got.replicas),
                        left_out: got.left_out,
                        fingerprint: encode_fingerprint(got.fingerprint),
                        layout_id: got.layout_id,
                        early_token: got.early.map_or(0, |table| table.token.0.get()),
                        early_slots: got.early.map_or(0, |table| table.slots),
                    },
                )
            })
            .collect();
        Self {
            results,
            segments: encode_segments(&answer.segments),
            lease_ms: encode_millis(answer.lease),
            epoch: answer.epoch.0,
        }
    }
}

impl GetStartAnswer {
    /// Checks the answer to a call with `keys` keys.
    pub fn decode(response: wire::GetStartResponse, keys: usize) -> Result<Self, WireError> {
        aligned("results", response.results.len(), keys)?;
        let mut details = Details::new(Vec::new());
        let mut results = Vec::with_capacity(keys);
        for got in response.results {
            if let Some(refusal) = details.next("results.refusal", got.refusal)? {
                results.push(Err(refusal));
                continue;
            }
            if got.size == 0 {
                return Err(WireError::Missing {
                    field: "results.size",
                });
            }
            results.push(Ok(GetStarted {
                size: got.size,
                replicas: decode_replicas(got.replicas)?,
                left_out: got.left_out,
                fingerprint: decode_fingerprint(&got.fingerprint)?,
                layout_id: got.layout_id,
                early: decode_early(got.early_token, got.early_slots)?,
            }));
        }
        Ok(Self {
            results,
            segments: decode_segments(response.segments)?,
            lease: Duration::from_millis(response.lease_ms),
            epoch: Epoch(response.epoch),
        })
    }
}

// By reference: the master keeps the answer, to repeat it after a broken connection.
impl From<&PutStartAnswer> for wire::PutStartResponse {
    fn from(answer: &PutStartAnswer) -> Self {
        let details = encode_details(&answer.results);
        let results = answer
            .results
            .iter()
            .map(|result| {
                let refusal = encode_result(result);
                match result {
                    Err(_) => wire::PutStarted {
                        refusal,
                        ..Default::default()
                    },
                    Ok(put) => wire::PutStarted {
                        refusal,
                        generation: put.generation.0,
                        replicas: put.replicas.iter().copied().map(Into::into).collect(),
                    },
                }
            })
            .collect();
        Self {
            results,
            segments: encode_segments(&answer.segments),
            epoch: answer.epoch.0,
            discard_after_ms: encode_millis(answer.discard_after),
            details,
            hold: answer.hold.as_ref().map(Into::into),
        }
    }
}

impl PutStartAnswer {
    /// Checks the answer to a call with `entries` entries.
    pub fn decode(response: wire::PutStartResponse, entries: usize) -> Result<Self, WireError> {
        aligned("results", response.results.len(), entries)?;
        let mut details = Details::new(response.details);
        let mut results = Vec::with_capacity(entries);
        for put in response.results {
            if let Some(refusal) = details.next("results.refusal", put.refusal)? {
                results.push(Err(refusal));
                continue;
            }
            let replicas = decode_replicas(put.replicas)?;
            let generation = Generation(put.generation);
            if replicas.iter().any(|r| r.generation != generation) {
                return Err(invalid(
                    "results.generation",
                    format!("{generation}, its replicas have another"),
                ));
            }
            results.push(Ok(PutStarted {
                generation,
                replicas,
            }));
        }
        details.finish()?;
        Ok(Self {
            results,
            segments: decode_segments(response.segments)?,
            epoch: Epoch(response.epoch),
            discard_after: Duration::from_millis(response.discard_after_ms),
            hold: response.hold.map(TryInto::try_into).transpose()?,
        })
    }
}

/// One byte per key.
pub fn encode_presences(presences: &[Presence]) -> Bytes {
    presences
        .iter()
        .map(|presence| match presence {
            Presence::Absent => 0,
            Presence::Complete => 1,
            Presence::Reserved => 2,
        })
        .collect::<Vec<u8>>()
        .into()
}

/// What an existence query of `keys` keys found. A query that stopped at its first miss is answered
/// with a shorter list, and what is missing is absent.
pub fn decode_presences(states: &[u8], keys: usize) -> Result<Vec<Presence>, WireError> {
    if states.len() > keys {
        return Err(invalid(
            "states",
            format!("{} entries for {keys} keys", states.len()),
        ));
    }
    let mut presences = states
        .iter()
        .map(|state| match state {
            0 => Ok(Presence::Absent),
            1 => Ok(Presence::Complete),
            2 => Ok(Presence::Reserved),
            other => Err(invalid("states", format!("{other}, 0 to 2 are accepted"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    presences.resize(keys, Presence::Absent);
    Ok(presences)
}
