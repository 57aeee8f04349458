//! The task that loads (W2).
//!
//! A job is a step's loads: distinct objects, each with the blocks that need it. Its sessions are opened
//! tile by tile ([`window`](crate::window)); within a tile, layers are asked for in order, as far ahead
//! of the computation as the controller says, several at a time but no more than keeps the link busy. What
//! fails fails its row: its blocks are published as invalid, and later layers leave it out. Sessions end
//! when every read of the tile has come back. Dropping the job, finished or not, aborts what has not arrived.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::AppliedRanges;
use layercake_protocol::replica::Recency;
use layercake_store::{GetOptions, GetRequest, StoreError};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::board::Receiving;
use super::caches::Caches;
use super::queue::Queue;
use super::reads::{Call, Done, Session};
use super::shared::{Loading, Shared, reached};
use super::staging::Staging;
use crate::audit::Operation;
use crate::batcher::CallReport;
use crate::contract::{Event, RequestId};
use crate::prefetch::Room;
use crate::stats::MissReason;
use crate::window::{Tile, Tiles};

/// What is to be loaded of a step.
pub(crate) struct LoadJob {
    pub(crate) caches: Arc<Caches>,
    pub(crate) staging: Option<Arc<Staging>>,
    pub(crate) receiving: Receiving,
    pub(crate) rows: Vec<LoadRow>,
    /// Who reads; they let go at the end.
    pub(crate) requests: Vec<RequestId>,
    /// Earlier computation no longer uses the blocks.
    pub(crate) ready: Event,
    /// Goes last, when nothing is read any more.
    pub(crate) loading: Loading,
}

/// One object of it. Its blocks are on the board, under the same index.
#[derive(Clone, Debug)]
pub(crate) struct LoadRow {
    pub(crate) key: ObjectKey,
    pub(crate) epoch: Epoch,
    pub(crate) index: u32,
}

/// Calls of a tile. Whatever becomes of who waits for them, they are seen through.
#[derive(Default)]
struct Flights(JoinSet<Done>);

impl Drop for Flights {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

pub(crate) async fn run(shared: Arc<Shared>, queue: Arc<Queue<LoadJob>>) {
    let _taker = queue.taker();
    while let Some(job) = queue.pop().await {
        let cursor = job.receiving.0.cursor();
        let mut load = Load {
            shared: &shared,
            job: &job,
            cursor,
            damaged: Mutex::default(),
            scratch: AppliedRanges::default(),
        };
        load.run().await;
        shared.tracker(|tracker| {
            for request in &job.requests {
                tracker.release_gets(request);
            }
        });
        let loaded = job
            .receiving
            .0
            .look(crate::convergence::Convergence::loaded_blocks);
        shared.counters.loaded_blocks.add(loaded as u64);
        let damaged = load.damaged.into_inner();
        drop(job.loading);
        remove(&shared, &damaged).await;
    }
}

struct Load<'a> {
    shared: &'a Arc<Shared>,
    job: &'a LoadJob,
    cursor: watch::Receiver<usize>,
    /// Objects that are not what was written.
    damaged: Mutex<Vec<ObjectKey>>,
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

    /// Whole-object mode (W14): every object is read in one go, once for each block.
    async fn whole(&mut self) {
        let (board, caches) = (&self.job.receiving.0, &self.job.caches);
        let rows: Vec<usize> = (0..self.job.rows.len()).collect();
        for rows in rows.chunks(self.shared.options.max_transfer_blocks.get()) {
            let _flight = (board.take_off(), self.shared.traffic.load());
            let rows = board.look(|state| {
                rows.iter()
                    .copied()
                    .filter(|row| state.is_alive(*row))
                    .collect::<Vec<_>>()
            });
            let mut of_row = Vec::with_capacity(rows.len());
            let mut gets = Vec::with_capacity(rows.len());
            for &row in &rows {
                for block in board.look(|state| state.blocks(row).to_vec()) {
                    let Some(ranges) = caches.whole(block, &mut self.scratch) else {
                        self.failed(row, MissReason::Peer);
                        continue;
                    };
                    of_row.push(row);
                    gets.push(GetRequest {
                        key: self.job.rows[row].key.clone(),
                        ranges,
                    });
                }
            }
            let mut read = self.shared.store.get_into(gets).await.into_iter();
            for row in of_row {
                let read = read.next();
                let error = read.as_ref().and_then(|read| read.as_ref().err());
                self.note(Operation::Get, row, None, error);
                match read {
                    Some(Ok(done)) => self.note_loaded(done.bytes),
                    Some(Err(error)) => self.failed(row, reason(&error)),
                    None => self.failed(row, MissReason::Master),
                }
            }
            let there = vec![true; rows.len()];
            board.update(|state| {
                for layer in 0..caches.layers() {
                    state.answered(layer, &rows, &there);
                }
            });
        }
    }

