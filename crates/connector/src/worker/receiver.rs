//! The task that loads (W2).
//!
//! A job is a step's loads: distinct objects, each with the blocks that need it. Its sessions are opened
//! tile by tile ([`window`](crate::window)); within a tile, layers are asked for in order, as far ahead
//! of the computation as the controller says, several at a time but no more than keeps the link busy. What
//! fails fails its row: its blocks are published as invalid, and later layers leave it out. Sessions end
//! when every read of the tile has come back. Dropping the job, finished or not, aborts what has not arrived.
//! Objects that are damaged are left to the [`remover`](super::remover).

use std::future::poll_fn;
use std::mem;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, Recency};
use layercake_store::{GetOptions, StoreError};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::board::{Loading, Receiving};
use super::caches::{Caches, Part, Scratch};
use super::queue::Queue;
use super::reads::{Call, Session};
use super::remover::{self, Damaged};
use super::shared::{Shared, reached};
use super::staging::Staging;
use crate::audit::{Moved, Operation};
use crate::batcher::CallReport;
use crate::contract::Event;
use crate::plan::LoadRow;
use crate::stats::MissReason;
use crate::window::{Tile, Tiles};

/// Calls for whole objects that are under way at a time.
const WHOLE_CALLS: usize = 4;

/// What is to be loaded of a step.
pub(crate) struct LoadJob {
    pub(crate) caches: Arc<Caches>,
    pub(crate) staging: Option<Arc<Staging>>,
    pub(crate) receiving: Receiving,
    pub(crate) rows: Vec<LoadRow>,
    /// Earlier computation no longer uses the blocks.
    pub(crate) ready: Event,
    /// Its reads keep it, too.
    pub(crate) loading: Arc<Loading>,
}

/// Calls that are under way. Whatever becomes of who waits for them, they are seen through.
struct Flights {
    shared: Arc<Shared>,
    /// In the order in which they began.
    calls: Vec<Call>,
    /// Those that are over, for the next ones.
    spare: Vec<Call>,
}

