//! One request of the trace, through the connector: what an engine would do that computes nothing.
//!
//! The cache holds the blocks of one request. A request of so many blocks stands for one token more, so
//! that every block is whole and one token is left to compute. What is loaded is compared layer by
//! layer; what is not is made, layer by layer, and saved. A load that failed cuts the request back, and
//! the rest is made in a second step. A request ends when its saves are over, so that the next one finds
//! them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layercake_connector::checks::{Deployment, Execution};
use layercake_connector::contract::{
    Absorbed, BlockHash, BlockId, CacheLayout, CacheRegistration, EntryCache, FreeBlocks,
    HostEvent, LayerCache, Matched, RequestId, RequestView, ScheduledRequest, SchedulerSide as _,
    StepPlan, WorkerSide as _,
};
use layercake_connector::options::Options;
use layercake_connector::scheduler::StoreScheduler;
use layercake_connector::stats::{ConnectorStats, MissReason};
use layercake_connector::worker::StoreWorker;
use layercake_protocol::layout::{LayerSpec, ObjectLayout};
use layercake_store::StoreClient;
use layercake_transport::{AllocateOptions, Engine, Memory};
use tokio::runtime::Handle;

use super::keys::{BLOCK_TOKENS, MODEL};
use super::messages::{Done, Measured, Request, Setup};
use super::pattern::Pattern;

/// Bytes that are made or compared at a time: they stay in the first cache.
const CHUNK: usize = 16 << 10;

/// How long one wait for the connector's tasks is, before it is begun anew.
const WAIT: Duration = Duration::from_secs(1);

/// Works requests off, one at a time.
pub(crate) struct ConnectorRequests {
    scheduler: StoreScheduler,
    worker: StoreWorker,
    layout: ObjectLayout,
    memory: Memory,
    /// Blocks of the cache.
    blocks: u64,
    chunk: Vec<u8>,
    pub(crate) measured: Measured,
}

/// A request's blocks.
struct Blocks<'a> {
    id: RequestId,
    ids: &'a [u64],
    hashes: Vec<BlockHash>,
    table: Vec<BlockId>,
    tokens: u64,
}

/// The options of the connector: nothing may depend on measured times, and a slow answer is waited for.
fn options() -> Options {
    Options {
        decline_slow_loads: false,
        lookup_timeout: Duration::from_mins(1),
        ..Options::default()
    }
}

fn deployment(setup: &Setup, layout: &ObjectLayout) -> Result<Deployment> {
    let layers = (0..layout.layer_count()).map(|layer| {
        let physical = layout
            .physical_layer(layer)
            .context("there is no such layer")?;
        let entries = layout.layer_entries(layer);
        Ok(LayerSpec::new(
            physical,
            entries.map(|e| (e.name, e.range.len())),
        ))
    });
    Ok(Deployment {
        tenant: setup.tenant.clone(),
        model: MODEL.to_owned(),
        revision: setup.run.clone(),
        kv_dtype: "pattern".to_owned(),
        block_size: BLOCK_TOKENS,
        tp_size: 1,
        storing_ranks: 1,
        pp_size: 1,
        pcp_size: 1,
        dcp_size: 1,
        groups: vec![CacheLayout {
            layers: layers.collect::<Result<_>>()?,
        }],
        compatible_keys: false,
        execution: Execution::Eager,
        retains_blocks: true,
    })
}

impl ConnectorRequests {
    /// With a cache for requests of `setup.most_blocks` blocks.
    pub(crate) fn new(
        setup: &Setup,
        layout: &ObjectLayout,
        store: &StoreClient,
        engine: &Engine,
    ) -> Result<Self> {
        let deployment = deployment(setup, layout)?;
        let runtime = Handle::current();
        let scheduler =
            StoreScheduler::new(&deployment, options(), store.clone(), runtime.clone())?;
        let mut worker = StoreWorker::new(&deployment, 0, options(), store.clone(), &runtime)?;
        // The token that is left to compute has a block of its own.
        let blocks = setup.most_blocks.saturating_add(1);
        let memory = engine
            .allocate(
                blocks.saturating_mul(layout.object_len()),
                AllocateOptions::default(),
            )
            .context("can't get the memory of a request's blocks")?;
        worker.register_caches(&registration(layout, &memory, blocks)?)?;
        Ok(Self {
            scheduler,
            worker,
            layout: layout.clone(),
            memory,
            blocks,
            chunk: vec![0; CHUNK],
            measured: Measured::default(),
        })
    }

