//! Whole objects.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::key::{KeyError, ObjectKey};
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{GetOptions, PutOutcome, PutRequest, Range, RangeRead, StoreError};
use layercake_transport::LocalSlice;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList};

use super::ranges::NOW;
use crate::args::{Bytes, BytesMut, Key, Keys};
use crate::core::StoreCore;
use crate::errors::{self, Failure, Kind};
use crate::memory;
use crate::runtime;
use crate::session::{lost, usable};

/// The answer of a call on one key.
pub(super) fn only<T>(answer: Option<Result<T, StoreError>>) -> Result<T, Failure> {
    answer
        .unwrap_or_else(|| Err(lost()))
        .map_err(|error| errors::of_store(&error))
}

/// A list with the exception where an entry failed.
pub(super) fn list<'py, T>(
    py: Python<'py>,
    answers: Vec<Result<T, Failure>>,
    value: impl Fn(T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for answer in answers {
        match answer {
            Ok(answer) => list.append(value(answer)?)?,
            Err(failure) => list.append(PyErr::from(failure).into_value(py))?,
        }
    }
    Ok(list)
}

/// The same for answers on the good ones of `keys`; the bad ones have their own exception.
pub(super) fn key_list<'py, T>(
    py: Python<'py>,
    keys: &Keys,
    answers: Vec<Result<T, StoreError>>,
    value: impl Fn(T) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let answers = answers.into_iter();
    let answers = answers.map(|answer| answer.map_err(|error| errors::of_store(&error)));
    list(
        py,
        keys.align(answers.collect(), |error| Err(bad_key(error))),
        value,
    )
}

fn bad_key(error: &KeyError) -> Failure {
    Kind::InvalidArgument.failure(error.to_string())
}

fn boolean(py: Python<'_>, value: bool) -> Bound<'_, PyAny> {
    PyBool::new(py, value).to_owned().into_any()
}

pub(super) fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    py.None().into_bound(py)
}

pub(super) fn number(py: Python<'_>, value: u64) -> Bound<'_, PyAny> {
    PyInt::new(py, value).into_any()
}

/// A request of these bytes, which must outlive the call.
fn request(key: ObjectKey, data: &Bytes) -> Result<PutRequest, Failure> {
    if data.len() == 0 {
        return Err(
            Kind::InvalidArgument.failure("an object of 0 bytes: at least 1 byte is needed")
        );
    }
    Ok(PutRequest::new(key, vec![usable(memory::lent(data))?]))
}

pub(super) fn put(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    key: ObjectKey,
    data: &Bytes,
    config: &ReplicateConfig,
    group: Option<String>,
    replace: bool,
) -> PyResult<bool> {
    let requests = vec![PutRequest {
        group,
        ..request(key, data)?
    }];
    let outcome = py.detach(|| {
        let client = core.client();
        PyResult::Ok(if replace {
            let keys = requests.iter().map(|request| &request.key);
            let _turn = core.turns.take(keys, runtime::look_for_signals)?;
            core.block(client.upsert(requests, config)).pop()
        } else {
            core.block(client.put(requests, config)).pop()
        })
    })?;
    Ok(only(outcome)? == PutOutcome::Stored)
}

pub(super) fn put_many<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    items: Vec<(Key, Bytes)>,
    config: &ReplicateConfig,
) -> PyResult<Bound<'py, PyList>> {
    let (requests, answers) = split(items.iter().map(|(key, data)| request(key.0.clone(), data)));
    let done = py.detach(|| core.block(core.client().put(requests, config)));
    drop(items);
    list(py, fill(answers, done), |outcome| {
        Ok(boolean(py, outcome == PutOutcome::Stored))
    })
}

/// Entries that can be asked for, and what the others are answered with.
fn split<T>(entries: impl Iterator<Item = Result<T, Failure>>) -> (Vec<T>, Vec<Option<Failure>>) {
    let mut good = Vec::new();
    let answers = entries.map(|entry| match entry {
        Ok(entry) => {
            good.push(entry);
            None
        }
        Err(error) => Some(error),
    });
    let answers = answers.collect();
    (good, answers)
}

/// Answers for the entries that were asked for, put between the others.
pub(super) fn fill<T>(
    answers: Vec<Option<Failure>>,
    done: Vec<Result<T, StoreError>>,
) -> Vec<Result<T, Failure>> {
    let mut done = done.into_iter();
    let answers = answers.into_iter();
    answers
        .map(|answer| answer.map_or_else(|| only(done.next()), Err))
        .collect()
}

