//! From a step's metadata to what a worker waits for, loads and saves. Pure: the tracker says who has what, keys are made
//! by whoever asks, and nothing is moved here.
//!
//! Loads are distinct objects, each with all blocks of the step that need it. So an object is opened once in a step
//! and read for all its owners, and its session ends when nobody of them is to be given anything more of it (W3).

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;

use crate::contract::{BlockHash, BlockId, RequestId, RequestStep, Span, StepMetadata};
use crate::error::ConnectorError;
use crate::tracker::{Begun, Tracker};

/// Whose saves a step waits for before anything else happens.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Fence {
    /// Their blocks are others' from here on: the step can't begin before their saves are over.
    pub over: Vec<RequestId>,
    /// Their earlier blocks are loaded again: what is not committed in time is lost.
    pub restored: Vec<RequestId>,
}

/// One object to load. Its blocks stand under the same index in [`Loads::blocks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRow<K = ObjectKey> {
    /// The object.
    pub key: K,
    /// Of the look-up that found it.
    pub epoch: Epoch,
    /// The block's index in its request.
    pub index: u32,
}

/// The loads of a step.
#[derive(Debug)]
pub struct Loads<K = ObjectKey> {
    /// Distinct objects.
    pub rows: Vec<LoadRow<K>>,
    /// For each of them the blocks that need it; behind them, as a row that has failed from the start, the blocks
    /// that the engine has lost and the store does not have.
    pub blocks: Vec<Vec<BlockId>>,
}

/// One object to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveRow<K = ObjectKey> {
    /// Whose it is.
    pub request: RequestId,
    /// The object.
    pub key: K,
    /// Where its bytes are.
    pub block: BlockId,
    /// Of the request's look-up; unset if there was none.
    pub epoch: Epoch,
    /// The block's index in its request.
    pub index: u32,
}

impl<K> Loads<K> {
    /// Blocks that are lost.
    pub fn lost(&self) -> usize {
        self.blocks.last().map_or(0, Vec::len)
    }
}

/// Tells the tracker who is in the step and what came of the steps before, all of it, also if some makes no sense. Gives
/// those whose earlier saves must be over first.
pub fn begin<K: Clone + Eq + Hash + Ord>(
    tracker: &mut Tracker<K>,
    step: &StepMetadata,
) -> (Fence, Result<(), ConnectorError>) {
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
    let mut begun = Ok(());
    for part in &step.requests {
        let (request, attempt) = (&part.request, part.attempt);
        let detail = match tracker.begin(request, attempt, &part.table) {
            Begun::Continues => continue,
            Begun::StartsOver => {
                over.push(request.clone());
                continue;
            }
            Begun::Stale => format!("attempt {attempt} of request {request:?} is over"),
            Begun::Unknown => format!(
                "it adds to the table of request {request:?}, which this rank does not know: it has to start over"
            ),
        };
        begun = Err(ConnectorError::Metadata { detail });
    }
    if begun.is_err() {
        refuse(tracker, step);
    }
    let parts = step.requests.iter();
    let restored = parts.filter(|part| part.restore > 0);
    let restored = restored.map(|part| part.request.clone()).collect();
    (Fence { over, restored }, begun)
}

/// The step does not run here, whatever the engine does: nothing of what its requests compute from here on is committed
/// before they start over.
pub fn refuse<K: Clone + Eq + Hash + Ord>(tracker: &mut Tracker<K>, step: &StepMetadata) {
    for part in &step.requests {
        tracker.cancel(&part.request);
    }
}

/// The blocks that the step gets from the store, if it has them.
pub fn loaded<K: Clone + Eq + Hash + Ord>(
    tracker: &Tracker<K>,
    step: &StepMetadata,
) -> BTreeSet<BlockId> {
    let mut loaded = BTreeSet::new();
    for part in &step.requests {
        let indices = part.load.iter().flat_map(Span::iter);
        let indices = indices.map(|(index, _)| index).chain(0..part.restore);
        loaded.extend(indices.filter_map(|index| tracker.block(&part.request, index)));
    }
    loaded
}

