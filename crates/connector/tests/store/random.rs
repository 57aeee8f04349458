//! Many requests in random order on a real store: chunks, preemption, objects that vanish. Whatever
//! counts as computed is right, and whatever is readable in the end is right.

use std::collections::BTreeMap;

use layercake_connector::contract::{BlockHash, BlockId, FreeBlocks, SchedulerSide as _};
use layercake_connector::stats::MissReason;
use layercake_store::StoreClient;
use serde_json::{Value, json};

use crate::cluster::{Cluster, PATIENCE, deployment, eventually};
use crate::rig::{BLOCKS, Rig};

struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }
}

#[derive(Default)]
struct Request {
    hashes: Vec<BlockHash>,
    table: Vec<BlockId>,
    computed: u64,
    running: bool,
}

impl Request {
    fn tokens(&self) -> u64 {
        self.hashes.len() as u64 * 4 + 1
    }
}

/// One engine and its requests.
struct Engine {
    rig: Rig,
    store: StoreClient,
    requests: BTreeMap<String, Request>,
    preempted: Vec<String>,
    held: BTreeMap<String, Vec<BlockId>>,
    named: u64,
}

impl Engine {
    fn free(&self) -> Vec<BlockId> {
        let held = self.held.values().flatten();
        let used: Vec<BlockId> = self
            .requests
            .values()
            .flat_map(|r| &r.table)
            .chain(held)
            .copied()
            .collect();
        (0..BLOCKS).filter(|block| !used.contains(block)).collect()
    }

    fn arrive(&mut self, hashes: &[BlockHash]) {
        if self.requests.len() < 4 {
            let name = format!("r{}", self.named);
            self.named += 1;
            let hashes = hashes.to_vec();
            self.requests.insert(
                name,
                Request {
                    hashes,
                    ..Request::default()
                },
            );
        }
    }

    fn preempt(&mut self, name: &str) {
        let request = self.requests.get_mut(name).expect("it waits or runs");
        if request.running {
            request.running = false;
            request.computed = 0;
            request.table.clear();
            self.preempted.push(name.to_owned());
        }
    }

    fn finish(&mut self, name: &str) {
        let request = self.requests.remove(name).expect("it waits or runs");
        if self.rig.scheduler.request_finished(&name.into()) == FreeBlocks::Delayed {
            self.held.insert(name.to_owned(), request.table);
        }
    }

    async fn remove_one(&self, draw: &mut Draw) {
        let hashes = family(draw);
        let hash = &hashes[usize::try_from(draw.below(hashes.len() as u64)).expect("small")];
        let rank = usize::try_from(draw.below(2)).expect("small");
        // Refused if it is not there.
        self.store.remove(&[self.rig.key(rank, hash)], true).await;
    }

    async fn step(&mut self, draw: &mut Draw) {
        let mut chunks: BTreeMap<String, u64> = BTreeMap::new();
        let names: Vec<String> = self.requests.keys().cloned().collect();
        for name in names {
            let free = self.free();
            let request = &self.requests[&name];
            let mut computed = request.computed;
            if !request.running {
                // Enough for all of it, so that nothing that is to be loaded waits for blocks.
                if free.len() < request.hashes.len() + 1 {
                    continue;
                }
                let hashes = request.hashes.clone();
                computed = self.rig.admit(&name, &hashes).await;
            }
            let request = self.requests.get_mut(&name).expect("as before");
            let chunk = (1 + draw.below(9)).min(request.tokens() - computed);
            if chunk == 0 {
                continue;
            }
            let blocks = usize::try_from((computed + chunk).div_ceil(4)).expect("small");
            let missing = blocks.saturating_sub(request.table.len());
            if free.len() < missing {
                continue;
            }
            request.table.extend(&free[..missing]);
            request.computed = computed;
            request.running = true;
            chunks.insert(name, chunk);
        }
        // What was matched may be gone when it is loaded.
        self.remove_one(draw).await;
        let parts: Vec<_> = chunks
            .iter()
            .map(|(name, &chunk)| {
                let request = &self.requests[name];
                let part = (
                    name.as_str(),
                    request.table.as_slice(),
                    request.tokens(),
                    request.computed,
                    chunk,
                );
                (part, request.hashes.as_slice())
            })
            .collect();
        let preempted = std::mem::take(&mut self.preempted);
        let preempted: Vec<&str> = preempted.iter().map(String::as_str).collect();
        let absorbed = self.rig.step_after(&parts, &preempted);
        for (name, chunk) in chunks {
            self.requests.get_mut(&name).expect("as before").computed += chunk;
        }
        for (name, tokens) in absorbed.recompute {
            self.requests
                .get_mut(name.as_str())
                .expect("it runs")
                .computed = tokens;
        }
        for name in absorbed.free {
            self.held.remove(name.as_str()).expect("freed once");
        }
        for (name, request) in &self.requests {
            let whole = usize::try_from(request.computed / 4).expect("small");
            let right = self.rig.right(&request.table[..whole], &request.hashes);
            assert!(
                right.iter().all(|right| *right),
                "{name} counts what is void: {right:?}"
            );
        }
    }

