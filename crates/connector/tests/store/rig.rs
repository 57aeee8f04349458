//! An engine that computes nothing: what a block holds follows from its hash, so that whatever is in
//! the cache can be compared in full.

use std::time::Duration;

use layercake_connector::checks::Deployment;
use layercake_connector::contract::{
    Absorbed, BlockHash, BlockId, CacheRegistration, EntryCache, Event, FreeBlocks, HostEvent,
    LayerCache, Matched, RequestId, RequestView, ScheduledRequest, SchedulerSide as _,
    StepMetadata, StepPlan, WorkerResults, WorkerSide as _,
};
use layercake_connector::keys::BlockKeys;
use layercake_connector::options::Options;
use layercake_connector::scheduler::StoreScheduler;
use layercake_connector::worker::StoreWorker;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::LayerSpec;
use layercake_store::StoreClient;
use layercake_transport::{Access, Memory};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::task::block_in_place;

use crate::cluster::PATIENCE;

pub(crate) const BLOCKS: u64 = 32;
/// Distance of blocks beyond their entry's length.
const GAP: u64 = 8;

pub(crate) fn options(value: &Value) -> Options {
    let mut map = value.as_object().expect("a map").clone();
    map.entry("decline_slow_loads").or_insert(false.into());
    map.entry("lookup_timeout_ms").or_insert(10_000.into());
    Options::from_json(&map).expect("good options")
}

/// One request in a step: its id, its table, tokens of its prompt, computed and scheduled.
pub(crate) type Part<'a> = (&'a str, &'a [BlockId], u64, u64, u64);

/// One rank's worker and its cache.
pub(crate) struct Rank {
    pub(crate) worker: StoreWorker,
    /// The rank that stores its bytes, which other ranks may have copies of.
    bytes_of: u32,
    layers: Vec<(LayerSpec, Vec<Memory>)>,
}

/// A scheduler and its workers.
pub(crate) struct Rig {
    pub(crate) scheduler: StoreScheduler,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) keys: BlockKeys,
    /// Blocks that steps were to load.
    pub(crate) wanted: u64,
}

impl Rig {
    pub(crate) fn new(deployment: &Deployment, store: &StoreClient, with: &Value) -> Self {
        Self::with(deployment, store, &options(with))
    }

    pub(crate) fn with(deployment: &Deployment, store: &StoreClient, options: &Options) -> Self {
        let checked = deployment.check(options).expect("covered");
        let scheduler = StoreScheduler::new(
            deployment,
            options.clone(),
            store.clone(),
            Handle::current(),
        );
        let ranks = (0..deployment.tp_size)
            .map(|rank| Rank::new(deployment, rank, options, store, &Handle::current()));
        Self {
            scheduler: scheduler.expect("covered"),
            ranks: ranks.collect(),
            keys: BlockKeys::new(deployment, &checked).expect("keys"),
            wanted: 0,
        }
    }

