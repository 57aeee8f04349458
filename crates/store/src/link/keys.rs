//! Calls about keys: probes, starts, ends, removals.
//!
//! Each takes a batch of any size. What exceeds one message goes in several, one after the other, and
//! the answers are joined in order; the epoch that the master draws for the first part is that of all.
//! A batch that fails half-way fails as a whole: what its first parts reserved is given back.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use layercake_protocol::convert::{
    Batch, GetStartAnswer, PutStartAnswer, decode_key_results, decode_presences, decode_refusals,
    encode_batch, encode_upserts,
};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{Epoch, SegmentId};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, Presence, PutStart, Recency, ReplicateConfig};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use tokio::time::Instant;

use super::MasterLink;
use super::codec::encode_body;
use super::connection::{IfLost, Request, Response};
use super::joined::{Joined, Reserved, granted};
use super::outbox::Chore;
use super::split::parts;
use super::types::{Existence, Exists, GetsStarted, Life, PutsStarted, Renewed, StartOptions};
use crate::error::StoreError;

/// What stands around a key in a message, at most, in bytes.
const KEY_OVERHEAD: usize = 8;
const REF_OVERHEAD: usize = 24;
const START_OVERHEAD: usize = 96;

/// The longest wait that one message asks for; masters bound it.
pub(super) const LONGEST_WAIT: Duration = Duration::from_mins(5);

type KeyResults = Vec<Result<(), Refusal>>;

impl MasterLink {
    /// Asks which objects are there. Grants probe leases and refreshes recency, unless it peeks.
    pub async fn exists(&self, query: &Exists<'_>) -> Result<Existence, StoreError> {
        let mut existence = Existence {
            states: Vec::with_capacity(query.keys.len()),
            epoch: query.recency.epoch,
            keys_queried: 0,
        };
        for part in key_parts(query.keys) {
            let keys = &query.keys[part.clone()];
            let probe = if query.readable {
                wire::Probe::Readable
            } else {
                wire::Probe::Exists
            };
            let request = wire::ExistsRequest {
                probe: probe.into(),
                keys: Vec::new(),
                recency: Some(part_recency(query.recency, existence.epoch, &part).into()),
                stop_at_first_miss: query.stop_at_first_miss,
                unreachable_segments: segment_ids(query.unreachable),
                peek: query.peek,
            };
            let request = self.about(&request, keys);
            let Response::Exists(answer) = self.call(&request).await?.0 else {
                return Err(self.shared().wrong_kind());
            };
            let states = decode_presences(&answer.states, keys.len())
                .map_err(|error| self.shared().bad_answer(error))?;
            let missed = states.iter().any(|state| *state != Presence::Complete);
            existence.keys_queried += keys.len() as u64;
            existence.epoch = Epoch(answer.epoch);
            existence.states.extend(states);
            if missed && query.stop_at_first_miss {
                break;
            }
        }
        existence.states.resize(query.keys.len(), Presence::Absent);
        Ok(existence)
    }

    /// Finds objects and leases them. With `session` the leases are renewable and belong to this
    /// member until [`Self::get_end`]; without, they just run out.
    pub async fn get_start(
        &self,
        keys: &[ObjectKey],
        options: StartOptions<'_>,
        session: bool,
    ) -> Result<GetsStarted, StoreError> {
        self.find(keys, options, session, false).await
    }

    /// Asks about objects that are being written by writers who publish what they have. Leases nothing.
    /// [`Refusal::AlreadyExists`], and an answer without a table for early readers: it is complete.
    pub async fn unfinished(
        &self,
        keys: &[ObjectKey],
        options: StartOptions<'_>,
    ) -> Result<GetsStarted, StoreError> {
        self.find(keys, options, false, true).await
    }

