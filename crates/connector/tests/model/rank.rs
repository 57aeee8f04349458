//! One rank's worker: its plan, tracker and convergence, which are the worker's own, with chance in the place of the network.

use std::collections::{BTreeMap, BTreeSet};

use layercake_connector::contract::{
    BlockHash, BlockId, RequestId, RequestStep, StepMetadata, WorkerResults,
};
use layercake_connector::convergence::Convergence;
use layercake_connector::plan::{self, Fence, Loads};
use layercake_connector::tracker::{PutOutcome, Tracker};

use crate::world::{Content, Draw, Key, Object, World};

const LAYERS: usize = 3;

struct Put {
    key: Key,
    owner: RequestId,
    block: BlockId,
    /// What was read from the block.
    read: Option<Content>,
    /// Its step has ended: it may be committed.
    step_over: bool,
    committing: bool,
    /// What is read of it may be served at once, if the tracker agrees.
    publishes: bool,
}

pub(crate) struct Rank {
    pub(crate) number: usize,
    pub(crate) tracker: Tracker<Key>,
    pub(crate) blocks: BTreeMap<BlockId, Content>,
    puts: Vec<Put>,
    ending: BTreeSet<RequestId>,
    attempts: BTreeMap<RequestId, u32>,
    /// It computes with others.
    shares: bool,
}

impl Rank {
    pub(crate) fn new(number: usize, shares: bool) -> Self {
        Self {
            number,
            tracker: Tracker::default(),
            blocks: BTreeMap::new(),
            puts: Vec::new(),
            ending: BTreeSet::new(),
            attempts: BTreeMap::new(),
            shares,
        }
    }

    /// Begins a step up to its computation. Blocks that are `gone` were not retained. The blocks that are
    /// void.
    pub(crate) fn start(
        &mut self,
        step: &StepMetadata,
        gone: &[BlockId],
        world: &mut World,
        draw: &mut Draw,
    ) -> BTreeSet<BlockId> {
        self.begin(step, world, draw);
        for block in gone {
            self.blocks.insert(*block, None);
        }
        let void = self.load(step, world, draw);
        if self.shares {
            plan::doubt(&mut self.tracker, step);
        }
        self.open_puts(step, world, draw);
        void
    }

    /// Ends it.
    pub(crate) fn end(
        &mut self,
        step: &StepMetadata,
        void: BTreeSet<BlockId>,
        world: &mut World,
        draw: &mut Draw,
    ) -> WorkerResults {
        // Some layers are written while the step runs.
        self.progress(world, draw);
        let requests: Vec<_> = step.requests.iter().map(|r| r.request.clone()).collect();
        self.tracker.cancel_users_of(&void, &requests);
        for put in &mut self.puts {
            put.step_over = true;
        }
        self.progress(world, draw);
        self.results(step.step, void.into_iter().collect())
    }

    /// Leaves it in its middle: nobody hears of it, and what it was to save is lost.
    pub(crate) fn leave(
        &mut self,
        step: &StepMetadata,
        void: &BTreeSet<BlockId>,
        world: &mut World,
        draw: &mut Draw,
    ) {
        self.progress(world, draw);
        let requests: Vec<_> = step.requests.iter().map(|r| r.request.clone()).collect();
        self.tracker.cancel_users_of(void, &requests);
        while let Some(at) = self.puts.iter().position(|put| !put.step_over) {
            world.objects.remove(&self.puts[at].key);
            self.settle(at, PutOutcome::Lost);
        }
    }

    fn begin(&mut self, step: &StepMetadata, world: &mut World, draw: &mut Draw) {
        let (Fence { over, restored }, begun) = plan::begin(&mut self.tracker, step);
        begun.expect("steps come in order");
        self.ending.extend(step.finished.iter().cloned());
        let waits: BTreeSet<RequestId> = over.into_iter().chain(restored).collect();
        // Nothing reads their blocks from here on.
        while let Some(at) = self.puts.iter().position(|put| waits.contains(&put.owner)) {
            let waits = self.tracker.must_wait(&self.puts[at].key);
            assert!(!waits, "a step waits for what comes behind it");
            self.advance(at, world, draw);
        }
        // Whoever has lost its blocks, or computes them again, by the metadata itself.
        let again = step.requests.iter().filter(|part| {
            let before = self.attempts.insert(part.request.clone(), part.attempt);
            before.is_some_and(|before| before < part.attempt)
        });
        let again = again.map(|part| &part.request);
        for request in step.preempted.iter().chain(again) {
            assert_eq!(
                self.tracker.unsettled(request),
                0,
                "{request} is still saved"
            );
        }
    }