    /// Tokens that the store has of a prompt of whole blocks and one token.
    pub(crate) async fn matched(&mut self, id: &str, hashes: &[BlockHash]) -> u64 {
        let request = RequestId::from(id);
        let view = RequestView {
            request: &request,
            tokens: hashes.len() as u64 * 4 + 1,
            hashes,
            computed: 0,
        };
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            match self.scheduler.matched_tokens(&view) {
                Matched::Tokens(tokens) => return tokens,
                Matched::NotKnownYet => {
                    assert!(tokio::time::Instant::now() < until, "the look-up ends");
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Looks up and takes all that there is.
    pub(crate) async fn admit(&mut self, id: &str, hashes: &[BlockHash]) -> u64 {
        let tokens = self.matched(id, hashes).await;
        let request = id.into();
        self.scheduler
            .after_allocation(&request, tokens)
            .expect("offered");
        tokens
    }

    pub(crate) fn plan(
        &mut self,
        parts: &[(Part<'_>, &[BlockHash])],
        preempted: &[&str],
    ) -> StepMetadata {
        let ids: Vec<RequestId> = parts.iter().map(|(part, _)| part.0.into()).collect();
        let requests = ids.iter().zip(parts);
        let requests: Vec<_> = requests
            .map(
                |(request, &((_, table, prompt, computed, scheduled), hashes))| ScheduledRequest {
                    request,
                    table,
                    hashes,
                    prompt,
                    computed,
                    scheduled,
                },
            )
            .collect();
        let preempted: Vec<RequestId> = preempted.iter().map(|id| (*id).into()).collect();
        let plan = StepPlan {
            requests: &requests,
            preempted: &preempted,
        };
        let metadata = self.scheduler.build_metadata(&plan).expect("a plan");
        // As it would travel.
        let bytes = metadata.encode().expect("encodes");
        StepMetadata::decode(&bytes).expect("decodes")
    }

    /// A step from its plan to its results. Whole blocks that it computes get their bytes layer by layer.
    pub(crate) fn step(&mut self, parts: &[(Part<'_>, &[BlockHash])]) -> Absorbed {
        self.step_after(parts, &[])
    }

    /// A step before which these requests lost their blocks.
    pub(crate) fn step_after(
        &mut self,
        parts: &[(Part<'_>, &[BlockHash])],
        preempted: &[&str],
    ) -> Absorbed {
        let metadata = self.plan(parts, preempted);
        let loads = metadata.requests.iter().filter_map(|r| r.load.as_ref());
        self.wanted += loads.map(|span| span.hashes.len() as u64).sum::<u64>();
        let results: Vec<_> = self
            .ranks
            .iter_mut()
            .map(|rank| block_in_place(|| rank.step(&metadata, parts)))
            .collect();
        self.scheduler.absorb(&results)
    }

    /// Steps without requests until this one's blocks are free.
    pub(crate) async fn finish(&mut self, id: &str) {
        let request = id.into();
        if self.scheduler.request_finished(&request) == FreeBlocks::Now {
            return;
        }
        let until = tokio::time::Instant::now() + PATIENCE;
        while !self.step(&[]).free.contains(&request) {
            assert!(
                tokio::time::Instant::now() < until,
                "the request's saves end"
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) fn key(&self, rank: usize, hash: &BlockHash) -> ObjectKey {
        self.keys.key(rank, hash).expect("a key")
    }

    /// Which of these blocks each rank's cache has with the right bytes.
    pub(crate) fn right(&self, blocks: &[BlockId], hashes: &[BlockHash]) -> Vec<bool> {
        let pairs = blocks.iter().zip(hashes);
        let right = |(block, hash): (&u64, &BlockHash)| {
            self.ranks.iter().all(|rank| rank.has(*block, hash))
        };
        pairs.map(right).collect()
    }

    pub(crate) async fn close(self) {
        for rank in self.ranks {
            rank.worker.close(PATIENCE).await.expect("tasks end");
        }
    }
}

impl Rank {
    pub(crate) fn new(
        deployment: &Deployment,
        rank: u32,
        options: &Options,
        store: &StoreClient,
        runtime: &Handle,
    ) -> Self {
        let mut worker =
            StoreWorker::new(deployment, rank, options.clone(), store.clone(), runtime)
                .expect("covered");
        let layers: Vec<(LayerSpec, Vec<Memory>)> = deployment.groups[0]
            .layers
            .iter()
            .map(|layer| {
                let memories = layer.entries.iter().map(|entry| {
                    let len = usize::try_from((entry.len + GAP) * BLOCKS).expect("small");
                    let registered = store
                        .engine()
                        .register(vec![0; len].into(), Access::LocalOnly);
                    registered.expect("memory of its own")
                });
                (layer.clone(), memories.collect())
            })
            .collect();
        worker
            .register_caches(&registration(&layers))
            .expect("as in the layout");
        Self {
            worker,
            bytes_of: deployment.storing_rank(rank).expect("a rank").0,
            layers,
        }
    }

    pub(crate) fn registration(&self) -> CacheRegistration {
        registration(&self.layers)
    }

    /// What the engine does on one rank.
    pub(crate) fn step(
        &mut self,
        metadata: &StepMetadata,
        parts: &[(Part<'_>, &[BlockHash])],
    ) -> WorkerResults {
        self.worker
            .start_load(metadata, HostEvent::done())
            .expect("begins");
        for layer in 0..self.layers.len() {
            let physical = self.layers[layer].0.physical;
            self.worker.wait_for_layer(physical).expect("in time");
            self.compute(layer, parts);
            self.worker
                .save_layer(physical, HostEvent::done())
                .expect("handed over");
        }
        self.worker.wait_for_save(HostEvent::done()).expect("ends");
        let results = self.worker.take_results();
        self.worker.clear_metadata();
        results
    }

    /// Fills a layer of the blocks that a step computes, from what is before them.
    pub(crate) fn compute(&self, layer: usize, parts: &[(Part<'_>, &[BlockHash])]) {
        for ((_, table, _, computed, scheduled), hashes) in parts {
            let first = usize::try_from(computed / 4).expect("small");
            let end = usize::try_from((computed + scheduled) / 4).expect("small");
            for index in first..end.min(hashes.len()) {
                let mut before = table[..index].iter().zip(*hashes);
                if before.all(|(block, hash)| self.has_layer(layer, *block, hash)) {
                    self.fill(layer, table[index], &hashes[index]);
                } else {
                    // What follows from void bytes is void.
                    self.fill(layer, table[index], &BlockHash::new(b"void"));
                }
            }
        }
    }

    pub(crate) fn fill(&self, layer: usize, block: BlockId, hash: &BlockHash) {
        let (spec, memories) = &self.layers[layer];
        for (entry, memory) in spec.entries.iter().zip(memories) {
            let bytes = self.bytes(spec.physical, &entry.name, entry.len, hash);
            memory
                .copy_in(block * (entry.len + GAP), &bytes)
                .expect("inside");
        }
    }

    fn has(&self, block: BlockId, hash: &BlockHash) -> bool {
        (0..self.layers.len()).all(|layer| self.has_layer(layer, block, hash))
    }

    pub(crate) fn has_layer(&self, layer: usize, block: BlockId, hash: &BlockHash) -> bool {
        let (spec, memories) = &self.layers[layer];
        spec.entries.iter().zip(memories).all(|(entry, memory)| {
            let mut found = vec![0; usize::try_from(entry.len).expect("small")];
            let at = block * (entry.len + GAP);
            memory.copy_out(at, &mut found).expect("inside");
            found == self.bytes(spec.physical, &entry.name, entry.len, hash)
        })
    }

    /// Forgets everything.
    pub(crate) fn wipe(&self) {
        for memory in self.layers.iter().flat_map(|(_, memories)| memories) {
            let zeros = vec![0; usize::try_from(memory.len()).expect("small")];
            memory.copy_in(0, &zeros).expect("inside");
        }
    }

    fn bytes(&self, layer: u32, entry: &str, len: u64, hash: &BlockHash) -> Vec<u8> {
        let name = format!("{}/{layer}/{entry}/{hash}", self.bytes_of);
        let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |state, byte| {
            (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        };
        (0..len).map(|_| next()).collect()
    }
}

fn registration(layers: &[(LayerSpec, Vec<Memory>)]) -> CacheRegistration {
    let layers = layers.iter().map(|(spec, memories)| LayerCache {
        physical: spec.physical,
        entries: spec
            .entries
            .iter()
            .zip(memories)
            .map(|(entry, memory)| EntryCache {
                name: entry.name.clone(),
                memory: memory.slice(0, memory.len()).expect("whole"),
                stride: entry.len + GAP,
                len: entry.len,
            })
            .collect(),
    });
    CacheRegistration {
        layers: layers.collect(),
        blocks: BLOCKS,
    }
}

/// An event that a test sets.
pub(crate) fn pending() -> (HostEvent, Event) {
    let event = HostEvent::pending();
    (event.clone(), std::sync::Arc::new(event))
}
