//! From a step's metadata to what is loaded and saved.

use std::collections::{BTreeSet, HashMap};

use layercake_protocol::key::ObjectKey;

use super::StoreWorker;
use super::receiver::LoadRow;
use super::sender::SaveRow;
use crate::contract::{BlockId, RequestId, RequestStep, Span, StepMetadata};
use crate::error::ConnectorError;
use crate::tracker::{Begun, Tracker};

/// The loads of a step: distinct objects with all the blocks that need each.
#[derive(Debug, Default)]
pub(super) struct StepLoads {
    pub(super) rows: Vec<LoadRow>,
    pub(super) blocks: Vec<Vec<BlockId>>,
    pub(super) requests: Vec<RequestId>,
    /// Blocks that the engine has lost and the store does not have.
    pub(super) lost: Vec<BlockId>,
    by_key: HashMap<ObjectKey, usize>,
}

impl StepLoads {
    fn add(&mut self, request: &RequestStep, index: u32, key: ObjectKey, block: BlockId) {
        if let Some(&row) = self.by_key.get(&key) {
            if !self.blocks[row].contains(&block) {
                self.blocks[row].push(block);
            }
            return;
        }
        self.by_key.insert(key.clone(), self.rows.len());
        self.blocks.push(vec![block]);
        self.rows.push(LoadRow {
            key,
            epoch: request.epoch(),
            index,
        });
    }
}

/// Tells the tracker who is in the step and what came of the steps before, and gives those whose earlier
/// saves must not read on.
pub(super) fn begin(
    tracker: &mut Tracker<ObjectKey>,
    step: &StepMetadata,
) -> Result<Vec<RequestId>, ConnectorError> {
    let mut over = step.preempted.clone();
    for request in &step.preempted {
        tracker.preempt(request);
    }
    for request in &step.void {
        tracker.cancel(request);
    }
    tracker.confirm(step.confirmed);
    for request in &step.finished {
        tracker.finish(request);
    }
    for step in &step.requests {
        match tracker.begin(&step.request, step.attempt, &step.table) {
            Begun::Continues => {}
            Begun::StartsOver => over.push(step.request.clone()),
            Begun::Stale => {
                let (request, attempt) = (&step.request, step.attempt);
                return Err(ConnectorError::Metadata {
                    detail: format!("attempt {attempt} of request {request:?} is over"),
                });
            }
        }
    }
    Ok(over)
}

/// Marks the requests that compute from blocks loaded in this step. Whether there are any.
pub(super) fn doubt(tracker: &mut Tracker<ObjectKey>, step: &StepMetadata) -> bool {
    let mut loaded = BTreeSet::new();
    for request in &step.requests {
        let indices = request.load.iter().flat_map(Span::iter);
        let blocks = indices.filter_map(|(index, _)| tracker.block(&request.request, index));
        loaded.extend(blocks);
    }
    let mut any = false;
    for part in &step.requests {
        if part.restore > 0 || (!loaded.is_empty() && tracker.uses(&part.request, &loaded)) {
            tracker.doubt(&part.request, step.step);
            any = true;
        }
    }
    any
}

pub(super) fn loads(
    worker: &StoreWorker,
    step: &StepMetadata,
) -> Result<StepLoads, ConnectorError> {
    let mut loads = StepLoads::default();
    for request in &step.requests {
        let mut wanted: Vec<(u32, ObjectKey)> = Vec::new();
        for (index, hash) in request.load.iter().flat_map(Span::iter) {
            wanted.push((index, worker.key(hash)?));
        }
        worker.shared.tracker(|tracker| {
            for index in 0..request.restore {
                match tracker.committed(&request.request, index) {
                    Some(key) => wanted.push((index, key.clone())),
                    None => loads.lost.extend(tracker.block(&request.request, index)),
                }
            }
            if !wanted.is_empty() {
                loads.requests.push(request.request.clone());
            }
            for (index, key) in wanted {
                let Some(block) = tracker.block(&request.request, index) else {
                    return Err(ConnectorError::Metadata {
                        detail: format!(
                            "request {:?} has no block {index} to load",
                            request.request
                        ),
                    });
                };
                tracker.want_get(&request.request, &key);
                loads.add(request, index, key, block);
            }
            Ok(())
        })?;
    }
    Ok(loads)
}

pub(super) fn saves(
    worker: &StoreWorker,
    step: &StepMetadata,
) -> Result<Vec<SaveRow>, ConnectorError> {
    let (mut rows, mut wanted) = (Vec::new(), Vec::new());
    if !worker.saves {
        return Ok(rows);
    }
    for request in &step.requests {
        let blocks = request.save.iter().flat_map(Span::iter);
        let blocks = blocks.map(|(index, hash)| Ok((index, worker.key(hash)?)));
        wanted.push((request, blocks.collect::<Result<Vec<_>, ConnectorError>>()?));
    }
    // From here on nothing fails: what is wanted is settled by whoever gets the rows.
    for (request, blocks) in wanted {
        for (index, key) in blocks {
            let block = worker
                .shared
                .tracker(|tracker| tracker.want_put(&request.request, index, &key));
            if let Some(block) = block {
                rows.push(SaveRow {
                    request: request.request.clone(),
                    key,
                    block,
                    epoch: request.epoch(),
                    index,
                });
            }
        }
    }
    Ok(rows)
}