    /// Loads, and gives the blocks that are void.
    fn load(
        &mut self,
        step: &StepMetadata,
        world: &mut World,
        draw: &mut Draw,
    ) -> BTreeSet<BlockId> {
        let key = |hash: &BlockHash| Ok((self.number, hash.clone()));
        let Loads { rows, blocks } = plan::loads(&self.tracker, step, key).expect("in the tables");
        if step.requests.iter().any(|request| request.restore > 0) {
            world.seen.restored += rows.len() as u64;
        }
        let mut loads = Convergence::new(blocks, LAYERS);
        // What is lost.
        loads.fail(rows.len());
        for (at, row) in rows.iter().enumerate() {
            if !world.readable(&row.key) {
                loads.fail(at);
            }
        }
        for layer in 0..LAYERS {
            let alive = loads.alive(0..rows.len());
            let mut arrived: Vec<bool> = alive.iter().map(|_| !draw.one_in(60)).collect();
            if draw.one_in(60) {
                arrived.pop();
            }
            loads.answered(layer, &alive, &arrived);
            if draw.one_in(200) {
                loads.abort();
            }
            assert!(loads.ready(layer).is_some(), "every layer ends");
        }
        assert!(loads.is_over());
        for (at, row) in rows.iter().enumerate() {
            let content = match world.objects.get(&row.key) {
                Some(Object::Complete(content)) if loads.is_alive(at) => content.clone(),
                _ => {
                    world.seen.failed_loads += 1;
                    None
                }
            };
            for block in loads.blocks(at) {
                self.blocks.insert(*block, content.clone());
            }
        }
        loads.invalid().clone()
    }

    fn open_puts(&mut self, step: &StepMetadata, world: &mut World, draw: &mut Draw) {
        let key = |hash: &BlockHash| Ok((self.number, hash.clone()));
        let rows = plan::saves(&mut self.tracker, step, key).expect("keys can be made");
        for row in rows {
            let key = row.key;
            let refused = match world.objects.get(&key) {
                Some(Object::Complete(_)) => Some(PutOutcome::Elsewhere),
                Some(Object::Reserved) => Some(PutOutcome::Lost),
                None => draw.one_in(40).then_some(PutOutcome::Lost),
            };
            if let Some(outcome) = refused {
                world.seen.elsewhere += 1;
                assert!(self.tracker.settle(&key, outcome));
                continue;
            }
            world.objects.insert(key.clone(), Object::Reserved);
            self.puts.push(Put {
                key,
                owner: row.request,
                block: row.block,
                read: None,
                step_over: false,
                committing: false,
                publishes: !step.requests.iter().any(loads),
            });
        }
    }

    /// A block is computed.
    pub(crate) fn fill(&mut self, block: BlockId, content: Content) {
        self.blocks.insert(block, content);
    }

    pub(crate) fn holds(&self, block: BlockId, hash: &BlockHash) -> bool {
        self.blocks
            .get(&block)
            .is_some_and(|content| content.as_ref() == Some(hash))
    }

    /// Saves go on in the background.
    pub(crate) fn progress(&mut self, world: &mut World, draw: &mut Draw) {
        let mut at = 0;
        while at < self.puts.len() {
            if draw.one_in(2) || !self.advance(at, world, draw) {
                at += 1;
            }
        }
    }

    /// One thing happens to a put. Whether it is over.
    fn advance(&mut self, at: usize, world: &mut World, draw: &mut Draw) -> bool {
        let put = &mut self.puts[at];
        if put.committing {
            let complete = Object::Complete(put.read.clone().expect("read before"));
            let outcome = match draw.below(12) {
                0 => {
                    world.objects.remove(&put.key);
                    PutOutcome::Lost
                }
                1 => {
                    world.objects.insert(put.key.clone(), complete);
                    world.seen.lost_answers += 1;
                    PutOutcome::Lost
                }
                _ => {
                    world.objects.insert(put.key.clone(), complete);
                    world.seen.commits += 1;
                    PutOutcome::Committed
                }
            };
            self.settle(at, outcome);
            return true;
        }
        let failed = draw.one_in(30);
        if failed || !self.tracker.may_write(&put.key) {
            world.seen.cancelled += u64::from(!failed);
            world.objects.remove(&put.key);
            self.settle(at, PutOutcome::Lost);
            return true;
        }
        if put.read.is_none() {
            let read = self.blocks.get(&put.block).cloned().flatten();
            if put.publishes && !put.step_over && self.tracker.may_publish(&put.key) {
                world.seen.published += 1;
                assert_eq!(read.as_ref(), Some(&put.key.1), "other bytes are published");
            }
            put.read = Some(read);
        } else if put.step_over && self.tracker.must_wait(&put.key) {
            world.seen.waited += 1;
        } else if put.step_over {
            assert!(self.tracker.may_commit(&put.key));
            put.committing = true;
        } else {
            // Read again: a later layer.
            put.read = None;
        }
        false
    }

    fn settle(&mut self, at: usize, outcome: PutOutcome) {
        let put = self.puts.swap_remove(at);
        assert!(self.tracker.settle(&put.key, outcome));
        assert!(
            !self.tracker.settle(&put.key, PutOutcome::Committed),
            "a second completion"
        );
    }

    fn results(&mut self, step: u64, invalid_blocks: Vec<BlockId>) -> WorkerResults {
        let finished = plan::ended(&self.tracker, &mut self.ending);
        WorkerResults {
            rank: u32::try_from(self.number).expect("small"),
            step,
            finished,
            invalid_blocks,
            ..WorkerResults::default()
        }
    }
}

/// Whether the step gets blocks of this request from the store.
fn loads(step: &RequestStep) -> bool {
    step.load.is_some() || step.restore > 0
}
