//! The process's runtime, what a fork means, and the end of the interpreter.
//!
//! Libraries build no runtime, programs do; for a Python process this module is the program. There is
//! one tokio runtime with one worker, made when it is first needed and never torn down: its threads
//! end with the process. None of them ever touches Python, so the interpreter may be finalized while
//! they run. What must be done in order, leaving the master and withdrawing segments, is done by
//! [`close_at_exit`] while the interpreter is whole.
//!
//! A fork copies the memory of a process, but of its threads only the one that called it. So in a
//! child everything that was made before the fork is dead: locks may be held by threads that are not
//! there, joining such a thread would hang, and the table in which `parking_lot` keeps waiting threads
//! points to stacks that are gone. That table is one for the process, so nothing new can be made in such a
//! child either. [`Owned`] and [`handle`] keep to it: in a child, values of its parent are neither used
//! nor dropped, and a runtime is refused if the parent had one; both are a `ForkError`. A child of a process
//! that only imported the module is like any other process. [`RUNTIME`] and [`OPEN`] are locked only by
//! threads that hold the interpreter lock and keep it, and so are never locked while Python forks.

use std::fmt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinError;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::errors::Kind;
use crate::logs;

/// Worker threads. Bytes move on the transfer engines' threads and calls run on their callers', so what is
/// left is the traffic with the master; a second worker would be woken for every message, to watch for the
/// next one.
const WORKERS: usize = 1;

/// How often a long wait looks for signals.
pub(crate) const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// How long the end of the interpreter waits for all stores together.
const CLOSE_ALL_WITHIN: Duration = Duration::from_secs(3);

/// What a child is told.
const FORKED: &str = "the process forked after layercake was first used in it, and of its threads none is in this \
     child: start workers by spawn (multiprocessing.set_start_method(\"spawn\")), or fork before the first use";

/// A handle on the runtime, and the process that it belongs to.
#[derive(Clone, Debug)]
struct Current {
    pid: u32,
    handle: Handle,
}

static RUNTIME: Mutex<Option<Current>> = Mutex::new(None);
static OPEN: Mutex<Vec<(u32, Weak<dyn Close>)>> = Mutex::new(Vec::new());

/// What is being closed because its Python object has gone.
static BEHIND: LazyLock<TaskTracker> = LazyLock::new(|| {
    let tracker = TaskTracker::new();
    // It may be waited for at any time; tasks can still be added.
    tracker.close();
    tracker
});

/// The runtime of this process, made if there is none; `ForkError` in a child of a process that has one.
pub(crate) fn handle(_py: Python<'_>) -> PyResult<Handle> {
    let pid = std::process::id();
    let mut current = RUNTIME.lock();
    match &*current {
        Some(current) if current.pid == pid => return Ok(current.handle.clone()),
        Some(_) => return Err(Kind::Fork.err(FORKED)),
        None => {}
    }
    logs::start();
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("layercake")
        .enable_all()
        .build()
        .map_err(|error| Kind::Error.err(format!("threads can't be started: {error}")))?;
    // Never torn down: its owner would have to be dropped in the process that made it.
    let runtime = Box::leak(Box::new(runtime));
    let handle = runtime.handle().clone();
    *current = Some(Current {
        pid,
        handle: handle.clone(),
    });
    Ok(handle)
}

/// Runs a future on the runtime's threads, with the interpreter lock released, and waits for it.
///
/// For what starts tasks and threads; calls that only move bytes or ask the master are driven by the
/// calling thread ([`Handle::block_on`]), which saves two wake-ups.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = T> + Send + 'static,
) -> PyResult<T> {
    let handle = handle(py)?;
    let task = handle.spawn(future);
    py.detach(|| handle.block_on(task))
        .map_err(|error| failed(&error))
}

/// As [`run`], for waits that a person may get tired of: a signal handler that raises ends it.
pub(crate) fn run_interruptibly<T: Send + 'static>(
    py: Python<'_>,
    handle: &Handle,
    future: impl Future<Output = T> + Send + 'static,
) -> PyResult<T> {
    let mut task = handle.spawn(future);
    loop {
        let turn = async { tokio::time::timeout(SIGNALS_EVERY, &mut task).await };
        match py.detach(|| handle.block_on(turn)) {
            Ok(done) => return done.map_err(|error| failed(&error)),
            Err(_) => py.check_signals().inspect_err(|_| task.abort())?,
        }
    }
}