impl Flights {
    fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            calls: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// The next call that is over. There must be one under way.
    async fn next(&mut self) -> Call {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Call> {
        let shared = &self.shared;
        let mut calls = self.calls.iter_mut();
        match calls.position(|call| call.poll_over(shared, cx).is_ready()) {
            Some(at) => Poll::Ready(self.calls.remove(at)),
            None => Poll::Pending,
        }
    }

    /// Nobody waits for what is under way.
    fn leave(&mut self) {
        for mut call in self.calls.drain(..) {
            let shared = Arc::clone(&self.shared);
            let over = async move { poll_fn(|cx| call.poll_over(&shared, cx)).await };
            self.shared.runtime.spawn(over);
        }
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Memory that serves call after call.
#[derive(Default)]
struct Kept {
    scratch: Scratch,
    /// Positions of the sessions whose rows are worth asking for.
    alive: Vec<usize>,
    arrived: Vec<bool>,
}

pub(super) async fn run(
    shared: Arc<Shared>,
    queue: Arc<Queue<LoadJob>>,
    remover: Arc<Queue<Damaged>>,
) {
    let _taker = queue.taker();
    let (mut kept, mut flights) = (Kept::default(), Flights::new(&shared));
    while let Some(job) = queue.pop().await {
        let cursor = job.receiving.0.cursor();
        let mut load = Load {
            shared: &shared,
            job: &job,
            cursor,
            generations: vec![Generation::NONE; job.rows.len()],
            damaged: Mutex::default(),
            kept: &mut kept,
        };
        load.run(&mut flights).await;
        flights.leave();
        // None outlives the job, also where it was left.
        shared.open_gets.store(0, Ordering::Relaxed);
        remover::leave(&remover, load.damaged.into_inner());
    }
}

struct Load<'a> {
    shared: &'a Arc<Shared>,
    job: &'a LoadJob,
    cursor: watch::Receiver<usize>,
    /// Of the rows' objects, as sessions found them.
    generations: Vec<Generation>,
    /// Objects that are not what was written.
    damaged: Mutex<Damaged>,
    kept: &'a mut Kept,
}

impl Load<'_> {
    async fn run(&mut self, flights: &mut Flights) {
        let patience = self.shared.options.layer_timeout;
        if !reached(&self.job.ready, patience).await {
            tracing::warn!("the engine's blocks were not free to be loaded into in time");
            let board = &self.job.receiving.0;
            board.abort(&self.shared.counters, MissReason::TimeOut);
            return;
        }
        if self.shared.options.layerwise {
            let layers = self.job.caches.layers();
            let lead = NonZeroUsize::new(self.depth() + 1).unwrap_or(NonZeroUsize::MIN);
            let window = self.shared.options.session_window_blocks;
            for tile in Tiles::new(self.job.rows.len(), layers, window, lead) {
                if !self.tile(tile, flights).await {
                    return;
                }
            }
        } else {
            self.whole(flights).await;
        }
    }

    /// Whole-object mode (W14): every object is read in one go, once for each block. While some are read, the
    /// next ones' sessions are opened.
    async fn whole(&mut self, flights: &mut Flights) {
        let calls = self.shared.options.max_transfer_blocks.get();
        let window = self.shared.options.session_window_blocks.get();
        let mut sessions = Vec::new();
        let mut rest = 0..self.job.rows.len();
        while !rest.is_empty() {
            let end = rest.end.min(rest.start.saturating_add(calls.min(window)));
            let rows = rest.start..end;
            rest.start = end;
            if sessions.len() + rows.len() > window {
                self.drain(flights, 0).await;
                self.release(mem::take(&mut sessions));
            }
            let rows = self.job.receiving.0.look(|state| state.alive(rows));
            let opened = self.open(&rows, false).await;
            self.ask(Part::Whole, &opened, flights);
            sessions.extend(opened);
            self.drain(flights, WHOLE_CALLS - 1).await;
        }
        self.drain(flights, 0).await;
        self.release(sessions);
    }

    /// Waits until no more than so many calls are under way.
    async fn drain(&mut self, flights: &mut Flights, most: usize) {
        while flights.calls.len() > most {
            let call = flights.next().await;
            self.landed(&call);
            flights.spare.push(call);
        }
    }

    /// Ends sessions. Nobody waits for the leases: what is read next is another tile's, or another step's.
    fn release(&self, sessions: Vec<(usize, Session)>) {
        for (row, _) in &sessions {
            self.note(Operation::GetEnd, *row, None, None);
        }
        let open = &self.shared.open_gets;
        open.fetch_sub(sessions.len(), Ordering::Relaxed);
        let sessions = sessions.into_iter();
        let sessions = sessions
            .filter_map(|(_, session)| session.into_complete())
            .collect();
        self.shared.store.release_gets(sessions);
    }

    /// `false`: nobody computes any more.
    async fn tile(&mut self, tile: Tile, flights: &mut Flights) -> bool {
        self.near(tile.layers.start).await;
        let rows = self
            .job
            .receiving
            .0
            .look(|state| state.alive(tile.rows.clone()));
        let sessions = self.open(&rows, !tile.last).await;
        let mut next = tile.layers.start;
        self.shared.prefetch.lock().clear();
        // The computation passes none of these layers before all rows have it: it can be followed layer by
        // layer only where no rows are left to come.
        let follow = tile.rows.end == self.job.rows.len();
        while next < tile.layers.end || !flights.calls.is_empty() {
            let mut pause = None;
            if next < tile.layers.end && (!follow || self.is_near(next)) {
                let room = self.shared.prefetch.lock().has_room(Instant::now());
                match room {
                    Err(wait) if !flights.calls.is_empty() => pause = wait,
                    _ => {
                        self.ask(Part::Layer(next), &sessions, flights);
                        next += 1;
                        continue;
                    }
                }
            }
            tokio::select! {
                call = flights.next(), if !flights.calls.is_empty() => {
                    self.landed(&call);
                    flights.spare.push(call);
                }
                () = rest(pause), if pause.is_some() => {}
                moved = self.cursor.changed(), if next < tile.layers.end => {
                    if moved.is_err() {
                        return false;
                    }
                }
            }
        }
        self.release(sessions);
        true
    }

    /// Opens the sessions of these rows; what can't be opened fails.
    async fn open(&mut self, rows: &[usize], keep_lease: bool) -> Vec<(usize, Session)> {
        let mut sessions = Vec::with_capacity(rows.len());
        let job = self.job;
        let of = |row: usize| &job.rows[row];
        // A call's keys follow on each other in one prefix.
        let follows = |a: &usize, b: &usize| {
            of(*a).epoch == of(*b).epoch && of(*a).index.checked_add(1) == Some(of(*b).index)
        };
        for run in rows.chunk_by(follows) {
            for rows in run.chunks(self.shared.options.max_transfer_blocks.get()) {
                let keys: Vec<ObjectKey> = rows.iter().map(|row| of(*row).key.clone()).collect();
                let options = GetOptions {
                    recency: Recency {
                        epoch: of(rows[0]).epoch,
                        first_index: self.shared.prefix_index(of(rows[0]).index),
                    },
                    fingerprint: self.shared.fingerprint,
                    keep_lease,
                    ..GetOptions::default()
                };
                let mut started = self.start(&keys, options).await.into_iter();
                for &row in rows {
                    let started = started.next();
                    let error = started.as_ref().and_then(|started| started.as_ref().err());
                    self.note(Operation::GetStart, row, None, error);
                    match started {
                        Some(Ok(session)) if self.fits(&session) => {
                            self.generations[row] = session.generation();
                            self.shared.open_gets.fetch_add(1, Ordering::Relaxed);
                            sessions.push((row, session));
                        }
                        Some(Ok(_)) => self.failed(row, MissReason::OtherFingerprint),
                        Some(Err(error)) => {
                            if let StoreError::HeaderMismatch { generation, .. } = error {
                                self.generations[row] = generation;
                            }
                            self.failed(row, reason(&error));
                        }
                        None => self.failed(row, MissReason::Master),
                    }
                }
            }
        }
        sessions
    }

    async fn start(
        &self,
        keys: &[ObjectKey],
        options: GetOptions,
    ) -> Vec<Result<Session, StoreError>> {
        let store = &self.shared.store;
        if self.shared.options.per_layer_readiness {
            let started = store.start_early_gets(keys, options).await.into_iter();
            return started.map(|session| session.map(Session::Early)).collect();
        }
        let started = store.start_gets(keys, options).await.into_iter();
        started
            .map(|session| session.map(Session::Complete))
            .collect()
    }

    /// Whether an object has this side's layout; one without a word about it is judged by its size.
    fn fits(&self, session: &Session) -> bool {
        let layout = session.layout_id();
        session.size() == self.job.caches.object_len()
            && (layout == 0 || layout == self.shared.layout.layout_id())
    }

    fn failed(&self, row: usize, reason: MissReason) {
        let board = &self.job.receiving.0;
        // Counted before the board tells, so that whoever is told finds it counted.
        let fresh = board.update(|state| {
            let blocks = state.blocks(row).len() as u64;
            let fresh = state.fail(row);
            if fresh {
                self.shared.counters.failed_loads.add(blocks);
                self.shared.counters.miss(reason, blocks);
            }
            fresh
        });
        if fresh {
            tracing::debug!(key = %self.job.rows[row].key, reason = reason.name(), "a block is not loaded");
            if reason == MissReason::Damaged {
                self.damaged.lock().push(ObjectRef {
                    key: self.job.rows[row].key.clone(),
                    generation: self.generations[row],
                });
            }
        }
    }

    /// Asks for a part of all rows that are still good.
    fn ask(&mut self, part: Part, sessions: &[(usize, Session)], flights: &mut Flights) {
        let board = &self.job.receiving.0;
        let _asking = board.take_off();
        let mut alive = mem::take(&mut self.kept.alive);
        alive.clear();
        board.look(|state| {
            let all = sessions.iter().enumerate();
            let good = all.filter(|(_, (row, _))| state.is_alive(*row));
            alive.extend(good.map(|(at, _)| at));
        });
        let calls = self
            .shared
            .loads
            .lock()
            .calls(alive.len(), self.job.caches.part_len(part));
        for chosen in calls {
            let (chosen, scratch) = (&alive[chosen], &mut self.kept.scratch);
            let mut call = flights.spare.pop().unwrap_or_default();
            if call.begin(self.shared, self.job, part, (sessions, chosen), scratch) {
                flights.calls.push(call);
                continue;
            }
            for at in chosen {
                self.failed(sessions[*at].0, MissReason::Peer);
            }
        }
        self.kept.alive = alive;
    }

    /// Takes in what a call came to.
    fn landed(&mut self, done: &Call) {
        let board = &self.job.receiving.0;
        let passing = |error: &StoreError| error.is_retryable();
        self.shared.loads.lock().report(CallReport {
            rows: done.rows.len(),
            bytes: done.bytes,
            took: done.took,
            failed: done
                .results
                .iter()
                .flatten()
                .filter(|error| passing(error))
                .count(),
        });
        let now = Instant::now();
        self.shared.prefetch.lock().land(done.asked, done.took, now);
        self.note_loaded(done.bytes);
        for (at, &row) in done.rows.iter().enumerate() {
            let error = done.results.get(at).and_then(Option::as_ref);
            let moved = self.job.caches.moved(done.part, done.rows.len());
            self.note(Operation::Read, row, Some(moved), error);
            match done.results.get(at) {
                Some(None) => {}
                Some(Some(error)) => self.failed(row, reason(error)),
                None => self.failed(row, MissReason::Peer),
            }
        }
        let arrived = &mut self.kept.arrived;
        arrived.clear();
        arrived.extend(done.results.iter().map(Option::is_none));
        let layers = match done.part {
            Part::Layer(layer) => layer..layer + 1,
            Part::Whole => 0..self.job.caches.layers(),
        };
        board.update(|state| {
            for layer in layers {
                state.answered(layer, &done.rows, arrived);
            }
        });
    }

    fn note(
        &self,
        operation: Operation,
        row: usize,
        moved: Option<Moved>,
        error: Option<&StoreError>,
    ) {
        let error = error.map(|error| error as &dyn std::fmt::Display);
        let key = &self.job.rows[row].key;
        self.shared.audit.note(operation, key, moved, error);
    }

    /// Before the layer is published, so that whoever waits for it sees it.
    fn note_loaded(&self, bytes: u64) {
        let board = &self.job.receiving.0;
        board.loaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn depth(&self) -> usize {
        let layers = self.job.caches.layers();
        self.shared.prefetch.lock().depth(layers)
    }

    fn is_near(&self, layer: usize) -> bool {
        layer <= self.cursor.borrow().saturating_add(self.depth())
    }

    /// Waits until the computation is near the layer.
    async fn near(&mut self, layer: usize) {
        while !self.is_near(layer) {
            if self.cursor.changed().await.is_err() {
                return;
            }
        }
    }
}

/// So long, or for ever.
async fn rest(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

/// Why a block could not be loaded.
fn reason(error: &StoreError) -> MissReason {
    match error {
        StoreError::Refused(Refusal::NotFound) => MissReason::Evicted,
        StoreError::Refused(Refusal::NotReady | Refusal::InProgress | Refusal::Superseded)
        | StoreError::WriterGone { .. } => MissReason::InProgress,
        StoreError::Refused(Refusal::LeaseExpired) => MissReason::Lease,
        StoreError::FingerprintMismatch { .. } => MissReason::OtherFingerprint,
        StoreError::ChecksumMismatch { .. } | StoreError::HeaderMismatch { .. } => {
            MissReason::Damaged
        }
        StoreError::MasterUnreachable { .. }
        | StoreError::NotAMaster { .. }
        | StoreError::Closed => MissReason::Master,
        StoreError::MasterTimeout { .. } | StoreError::Timeout { .. } => MissReason::TimeOut,
        _ => MissReason::Peer,
    }
}
