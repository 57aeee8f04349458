//! Copies and moves of replicas.

use std::time::{SystemTime, UNIX_EPOCH};

use layercake_protocol::code::ResultCode;
use pyo3::prelude::*;

use super::PyMooncakeStore;
use crate::args::{Int, OneKey};
use crate::core::code::INVALID;
use crate::core::{Job, TaskId, TaskStatus};

/// Two halves of a number that names a task; zeros: there is none.
type Id = (u64, u64);

/// Type, status, milliseconds since the epoch when it began and when that changed, and why it failed.
type State = (u32, u32, u64, u64, String);

impl PyMooncakeStore {
    fn begin(&self, py: Python<'_>, key: &OneKey, job: Job) -> PyResult<(Id, i64)> {
        let (Some(core), [key]) = (self.core()?, key.0.good()) else {
            return Ok(((0, 0), INVALID));
        };
        Ok(match py.detach(|| core.begin_task(key, job)) {
            Ok(TaskId(high, low)) => ((high, low), 0),
            Err(refusal) => ((0, 0), refusal),
        })
    }
}

fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[pymethods]
impl PyMooncakeStore {
    /// Begins to give an object replicas in the segments of these names. Gives the task's id and 0, or a code.
    fn create_copy_task(
        &self,
        py: Python<'_>,
        key: OneKey,
        targets: Vec<String>,
    ) -> PyResult<(Id, i64)> {
        self.begin(py, &key, Job::Copy { targets })
    }

    /// Begins to give an object a replica in the segment ``target`` instead of the one in ``source``. Gives the
    /// task's id and 0, or a code.
    fn create_move_task(
        &self,
        py: Python<'_>,
        key: OneKey,
        source: String,
        target: String,
    ) -> PyResult<(Id, i64)> {
        self.begin(py, &key, Job::Move { source, target })
    }

    /// How a task stands, or ``None`` and a code.
    fn _query_task(&self, high: Int, low: Int) -> PyResult<(Option<State>, i64)> {
        let Some(core) = self.core()? else {
            return Ok((None, INVALID));
        };
        let Some(task) = core.task(TaskId(high.0, low.0)) else {
            return Ok((None, ResultCode::NO_TASK.as_result()));
        };
        let status = match task.status {
            TaskStatus::Processing => 1,
            TaskStatus::Failed => 2,
            TaskStatus::Succeeded => 3,
        };
        let state = (
            u32::from(task.moves),
            status,
            millis(task.created),
            millis(task.updated),
            task.message,
        );
        Ok((Some(state), 0))
    }
}
