//! The audit log (W13): one JSON line for every start, range, commit and other operation on a key. A range without
//! a layer is a whole object.
//!
//! Off, it costs a look at an `Option`. On, lines are made where things happen and written by a thread
//! of its own, since a task must not wait for a disk. The queue between is bounded; what does not fit is
//! dropped, and the next line, or the last, says how many were. Dropping the log writes what is queued and ends the
//! thread; one that a disk holds up longer than [`LAST_LINES`] is left behind, with a warning. Only regular files are
//! written: opening others may wait for somebody who reads.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;

use crate::error::ConnectorError;

/// Lines that may wait for the disk.
const QUEUED: usize = 16 << 10;

/// How long the end of a log waits for its last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(5);

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
    #[serde(flatten)]
    range: Option<Moved>,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The part of an object that a call moves.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Moved {
    /// Which layer of this rank's; none for a whole object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer: Option<usize>,
    /// Where it lies in the object, and how many bytes it has.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Objects of which the call moves it.
    pub(crate) rows: usize,
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
    dropped: Arc<AtomicU64>,
    /// Closed when the thread has ended.
    ended: Mutex<Option<Receiver<()>>>,
}

impl Audit {
    /// A log that is off.
    pub(crate) fn off() -> Self {
        Self {
            rank: 0,
            lines: None,
            dropped: Arc::default(),
            ended: Mutex::new(None),
        }
    }

    /// Appends to this file.
    pub(crate) fn to(path: &Path, rank: u32) -> Result<Self, ConnectorError> {
        let refused = |error: io::Error| ConnectorError::BadOption {
            name: "audit_log_path",
            value: path.display().to_string(),
            accepted: format!("a regular file that can be written ({error})"),
        };
        let file = open(path).map_err(refused)?;
        Self::start(file, rank).map_err(refused)
    }

    fn start(file: impl Write + Send + 'static, rank: u32) -> io::Result<Self> {
        let (lines, queue) = sync_channel(QUEUED);
        let (end, ended) = sync_channel(0);
        let dropped = Arc::default();
        let left = Arc::clone(&dropped);
        Builder::new()
            .name("layercake-audit".to_owned())
            .spawn(move || {
                let _end: SyncSender<()> = end;
                if let Err(error) = write(file, &queue, &left) {
                    tracing::warn!(%error, "the audit log can't be written and ends here");
                }
            })?;
        Ok(Self {
            rank,
            lines: Some(lines),
            dropped,
            ended: Mutex::new(Some(ended)),
        })
    }

    /// Notes what happened to an object. `error` is what went wrong, if anything did.
    pub(crate) fn note(
        &self,
        operation: Operation,
        key: impl AsRef<str>,
        range: Option<Moved>,
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
                range,
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
        self.end(LAST_LINES);
    }
}

impl Audit {
    /// Waits so long for what is queued to be written. `false`: it is not.
    fn end(&mut self, at_most: Duration) -> bool {
        self.lines = None;
        let Some(ended) = self.ended.get_mut().take() else {
            return true;
        };
        if ended.recv_timeout(at_most) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "the audit log is not written to its end in time, and left to its thread"
            );
            return false;
        }
        true
    }
}

/// Opens a file to append to it. Looks first what it is, since others may hold up whoever opens them.
fn open(path: &Path) -> io::Result<File> {
    let regular = |is_file: bool| {
        let other = || io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
        is_file.then_some(()).ok_or_else(other)
    };
    match std::fs::metadata(path) {
        Ok(found) => regular(found.is_file())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    regular(file.metadata()?.is_file())?;
    Ok(file)
}

fn push(text: &mut Vec<u8>, line: &impl Serialize) {
    serde_json::to_writer(&mut *text, line).expect("plain fields into memory");
    text.push(b'\n');
}

fn write(mut file: impl Write, queue: &Receiver<Vec<u8>>, dropped: &AtomicU64) -> io::Result<()> {
    while let Ok(mut text) = queue.recv() {
        // Whole lines in one write, so that the logs of several workers can share a file.
        while text.len() < 64 << 10
            && let Ok(more) = queue.try_recv()
        {
            text.extend(more);
        }
        file.write_all(&text)?;
    }
    let dropped = dropped.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        let mut text = Vec::new();
        push(&mut text, &Dropped { dropped });
        file.write_all(&text)?;
    }
    Ok(())
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
            let moved = Moved {
                layer: Some(layer),
                offset: 64 * layer as u64,
                len: 64,
                rows: 3,
            };
            audit.note(Operation::Write, "key", Some(moved), None);
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
        assert_eq!(
            (&lines[7]["offset"], &lines[7]["len"]),
            (&448.into(), &64.into())
        );
        assert_eq!(lines[7]["rows"], 3);
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
        // Opening a pipe that nobody reads would not return.
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("a program of every Unix").success());
        let error = Audit::to(&pipe, 0).expect_err("a pipe is no regular file");
        assert!(error.to_string().contains("regular"), "{error}");
        Audit::off().note(Operation::GetStart, "key", None, None);
    }

    /// A disk that takes nothing until it is told to.
    struct Disk {
        go: Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Goes on when the other end is gone.
            self.go.recv().ok();
            self.written.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_stands_still_holds_nobody_up_and_lines_that_were_dropped_are_counted() {
        let (tell, go) = sync_channel(0);
        let written = Arc::default();
        let disk = Disk {
            go,
            written: Arc::clone(&written),
        };
        let mut audit = Audit::start(disk, 0).expect("a thread");
        // More than the queue has room for, and what the thread may have taken from it.
        let all = 3 * QUEUED;
        for _ in 0..all {
            audit.note(Operation::GetStart, "key", None, None);
        }
        let ended = audit.ended.get_mut().take().expect("it runs");
        audit.lines = None;
        let held = ended.recv_timeout(Duration::ZERO);
        assert_eq!(held, Err(RecvTimeoutError::Timeout), "it stands");
        *audit.ended.get_mut() = Some(ended);
        drop(tell);
        assert!(audit.end(Duration::from_mins(1)), "it ends");
        let written = written.lock();
        let text = std::str::from_utf8(&written).expect("text");
        let lines = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let lines: Vec<serde_json::Value> = lines.collect();
        let dropped: u64 = lines
            .iter()
            .filter_map(|line| line["dropped"].as_u64())
            .sum();
        let noted = lines.iter().filter(|line| line["key"] == "key").count();
        assert!(dropped > 0);
        assert_eq!(noted as u64 + dropped, all as u64);
    }
}