/// Reads a whole object of a session into memory with room for it.
fn read_whole(
    core: &StoreCore,
    key: &ObjectKey,
    local: impl FnOnce(u64) -> Result<LocalSlice, Failure>,
) -> Result<u64, Failure> {
    let keys = std::slice::from_ref(key);
    let session = core
        .block(core.client().start_gets(keys, GetOptions::default()))
        .pop();
    let session = only(session)?;
    let size = session.size();
    let ranges = vec![Range {
        offset: 0,
        local: local(size)?,
    }];
    let read = RangeRead {
        session: &session,
        ranges,
    };
    let done = core.block(core.client().read_ranges(vec![read])).pop();
    core.block(core.client().end_gets(vec![session]));
    Ok(only(done)?.bytes)
}

pub(super) fn get<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    key: ObjectKey,
) -> PyResult<Bound<'py, PyBytes>> {
    let client = core.client();
    let started = py.detach(|| {
        core.block(client.start_gets(&[key], GetOptions::default()))
            .pop()
    });
    let session = only(started)?;
    let bytes = memory::fill_bytes(py, session.size(), |local| {
        let ranges = vec![Range { offset: 0, local }];
        let read = RangeRead {
            session: &session,
            ranges,
        };
        Ok(only(py.detach(|| core.block(client.read_ranges(vec![read])).pop()))?.bytes)
    });
    py.detach(|| core.block(client.end_gets(vec![session])));
    bytes
}

pub(super) fn get_many<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
) -> PyResult<Bound<'py, PyList>> {
    let objects = py.detach(|| core.block(core.client().get(keys.good())));
    key_list(py, keys, objects, |bytes| {
        Ok(PyBytes::new(py, &bytes).into_any())
    })
}

/// The part of a buffer that an object of `size` bytes fills.
fn room(buffer: &BytesMut, size: u64) -> Result<LocalSlice, Failure> {
    let local = usable(memory::lent_mut(buffer))?;
    local.part(0, size).ok_or_else(|| {
        Kind::InvalidArgument.failure(format!(
            "the buffer has {} bytes, the object {size}",
            local.len()
        ))
    })
}

pub(super) fn get_into(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    key: ObjectKey,
    buffer: &BytesMut,
) -> PyResult<u64> {
    Ok(py.detach(|| read_whole(core, &key, |size| room(buffer, size)))?)
}

pub(super) fn get_into_many<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    items: &[(Key, BytesMut)],
) -> PyResult<Bound<'py, PyList>> {
    let keys: Vec<ObjectKey> = items.iter().map(|(key, _)| key.0.clone()).collect();
    let client = core.client();
    let answers = py.detach(|| {
        let sessions = core.block(client.start_gets(&keys, GetOptions::default()));
        let entries = sessions.iter().zip(items).map(|(session, (_, buffer))| {
            let session = session.as_ref().map_err(errors::of_store)?;
            let local = room(buffer, session.size())?;
            Ok(RangeRead {
                session,
                ranges: vec![Range { offset: 0, local }],
            })
        });
        let (reads, answers) = split(entries);
        let done = core.block(client.read_ranges(reads));
        core.block(client.end_gets(sessions.into_iter().flatten().collect()));
        fill(answers, done)
    });
    list(py, answers, |done| Ok(number(py, done.bytes)))
}

pub(super) fn exists_many<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
    readable: bool,
) -> PyResult<Bound<'py, PyList>> {
    let client = core.client();
    let found = py.detach(|| {
        if readable {
            core.block(client.readable(keys.good(), NOW))
        } else {
            core.block(client.exists(keys.good(), NOW))
        }
    });
    key_list(py, keys, found, |found| Ok(boolean(py, found)))
}

pub(super) fn longest_prefix(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    keys: Vec<Key>,
    window: u64,
) -> PyResult<(usize, u64)> {
    let keys: Vec<ObjectKey> = keys.into_iter().map(|key| key.0).collect();
    let window = usize::try_from(window).unwrap_or(usize::MAX);
    let hit = py.detach(|| core.block(core.client().longest_prefix(&keys, window)));
    let hit = hit.map_err(|error| errors::raise(&error))?;
    Ok((hit.blocks, hit.epoch.0))
}

pub(super) fn remove_many<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
    force: bool,
) -> PyResult<Bound<'py, PyList>> {
    let done = py.detach(|| core.block(core.client().remove(keys.good(), force)));
    key_list(py, keys, done, |()| Ok(none(py)))
}

pub(super) fn wait_complete<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    keys: &Keys,
    timeout: Duration,
) -> PyResult<Bound<'py, PyList>> {
    let (client, good) = (core.client().clone(), keys.good().to_vec());
    let wait = async move { client.wait_complete(&good, timeout).await };
    let done = runtime::run_interruptibly(py, core.handle(), wait)?;
    key_list(py, keys, done, |()| Ok(none(py)))
}