    async fn find(
        &self,
        keys: &[ObjectKey],
        options: StartOptions<'_>,
        session: bool,
        unfinished: bool,
    ) -> Result<GetsStarted, StoreError> {
        let mut joined = Joined::new(options.recency.epoch);
        let mut lease = Duration::MAX;
        for part in key_parts(keys) {
            let request = wire::GetStartRequest {
                keys: Vec::new(),
                recency: Some(part_recency(options.recency, joined.epoch, &part).into()),
                session,
                unreachable_segments: segment_ids(options.unreachable),
                unfinished,
            };
            let request = self.about(&request, &keys[part.clone()]);
            let (answer, connection) = self.call(&request).await?;
            let Response::GetStart(answer) = answer else {
                return Err(self.shared().wrong_kind());
            };
            let answer = GetStartAnswer::decode(answer, part.len())
                .map_err(|error| self.shared().bad_answer(error))?;
            lease = lease.min(answer.lease);
            joined.add(
                self,
                connection.life,
                answer.results,
                answer.segments,
                answer.epoch,
            )?;
        }
        let (results, segments, epoch, life) = joined.finish();
        Ok(GetsStarted {
            results,
            segments,
            lease,
            epoch,
            life,
        })
    }

    /// Renews the leases of open get sessions.
    pub async fn renew(&self, objects: &[ObjectRef]) -> Result<Renewed, StoreError> {
        let mut renewed = Renewed {
            results: Vec::with_capacity(objects.len()),
            lease: Duration::MAX,
        };
        for part in ref_parts(objects) {
            let objects = &objects[part];
            let request = self.about(&wire::RenewRequest::default(), objects);
            let Response::Renew(answer) = self.call(&request).await?.0 else {
                return Err(self.shared().wrong_kind());
            };
            let results = decode_refusals(answer.refusals, objects.len())
                .map_err(|error| self.shared().bad_answer(error))?;
            renewed.results.extend(results);
            renewed.lease = renewed.lease.min(Duration::from_millis(answer.lease_ms));
        }
        Ok(renewed)
    }

    /// Gives leases back.
    pub async fn get_end(&self, objects: &[ObjectRef]) -> Result<(), StoreError> {
        for part in ref_parts(objects) {
            let request = self.about(&wire::GetEndRequest::default(), &objects[part]);
            match self.call(&request).await?.0 {
                Response::GetEnd(_) | Response::Done(_) => {}
                _ => return Err(self.shared().wrong_kind()),
            }
        }
        Ok(())
    }

    /// Reserves space for new objects.
    pub async fn put_start(
        &self,
        entries: &[PutStart],
        config: &ReplicateConfig,
        options: StartOptions<'_>,
    ) -> Result<PutsStarted, StoreError> {
        self.start_puts(entries, config, options, encode_batch)
            .await
    }

    /// As [`Self::put_start`], but complete objects of the keys are replaced when the new ones commit,
    /// and open reservations are taken over.
    pub async fn upsert_start(
        &self,
        entries: &[PutStart],
        config: &ReplicateConfig,
        options: StartOptions<'_>,
    ) -> Result<PutsStarted, StoreError> {
        self.start_puts(entries, config, options, encode_upserts)
            .await
    }

    async fn start_puts(
        &self,
        entries: &[PutStart],
        config: &ReplicateConfig,
        options: StartOptions<'_>,
        encode: impl Fn(&wire::PutStartRequest, &[PutStart]) -> Bytes,
    ) -> Result<PutsStarted, StoreError> {
        let mut puts = Reserved::new(self, entries, options.recency.epoch);
        let mut discard_after = Duration::MAX;
        let mut hold = None;
        let size = |entry: &PutStart| {
            let group = entry.group.as_ref().map_or(0, String::len);
            entry.key.as_str().len() + group + START_OVERHEAD
        };
        for part in parts(entries, size) {
            let request = wire::PutStartRequest {
                entries: Vec::new(),
                config: Some(config.into()),
                recency: Some(part_recency(options.recency, puts.joined.epoch, &part).into()),
                endpoint: self.shared().config.endpoint.as_ref().map(Into::into),
                unreachable_segments: segment_ids(options.unreachable),
                hold: options.hold && part.start == 0,
            };
            let request = Request {
                body: encode(&request, &entries[part.clone()]),
                tenant: self.tenant().clone(),
                if_lost: IfLost::Repeat,
                reserves: true,
            };
            let (answer, connection) = self.call(&request).await?;
            let Response::PutStart(answer) = answer else {
                return Err(self.shared().wrong_kind());
            };
            let answer = PutStartAnswer::decode(answer, part.len())
                .map_err(|error| self.shared().bad_answer(error))?;
            discard_after = discard_after.min(answer.discard_after);
            hold = hold.or(answer.hold);
            if !puts.joined.is_of(connection.life) {
                // What the parts before it reserved is void, not what this one did.
                let objects = granted(&entries[part], &answer.results);
                self.give_back(connection.life, objects);
                return Err(self.shared().membership_ended());
            }
            puts.joined.add(
                self,
                connection.life,
                answer.results,
                answer.segments,
                answer.epoch,
            )?;
        }
        let (results, segments, epoch, life) = puts.finish();
        Ok(PutsStarted {
            results,
            segments,
            discard_after,
            epoch,
            life,
            hold,
        })
    }

