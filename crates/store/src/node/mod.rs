//! The segment host: a process that lends memory to the store.
//!
//! A [`Node`] allocates segments with a transfer engine, touches them in the background, mounts each as
//! soon as it is ready, and keeps them mounted: when the master forgot them, it withdraws their memory
//! and brings new segments (see `slots` for why never the old ones). It keeps late writers out on
//! command (`fences`), can tell what its segments hold from their bytes alone (`inventory`), and hands
//! segments back drained.
//!
//! Bytes are not its business: clients reach the segments through the engine. Control runs in tasks on
//! the caller's runtime, everything that blocks on two threads of its own; all of them end with
//! [`Node::shutdown`], or soon after the node is dropped. One lock guards the slots; it is never held
//! across an await, and no other is taken under it.

mod fences;
mod inventory;
mod keeper;
mod room;
mod slots;
mod thread;
mod workshop;

pub use inventory::{HeldObject, Inventory};

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::SegmentId;
use layercake_protocol::replica::{GRANULE, Segment};
use layercake_transport::Engine;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use self::fences::{FenceCounts, Fences};
use self::slots::{Phase, Slots, Stock};
use self::workshop::{Job, Workshop};
use crate::error::StoreError;
use crate::link::MasterLink;

/// One segment to lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSpec {
    /// Bytes, in whole granules of 4,096: the rest is not used.
    pub len: u64,
    /// Ask for huge pages, and take ordinary ones where there are none.
    pub huge_pages: bool,
}

/// What a node lends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfig {
    /// The segments. No object is larger than one.
    pub segments: Vec<SegmentSpec>,
}

impl NodeConfig {
    /// The size up to which [`Self::lending`] makes one segment.
    pub const STEP: u64 = 8 << 30;

    /// The most segments that [`Self::lending`] makes; beyond, they grow. Their list is made before the
    /// machine is asked whether it has so much, and goes with every heartbeat.
    const MOST: u64 = 4096;

    /// Lends `bytes` in as few segments of at most [`Self::STEP`] as it takes (beyond 32 TiB in 4,096
    /// larger ones), of equal size: each is usable when it is touched, so a large node is there step by
    /// step.
    pub fn lending(bytes: u64, huge_pages: bool) -> Self {
        let count = bytes.div_ceil(Self::STEP).clamp(1, Self::MOST);
        let spec = |at: u64| SegmentSpec {
            len: bytes / count + u64::from(at < bytes % count),
            huge_pages,
        };
        Self {
            segments: (0..count).map(spec).collect(),
        }
    }

    /// The segments in whole granules, or what is wrong with them.
    fn checked(&self) -> Result<Vec<SegmentSpec>, StoreError> {
        let refused = |detail: String| StoreError::InvalidConfig {
            setting: "segments",
            detail,
        };
        if self.segments.is_empty() {
            return Err(refused("there are none, at least 1 is needed".to_owned()));
        }
        let mut total = 0_u64;
        let mut specs = Vec::with_capacity(self.segments.len());
        for spec in &self.segments {
            if spec.len < GRANULE {
                return Err(refused(format!(
                    "one of {} bytes, at least {GRANULE} are needed",
                    spec.len
                )));
            }
            // Rounding up, for the tags that lie beside the segment.
            let tags = spec.len.div_ceil(GRANULE) * 8;
            total = total.saturating_add(spec.len).saturating_add(tags);
            specs.push(SegmentSpec {
                len: spec.len - spec.len % GRANULE,
                ..*spec
            });
        }
        if let Some(room) = room::available() {
            room.check(total)?;
        }
        Ok(specs)
    }
}

/// What the tasks of a node share.
struct Shared {
    engine: Engine,
    link: MasterLink,
    slots: Mutex<Slots>,
    workshop: Workshop,
    fences: Fences,
    fence_counts: Arc<FenceCounts>,
    replaced: AtomicU64,
    settled: watch::Sender<Result<bool, StoreError>>,
}

impl Shared {
    /// Tells heartbeats and waiters what is mounted now.
    fn tell(&self) {
        let (ids, settled) = {
            let slots = self.slots.lock();
            let ids = slots.mounted_segments().map(|segment| segment.id);
            (ids.collect(), slots.is_settled())
        };
        self.link.set_mounted(ids);
        self.settled.send_modify(|state| {
            if state.is_ok() {
                *state = Ok(settled);
            }
        });
    }

    fn fail(&self, error: StoreError) {
        self.settled.send_modify(|state| *state = Err(error));
        self.tell();
    }
}

/// A node as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStats {
    /// Bytes that the node is to lend.
    pub capacity_bytes: u64,
    /// Bytes that the master has.
    pub mounted_bytes: u64,
    /// Segments that the master has.
    pub mounted_segments: u64,
    /// Segments brought anew because the master forgot their predecessors.
    pub replaced_segments: u64,
    /// Fences carried out: no late write can land.
    pub fences_done: u64,
    /// Fences that wait for a writer that stands still.
    pub fences_waiting: u64,
}