    async fn wind_up(mut self, draw: &mut Draw) {
        let names: Vec<String> = self.requests.keys().cloned().collect();
        for name in names {
            self.finish(&name);
        }
        let until = tokio::time::Instant::now() + PATIENCE;
        while !self.held.is_empty() {
            assert!(
                tokio::time::Instant::now() < until,
                "blocks are held: {:?}",
                self.held
            );
            self.step(draw).await;
        }
        self.step(draw).await;
        for rank in &self.rig.ranks {
            eventually("all sessions end", || rank.worker.open_sessions() == (0, 0)).await;
            // Every block that was to be loaded is, or is not for a reason.
            let stats = || rank.worker.stats();
            let wanted = self.rig.wanted;
            eventually("all loads are counted", || {
                stats().loaded_blocks + stats().failed_loads == wanted
            })
            .await;
            let missed = MissReason::ALL.map(|reason| stats().missed(reason));
            assert_eq!(missed.iter().sum::<u64>(), stats().failed_loads);
        }
        assert_eq!(self.rig.scheduler.open_requests(), 0);
        self.rig.close().await;
    }
}

fn family(draw: &mut Draw) -> Vec<BlockHash> {
    let family = u8::try_from(draw.below(3)).expect("small");
    let blocks = u8::try_from(1 + draw.below(6)).expect("small");
    let hash = |index: u8| BlockHash::new(&[if index < 2 { 9 } else { family }, index]);
    (0..blocks).map(hash).collect()
}

async fn engine(cluster: &Cluster, with: &Value) -> Engine {
    let store = cluster.client().await;
    Engine {
        rig: Rig::new(&deployment(2), &store, with),
        requests: BTreeMap::new(),
        preempted: Vec::new(),
        held: BTreeMap::new(),
        named: 0,
        store,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_any_order_only_right_bytes_are_loaded_and_stored() {
    let small = json!({
        "layerwise_max_transfer_blocks": 2,
        "session_window_blocks": 2,
        "layerwise_prefetch_layers": 1,
        "local_fanout": "on",
    });
    for (seed, with) in [
        (1, json!({})),
        (2, small),
        (3, json!({"use_layerwise": false})),
    ] {
        let mut draw = Draw(seed * 0x9e37_79b9 + 1);
        let cluster = Cluster::start().await;
        let a = engine(&cluster, &with).await;
        let b = engine(&cluster, &json!({})).await;
        let mut engines = [a, b];
        for _ in 0..120 {
            let engine = &mut engines[usize::try_from(draw.below(2)).expect("small")];
            let names: Vec<String> = engine.requests.keys().cloned().collect();
            let name = names.get(usize::try_from(draw.below(names.len() as u64)).expect("small"));
            match (draw.below(7), name) {
                (0 | 1, _) => engine.arrive(&family(&mut draw)),
                (2, Some(name)) => engine.preempt(name),
                (3, Some(name)) => engine.finish(name),
                _ => engine.step(&mut draw).await,
            }
        }
        let failed: u64 = engines
            .iter()
            .flat_map(|engine| &engine.rig.ranks)
            .map(|rank| rank.worker.stats().failed_loads)
            .sum();
        assert!(failed > 0, "loads fail now and then");
        for engine in engines {
            engine.wind_up(&mut draw).await;
        }
        eventually("nothing stays reserved", || {
            cluster.monitor.status().reserved_objects == 0
        })
        .await;
        assert!(cluster.monitor.status().objects > 0);

        let mut reader = engine(&cluster, &json!({})).await;
        for last in 0..3 {
            let hash = |index: u8| BlockHash::new(&[if index < 2 { 9 } else { last }, index]);
            let hashes: Vec<BlockHash> = (0..6).map(hash).collect();
            let name = format!("reader-{last}");
            let tokens = reader.rig.admit(&name, &hashes).await;
            let table: Vec<BlockId> = (0..7).collect();
            let part = (name.as_str(), table.as_slice(), 25, tokens, 1);
            assert!(reader.rig.step(&[(part, &hashes)]).recompute.is_empty());
            let stored = usize::try_from(tokens / 4).expect("small");
            assert_eq!(
                reader.rig.right(&table[..stored], &hashes),
                vec![true; stored]
            );
        }
    }
}
