//! Put sessions by key: coded.
//!
//! The Mooncake interface knows sessions by their key, one table for a client. An end of a session with bytes
//! that nobody wrote fills them with zeros, since callers end such sessions and count on success;
//! bytes whose write *failed* refuse the end until they are written again. So each session has
//! [`Failures`].
//!
//! A session leaves the table when it is ended or revoked, and comes back, sealed, if that did not reach the
//! master: then both can be repeated. One that was taken over is gone for good.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{Presence, PutStart, Recency, ReplicateConfig};
use layercake_store::link::Exists;
use layercake_store::{EndError, PutSession, Range, RangeWrite, StoreError};
use layercake_transport::{LocalSlice, PieceError};
use parking_lot::RwLock;

use super::StoreCore;
use super::code::{self, ABSENT, Call, INVALID};
use super::failures::{Failures, Verdict};
use super::reasons::{because, invalid};
use crate::args::{Keys, Names, Ragged};
use crate::memory::{Room, Use};

/// Zeros that are written at a time.
const ZEROS: u64 = 1 << 20;

/// Why a key is refused.
pub(super) const NO_SESSION: &str = "this client has no session on the key: start one first";

/// How long an end waits for range calls under way. A transfer has 30 s.
const SETTLE: Duration = Duration::from_mins(1);

/// The open put sessions of a client.
#[derive(Debug, Default)]
pub(super) struct PutTable(RwLock<HashMap<ObjectKey, Put>>);

#[derive(Debug)]
struct Put {
    session: PutSession,
    failures: Arc<Failures>,
}

impl PutTable {
    /// Takes every session out.
    pub(super) fn take_all(&self) -> Vec<PutSession> {
        let mut table = self.0.write();
        table.drain().map(|(_, put)| put.session).collect()
    }

    /// The sizes of the keys' sessions, and what tells these from later ones of the same keys.
    fn of(&self, keys: &Names) -> Vec<Option<(u64, Arc<Failures>)>> {
        let table = self.0.read();
        let found = keys.iter().map(|key| {
            let put = table.get(key)?;
            Some((put.session.size(), Arc::clone(&put.failures)))
        });
        found.collect()
    }

    /// Puts a session back; unless its key has another by now, which only a session that is over leaves
    /// room for.
    fn put_back(&self, put: Put) {
        if let Entry::Vacant(entry) = self.0.write().entry(put.session.key().clone()) {
            entry.insert(put);
        }
    }
}

/// The answers of a call on keys, and which entry each session answers for.
struct Answers {
    codes: Vec<i64>,
    indices: Vec<usize>,
}

impl StoreCore {
    /// Reserves room and opens sessions: 0 or a code for each key. `groups`: one id per key, or none.
    pub(crate) fn start_puts(
        &self,
        keys: &Keys,
        sizes: &[u64],
        groups: &[Option<String>],
        config: &ReplicateConfig,
    ) -> Vec<i64> {
        let groups_fit = groups.is_empty() || groups.len() == keys.len();
        if sizes.len() != keys.len() || !groups_fit || config.replicas == 0 {
            let code = invalid(format_args!(
                "{} keys need as many sizes, not {}, and at least one replica, not {}",
                keys.len(),
                sizes.len(),
                config.replicas
            ));
            return vec![code; keys.len()];
        }
        let mut answers = Answers::new(keys.len());
        let mut entries = Vec::with_capacity(keys.len());
        {
            let table = self.puts.0.read();
            for (index, (key, &size)) in keys.iter().zip(sizes).enumerate() {
                let key = match key {
                    Ok(key) if is_size(size) && !table.contains_key(key) => key,
                    Ok(_) if i64::try_from(size).is_err() => {
                        let code = ResultCode::NO_SPACE.as_result();
                        let reason = format_args!("no segment has room for {size} bytes");
                        answers.codes[index] = because(code, reason);
                        continue;
                    }
                    Ok(_) if size == 0 => {
                        invalid("an object of 0 bytes: at least 1 is needed");
                        continue;
                    }
                    Ok(_) => {
                        invalid("this client has a session on the key: end or revoke it first");
                        continue;
                    }
                    Err(error) => {
                        invalid(error);
                        continue;
                    }
                };
                answers.indices.push(index);
                entries.push(PutStart {
                    group: groups.get(index).cloned().flatten(),
                    prefix_index: u32::try_from(index).ok(),
                    ..PutStart::new(key.clone(), size)
                });
            }
        }
        let started = self
            .client()
            .start_puts(entries, config, Recency::default());
        let started = self.block(started);
        let mut table = self.puts.0.write();
        answers.fill(started, |session| match session {
            Ok(session) => {
                let failures = Arc::default();
                table.insert(session.key().clone(), Put { session, failures });
                ResultCode::OK.as_result()
            }
            Err(error) => code::of(&error, Call::Session),
        })
    }

