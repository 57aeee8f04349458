//! Sessions, many at a time.

use std::sync::Arc;

use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::{GetSession, PutSession, Range, RangeRead, RangeWrite, StoreError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::objects::{fill, key_list, list, none, number, only};
use crate::args::{Int, Keys, Ragged};
use crate::core::StoreCore;
use crate::errors::{self, Failure, Kind};
use crate::memory::Use;
use crate::session::{PyGetSession, PyPutSession, Slot, settle};

/// A call of its own: a new epoch, from the first block on.
pub(super) const NOW: Recency = Recency {
    epoch: Epoch::UNSET,
    first_index: 0,
};

pub(super) fn recency(epoch: Int, index: Int) -> PyResult<Recency> {
    let first_index = u32::try_from(index.0).map_err(|_| {
        Kind::InvalidArgument.err(format!("index is {}: less than 2**32 is accepted", index.0))
    })?;
    Ok(Recency {
        epoch: Epoch(epoch.0),
        first_index,
    })
}

fn differ(first: usize, second: usize, what: &str) -> PyErr {
    Kind::InvalidArgument.err(format!(
        "the lists differ in length: {first} and {second} {what}"
    ))
}

fn start(
    core: &StoreCore,
    entries: Vec<PutStart>,
    config: &ReplicateConfig,
    at: Recency,
    replace: bool,
) -> Vec<Result<PutSession, StoreError>> {
    if replace {
        core.block(core.client().start_upserts(entries, config, at))
    } else {
        core.block(core.client().start_puts(entries, config, at))
    }
}

pub(super) fn start_put(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    (key, size, group): (ObjectKey, u64, Option<String>),
    config: &ReplicateConfig,
    at: Recency,
    replace: bool,
) -> PyResult<PyPutSession> {
    let entry = PutStart {
        group,
        ..PutStart::new(key, size)
    };
    let session = py.detach(|| start(core, vec![entry], config, at, replace).pop());
    Ok(PyPutSession::new(Arc::clone(core), only(session)?))
}

pub(super) fn start_puts<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
    sizes: &[u64],
    config: &ReplicateConfig,
    at: Recency,
    replace: bool,
) -> PyResult<Bound<'py, PyList>> {
    if keys.len() != sizes.len() {
        return Err(differ(keys.len(), sizes.len(), "entries"));
    }
    let entries = keys
        .iter()
        .zip(sizes)
        .enumerate()
        .filter_map(|(index, (key, &size))| {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            Some(PutStart {
                prefix_index: Some(at.first_index.saturating_add(index)),
                ..PutStart::new(key.ok()?.clone(), size)
            })
        });
    let entries = entries.collect();
    let sessions = py.detach(|| start(core, entries, config, at, replace));
    key_list(py, keys, sessions, |session| {
        Ok(Bound::new(py, PyPutSession::new(Arc::clone(core), session))?.into_any())
    })
}

pub(super) fn start_get(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    key: ObjectKey,
    at: Recency,
) -> PyResult<PyGetSession> {
    let session = py.detach(|| core.block(core.client().start_gets(&[key], at)).pop());
    Ok(PyGetSession::new(Arc::clone(core), only(session)?))
}

pub(super) fn start_gets<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
    at: Recency,
) -> PyResult<Bound<'py, PyList>> {
    let sessions = py.detach(|| core.block(core.client().start_gets(keys.good(), at)));
    key_list(py, keys, sessions, |session| {
        Ok(Bound::new(py, PyGetSession::new(Arc::clone(core), session))?.into_any())
    })
}

/// The slots of sessions, which must be this store's.
fn slots<'a, S, P>(
    core: &Arc<StoreCore>,
    sessions: &'a [P],
    slot: impl Fn(&'a P) -> PyResult<&'a Slot<S>>,
) -> PyResult<Vec<&'a Slot<S>>> {
    sessions
        .iter()
        .enumerate()
        .map(|(index, session)| {
            let slot = slot(session)?;
            if Arc::ptr_eq(&slot.core, core) {
                Ok(slot)
            } else {
                Err(Kind::InvalidArgument.err(format!("session {index} belongs to another store")))
            }
        })
        .collect()
}

/// Rows of addresses, sizes and offsets.
type Table<'a> = [&'a Ragged; 3];

fn check_rows(sessions: usize, table: Table<'_>) -> PyResult<()> {
    for rows in table {
        if rows.len() != sessions {
            return Err(differ(sessions, rows.len(), "rows"));
        }
    }
    let [addrs, lens, offsets] = table;
    for index in 0..sessions {
        let (addrs, lens, offsets) = (addrs.row(index), lens.row(index), offsets.row(index));
        if addrs.len() != lens.len() || lens.len() != offsets.len() {
            return Err(Kind::InvalidArgument.err(format!(
                "row {index} has {} addresses, {} sizes and {} offsets",
                addrs.len(),
                lens.len(),
                offsets.len()
            )));
        }
    }
    Ok(())
}

