//! Copies and moves of replicas.

use std::time::{SystemTime, UNIX_EPOCH};

use layercake_protocol::code::ResultCode;
use pyo3::prelude::*;

use super::report::tell;
use super::{NOT_SET_UP, PyMooncakeStore};
use crate::args::{Int, OneKey};
use crate::core::code::INVALID;
use crate::core::reasons::invalid;
use crate::core::{Job, TaskId, TaskStatus};

/// Two halves of a number that names a task; zeros: there is none.
type Id = (u64, u64);

/// Type, status, milliseconds since the epoch when it began and when that changed, and why it failed.
type State = (u32, u32, u64, u64, String);

impl PyMooncakeStore {
    fn begin(
        &self,
        py: Python<'_>,
        name: &'static str,
        key: &OneKey,
        job: Job,
    ) -> PyResult<(Id, i64)> {
        let core = self.core()?;
        let begun = py.detach(|| {
            let core = core.ok_or_else(|| invalid(NOT_SET_UP))?;
            let named = key.0.iter().next();
            let named = named.ok_or(INVALID)?.map_err(invalid)?;
            core.begin_task(named, job)
        });
        let answer = begun.err().unwrap_or(0);
        tell(name, &[answer], |index| key.0.name(index));
        let TaskId(high, low) = begun.unwrap_or(TaskId(0, 0));
        Ok(((high, low), answer))
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
        self.begin(py, "create_copy_task", &key, Job::Copy { targets })
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
        let job = Job::Move { source, target };
        self.begin(py, "create_move_task", &key, job)
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