    /// Writes ranges, without the master: bytes or a code for each entry. A key may be there more than once.
    pub(crate) fn write_ranges(
        &self,
        keys: &Names,
        addrs: &Ragged,
        lens: &Ragged,
        offsets: &Ragged,
    ) -> Vec<i64> {
        let rows = [addrs.len(), lens.len(), offsets.len()];
        if rows.iter().any(|rows| *rows != keys.len()) {
            return vec![code::lists_differ(keys.len(), &rows); keys.len()];
        }
        let mut answers = Answers::new(keys.len());
        // Local memory is looked at, which may take long, before the table is held.
        let mut wanted = Vec::with_capacity(keys.len());
        for (index, open) in self.puts.of(keys).into_iter().enumerate() {
            let Some((size, failures)) = open else {
                invalid(NO_SESSION);
                continue;
            };
            let row = (addrs.row(index), lens.row(index), offsets.row(index));
            match self.ranges(size, row, Use::Read) {
                Ok(_) if row.1.is_empty() => {
                    let code = ResultCode::NO_RANGES.as_result();
                    answers.codes[index] = because(code, "no ranges are given");
                }
                Ok(ranges) if ranges.is_empty() => answers.codes[index] = 0,
                Ok(ranges) => wanted.push((index, failures, ranges)),
                Err(code) => answers.codes[index] = code,
            }
        }
        let mut entries = Vec::with_capacity(wanted.len());
        let written = {
            let names: Vec<&str> = keys.iter().collect();
            let table = self.puts.0.read();
            let mut writes = Vec::with_capacity(wanted.len());
            for (index, failures, ranges) in wanted {
                // One that was ended meanwhile is answered as any key without a session.
                let put = table.get(names[index]);
                if let Some(put) = put.filter(|put| Arc::ptr_eq(&put.failures, &failures)) {
                    answers.indices.push(index);
                    entries.push(put.failures.begin());
                    writes.push(RangeWrite {
                        session: &put.session,
                        ranges,
                    });
                }
            }
            // Under way when this returns; the table is not held while they fly.
            self.client().write_ranges(writes)
        };
        let written = self.block(written);
        let noted = answers.indices.iter().zip(entries).zip(&written);
        for ((&index, entry), written) in noted {
            let row = offsets.row(index).iter().zip(lens.row(index));
            let row = row.filter_map(|(&offset, &len)| ByteRange::new(offset, len).ok());
            entry.ended(row, written.is_ok(), written.as_ref().is_err_and(is_lost));
        }
        answers.fill(written, |written| match written {
            Ok(bytes) => code::count(bytes),
            // As for any key that has no session here.
            Err(error) if is_lost(&error) => invalid(error),
            Err(error) => code::of(&error, Call::Session),
        })
    }

    /// One entry's ranges, those without bytes left out; all checked against the object's size.
    pub(super) fn ranges(
        &self,
        size: u64,
        (addrs, lens, offsets): (&[u64], &[u64], &[u64]),
        of: Use,
    ) -> Result<Vec<Range>, i64> {
        code::check_row(&[addrs.len(), lens.len(), offsets.len()])?;
        let mut resolver = self.engine().resolver();
        let mut ranges = Vec::with_capacity(lens.len());
        for ((&addr, &len), &offset) in addrs.iter().zip(lens).zip(offsets) {
            if offset.checked_add(len).is_none_or(|end| end > size) {
                return Err(code::beyond(offset, len, size));
            }
            if len > 0 {
                let local = resolver.any(addr, len, of);
                let local = local.map_err(|error| code::of_memory(&error, Call::Session))?;
                ranges.push(Range { offset, local });
            }
        }
        Ok(ranges)
    }