    /// Works one request off. Blocks the thread.
    pub(crate) fn run(&mut self, request: &Request) -> Result<Done> {
        let before = (self.scheduler.stats(), self.worker.stats());
        let blocks = Blocks {
            id: RequestId::from(request.index.to_string().as_str()),
            ids: &request.ids,
            hashes: request
                .ids
                .iter()
                .map(|id| BlockHash::new(&id.to_be_bytes()))
                .collect(),
            table: (0..=request.ids.len() as u64).collect(),
            tokens: request.ids.len() as u64 * u64::from(BLOCK_TOKENS) + 1,
        };
        if blocks.table.len() as u64 > self.blocks {
            bail!("a request of more blocks than any of the trace");
        }
        let mut done = Done {
            index: request.index,
            blocks: request.ids.len() as u64,
            ..Done::default()
        };
        let mut computed = self.look_up(&blocks)?;
        let block_tokens = u64::from(BLOCK_TOKENS);
        done.found_blocks = computed / block_tokens;
        let mut good = done.found_blocks;
        // A load that failed is not tried again, so the second step is the last.
        while let Some(cut) = self.step(&blocks, computed, &mut good, &mut done)? {
            computed = cut;
            good = good.min(cut / block_tokens);
        }
        self.finish(&blocks.id)?;
        done.hit_blocks = good;
        self.count(&before, &mut done);
        Ok(done)
    }

    fn look_up(&mut self, blocks: &Blocks<'_>) -> Result<u64> {
        let view = RequestView {
            request: &blocks.id,
            tokens: blocks.tokens,
            hashes: &blocks.hashes,
            computed: 0,
        };
        let started = Instant::now();
        let tokens = loop {
            match self.scheduler.matched_tokens(&view) {
                Matched::Tokens(tokens) => break tokens,
                Matched::NotKnownYet => self.scheduler.wait(WAIT),
            }
        };
        self.measured.lookup.record(started.elapsed());
        self.scheduler.after_allocation(&blocks.id, tokens)?;
        Ok(tokens)
    }

    /// One step; to how many tokens it was cut back, if it was. The first `good` blocks held what they
    /// must.
    fn step(
        &mut self,
        blocks: &Blocks<'_>,
        computed: u64,
        good: &mut u64,
        done: &mut Done,
    ) -> Result<Option<u64>> {
        let request = ScheduledRequest {
            request: &blocks.id,
            table: &blocks.table,
            hashes: &blocks.hashes,
            prompt: blocks.tokens,
            computed,
            scheduled: blocks.tokens - computed,
        };
        let metadata = self.scheduler.build_metadata(&StepPlan {
            requests: &[request],
            preempted: &[],
        })?;
        self.worker.start_load(&metadata, HostEvent::done())?;
        let loads = metadata.requests.iter().any(|step| step.load.is_some());
        let saves = metadata.requests.iter().any(|step| step.save.is_some());
        let first = usize::try_from(computed / u64::from(BLOCK_TOKENS))?;
        let loaded = if loads { first } else { 0 };
        let mut wrong = vec![false; loaded];
        for layer in 0..self.layout.layer_count() {
            let physical = self
                .layout
                .physical_layer(layer)
                .context("there is no such layer")?;
            let started = Instant::now();
            let ready = self.worker.wait_for_layer(physical)?;
            if loads {
                self.measured.load_layer.record(started.elapsed());
            }
            for (at, wrong) in wrong.iter_mut().enumerate() {
                let invalid = ready.invalid_blocks.binary_search(&blocks.table[at]);
                if invalid.is_err() {
                    *wrong |= !self.matches(layer, at as u64, blocks.ids[at])?;
                }
            }
            for at in first..blocks.ids.len() {
                self.make(layer, at as u64, blocks.ids[at])?;
            }
            let started = Instant::now();
            self.worker.save_layer(physical, HostEvent::done())?;
            if saves {
                self.measured.save_layer.record(started.elapsed());
            }
        }
        let absorbed = self.end_step()?;
        for at in wrong
            .iter()
            .enumerate()
            .filter_map(|(at, wrong)| wrong.then_some(at))
        {
            done.mismatched_blocks += 1;
            *good = (*good).min(at as u64);
            let id = blocks.ids[at];
            done.trouble
                .get_or_insert_with(|| format!("block {id} holds wrong bytes"));
        }
        let cut = absorbed.recompute.first();
        Ok(cut.map(|(_, tokens)| *tokens))
    }

    fn end_step(&mut self) -> Result<Absorbed> {
        self.worker.wait_for_save(HostEvent::done())?;
        let results = self.worker.take_results();
        self.worker.clear_metadata();
        Ok(self.scheduler.absorb(&[results]))
    }