    /// Gives reservations back that nobody has written to, in the background.
    pub(crate) fn give_back(&self, life: Life, objects: Vec<ObjectRef>) {
        if !objects.is_empty() {
            self.shared().outbox.push(Chore::Revoke {
                life,
                tenant: self.tenant().clone(),
                objects,
            });
        }
    }

    /// Commits reservations whose every byte is written. Repeating it is harmless.
    pub async fn put_end(&self, objects: &[ObjectRef]) -> Result<KeyResults, StoreError> {
        let mut results = Vec::with_capacity(objects.len());
        for part in ref_parts(objects) {
            let objects = &objects[part];
            let request = self.about(&wire::PutEndRequest::default(), objects);
            results.extend(self.key_results(self.call(&request).await?.0, objects.len())?);
        }
        Ok(results)
    }

    /// Gives reservations up. The caller confirms that no transfer of them is in flight any more, but
    /// for those of which a write ended without an answer from the memory's owner: the master is told which these are, and keeps
    /// their memory until it was fenced. Repeating it is harmless.
    pub async fn put_revoke(&self, objects: &[ObjectRef]) -> Result<KeyResults, StoreError> {
        let mut results = Vec::with_capacity(objects.len());
        for (objects, request) in self.revokes(objects) {
            let answer = self.call(&request).await?.0;
            let answers = self.key_results(answer, objects.len())?;
            for (object, answer) in objects.iter().zip(&answers) {
                if !matches!(answer, Err(Refusal::ShuttingDown | Refusal::WrongTerm)) {
                    self.shared().doubts.told(object.generation);
                }
            }
            results.extend(answers);
        }
        Ok(results)
    }