    /// Publishes objects: 0 or a code for each key; a key's second mention has the answer of the first.
    pub(crate) fn end_puts(&self, keys: &Names) -> Vec<i64> {
        let (mut answers, mut puts) = self.take(keys);
        let zeroed = self.fill_gaps(&puts);
        let mut ending = Vec::with_capacity(puts.len());
        let mut order = Vec::with_capacity(puts.len());
        for ((index, put), zeroed) in answers.indices.drain(..).zip(puts.drain(..)).zip(zeroed) {
            match zeroed {
                Ok(()) => {
                    order.push((index, put.failures));
                    ending.push(put.session);
                }
                Err(error) => {
                    answers.codes[index] = code::of(&error, Call::Session);
                    if !is_lost(&error) {
                        self.puts.put_back(put);
                    }
                }
            }
        }
        let ended = self.block(self.client().end_puts(ending));
        let mut codes = self.settle(keys, answers.codes, order, ended);
        self.look_for_gone(keys, &mut codes);
        codes
    }

    /// An end that did not reach the object's memory may be of one whose memory is gone: its owner withdrew it, or the
    /// master started anew. There is no such object then, and nothing to try again. Asks once for all of them.
    fn look_for_gone(&self, keys: &Names, codes: &mut [i64]) {
        let failed = Call::Session.transfer_failed().as_result();
        let lost = keys.iter().zip(&*codes).enumerate();
        let (indices, lost): (Vec<usize>, Vec<ObjectKey>) = lost
            .filter(|(_, (_, code))| **code == failed)
            .filter_map(|(index, (key, _))| Some((index, ObjectKey::new(key).ok()?)))
            .unzip();
        if lost.is_empty() {
            return;
        }
        let query = Exists {
            peek: true,
            ..Exists::readable(&lost)
        };
        // Without an answer nobody knows.
        let Ok(found) = self.block(self.client().link().exists(&query)) else {
            return;
        };
        for (index, state) in indices.into_iter().zip(found.states) {
            if state == Presence::Absent {
                codes[index] = ABSENT;
            }
        }
    }

    /// Gives reservations back: 0 or a code for each key.
    pub(crate) fn revoke_puts(&self, keys: &Names) -> Vec<i64> {
        let (answers, puts) = self.take(keys);
        let mut order = Vec::with_capacity(puts.len());
        let mut sessions = Vec::with_capacity(puts.len());
        for (index, put) in answers.indices.into_iter().zip(puts) {
            order.push((index, put.failures));
            sessions.push(put.session);
        }
        let revoked = self.block(self.client().revoke_puts(sessions));
        // A reservation that is not this client's any more is what a revoke wants.
        let revoked = revoked.into_iter().map(|revoked| match revoked {
            Err(EndError {
                error: StoreError::Refused(Refusal::Superseded | Refusal::NotFound),
                session: None,
            }) => Ok(()),
            revoked => revoked,
        });
        self.settle(keys, answers.codes, order, revoked.collect())
    }

    /// Takes the keys' sessions out of the table.
    fn take(&self, keys: &Names) -> (Answers, Vec<Put>) {
        let mut answers = Answers::new(keys.len());
        let mut puts = Vec::with_capacity(keys.len());
        let mut table = self.puts.0.write();
        for (index, key) in keys.iter().enumerate() {
            if let Some(put) = table.remove(key) {
                answers.indices.push(index);
                puts.push(put);
            } else {
                invalid(NO_SESSION);
            }
        }
        (answers, puts)
    }

    /// Codes for sessions that were ended or revoked, those that can be tried again put back, and further
    /// mentions of a key answered like its first.
    fn settle(
        &self,
        keys: &Names,
        mut codes: Vec<i64>,
        order: Vec<(usize, Arc<Failures>)>,
        done: Vec<Result<(), EndError>>,
    ) -> Vec<i64> {
        let mut answered: Vec<usize> = Vec::with_capacity(order.len());
        for ((index, failures), done) in order.into_iter().zip(done) {
            answered.push(index);
            codes[index] = match done {
                Ok(()) => ResultCode::OK.as_result(),
                Err(EndError { error, session }) => {
                    if let Some(session) = session {
                        self.puts.put_back(Put { session, failures });
                    }
                    code::of(&error, Call::Session)
                }
            };
        }
        repeat_first(keys, &answered, &mut codes);
        codes
    }