/// A segment host. See the module's text.
pub struct Node {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stops_tasks: DropGuard,
}

impl Node {
    /// Starts lending, and returns when every segment is mounted; each is in use as soon as it is,
    /// so a large node serves before this returns. Dropping the future stops the node.
    pub async fn start(
        config: NodeConfig,
        engine: Engine,
        link: MasterLink,
    ) -> Result<Self, StoreError> {
        let node = Self::begin(&config, engine, link)?;
        node.ready().await?;
        Ok(node)
    }

    /// Starts lending, within a runtime. Segments that can't fit the memory are refused before anything
    /// is allocated; when this returns, they are being made. See [`Self::ready`].
    ///
    /// The link must have joined with the engine's endpoint, and serves one node in its life.
    pub fn begin(
        config: &NodeConfig,
        engine: Engine,
        link: MasterLink,
    ) -> Result<Self, StoreError> {
        let specs = config.checked()?;
        check_generations(&engine)?;
        let events = link
            .node_events()
            .ok_or_else(|| StoreError::InvalidConfig {
                setting: "link",
                detail: "it serves another node, each needs a link of its own".to_owned(),
            })?;
        let (made, arrived) = mpsc::channel(1);
        let fence_counts = Arc::<FenceCounts>::default();
        let shared = Arc::new(Shared {
            slots: Mutex::new(Slots::new(&specs)),
            workshop: Workshop::start(engine.clone(), made)?,
            fences: Fences::start(engine.clone(), link.clone(), Arc::clone(&fence_counts))?,
            fence_counts,
            replaced: AtomicU64::new(0),
            settled: watch::Sender::new(Ok(false)),
            engine,
            link,
        });
        for (slot, spec) in specs.into_iter().enumerate() {
            let old = None;
            shared.workshop.submit(Job::Make { slot, spec, old });
        }
        let cancel = CancellationToken::new();
        let tasks = TaskTracker::new();
        let keep = keeper::keep_mounted(Arc::clone(&shared), arrived);
        tasks.spawn(cancel.clone().run_until_cancelled_owned(keep));
        let listen = keeper::listen(Arc::clone(&shared), events);
        tasks.spawn(cancel.clone().run_until_cancelled_owned(listen));
        Ok(Self {
            shared,
            tasks,
            stops_tasks: cancel.drop_guard(),
        })
    }

    /// Waits until every segment is made and mounted, or one can't be.
    pub async fn ready(&self) -> Result<(), StoreError> {
        let mut settled = self.shared.settled.subscribe();
        match settled.wait_for(|state| !matches!(state, Ok(false))).await {
            Ok(state) => state.clone().map(drop),
            Err(_) => Err(StoreError::Closed),
        }
    }

    /// The segments that the master has now.
    pub fn segments(&self) -> Vec<Segment> {
        self.shared
            .slots
            .lock()
            .mounted_segments()
            .cloned()
            .collect()
    }

    /// What the segments hold, from their bytes alone.
    pub async fn inventory(&self) -> Result<Vec<Inventory>, StoreError> {
        let stocks: Vec<Stock> = self.shared.slots.lock().stocks().cloned().collect();
        let mut inventories = Vec::with_capacity(stocks.len());
        for Stock { segment, memory } in stocks {
            inventories.push(inventory::take(segment.id, &memory).await?);
        }
        Ok(inventories)
    }

    /// Takes a mounted segment back. With `drain` the master places nothing there any more, and the
    /// segment goes when its last lease is over; if that takes longer than the time given, this fails
    /// with [`Refusal::Leased`], the segment goes on draining, and the call can be repeated. Without
    /// `drain` its objects go at once. Its memory is freed when nothing moves in it any more; if that
    /// takes longer than 30 s, an error says so, and it is freed later.
    pub async fn unmount(&self, id: SegmentId, drain: Option<Duration>) -> Result<(), StoreError> {
        let leaving = self.shared.slots.lock().leave(id);
        let Some((slot, stock, life)) = leaving else {
            return Err(StoreError::Refused(Refusal::UnknownMember));
        };
        // Gone unless the master says otherwise, also when the caller does not wait for it.
        let mut back = PutBack {
            shared: &self.shared,
            slot,
            mounted: Some(Phase::Mounted {
                stock: stock.clone(),
                life,
            }),
        };
        self.shared.tell();
        match self.shared.link.unmount(id, drain).await {
            Ok(()) | Err(StoreError::Refused(Refusal::UnknownMember)) => back.mounted = None,
            // A master of another life never had it.
            Err(_) if keeper::life(&self.shared).is_some_and(|now| now != life) => {
                back.mounted = None;
            }
            Err(error) => return Err(error),
        }
        drop(back);
        let until = Instant::now() + RELEASE_WITHIN;
        let (reply, released) = oneshot::channel();
        self.shared.workshop.submit(Job::Release {
            memory: stock.memory,
            until: until.into_std(),
            reply,
        });
        // The thread answers by then, unless it is making another segment.
        match timeout_at(until + ANSWER_WITHIN, released).await {
            Ok(Ok(released)) => Ok(released?),
            Ok(Err(_)) => Err(StoreError::Closed),
            Err(_) => Err(StoreError::Timeout {
                what: "the memory of an unmounted segment, which is withdrawn and freed when nothing uses it",
                after: RELEASE_WITHIN + ANSWER_WITHIN,
            }),
        }
    }

