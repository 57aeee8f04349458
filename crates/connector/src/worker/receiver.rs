//! The task that loads (W2).
//!
//! A job is a step's loads: distinct objects, each with the blocks that need it. Its sessions are opened
//! tile by tile ([`window`](crate::window)); within a tile, layers are asked for in order, as far ahead
//! of the computation as the controller says, several at a time but no more than keeps the link busy. What
//! fails fails its row: its blocks are published as invalid, and later layers leave it out. Sessions end
//! when every read of the tile has come back. Dropping the job, finished or not, aborts what has not arrived.
//! Objects that are damaged are left to the [`remover`](super::remover).

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::AppliedRanges;
use layercake_protocol::replica::{ObjectRef, Recency};
use layercake_store::{GetOptions, StoreError};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::board::Receiving;
use super::caches::{Caches, Part};
use super::queue::Queue;
use super::reads::{Call, Done, Session};
use super::remover::{self, Damaged};
use super::shared::{Loading, Shared, reached};
use super::staging::Staging;
use crate::audit::Operation;
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
    /// Goes last, when nothing is read any more.
    pub(crate) loading: Loading,
}

/// Calls of a tile. Whatever becomes of who waits for them, they are seen through.
#[derive(Default)]
struct Flights(JoinSet<Done>);

impl Drop for Flights {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

pub(super) async fn run(
    shared: Arc<Shared>,
    queue: Arc<Queue<LoadJob>>,
    remover: Arc<Queue<Damaged>>,
) {
    let _taker = queue.taker();
    while let Some(job) = queue.pop().await {
        let cursor = job.receiving.0.cursor();
        let mut load = Load {
            shared: &shared,
            job: &job,
            cursor,
            generations: vec![Generation::NONE; job.rows.len()],
            damaged: Mutex::default(),
            scratch: AppliedRanges::default(),
        };
        load.run().await;
        // None outlives the job, also where it was left.
        shared.open_gets.store(0, Ordering::Relaxed);
        let loaded = job
            .receiving
            .0
            .look(crate::convergence::Convergence::loaded_blocks);
        shared.counters.loaded_blocks.add(loaded as u64);
        remover::leave(&remover, load.damaged.into_inner());
        drop(job.loading);
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
    scratch: AppliedRanges,
}

impl Load<'_> {
    async fn run(&mut self) {
        let patience = self.shared.options.layer_timeout;
        if !reached(&self.job.ready, patience).await {
            tracing::warn!("the engine's blocks were not free to be loaded into in time");
            return;
        }
        if self.shared.options.layerwise {
            let layers = self.job.caches.layers();
            let lead = NonZeroUsize::new(self.depth() + 1).unwrap_or(NonZeroUsize::MIN);
            let window = self.shared.options.session_window_blocks;
            for tile in Tiles::new(self.job.rows.len(), layers, window, lead) {
                self.tile(tile).await;
            }
        } else {
            self.whole().await;
        }
    }

    /// Whole-object mode (W14): every object is read in one go, once for each block. While some are read, the
    /// next ones' sessions are opened.
    async fn whole(&mut self) {
        let calls = self.shared.options.max_transfer_blocks.get();
        let window = self.shared.options.session_window_blocks.get();
        let (mut flights, mut sessions) = (Flights::default(), Vec::new());
        let mut rest = 0..self.job.rows.len();
        while !rest.is_empty() {
            let end = rest.end.min(rest.start.saturating_add(calls.min(window)));
            let rows = rest.start..end;
            rest.start = end;
            if sessions.len() + rows.len() > window {
                self.drain(&mut flights, 0).await;
                self.release(std::mem::take(&mut sessions));
            }
            let rows = self.job.receiving.0.look(|state| state.alive(rows));
            let opened = self.open(&rows, false).await;
            self.ask(Part::Whole, &opened, &mut flights);
            sessions.extend(opened);
            self.drain(&mut flights, WHOLE_CALLS - 1).await;
        }
        self.drain(&mut flights, 0).await;
        self.release(sessions);
    }

    /// Waits until no more than so many calls are under way.
    async fn drain(&self, flights: &mut Flights, most: usize) {
        while flights.0.len() > most {
            if let Some(done) = flights.0.join_next().await {
                self.over(done);
            }
        }
    }

    fn over(&self, done: Result<Done, JoinError>) {
        match done {
            Ok(done) => self.landed(&done),
            // A read that panicked: what it was to bring is aborted with the job.
            Err(error) => {
                tracing::error!(%error, "a read broke off");
                let board = &self.job.receiving.0;
                board.update(crate::convergence::Convergence::abort);
            }
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

    async fn tile(&mut self, tile: Tile) {
        self.near(tile.layers.start).await;
        let rows = self
            .job
            .receiving
            .0
            .look(|state| state.alive(tile.rows.clone()));
        let sessions = self.open(&rows, !tile.last).await;
        let mut flights = Flights::default();
        let mut next = tile.layers.start;
        self.shared.prefetch.lock().clear();
        // The computation passes none of these layers before all rows have it: it can be followed layer by
        // layer only where no rows are left to come.
        let follow = tile.rows.end == self.job.rows.len();
        while next < tile.layers.end || !flights.0.is_empty() {
            let mut pause = None;
            if next < tile.layers.end && (!follow || self.is_near(next)) {
                let room = self.shared.prefetch.lock().has_room(Instant::now());
                match room {
                    Err(wait) if !flights.0.is_empty() => pause = wait,
                    _ => {
                        self.ask(Part::Layer(next), &sessions, &mut flights);
                        next += 1;
                        continue;
                    }
                }
            }
            tokio::select! {
                Some(done) = flights.0.join_next(), if !flights.0.is_empty() => self.over(done),
                () = rest(pause), if pause.is_some() => {}
                moved = self.cursor.changed(), if next < tile.layers.end => {
                    if moved.is_err() {
                        return;
                    }
                }
            }
        }
        self.release(sessions);
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
        let rows: Vec<&(usize, Session)> = board.look(|state| {
            let alive = |(row, _): &&(usize, Session)| state.is_alive(*row);
            sessions.iter().filter(alive).collect()
        });
        let calls = self.shared.loads.lock().calls(rows.len());
        for call in calls {
            let rows = &rows[call];
            let call = Call::new(self.shared, self.job, part, rows, &mut self.scratch);
            match call {
                Some(call) => {
                    let flight = (board.take_off(), self.shared.traffic.load());
                    let done = call.run(Arc::clone(self.shared));
                    flights.0.spawn(async move {
                        let done = done.await;
                        drop(flight);
                        done
                    });
                }
                None => {
                    for (row, _) in rows {
                        self.failed(*row, MissReason::Peer);
                    }
                }
            }
        }
    }

    fn landed(&self, done: &Done) {
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
            self.note(Operation::Read, row, done.part.layer(), error);
            match done.results.get(at) {
                Some(None) => {}
                Some(Some(error)) => self.failed(row, reason(error)),
                None => self.failed(row, MissReason::Peer),
            }
        }
        let arrived: Vec<bool> = done.results.iter().map(Option::is_none).collect();
        let layers = match done.part {
            Part::Layer(layer) => layer..layer + 1,
            Part::Whole => 0..self.job.caches.layers(),
        };
        board.update(|state| {
            for layer in layers {
                state.answered(layer, &done.rows, &arrived);
            }
        });
    }

    fn note(
        &self,
        operation: Operation,
        row: usize,
        layer: Option<usize>,
        error: Option<&StoreError>,
    ) {
        let error = error.map(|error| error as &dyn std::fmt::Display);
        let key = &self.job.rows[row].key;
        self.shared.audit.note(operation, key, layer, error);
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
