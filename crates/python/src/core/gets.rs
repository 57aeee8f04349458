//! Get sessions by key: coded.

use std::collections::HashMap;

use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_store::{GetOptions, GetSession, RangeRead, StoreError};
use parking_lot::RwLock;

use super::StoreCore;
use super::code::{self, ABSENT, Call, INVALID};
use super::puts::NO_SESSION;
use super::reasons::invalid;
use crate::args::{Keys, Names, Ragged};
use crate::memory::Use;

/// The open get sessions of a client. A reading call has handles on those it reads from, so that the table is held for
/// look-ups only; a session that was ended meanwhile gives its lease back when the call is done.
#[derive(Debug, Default)]
pub(super) struct GetTable(RwLock<HashMap<ObjectKey, GetSession>>);

impl GetTable {
    pub(super) fn clear(&self) {
        // Dropped outside the lock.
        let sessions = std::mem::take(&mut *self.0.write());
        drop(sessions);
    }

    /// The keys' sessions, in the keys' order.
    fn of(&self, keys: &Names) -> Vec<Option<GetSession>> {
        let table = self.0.read();
        keys.iter().map(|key| table.get(key).cloned()).collect()
    }

    /// Takes a session out, unless its key has another one by now.
    fn remove(&self, ended: &GetSession) {
        let mut table = self.0.write();
        let key = ended.key();
        if table.get(key).is_some_and(|now| now.is_same(ended)) {
            table.remove(key);
        }
    }
}

impl StoreCore {
    /// Opens sessions: 0 or a code for each key. One that is open is begun anew, and ends if it can't be.
    pub(crate) fn start_gets(&self, keys: &Keys) -> Vec<i64> {
        let started = self.client().start_gets(keys.good(), GetOptions::default());
        let started = self.block(started);
        let mut old = Vec::new();
        let codes = {
            let mut table = self.gets.0.write();
            let codes = keys
                .good()
                .iter()
                .zip(started)
                .map(|(key, session)| match session {
                    Ok(session) => {
                        old.extend(table.insert(key.clone(), session));
                        ResultCode::OK.as_result()
                    }
                    Err(error) => {
                        old.extend(table.remove(key));
                        code::of(&error, Call::Question)
                    }
                });
            codes.collect()
        };
        self.client().release_gets(old);
        keys.align(codes, |_| ABSENT)
    }

    /// Reads ranges, without the master: bytes or a code for each entry. A key may be there more than
    /// once. A session whose lease is over says so once, and is gone.
    pub(crate) fn read_ranges(
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
        let mut codes = vec![INVALID; keys.len()];
        let sessions = self.gets.of(keys);
        let mut entries = Vec::with_capacity(keys.len());
        let mut reads = Vec::with_capacity(keys.len());
        for (index, session) in sessions.iter().enumerate() {
            let Some(session) = session else {
                invalid(NO_SESSION);
                continue;
            };
            let row = (addrs.row(index), lens.row(index), offsets.row(index));
            match self.ranges(session.size(), row, Use::Write) {
                Ok(ranges) if ranges.is_empty() => codes[index] = 0,
                Ok(ranges) => {
                    entries.push((index, session));
                    reads.push(RangeRead { session, ranges });
                }
                Err(code) => codes[index] = code,
            }
        }
        let read = self.block(self.client().read_ranges(reads));
        for ((index, session), done) in entries.into_iter().zip(read) {
            codes[index] = match done {
                Ok(done) => code::count(done.bytes),
                Err(error) => {
                    if matches!(error, StoreError::Refused(Refusal::LeaseExpired)) {
                        self.gets.remove(session);
                    }
                    code::of(&error, Call::Session)
                }
            };
        }
        codes
    }

    /// Ends sessions; keys without one are passed over. Their leases are given back in the background: nobody
    /// waits for the master's word on that.
    pub(crate) fn end_gets(&self, keys: &Names) {
        let mut ended = Vec::with_capacity(keys.len());
        {
            let mut table = self.gets.0.write();
            ended.extend(keys.iter().filter_map(|key| table.remove(key)));
        }
        self.client().release_gets(ended);
    }
}