    /// Requests that give reservations up, and what each is about.
    pub(super) fn revokes<'a>(
        &self,
        objects: &'a [ObjectRef],
    ) -> impl Iterator<Item = (&'a [ObjectRef], Request)> {
        ref_parts(objects).map(|part| {
            let objects = &objects[part];
            let in_doubt = objects.iter().map(|object| self.is_in_doubt(object));
            let unconfirmed: Vec<bool> = in_doubt.collect();
            let request = wire::PutRevokeRequest {
                objects: Vec::new(),
                unconfirmed: if unconfirmed.contains(&true) {
                    unconfirmed
                } else {
                    Vec::new()
                },
            };
            (objects, self.about(&request, objects))
        })
    }

    /// Notes that a write of a reservation ended without an answer from the memory's owner, who may still
    /// carry it out. From then on this member can't confirm that nothing of it is in flight.
    pub(crate) fn put_in_doubt(&self, object: &ObjectRef) {
        self.shared().doubts.note(self.tenant(), object);
    }

    /// Whether that was noted.
    pub(crate) fn is_in_doubt(&self, object: &ObjectRef) -> bool {
        self.shared().doubts.has(object.generation)
    }

    /// Waits until each key is complete, or its writer failed, or the time is over
    /// ([`Refusal::NotReady`]).
    pub async fn wait_complete(
        &self,
        keys: &[ObjectKey],
        timeout: Duration,
    ) -> Result<KeyResults, StoreError> {
        let deadline = Instant::now() + timeout;
        let mut results = Vec::with_capacity(keys.len());
        for part in key_parts(keys) {
            let keys = &keys[part];
            // Later parts have become complete meanwhile, or have what is left.
            results.extend(self.wait_part(keys, deadline).await?);
        }
        Ok(results)
    }

    async fn wait_part(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<KeyResults, StoreError> {
        loop {
            let asked = Instant::now();
            let left = deadline.saturating_duration_since(asked);
            let wait = left.min(LONGEST_WAIT);
            let request = wire::WaitCompleteRequest {
                keys: Vec::new(),
                timeout_ms: millis(wait),
            };
            let request = self.about(&request, keys);
            let within = wait + self.shared().config.timeouts.call;
            let answer = self.shared().call(&request, within).await?.0;
            let results = self.key_results(answer, keys.len())?;
            // A master that has too many waits answers early: that is an answer too.
            let ask_again = left > wait && asked.elapsed() >= wait;
            if !ask_again || !results.contains(&Err(Refusal::NotReady)) {
                return Ok(results);
            }
        }
    }

    /// Removes objects. `force` takes the names away even under leases; the memory is kept until
    /// those end.
    pub async fn remove(&self, keys: &[ObjectKey], force: bool) -> Result<KeyResults, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for part in key_parts(keys) {
            let keys = &keys[part];
            let request = wire::RemoveRequest {
                keys: Vec::new(),
                force,
            };
            let request = Request {
                if_lost: IfLost::Tell,
                ..self.about(&request, keys)
            };
            results.extend(self.key_results(self.call(&request).await?.0, keys.len())?);
        }
        Ok(results)
    }

    /// Removes objects of exactly these generations, leased or not. [`Refusal::NotFound`]: the key names another
    /// version by now, or none.
    pub async fn remove_versions(&self, objects: &[ObjectRef]) -> Result<KeyResults, StoreError> {
        let mut results = Vec::with_capacity(objects.len());
        for part in ref_parts(objects) {
            let objects = &objects[part];
            let request = self.about(&wire::RemoveVersionsRequest::default(), objects);
            results.extend(self.key_results(self.call(&request).await?.0, objects.len())?);
        }
        Ok(results)
    }

    /// Removes the objects whose keys the regular expression matches anywhere; an empty one matches
    /// all. Gives the number that were removed.
    pub async fn remove_matching(&self, pattern: &str, force: bool) -> Result<u64, StoreError> {
        let request = self.once(Body::RemoveMatching(wire::RemoveMatchingRequest {
            pattern: pattern.to_owned(),
            force,
        }));
        match self.call(&request).await?.0 {
            Response::RemoveMatching(answer) => Ok(answer.removed),
            _ => Err(self.shared().wrong_kind()),
        }
    }

    fn key_results(&self, answer: Response, keys: usize) -> Result<KeyResults, StoreError> {
        match answer {
            Response::Results(results) => {
                decode_key_results(results, keys).map_err(|error| self.shared().bad_answer(error))
            }
            _ => Err(self.shared().wrong_kind()),
        }
    }

    /// A request about keys, which may be repeated.
    fn about<R: Batch>(&self, request: &R, entries: &[R::Entry]) -> Request {
        Request {
            body: encode_batch(request, entries),
            tenant: self.tenant().clone(),
            if_lost: IfLost::Repeat,
            reserves: false,
        }
    }

    pub(super) fn once(&self, body: Body) -> Request {
        Request {
            body: encode_body(body),
            tenant: self.tenant().clone(),
            if_lost: IfLost::Tell,
            reserves: false,
        }
    }
}

fn key_parts(keys: &[ObjectKey]) -> impl Iterator<Item = Range<usize>> {
    parts(keys, |key| key.as_str().len() + KEY_OVERHEAD)
}

fn ref_parts(objects: &[ObjectRef]) -> impl Iterator<Item = Range<usize>> {
    parts(objects, |object| object.key.as_str().len() + REF_OVERHEAD)
}

pub(super) fn segment_ids(segments: &[SegmentId]) -> Vec<u64> {
    segments.iter().map(|id| id.0).collect()
}

/// The recency of a part: the epoch of the parts before it, and its own place in the prefix.
fn part_recency(recency: Recency, epoch: Epoch, part: &Range<usize>) -> Recency {
    let start = u32::try_from(part.start).unwrap_or(u32::MAX);
    Recency {
        epoch,
        first_index: recency.first_index.saturating_add(start),
    }
}

/// Whole milliseconds, rounded up.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