/// Runs the handlers of signals that have come, where that is this thread's to do; what they raise. Called without the
/// interpreter lock.
pub(crate) fn look_for_signals() -> PyResult<()> {
    // Without an interpreter nobody handles any.
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    raised.map_or(Ok(()), Err)
}

/// Does what may wait, where nobody may be kept waiting: on a thread of the runtime that is there for that, if this one
/// drives tasks, else here, without the interpreter lock.
pub(crate) fn apart(work: impl FnOnce() + Send + 'static) {
    if let Ok(handle) = Handle::try_current() {
        handle.spawn_blocking(work);
        return;
    }
    let mut work = Some(work);
    let mut run = || work.take().map_or((), |work| work());
    // Without an interpreter there is no lock.
    if Python::try_attach(|py| py.detach(&mut run)).is_none() {
        run();
    }
}

/// Closes what nobody waits for.
pub(crate) fn close_behind(handle: &Handle, closing: impl Future<Output = ()> + Send + 'static) {
    BEHIND.spawn_on(closing, handle);
}

/// While it is there, something is being closed that nobody waits for.
pub(crate) fn behind() -> TaskTrackerToken {
    BEHIND.token()
}

/// Returns when nothing is being closed that nobody waits for.
pub(crate) async fn closed_behind() {
    BEHIND.wait().await;
}

fn failed(error: &JoinError) -> PyErr {
    Kind::Error.err(format!("an internal task failed: {error}"))
}

/// A value that lives in one process: see the module's text.
pub(crate) struct Owned<T: Send + 'static> {
    pid: u32,
    /// Always there until dropped.
    value: Option<T>,
}

impl<T: Send + 'static> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            pid: std::process::id(),
            value: Some(value),
        }
    }

    /// The value; `ForkError` in a child of the process that made it.
    pub(crate) fn get(&self) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.pid == std::process::id() => Ok(value),
            _ => Err(Kind::Fork.err(FORKED)),
        }
    }
}

impl<T: Send + 'static> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            Box::leak(Box::new(self.value.take()));
        }
    }
}

impl<T: Send + fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// What can be closed while the interpreter ends.
pub(crate) trait Close: Send + Sync {
    /// Closes by this time, whatever is in flight. Called without the interpreter lock.
    fn close_by(&self, until: Instant);

    /// Whether others need it while they close.
    fn is_needed_by_others(&self) -> bool {
        false
    }
}

/// Has `object` closed at the end of the interpreter, if it is still there then.
pub(crate) fn close_later<T: Close + 'static>(_py: Python<'_>, object: &Arc<T>) {
    let weak: Weak<T> = Arc::downgrade(object);
    let mut open = OPEN.lock();
    open.retain(|(_, weak)| weak.strong_count() > 0);
    open.push((std::process::id(), weak));
}

/// Registers the closing of all open objects with Python's `atexit`, which runs once all threads but
/// daemons have ended and the interpreter is still whole.
pub(crate) fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    let close = pyo3::types::PyCFunction::new_closure(py, None, None, |args, _kwargs| {
        close_all(args.py());
    })?;
    py.import("atexit")?.call_method1("register", (close,))?;
    Ok(())
}

fn close_all(py: Python<'_>) {
    let pid = std::process::id();
    let open = std::mem::take(&mut *OPEN.lock());
    let until = Instant::now() + CLOSE_ALL_WITHIN;
    // Those of a parent process stay where they are: their locks may be held for ever.
    let (mine, foreign): (Vec<_>, Vec<_>) = open.into_iter().partition(|(owner, _)| *owner == pid);
    Box::leak(Box::new(foreign));
    let mine = mine.iter().filter_map(|(_, weak)| weak.upgrade());
    let (needed, first): (Vec<Arc<dyn Close>>, Vec<_>) =
        mine.partition(|object| object.is_needed_by_others());
    py.detach(|| {
        for together in [first, needed] {
            std::thread::scope(|scope| {
                for object in &together {
                    scope.spawn(|| object.close_by(until));
                }
            });
        }
    });
}