    /// Steps without requests until the request's saves are over.
    fn finish(&mut self, id: &RequestId) -> Result<()> {
        let mut free = self.scheduler.request_finished(id) == FreeBlocks::Now;
        while !free {
            let metadata = self.scheduler.build_metadata(&StepPlan {
                requests: &[],
                preempted: &[],
            })?;
            self.worker.start_load(&metadata, HostEvent::done())?;
            self.worker.wait_for_ends(WAIT);
            free = self.end_step()?.free.contains(id);
        }
        Ok(())
    }

    /// What the connector has counted since `before`.
    fn count(&self, before: &(ConnectorStats, ConnectorStats), done: &mut Done) {
        let (scheduler, worker) = (self.scheduler.stats(), self.worker.stats());
        let since = |now: u64, before: u64| now.saturating_sub(before);
        done.keys_queried = since(scheduler.keys_queried, before.0.keys_queried);
        let window = options().lookup_window_blocks.get() as u64;
        done.keys_bound = since(scheduler.hit_blocks, before.0.hit_blocks) + window;
        done.saved_blocks = since(worker.saved_blocks, before.1.saved_blocks);
        done.skipped_blocks = since(worker.saved_elsewhere, before.1.saved_elsewhere);
        done.unsaved_blocks = since(worker.failed_saves, before.1.failed_saves)
            + since(worker.dropped_saves, before.1.dropped_saves);
        let missed = |now: &ConnectorStats, before: &ConnectorStats, reason| {
            since(now.missed(reason), before.missed(reason))
        };
        done.corrupt_blocks = missed(&worker, &before.1, MissReason::Damaged);
        for reason in [MissReason::Master, MissReason::TimeOut] {
            if missed(&scheduler, &before.0, reason) > 0 {
                done.failed = Some(format!("the look-up failed: {}", reason.name()));
            }
        }
        done.bytes_saved = done.saved_blocks * self.layout.object_len();
        done.bytes_loaded = done.hit_blocks * self.layout.object_len();
    }

    /// Ends the connector.
    pub(crate) async fn close(self, within: Duration) -> Result<()> {
        Ok(self.worker.close(within).await?)
    }

    /// Makes the bytes of a layer of a block.
    fn make(&mut self, layer: usize, block: u64, id: u64) -> Result<()> {
        self.visit(layer, block, id, |memory, chunk, pattern, at, word| {
            pattern.fill(word, chunk);
            memory.copy_in(at, chunk)?;
            Ok(true)
        })
        .map(|_| ())
    }

    /// Compares every byte of a layer of a block with what it must be.
    fn matches(&mut self, layer: usize, block: u64, id: u64) -> Result<bool> {
        self.visit(layer, block, id, |memory, chunk, pattern, at, word| {
            memory.copy_out(at, chunk)?;
            Ok(pattern.matches(word, chunk))
        })
    }

    /// Visits the bytes of a layer of a block, with what they must be, until a visit says no.
    fn visit(
        &mut self,
        layer: usize,
        block: u64,
        id: u64,
        mut visit: impl FnMut(&Memory, &mut [u8], Pattern, u64, u64) -> Result<bool>,
    ) -> Result<bool> {
        for (entry, place) in self.layout.layer_entries(layer).enumerate() {
            let pattern = Pattern::new(id, u32::try_from(layer)?, u32::try_from(entry)?);
            let base = place.range.start() * self.blocks + block * place.range.len();
            let mut at = 0;
            while at < place.range.len() {
                let len =
                    usize::try_from(place.range.len() - at).map_or(CHUNK, |left| left.min(CHUNK));
                let chunk = &mut self.chunk[..len];
                if !visit(&self.memory, chunk, pattern, base + at, at / 8)? {
                    return Ok(false);
                }
                at += len as u64;
            }
        }
        Ok(true)
    }
}

/// All blocks' entries of one kind lie one after the other.
fn registration(layout: &ObjectLayout, memory: &Memory, blocks: u64) -> Result<CacheRegistration> {
    let layers = (0..layout.layer_count()).map(|layer| {
        let entries = layout.layer_entries(layer).map(|place| {
            Ok(EntryCache {
                name: place.name.to_owned(),
                memory: memory.slice(place.range.start() * blocks, place.range.len() * blocks)?,
                stride: place.range.len(),
                len: place.range.len(),
            })
        });
        let physical = layout.physical_layer(layer);
        Ok(LayerCache {
            physical: physical.context("there is no such layer")?,
            entries: entries.collect::<Result<_>>()?,
        })
    });
    Ok(CacheRegistration {
        layers: layers.collect::<Result<_>>()?,
        blocks,
    })
}
