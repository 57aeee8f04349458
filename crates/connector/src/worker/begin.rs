//! How a step begins.
//!
//! What its metadata tells is told once. So it is taken in before anything can fail, and a step that can't begin in
//! time is one whose loads are all void. A step that this worker was never given leaves holes in what it knows of
//! tables: then it forgets them all, and refuses what builds on them.

use std::sync::Arc;

use layercake_protocol::key::ObjectKey;

use super::StoreWorker;
use super::board::{Board, Loading, Receiving};
use super::caches::Caches;
use super::receiver::LoadJob;
use super::step::Step;
use crate::contract::{Event, RequestId, StepMetadata};
use crate::error::ConnectorError;
use crate::plan::{self, Fence, Loads};
use crate::stats::MissReason;
use crate::tracker::Tracker;

impl StoreWorker {
    /// Takes in who is in the step and what became of others. Whose earlier saves must be over first, and whether the step
    /// runs then.
    pub(super) fn apply(
        &mut self,
        step: &StepMetadata,
    ) -> Result<(Fence, Result<(), ConnectorError>), ConnectorError> {
        let number = step.step;
        if let Some(last) = self.last
            && number <= last
        {
            return Err(ConnectorError::Metadata {
                detail: format!(
                    "it is of step {number}, and that of step {last} was taken in before"
                ),
            });
        }
        let missed = self.last.is_some_and(|last| number > last + 1);
        self.last = Some(number);
        let (fence, begun) = self.shared.tracker(|tracker| {
            let forgotten = if missed {
                tracker.forget_all()
            } else {
                Vec::new()
            };
            let (mut fence, begun) = plan::begin(tracker, step);
            fence.over.extend(forgotten);
            (fence, begun)
        });
        if missed {
            tracing::warn!(
                step = number,
                "this rank was not given every step: what it knew is void"
            );
        }
        if self.doubtful.is_some() || !(fence.over.is_empty() && step.void.is_empty()) {
            self.doubtful
                .take_if(|doubtful| *doubtful <= step.confirmed);
            self.shared.saves_told.notify_one();
        }
        self.ending.extend(step.finished.iter().cloned());
        Ok((fence, begun))
    }

    /// Waits until nothing reads or writes blocks that were lost, and nothing is loaded into those of a step that was left.
    pub(super) fn fence(&mut self, fence: &Fence) -> Result<(), ConnectorError> {
        let patience = self.patience();
        let late = |what| ConnectorError::Deadline {
            what,
            after: patience,
        };
        if let Some(stuck) = &self.stuck {
            if !stuck.wait_all(patience) {
                self.lose(&fence.restored);
                return Err(late(
                    "the end of loads of a step that was left in the middle",
                ));
            }
            self.stuck = None;
        }
        // Also what others save of them.
        let saved = |tracker: &Tracker<ObjectKey>, request: &RequestId| tracker.is_saved(request);
        if !self
            .shared
            .wait_until_none(&fence.restored, saved, patience)
        {
            self.lose(&fence.restored);
        }
        let unsettled = |tracker: &Tracker<ObjectKey>, id: &RequestId| tracker.unsettled(id) > 0;
        if self
            .shared
            .wait_until_none(&fence.over, unsettled, patience)
        {
            return Ok(());
        }
        Err(late(
            "the end of saves that read the blocks of preempted requests",
        ))
    }

    /// What of them is not committed by now is lost: their blocks are void, and are written again.
    fn lose(&self, restored: &[RequestId]) {
        self.shared.tracker(|tracker| {
            for request in restored {
                tracker.cancel(request);
            }
        });
    }

    /// A step of which nothing is loaded or saved.
    pub(super) fn void_step(&self, step: &StepMetadata, caches: &Caches) -> Step {
        let counters = &self.shared.counters;
        if self.saves {
            let spans = step.requests.iter().filter_map(|part| part.save.as_ref());
            let saves: usize = spans.map(|span| span.hashes.len()).sum();
            counters.dropped_saves.add(saves as u64);
        }
        let mut void = self.shared.tracker(|tracker| plan::loaded(tracker, step));
        counters.failed_loads.add(void.len() as u64);
        counters.miss(MissReason::TimeOut, void.len() as u64);
        if let Some(stuck) = &self.stuck {
            // Whatever this step computes there may be written over.
            stuck.look(|state| void.extend(state.invalid()));
        }
        if void.is_empty() {
            return Step::new(step);
        }
        let rows = vec![void.into_iter().collect()];
        let board = Arc::new(Board::new(rows, caches.layers()));
        board.update(|state| state.fail(0));
        Step {
            board: Some(board),
            ..Step::new(step)
        }
    }

    pub(super) fn begin_loads(
        &self,
        caches: &Arc<Caches>,
        loads: Loads,
        ready: Event,
    ) -> Option<Arc<Board>> {
        let (rows, lost) = (loads.rows.len(), loads.lost() as u64);
        if rows == 0 && lost == 0 {
            return None;
        }
        let board = Arc::new(Board::new(loads.blocks, caches.layers()));
        // The last row is not loaded.
        board.update(|state| state.fail(rows));
        self.shared.counters.failed_loads.add(lost);
        self.shared.counters.miss(MissReason::NeverStored, lost);
        if rows == 0 {
            return Some(board);
        }
        let job = LoadJob {
            caches: Arc::clone(caches),
            staging: self.staging.clone(),
            receiving: Receiving(Arc::clone(&board), Arc::clone(&self.shared.counters)),
            rows: loads.rows,
            ready,
            loading: Loading::begin(&board, &self.shared.loading),
        };
        // A job that is not taken is dropped, which publishes its blocks as invalid.
        self.loads_queue.push(job, &mut self.patience());
        Some(board)
    }
}