    async fn tile(&mut self, tile: Tile) {
        self.near(tile.layers.start).await;
        let board = &self.job.receiving.0;
        let rows = board.look(|state| state.alive(tile.rows.clone()));
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
                        self.ask(next, &sessions, &mut flights);
                        next += 1;
                        continue;
                    }
                }
            }
            tokio::select! {
                Some(done) = flights.0.join_next(), if !flights.0.is_empty() => match done {
                    Ok(done) => self.landed(&done),
                    // A read that panicked: what it was to bring is aborted with the job.
                    Err(error) => {
                        tracing::error!(%error, "a read broke off");
                        board.update(crate::convergence::Convergence::abort);
                    }
                },
                () = rest(pause), if pause.is_some() => {}
                moved = self.cursor.changed(), if next < tile.layers.end => {
                    if moved.is_err() {
                        return;
                    }
                }
            }
        }
        for (row, _) in &sessions {
            self.note(Operation::GetEnd, *row, None, None);
        }
        let sessions = sessions.into_iter();
        let sessions = sessions
            .filter_map(|(_, session)| session.into_complete())
            .collect();
        // Nobody waits for the leases: what is read next is another tile's, or another step's.
        self.shared.store.release_gets(sessions);
    }

    /// Opens the sessions of these rows; what can't be opened fails.
    async fn open(&self, rows: &[usize], keep_lease: bool) -> Vec<(usize, Session)> {
        let mut sessions = Vec::with_capacity(rows.len());
        let of = |row: usize| &self.job.rows[row];
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
                };
                let mut started = self.start(&keys, options).await.into_iter();
                for &row in rows {
                    let started = started.next();
                    let error = started.as_ref().and_then(|started| started.as_ref().err());
                    self.note(Operation::GetStart, row, None, error);
                    match started {
                        Some(Ok(session)) if self.fits(&session) => sessions.push((row, session)),
                        Some(Ok(_)) => self.failed(row, MissReason::OtherFingerprint),
                        Some(Err(error)) => self.failed(row, reason(&error)),
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
        let (fresh, blocks) = board.update(|state| {
            let blocks = state.blocks(row).len() as u64;
            (state.fail(row), blocks)
        });
        if fresh {
            tracing::debug!(key = %self.job.rows[row].key, reason = reason.name(), "a block is not loaded");
            self.shared.counters.failed_loads.add(blocks);
            self.shared.counters.miss(reason, blocks);
            if reason == MissReason::Damaged {
                self.damaged.lock().push(self.job.rows[row].key.clone());
            }
        }
    }

    /// Asks for a layer of all rows that are still good.
    fn ask(&mut self, layer: usize, sessions: &[(usize, Session)], flights: &mut Flights) {
        let board = &self.job.receiving.0;
        let _asking = board.take_off();
        let rows: Vec<&(usize, Session)> = board.look(|state| {
            let alive = |(row, _): &&(usize, Session)| state.is_alive(*row);
            sessions.iter().filter(alive).collect()
        });
        let calls = self.shared.loads.lock().calls(rows.len());
        for call in calls {
            let rows = &rows[call];
            let call = Call::new(self.shared, self.job, layer, rows, &mut self.scratch);
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
            self.note(Operation::Read, row, Some(done.layer), error);
            match done.results.get(at) {
                Some(None) => {}
                Some(Some(error)) => self.failed(row, reason(error)),
                None => self.failed(row, MissReason::Peer),
            }
        }
        let arrived: Vec<bool> = done.results.iter().map(Option::is_none).collect();
        board.update(|state| state.answered(done.layer, &done.rows, &arrived));
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
        self.shared.prefetch.lock().depth(Room {
            layers: self.job.caches.layers(),
            queue: self.job.caches.layers(),
            buffers: usize::MAX,
        })
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

/// Removes objects that are damaged, so that whoever computes their blocks again can save them.
/// Whoever has one open still reads what of it is good.
async fn remove(shared: &Shared, damaged: &[ObjectKey]) {
    let removed = shared.store.remove(damaged, true).await;
    for (key, removed) in damaged.iter().zip(removed) {
        let error = removed.as_ref().err();
        let noted = error.map(|error| error as &dyn std::fmt::Display);
        shared.audit.note(Operation::Remove, key, None, noted);
        match error {
            None => {
                shared.counters.removed_damaged.add(1);
                tracing::warn!(%key, "an object was damaged, and is removed");
            }
            Some(error) => tracing::warn!(%key, %error, "a damaged object could not be removed"),
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