    /// The counters.
    pub fn stats(&self) -> NodeStats {
        let shared = &self.shared;
        let slots = shared.slots.lock();
        let (mut mounted_segments, mut mounted_bytes) = (0, 0);
        for segment in slots.mounted_segments() {
            mounted_segments += 1;
            mounted_bytes += segment.len;
        }
        NodeStats {
            capacity_bytes: slots.iter().map(|slot| slot.spec.len).sum(),
            mounted_bytes,
            mounted_segments,
            replaced_segments: shared.replaced.load(Ordering::Relaxed),
            fences_done: shared.fence_counts.done.load(Ordering::Relaxed),
            fences_waiting: shared.fence_counts.waiting.load(Ordering::Relaxed),
        }
    }

    /// Unmounts everything without draining, frees the memory and ends tasks and threads. What the
    /// master can't be told any more is its time to live's business. Errors say what did not end by
    /// the deadline; it ends by itself later.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), StoreError> {
        let until = Instant::now() + deadline;
        let late = |what| StoreError::Timeout {
            what,
            after: deadline,
        };
        let Self {
            shared,
            tasks,
            stops_tasks,
        } = self;
        drop(stops_tasks);
        tasks.close();
        let tasks_ended = timeout_at(until, tasks.wait()).await;
        let stocks: Vec<Stock> = {
            let mut slots = shared.slots.lock();
            let stocks = slots.stocks().cloned().collect();
            slots.clear();
            stocks
        };
        shared.link.set_mounted(Vec::new());
        for stock in &stocks {
            let unmounted = timeout_at(until, shared.link.unmount(stock.segment.id, None)).await;
            if !matches!(unmounted, Ok(Ok(()))) {
                tracing::debug!(segment = %stock.segment.id, ?unmounted, "not unmounted at the master");
            }
        }
        let mut freed = Ok(());
        for stock in stocks {
            let (reply, released) = oneshot::channel();
            shared.workshop.submit(Job::Release {
                memory: stock.memory,
                until: until.into_std(),
                reply,
            });
            freed = match timeout_at(until, released).await {
                Ok(Ok(Ok(()))) => freed,
                Ok(Ok(Err(error))) => Err(error.into()),
                Ok(Err(_)) | Err(_) => Err(late("the transfers of a segment")),
            };
        }
        let Some(Shared {
            workshop, fences, ..
        }) = Arc::into_inner(shared).filter(|_| tasks_ended.is_ok())
        else {
            return Err(late("the tasks of the node"));
        };
        for thread in [workshop.stop(), fences.stop()] {
            if !thread.join(until).await {
                return Err(late("a thread of the node"));
            }
        }
        freed
    }
}

/// Refuses an engine that was started without generation checks: what it writes late, or lets others
/// write late, can't be kept out of places that have a new owner.
pub(crate) fn check_generations(engine: &Engine) -> Result<(), StoreError> {
    if engine.checks_generations() {
        return Ok(());
    }
    Err(StoreError::InvalidConfig {
        setting: "generation_checks",
        detail: "the engine was started without, and the store needs them to keep late writers out"
            .to_owned(),
    })
}

/// How long an unmounted segment's transfers are waited for.
const RELEASE_WITHIN: Duration = Duration::from_secs(30);

/// How long their thread may take to say what came of it.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Decides what a slot is when its unmounting ends, however it does.
struct PutBack<'a> {
    shared: &'a Shared,
    slot: usize,
    /// What it was, and is again; `None`: it is gone.
    mounted: Option<Phase>,
}

impl Drop for PutBack<'_> {
    fn drop(&mut self) {
        let phase = self.mounted.take().unwrap_or(Phase::Gone);
        self.shared.slots.lock().set(self.slot, phase);
        self.shared.tell();
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.shared.link.name())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lending_makes_few_segments_of_equal_size_that_are_the_whole() {
        for (bytes, count) in [
            (1, 1),
            (NodeConfig::STEP, 1),
            (NodeConfig::STEP + 1, 2),
            (5 * NodeConfig::STEP - 3, 5),
            (32 << 40, 4096),
            (u64::MAX, 4096),
        ] {
            let segments = NodeConfig::lending(bytes, false).segments;
            assert_eq!(segments.len(), count, "of {bytes}");
            let lens = || segments.iter().map(|spec| spec.len);
            assert_eq!(lens().sum::<u64>(), bytes);
            assert!(lens().max() <= lens().min().map(|least| least + 1));
        }
    }
}