    /// Writes zeros where nobody wrote. An entry with bytes whose write failed is refused, and one whose memory
    /// was taken away is over.
    fn fill_gaps(&self, puts: &[Put]) -> Vec<Result<(), StoreError>> {
        let mut answers: Vec<Result<(), StoreError>> = Vec::with_capacity(puts.len());
        let mut gaps = Vec::new();
        for (index, put) in puts.iter().enumerate() {
            let settled = put.failures.settled(SETTLE);
            let missing = put.session.missing();
            let first = missing.first().map(|gap| gap.start());
            answers.push(match (settled, first) {
                (Err(error), _) => Err(error),
                (Ok(Verdict::Lost), _) => Err(Refusal::Superseded.into()),
                (Ok(Verdict::Failed), Some(first_missing)) => {
                    Err(StoreError::Incomplete { first_missing })
                }
                (Ok(_), None) => Ok(()),
                (Ok(Verdict::Whole), Some(_)) => {
                    gaps.push((index, missing));
                    Ok(())
                }
            });
        }
        if gaps.is_empty() {
            return answers;
        }
        let mut room = match Room::zeros(longest(&gaps).min(ZEROS)) {
            Ok(room) => room,
            Err(error) => {
                let error = StoreError::from(error);
                for (index, _) in gaps {
                    answers[index] = Err(error.clone());
                }
                return answers;
            }
        };
        let zeros = room.slice(ZEROS);
        let writes = gaps.iter().map(|(index, gaps)| RangeWrite {
            session: &puts[*index].session,
            ranges: zero_ranges(gaps, &zeros),
        });
        let written = self.client().write_ranges(writes);
        for ((index, _), written) in gaps.iter().zip(self.block(written)) {
            answers[*index] = match written {
                Err(error) if is_lost(&error) => Err(Refusal::Superseded.into()),
                written => written.map(drop),
            };
        }
        answers
    }
}

/// Whether an object may have this size, for all that is known here.
fn is_size(size: u64) -> bool {
    size > 0 && i64::try_from(size).is_ok()
}

/// Bytes of the longest gap.
fn longest(gaps: &[(usize, Vec<ByteRange>)]) -> u64 {
    let lens = gaps.iter().flat_map(|(_, gaps)| gaps).map(|gap| gap.len());
    lens.max().unwrap_or(1)
}

/// Whether a write failed because the place is not the session's any more.
fn is_lost(error: &StoreError) -> bool {
    match error {
        StoreError::Refused(Refusal::Superseded) => true,
        StoreError::Transfer { source, .. } => {
            *source == PieceError::Refused(layercake_transport::Refusal::StaleGeneration)
        }
        _ => false,
    }
}

fn zero_ranges(gaps: &[ByteRange], zeros: &LocalSlice) -> Vec<Range> {
    let unit = std::num::NonZeroU64::new(zeros.len()).unwrap_or(std::num::NonZeroU64::MIN);
    let cuts = gaps.iter().flat_map(|gap| gap.split_every(unit));
    cuts.map(|cut| Range {
        offset: cut.start(),
        local: zeros
            .part(0, cut.len())
            .expect("a cut is no longer than the zeros"),
    })
    .collect()
}

/// Gives entries that were not answered the answer of an earlier entry of the same key.
fn repeat_first(keys: &Names, answered: &[usize], codes: &mut [i64]) {
    if answered.len() == keys.len() {
        return;
    }
    let keys: Vec<&str> = keys.iter().collect();
    let first: HashMap<&str, i64> = answered
        .iter()
        .map(|&index| (keys[index], codes[index]))
        .collect();
    for (key, code) in keys.iter().zip(codes) {
        if let Some(first) = first.get(key) {
            *code = *first;
        }
    }
}

impl Answers {
    /// Every entry is a bad argument until it is answered.
    fn new(len: usize) -> Self {
        Self {
            codes: vec![INVALID; len],
            indices: Vec::with_capacity(len),
        }
    }

    /// Answers the entries that were asked for.
    fn fill<T>(mut self, results: Vec<T>, mut code: impl FnMut(T) -> i64) -> Vec<i64> {
        for (index, result) in self.indices.into_iter().zip(results) {
            self.codes[index] = code(result);
        }
        self.codes
    }
}