/// The ranges of one row.
fn row(core: &StoreCore, table: Table<'_>, index: usize, of: Use) -> Result<Vec<Range>, Failure> {
    let mut resolver = core.engine().resolver();
    let [addrs, lens, offsets] = table.map(|rows| rows.row(index));
    let pieces = addrs.iter().zip(lens).zip(offsets);
    pieces
        .map(|((&addr, &len), &offset)| {
            let local = resolver.any(addr, len, of);
            let local = local.map_err(|error| Kind::InvalidArgument.failure(error.to_string()))?;
            Ok(Range { offset, local })
        })
        .collect()
}

pub(super) fn write<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    sessions: &[PyRef<'py, PyPutSession>],
    table: Table<'_>,
) -> PyResult<Bound<'py, PyList>> {
    check_rows(sessions.len(), table)?;
    let slots = slots(core, sessions, |session| session.slot())?;
    let answers = py.detach(|| {
        let mut answers = Vec::with_capacity(slots.len());
        let writing = {
            let open: Vec<_> = slots.iter().map(|slot| slot.read()).collect();
            let mut writes = Vec::with_capacity(slots.len());
            for (index, session) in open.iter().enumerate() {
                let ranges = match session.as_ref() {
                    Some(session) => {
                        row(core, table, index, Use::Read).map(|ranges| (session, ranges))
                    }
                    None => Err(errors::of_store(&StoreError::SessionEnded)),
                };
                answers.push(match ranges {
                    Ok((session, ranges)) => {
                        writes.push(RangeWrite { session, ranges });
                        None
                    }
                    Err(error) => Some(error),
                });
            }
            core.client().write_ranges(writes)
        };
        fill(answers, core.block(writing))
    });
    list(py, answers, |bytes| Ok(number(py, bytes)))
}

pub(super) fn read<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    sessions: &[PyRef<'py, PyGetSession>],
    table: Table<'_>,
) -> PyResult<Bound<'py, PyList>> {
    check_rows(sessions.len(), table)?;
    let slots = slots(core, sessions, |session| session.slot())?;
    let answers = py.detach(|| {
        let mut answers = Vec::with_capacity(slots.len());
        let reading = {
            let open: Vec<_> = slots.iter().map(|slot| slot.read()).collect();
            let mut reads = Vec::with_capacity(slots.len());
            for (index, session) in open.iter().enumerate() {
                let ranges = match session.as_ref() {
                    Some(session) => {
                        row(core, table, index, Use::Write).map(|ranges| (session, ranges))
                    }
                    None => Err(errors::of_store(&StoreError::SessionEnded)),
                };
                answers.push(match ranges {
                    Ok((session, ranges)) => {
                        reads.push(RangeRead { session, ranges });
                        None
                    }
                    Err(error) => Some(error),
                });
            }
            core.client().read_ranges(reads)
        };
        fill(answers, core.block(reading))
    });
    list(py, answers, |done| Ok(number(py, done.bytes)))
}

pub(super) fn finish<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    sessions: &[PyRef<'py, PyPutSession>],
    commit: bool,
) -> PyResult<Bound<'py, PyList>> {
    let slots = slots(core, sessions, |session| session.slot())?;
    let answers = py.detach(|| {
        let taken: Vec<Option<PutSession>> = slots.iter().map(|slot| slot.take()).collect();
        let answers: Vec<Option<Failure>> = taken
            .iter()
            .map(|session| {
                session
                    .is_none()
                    .then(|| errors::of_store(&StoreError::SessionEnded))
            })
            .collect();
        let open = taken.into_iter().flatten().collect();
        let mut done = if commit {
            core.block(core.client().end_puts(open)).into_iter()
        } else {
            core.block(core.client().revoke_puts(open)).into_iter()
        };
        let answers = answers
            .into_iter()
            .zip(&slots)
            .map(|(answer, slot)| match answer {
                Some(error) => Err(error),
                None => only(done.next().map(|done| settle(slot, done))),
            });
        answers.collect()
    });
    list(py, answers, |()| Ok(none(py)))
}

pub(super) fn end_gets(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    sessions: &[PyRef<'_, PyGetSession>],
) -> PyResult<()> {
    let slots = slots(core, sessions, |session| session.slot())?;
    py.detach(|| {
        let open: Vec<GetSession> = slots.iter().filter_map(|slot| slot.take()).collect();
        core.block(core.client().end_gets(open));
    });
    Ok(())
}
