//! Copies and moves of replicas, which somebody asks about later: coded.
//!
//! A task runs in the client that it was given to, and ends with it. So many of them are remembered that nobody
//! who asks in time is told of an unknown one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use layercake_protocol::key::ObjectKey;
use layercake_store::StoreError;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::StoreCore;
use super::code::{self, Call};
use super::reasons::invalid;

/// Tasks that are remembered.
const KEPT: usize = 4096;

/// Names a task: half of the member's id, and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskId(pub(crate) u64, pub(crate) u64);

/// What a task does.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Copy { targets: Vec<String> },
    Move { source: String, target: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskStatus {
    Processing,
    Succeeded,
    Failed,
}

/// How a task stands.
#[derive(Clone, Debug)]
pub(crate) struct TaskState {
    pub(crate) moves: bool,
    pub(crate) status: TaskStatus,
    pub(crate) created: SystemTime,
    pub(crate) updated: SystemTime,
    /// Why it failed.
    pub(crate) message: String,
}

#[derive(Debug)]
struct Task {
    id: TaskId,
    state: Arc<Mutex<TaskState>>,
    abort: AbortHandle,
}

/// The tasks of a client.
#[derive(Debug, Default)]
pub(super) struct TaskTable {
    /// The oldest first.
    tasks: Mutex<VecDeque<Task>>,
    /// How many there were.
    count: AtomicU64,
}

impl TaskTable {
    /// Ends what is under way.
    pub(super) fn stop(&self) {
        for task in self.tasks.lock().drain(..) {
            task.abort.abort();
        }
    }
}

impl StoreCore {
    /// Begins a task on an object that is there, with segments that are there, or says why not.
    pub(crate) fn begin_task(self: &Arc<Self>, key: &ObjectKey, job: Job) -> Result<TaskId, i64> {
        self.check(key, &job)?;
        let member = (self.client().link().client_id().0 >> 64) as u64;
        let id = TaskId(member, self.tasks.count.fetch_add(1, Ordering::Relaxed) + 1);
        let now = SystemTime::now();
        let state = Arc::new(Mutex::new(TaskState {
            moves: matches!(job, Job::Move { .. }),
            status: TaskStatus::Processing,
            created: now,
            updated: now,
            message: String::new(),
        }));
        let (client, key, outcome) = (self.client().clone(), key.clone(), Arc::clone(&state));
        let task = self.handle().spawn(async move {
            let done = match &job {
                Job::Copy { targets } => client.copy_replicas(&key, targets).await,
                Job::Move { source, target } => client.move_replica(&key, source, target).await,
            };
            let mut state = outcome.lock();
            state.updated = SystemTime::now();
            match done {
                Ok(()) => state.status = TaskStatus::Succeeded,
                Err(error) => {
                    state.status = TaskStatus::Failed;
                    state.message = error.to_string();
                }
            }
        });
        let mut tasks = self.tasks.tasks.lock();
        if tasks.len() == KEPT {
            // Its end, if that is still to come, is nobody's to ask about.
            tasks.pop_front();
        }
        tasks.push_back(Task {
            id,
            state,
            abort: task.abort_handle(),
        });
        Ok(id)
    }

    fn check(&self, key: &ObjectKey, job: &Job) -> Result<(), i64> {
        if matches!(job, Job::Copy { targets } if targets.is_empty()) {
            return Err(invalid("a copy needs at least one target"));
        }
        let coded = |error: StoreError| code::of(&error, Call::Question);
        let detail = self.block(self.client().stat(key)).map_err(coded)?;
        let segments = self.block(self.client().link().segments()).map_err(coded)?;
        let is_there = |name: &String| segments.iter().any(|stat| stat.segment.name == *name);
        let good = match job {
            Job::Copy { targets } => targets.iter().all(is_there),
            Job::Move { source, target } => {
                let at_source =
                    |segment: &layercake_protocol::replica::Segment| segment.name == *source;
                source != target && is_there(target) && detail.segments.iter().any(at_source)
            }
        };
        if good {
            Ok(())
        } else {
            Err(invalid(format_args!(
                "{job:?} names a segment that is not there, or has no replica, or nothing to do"
            )))
        }
    }

    /// How a task stands, if it is known.
    pub(crate) fn task(&self, id: TaskId) -> Option<TaskState> {
        let tasks = self.tasks.tasks.lock();
        let task = tasks.iter().find(|task| task.id == id)?;
        Some(task.state.lock().clone())
    }
}