/// Marks the requests that compute from blocks loaded in this step. Whether there are any.
pub fn doubt<K: Clone + Eq + Hash + Ord>(tracker: &mut Tracker<K>, step: &StepMetadata) -> bool {
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

/// What the step loads.
pub fn loads<K: Clone + Eq + Hash + Ord>(
    tracker: &Tracker<K>,
    step: &StepMetadata,
    key: impl Fn(&BlockHash) -> Result<K, ConnectorError>,
) -> Result<Loads<K>, ConnectorError> {
    let mut loads = Loads {
        rows: Vec::new(),
        blocks: Vec::new(),
    };
    let (mut by_key, mut lost) = (HashMap::new(), Vec::new());
    for request in &step.requests {
        let mut wanted: Vec<(u32, K)> = Vec::new();
        for (index, hash) in request.load.iter().flat_map(Span::iter) {
            wanted.push((index, key(hash)?));
        }
        for index in 0..request.restore {
            match tracker.committed(&request.request, index) {
                Some(key) => wanted.push((index, key.clone())),
                None => lost.extend(tracker.block(&request.request, index)),
            }
        }
        for (index, key) in wanted {
            let block = block_of(tracker, request, index)?;
            let row = *by_key.entry(key.clone()).or_insert(loads.rows.len());
            if row == loads.rows.len() {
                loads.blocks.push(Vec::new());
                loads.rows.push(LoadRow {
                    key,
                    epoch: request.epoch(),
                    index,
                });
            }
            if !loads.blocks[row].contains(&block) {
                loads.blocks[row].push(block);
            }
        }
    }
    loads.blocks.push(lost);
    Ok(loads)
}

fn block_of<K: Clone + Eq + Hash + Ord>(
    tracker: &Tracker<K>,
    request: &RequestStep,
    index: u32,
) -> Result<BlockId, ConnectorError> {
    let block = tracker.block(&request.request, index);
    block.ok_or_else(|| ConnectorError::Metadata {
        detail: format!("request {:?} has no block {index} to load", request.request),
    })
}

/// What the step saves: what nobody saves already, or has saved. Whoever gets the rows settles them with the tracker.
pub fn saves<K: Clone + Eq + Hash + Ord>(
    tracker: &mut Tracker<K>,
    step: &StepMetadata,
    key: impl Fn(&BlockHash) -> Result<K, ConnectorError>,
) -> Result<Vec<SaveRow<K>>, ConnectorError> {
    let mut wanted = Vec::new();
    for request in &step.requests {
        for (index, hash) in request.save.iter().flat_map(Span::iter) {
            wanted.push((request, index, key(hash)?));
        }
    }
    // From here on nothing fails: what is wanted is settled by whoever gets the rows.
    let rows = wanted.into_iter().filter_map(|(request, index, key)| {
        let block = tracker.want_put(&request.request, index, &key)?;
        Some(SaveRow {
            request: request.request.clone(),
            key,
            block,
            epoch: request.epoch(),
            index,
        })
    });
    Ok(rows.collect())
}

/// Takes from those that end who has no save under way any more.
pub fn ended<K: Clone + Eq + Hash + Ord>(
    tracker: &Tracker<K>,
    ending: &mut BTreeSet<RequestId>,
) -> Vec<RequestId> {
    let over = |request: &RequestId| tracker.unsettled(request) == 0;
    ending.extract_if(.., over).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{METADATA_VERSION, TableUpdate};

    fn hash(n: u8) -> BlockHash {
        BlockHash::new(&[n])
    }

    #[expect(
        clippy::unnecessary_wraps,
        reason = "as the worker makes keys, which can fail"
    )]
    fn key(hash: &BlockHash) -> Result<BlockHash, ConnectorError> {
        Ok(hash.clone())
    }

    fn part(id: &str, table: &[BlockId], load: &[u8], save: &[u8]) -> RequestStep {
        let span = |first: usize, hashes: &[u8]| {
            (!hashes.is_empty()).then(|| Span {
                first: u32::try_from(first).expect("small"),
                hashes: hashes.iter().map(|n| hash(*n)).collect(),
            })
        };
        RequestStep {
            request: id.into(),
            attempt: 0,
            epoch: 1,
            table: TableUpdate {
                begins: true,
                replace: true,
                blocks: table.to_vec(),
            },
            load: span(0, load),
            save: span(load.len(), save),
            restore: 0,
        }
    }

    fn begun(tracker: &mut Tracker<BlockHash>, step: &StepMetadata) -> Fence {
        let (fence, begun) = begin(tracker, step);
        begun.expect("in order");
        fence
    }

    fn step(requests: Vec<RequestStep>) -> StepMetadata {
        StepMetadata {
            version: METADATA_VERSION,
            step: 7,
            requests,
            preempted: Vec::new(),
            finished: Vec::new(),
            void: Vec::new(),
            confirmed: 0,
        }
    }

    // DEV-05: the first to finish does not close the session for everyone.
    // contract: connector-14
    #[test]
    fn dev_05_what_several_requests_read_is_one_row_with_the_blocks_of_all() {
        let mut tracker = Tracker::default();
        let both = step(vec![
            part("a", &[10, 11, 12], &[1, 2], &[3]),
            part("b", &[20, 21, 22], &[1, 2], &[3]),
        ]);
        let fence = begun(&mut tracker, &both);
        assert_eq!(fence, Fence::default());
        let found = loads(&tracker, &both, key).expect("in the tables");
        let keys: Vec<_> = found.rows.iter().map(|row| row.key.clone()).collect();
        assert_eq!(keys, [hash(1), hash(2)]);
        assert_eq!(found.blocks, [vec![10, 20], vec![11, 21], vec![]]);
        // One saves, the other follows, and both compute beside loads.
        let rows = saves(&mut tracker, &both, key).expect("keys");
        let saved: Vec<_> = rows.iter().map(|row| (row.block, row.index)).collect();
        assert_eq!(saved, [(12, 2)]);
        assert!(doubt(&mut tracker, &both));
        // The end of one takes nothing from the other.
        let mut next = step(vec![part("b", &[20, 21, 22], &[1, 2], &[])]);
        next.finished.push("a".into());
        begun(&mut tracker, &next);
        let found = loads(&tracker, &next, key).expect("in the table");
        assert_eq!(found.blocks, [vec![20], vec![21], vec![]]);
        let mut ending = BTreeSet::from(["a".into()]);
        assert_eq!(ended(&tracker, &mut ending), [], "its save goes on");
        tracker.settle(&hash(3), crate::tracker::PutOutcome::Lost);
        assert_eq!(ended(&tracker, &mut ending), ["a".into()]);
        assert!(ending.is_empty());
    }

    #[test]
    fn nothing_is_saved_of_a_step_that_is_refused() {
        let mut tracker = Tracker::default();
        let mut grown = part("b", &[20], &[], &[3]);
        grown.table.begins = false;
        let refused = step(vec![part("a", &[10, 11], &[1], &[2]), grown]);
        let (_, begun) = begin(&mut tracker, &refused);
        assert!(begun.is_err());
        assert_eq!(saves(&mut tracker, &refused, key).expect("keys"), []);
    }

    #[test]
    fn what_is_restored_and_not_there_is_lost_and_what_is_not_in_the_table_refused() {
        let mut tracker = Tracker::default();
        let mut restored = step(vec![part("a", &[10, 11], &[], &[])]);
        restored.requests[0].restore = 2;
        let fence = begun(&mut tracker, &restored);
        assert_eq!(fence.restored, ["a".into()]);
        let found = loads(&tracker, &restored, key).expect("in the table");
        assert_eq!((found.rows.len(), found.lost()), (0, 2));
        let beyond = step(vec![part("a", &[10], &[1, 2], &[])]);
        begun(&mut tracker, &beyond);
        let error = loads(&tracker, &beyond, key).expect_err("two blocks");
        assert!(error.to_string().contains("no block 1"), "{error}");
    }
}
