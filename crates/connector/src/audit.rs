//! The audit log (W13): one JSON line for every start, range, commit and other operation on a key. A range without
//! a layer is a whole object.
//!
//! Off, it costs a look at an `Option`. On, lines are made where things happen and written by a thread
//! of its own, since a task must not wait for a disk. The queue between is bounded; what does not fit is
//! dropped, and the next line says how many were. Dropping the log writes what is queued, and ends the
//! thread.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::error::ConnectorError;

/// Lines that may wait for the disk.
const QUEUED: usize = 16 << 10;

/// What happened to one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    PutStart,
    Write,
    PutEnd,
    PutRevoke,
    GetStart,
    Read,
    GetEnd,
    Remove,
}

#[derive(Serialize)]
struct Line<'a> {
    /// Microseconds since 1970.
    time_us: u64,
    rank: u32,
    operation: Operation,
    key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<usize>,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Dropped {
    dropped: u64,
}

/// The log of one worker.
#[derive(Debug)]
pub(crate) struct Audit {
    rank: u32,
    lines: Option<SyncSender<Vec<u8>>>,
    dropped: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl Audit {
    /// A log that is off.
    pub(crate) fn off() -> Self {
        Self {
            rank: 0,
            lines: None,
            dropped: AtomicU64::new(0),
            thread: None,
        }
    }

    /// Appends to this file.
    pub(crate) fn to(path: &Path, rank: u32) -> Result<Self, ConnectorError> {
        let refused = |error: std::io::Error| ConnectorError::BadOption {
            name: "audit_log_path",
            value: path.display().to_string(),
            accepted: format!("a file that can be written ({error})"),
        };
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(refused)?;
        let (lines, queue) = sync_channel(QUEUED);
        let thread = Builder::new()
            .name("layercake-audit".to_owned())
            .spawn(move || write(file, &queue))
            .map_err(refused)?;
        Ok(Self {
            rank,
            lines: Some(lines),
            dropped: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// Notes what happened to an object. `error` is what went wrong, if anything did.
    pub(crate) fn note(
        &self,
        operation: Operation,
        key: impl AsRef<str>,
        layer: Option<usize>,
        error: Option<&dyn std::fmt::Display>,
    ) {
        let Some(lines) = &self.lines else {
            return;
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let micros = since.map_or(0, |since| since.as_micros());
        let mut text = Vec::with_capacity(256);
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            push(&mut text, &Dropped { dropped });
        }
        push(
            &mut text,
            &Line {
                time_us: u64::try_from(micros).unwrap_or(u64::MAX),
                rank: self.rank,
                operation,
                key: key.as_ref(),
                layer,
                ok: error.is_none(),
                error: error.map(ToString::to_string),
            },
        );
        if lines.try_send(text).is_err() {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        }
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the audit log's thread broke off");
        }
    }
}

fn push(text: &mut Vec<u8>, line: &impl Serialize) {
    serde_json::to_writer(&mut *text, line).expect("plain fields into memory");
    text.push(b'\n');
}

fn write(mut file: File, queue: &Receiver<Vec<u8>>) {
    while let Ok(mut text) = queue.recv() {
        // Whole lines in one write, so that the logs of several workers can share a file.
        while text.len() < 64 << 10
            && let Ok(more) = queue.try_recv()
        {
            text.extend(more);
        }
        if let Err(error) = file.write_all(&text) {
            tracing::warn!(%error, "the audit log can't be written and ends here");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_and_all_there_when_the_log_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::to(&path, 3).expect("a file");
        for layer in 0..100 {
            audit.note(Operation::Write, "key", Some(layer), None);
        }
        audit.note(Operation::PutEnd, "key", None, Some(&"refused"));
        drop(audit);
        let text = std::fs::read_to_string(&path).expect("written");
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 101);
        assert_eq!(lines[7]["layer"], 7);
        assert_eq!(lines[7]["operation"], "write");
        assert_eq!(lines[7]["rank"], 3);
        assert_eq!(lines[100]["error"], "refused");
        assert_eq!(lines[100]["ok"], false);
    }

    #[test]
    fn a_file_that_can_not_be_written_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Audit::to(folder.path(), 0).expect_err("a folder is no file");
        assert!(error.to_string().contains("audit_log_path"), "{error}");
        Audit::off().note(Operation::GetStart, "key", None, None);
    }
}
