//! The workers of a replay, and which request is whose.
//!
//! Requests go round robin, in the trace's order; a worker has at most [`WINDOW`] at a time, so that
//! the next one waits at its door. A worker that dies loses the requests it had: they count as failed,
//! and the others take its turns.

use std::collections::VecDeque;

use super::cluster::ProcessId;
use super::messages::Done;

/// Requests a worker has at most.
const WINDOW: usize = 2;

#[derive(Debug)]
struct Worker {
    process: ProcessId,
    /// Given and not answered, oldest first, with their number of blocks.
    open: VecDeque<(usize, u64)>,
}

/// The workers that are alive, in turn.
#[derive(Debug)]
pub(crate) struct Workers {
    alive: Vec<Worker>,
    turn: usize,
}

impl Workers {
    pub(crate) fn new(processes: impl IntoIterator<Item = ProcessId>) -> Self {
        let worker = |process| Worker {
            process,
            open: VecDeque::new(),
        };
        Self {
            alive: processes.into_iter().map(worker).collect(),
            turn: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.alive.is_empty()
    }

    pub(crate) fn contains(&self, process: ProcessId) -> bool {
        self.alive.iter().any(|worker| worker.process == process)
    }

    pub(crate) fn processes(&self) -> impl Iterator<Item = ProcessId> {
        self.alive.iter().map(|worker| worker.process)
    }

    /// Gives the next request to the worker whose turn it is, if it can take one more.
    pub(crate) fn assign(&mut self, request: usize, blocks: u64) -> Option<ProcessId> {
        let worker = self.alive.get_mut(self.turn)?;
        if worker.open.len() >= WINDOW {
            return None;
        }
        worker.open.push_back((request, blocks));
        let process = worker.process;
        self.turn = (self.turn + 1) % self.alive.len();
        Some(process)
    }

    /// Takes a request back from the worker that answered it. `None`: it had no such request.
    pub(crate) fn answered(&mut self, process: ProcessId, request: usize) -> Option<()> {
        let worker = self
            .alive
            .iter_mut()
            .find(|worker| worker.process == process)?;
        let at = worker.open.iter().position(|(open, _)| *open == request)?;
        worker.open.remove(at);
        Some(())
    }

    /// Takes a worker out that has answered everything and told its measurements: it may end now.
    pub(crate) fn finished(&mut self, process: ProcessId) {
        if let Some(at) = self.position(process) {
            self.take(at);
        }
    }

    /// Takes a dead worker out, and answers its requests as failed.
    pub(crate) fn bury(&mut self, process: ProcessId, reason: &str) -> Vec<Done> {
        let Some(at) = self.position(process) else {
            return Vec::new();
        };
        let worker = self.take(at);
        let failed = |(index, blocks)| Done {
            index,
            blocks,
            failed: Some(reason.to_owned()),
            ..Done::default()
        };
        worker.open.into_iter().map(failed).collect()
    }

    fn position(&self, process: ProcessId) -> Option<usize> {
        let mut alive = self.alive.iter();
        alive.position(|worker| worker.process == process)
    }

    fn take(&mut self, at: usize) -> Worker {
        let worker = self.alive.remove(at);
        if at < self.turn {
            self.turn -= 1;
        }
        if self.turn >= self.alive.len() {
            self.turn = 0;
        }
        worker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(count: usize) -> Workers {
        Workers::new((0..count).map(ProcessId::for_tests))
    }

    #[test]
    fn requests_go_round_robin_and_wait_for_their_worker() {
        let mut workers = workers(2);
        let (a, b) = (ProcessId::for_tests(0), ProcessId::for_tests(1));
        let given: Vec<_> = (0..5).map(|request| workers.assign(request, 1)).collect();
        assert_eq!(given, [Some(a), Some(b), Some(a), Some(b), None]);
        assert_eq!(workers.answered(b, 1), Some(()));
        assert_eq!(workers.assign(4, 1), None, "it is the other one's turn");
        assert_eq!(workers.answered(a, 1), None, "not its request");
        assert_eq!(workers.answered(a, 0), Some(()));
        assert_eq!(workers.assign(4, 1), Some(a));
    }

    #[test]
    fn a_worker_that_has_finished_is_not_missed_and_the_others_are() {
        let mut workers = workers(2);
        let (a, b) = (ProcessId::for_tests(0), ProcessId::for_tests(1));
        workers.finished(b);
        assert!(!workers.contains(b), "its end is no loss");
        assert!(workers.contains(a));
        assert_eq!(workers.assign(0, 1), Some(a));
        workers.finished(a);
        assert!(workers.is_empty());
    }

    #[test]
    fn a_dead_workers_requests_fail_and_the_others_go_on() {
        let mut workers = workers(3);
        for request in 0..4 {
            workers.assign(request, 7).expect("free");
        }
        let failed = workers.bury(ProcessId::for_tests(0), "killed");
        let indices: Vec<_> = failed
            .iter()
            .map(|done| (done.index, done.blocks))
            .collect();
        assert_eq!(indices, [(0, 7), (3, 7)]);
        assert!(
            failed
                .iter()
                .all(|done| done.failed.as_deref() == Some("killed"))
        );
        assert_eq!(workers.assign(4, 1), Some(ProcessId::for_tests(1)));
        assert_eq!(workers.assign(5, 1), Some(ProcessId::for_tests(2)));
        workers.bury(ProcessId::for_tests(2), "killed");
        workers.bury(ProcessId::for_tests(1), "killed");
        assert!(workers.is_empty());
        assert_eq!(workers.assign(6, 1), None);
    }
}
