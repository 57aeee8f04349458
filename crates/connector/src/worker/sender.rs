//! The task that saves (W1).
//!
//! Jobs come in order, one step after the other: the step's rows are opened, each layer is written when
//! the engine says that it is there, and at the end what may be committed is. A row's object is revoked
//! as soon as one of its ranges failed, or its owner lost its blocks; its neighbours go on. Whatever
//! happens, every row is settled exactly once with the tracker: that is what frees the engine's blocks.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::Epoch;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{PutSession, RangeWrite, StoreError, Writing};

use super::caches::{Caches, Part, Scratch};
use super::queue::Queue;
use super::shared::{Shared, reached};
use crate::audit::Operation;
use crate::batcher::CallReport;
use crate::contract::{BlockId, Event};
use crate::plan::SaveRow;
use crate::tracker::PutOutcome;

/// Calls of a step that are under way at a time.
const CALLS: usize = 4;

/// What is to be saved of a step.
pub(crate) struct SaveStep {
    pub(crate) caches: Arc<Caches>,
    pub(crate) rows: Vec<SaveRow>,
    /// What is written is published at once, but for rows that wait for other ranks. Not beside loads: one that fails makes
    /// void what is computed, and that shows only later.
    pub(crate) publish: bool,
    /// The engine went on without: everything is revoked.
    pub(crate) given_up: AtomicBool,
}

impl SaveStep {
    /// Settles rows that the sender never heard of.
    pub(super) fn never_opened(&self, shared: &Shared) {
        let blocks = self.rows.len();
        tracing::warn!(blocks, "saves are too slow: a step's blocks are not saved");
        shared.counters.dropped_saves.add(blocks as u64);
        for row in &self.rows {
            shared.settle(&row.key, PutOutcome::Lost);
        }
    }
}

pub(crate) enum SaveJob {
    Open(Arc<SaveStep>),
    Layer(Arc<SaveStep>, usize, Event),
    End(Arc<SaveStep>, Event),
}

pub(crate) struct Sender {
    pub(super) shared: Arc<Shared>,
    open: Option<OpenStep>,
    /// Written, and waiting for the results of other ranks.
    pub(super) held: Vec<OpenStep>,
    kept: Kept,
}

/// Memory that serves call after call.
#[derive(Default)]
struct Kept {
    scratch: Scratch,
    /// All rows of a part.
    rows: Vec<usize>,
    under_way: VecDeque<Write>,
    /// Rows of calls that are over.
    of_calls: Vec<Vec<usize>>,
    blocks: Vec<BlockId>,
}

/// However the task ends, nobody waits for what it had to save.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.settle_all();
    }
}

/// One for each row of a call: the bytes, or what is wrong.
type Written = Vec<Result<u64, StoreError>>;

/// A call that saves, and is under way.
struct Write {
    rows: Vec<usize>,
    begun: Instant,
    writing: Writing,
}

/// What the first of these calls comes to.
async fn first(under_way: &mut VecDeque<Write>) -> Written {
    match under_way.front_mut() {
        Some(call) => (&mut call.writing).await,
        None => std::future::pending().await,
    }
}

/// A step that is being saved.
pub(super) struct OpenStep {
    pub(super) step: Arc<SaveStep>,
    /// One for each row that is not settled.
    pub(super) sessions: Vec<Option<PutSession>>,
}

impl Sender {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            open: None,
            held: Vec::new(),
            kept: Kept::default(),
        }
    }

    pub(crate) async fn run(mut self, queue: Arc<Queue<SaveJob>>) {
        // Goes last, when nothing more can come.
        let _end = End(Arc::clone(&self.shared));
        let _taker = queue.taker();
        let told = Arc::clone(&self.shared);
        loop {
            tokio::select! {
                biased;
                () = told.saves_told.notified() => self.told().await,
                job = queue.pop() => match job {
                    Some(job) => self.job(job, &queue).await,
                    None => break,
                },
            }
        }
        self.leave().await;
        self.leave_waiting().await;
    }

    async fn job(&mut self, job: SaveJob, queue: &Queue<SaveJob>) {
        match job {
            SaveJob::Open(step) => {
                self.leave().await;
                self.open(step).await;
            }
            SaveJob::Layer(step, layer, ready) => {
                self.part(&step, Part::Layer(layer), &ready, queue).await;
            }
            SaveJob::End(step, ready) => {
                if !self.shared.options.layerwise {
                    // Everything at the step's end (W14).
                    self.open(Arc::clone(&step)).await;
                    self.part(&step, Part::Whole, &ready, queue).await;
                }
                self.end(&step, &ready).await;
            }
        }
    }

    async fn open(&mut self, step: Arc<SaveStep>) {
        if step.given_up.load(Ordering::Acquire) {
            step.never_opened(&self.shared);
            return;
        }
        let mut sessions = Vec::with_capacity(step.rows.len());
        let limit = self.shared.options.max_transfer_blocks.get();
        let mut rest = step.rows.as_slice();
        while let Some(first) = rest.first() {
            // One epoch for a call; the one that the master draws for a request's first call stays.
            let epoch = self.epoch(first);
            let same = rest
                .iter()
                .take(limit)
                .take_while(|row| self.epoch(row) == epoch);
            let (rows, others) = rest.split_at(same.count());
            self.open_rows(&step, rows, epoch, &mut sessions).await;
            rest = others;
        }
        self.open = Some(OpenStep { step, sessions });
    }

    async fn open_rows(
        &self,
        step: &SaveStep,
        rows: &[SaveRow],
        epoch: Epoch,
        sessions: &mut Vec<Option<PutSession>>,
    ) {
        let shared = &self.shared;
        let puts = rows.iter().map(|row| PutStart {
            header_rows: u32::try_from(step.caches.pieces()).unwrap_or(u32::MAX),
            fingerprint: shared.fingerprint,
            layout_id: shared.layout.layout_id(),
            prefix_index: Some(shared.prefix_index(row.index)),
            ..PutStart::new(row.key.clone(), step.caches.object_len())
        });
        // Whether a reservation is published is said when it begins: one that waits for other ranks then never is.
        let puts = puts.map(|put| {
            let publish = step.publish && shared.tracker(|tracker| tracker.may_publish(&put.key));
            if publish { put.early_reads() } else { put }
        });
        let recency = Recency {
            epoch,
            first_index: 0,
        };
        let config = shared.options.replicate();
        let started = shared
            .store
            .start_puts(puts.collect(), &config, recency)
            .await;
        let mut started = started.into_iter();
        for row in rows {
            sessions.push(match started.next() {
                Some(Ok(session)) => {
                    let epoch = session.epoch();
                    let source = shared.tracker(|tracker| {
                        tracker.note_epoch(&row.request, epoch);
                        tracker.source(&row.key)
                    });
                    if let Some(source) = source {
                        session.write_from(source);
                    }
                    shared.audit.note(Operation::PutStart, &row.key, None, None);
                    Some(session)
                }
                Some(Err(error)) => {
                    self.refused(row, &error);
                    None
                }
                None => {
                    self.refused(row, &StoreError::UnknownSession);
                    None
                }
            });
        }
    }

    fn epoch(&self, row: &SaveRow) -> Epoch {
        match row.epoch {
            Epoch::UNSET => self.shared.tracker(|tracker| tracker.epoch(&row.request)),
            epoch => epoch,
        }
    }

    /// A row that is not saved from here: why, and what that means.
    fn refused(&self, row: &SaveRow, error: &StoreError) {
        let audit = &self.shared.audit;
        audit.note(Operation::PutStart, &row.key, None, Some(error));
        let (counter, outcome) = match error {
            StoreError::Refused(Refusal::AlreadyExists) => {
                (&self.shared.counters.saved_elsewhere, PutOutcome::Elsewhere)
            }
            StoreError::Refused(Refusal::InProgress) => {
                (&self.shared.counters.saved_elsewhere, PutOutcome::Lost)
            }
            _ => {
                tracing::debug!(key = %row.key, %error, "a block is not saved");
                (&self.shared.counters.failed_saves, PutOutcome::Lost)
            }
        };
        counter.add(1);
        self.shared.settle(&row.key, outcome);
    }

    /// Saves a part of all rows: some calls at a time, the next one as soon as there is room for it.
    async fn part(
        &mut self,
        step: &Arc<SaveStep>,
        part: Part,
        ready: &Event,
        queue: &Queue<SaveJob>,
    ) {
        let Some(mut open) = self.take(step) else {
            return;
        };
        if !reached(ready, self.shared.options.layer_timeout).await {
            self.shared.give_up(step);
        }
        let mut rows = mem::take(&mut self.kept.rows);
        rows.clear();
        rows.extend(open.rows());
        let mut calls = self
            .shared
            .saves
            .lock()
            .calls(rows.len(), step.caches.part_len(part));
        let mut next = calls.next();
        let mut under_way = mem::take(&mut self.kept.under_way);
        let mut landed = Instant::now();
        loop {
            let hurry = || queue.fills_up() || step.given_up.load(Ordering::Acquire);
            tokio::select! {
                biased;
                written = first(&mut under_way), if !under_way.is_empty() => {
                    if let Some(call) = under_way.pop_front() {
                        self.shared.observed(part, true, call.rows.len(), call.begun, Duration::ZERO);
                        // While the one before it was under way, the link was that one's.
                        let since = call.begun.max(landed);
                        self.written(&mut open, part, &call.rows, &written, since).await;
                        landed = Instant::now();
                        if next.is_some() || !under_way.is_empty() {
                            // Nobody waits for the others, either.
                            self.drop_cancelled(&mut open, &call.rows).await;
                        }
                        self.kept.of_calls.push(call.rows);
                    }
                }
                gave_way = self.shared.traffic.give_way(hurry), if next.is_some() && under_way.len() < CALLS => {
                    if gave_way {
                        self.shared.counters.yielded_saves.add(1);
                    }
                    let rows = next.take().map_or(&[][..], |call| &rows[call]);
                    next = calls.next();
                    // Whoever waits for a cancelled save waits for the calls under way at most.
                    self.drop_cancelled(&mut open, rows).await;
                    under_way.extend(self.write(&open, part, rows));
                }
                else => break,
            }
        }
        (self.kept.rows, self.kept.under_way) = (rows, under_way);
        self.open = Some(open);
    }

    /// Submits one call for those of these rows that are still good.
    fn write(&mut self, open: &OpenStep, part: Part, rows: &[usize]) -> Option<Write> {
        let step = &open.step;
        let Kept {
            scratch,
            of_calls,
            blocks,
            ..
        } = &mut self.kept;
        let good = |row: &usize| open.sessions[*row].is_some();
        let mut of_call = of_calls.pop().unwrap_or_default();
        of_call.clear();
        of_call.extend(rows.iter().copied().filter(good));
        if of_call.is_empty() {
            return None;
        }
        blocks.clear();
        blocks.extend(of_call.iter().map(|row| step.rows[*row].block));
        let Some(placed) = step.caches.place(part, blocks, scratch) else {
            tracing::warn!(
                ?part,
                "a step saves blocks that the registered caches don't have"
            );
            self.shared.give_up(step);
            return None;
        };
        let writes = of_call.iter().enumerate().filter_map(|(at, row)| {
            let session = open.sessions[*row].as_ref()?;
            let ranges = placed.ranges(at);
            Some(RangeWrite { session, ranges })
        });
        let begun = Instant::now();
        Some(Write {
            writing: self.shared.store.write_ranges(writes),
            rows: of_call,
            begun,
        })
    }

    /// A call for these rows is over. `since`: from when on the link was its own.
    async fn written(
        &self,
        open: &mut OpenStep,
        part: Part,
        rows: &[usize],
        written: &[Result<u64, StoreError>],
        since: Instant,
    ) {
        let step = Arc::clone(&open.step);
        let (mut failed, mut dropped) = (Vec::new(), Vec::new());
        for (at, &row) in rows.iter().enumerate() {
            let key = &step.rows[row].key;
            let error = match written.get(at) {
                Some(Ok(_)) => None,
                Some(Err(error)) => Some(error),
                None => Some(&StoreError::UnknownSession),
            };
            let shown = error.map(|error| error as &dyn std::fmt::Display);
            let audit = &self.shared.audit;
            let moved = step.caches.moved(part, rows.len());
            audit.note(Operation::Write, key, Some(moved), shown);
            match error {
                None => {}
                // Cancelled while it was under way.
                Some(StoreError::SourceWithdrawn) => dropped.push(row),
                Some(error) => {
                    tracing::debug!(%key, ?part, %error, "a block is not saved");
                    failed.push(row);
                }
            }
        }
        self.shared.saves.lock().report(CallReport {
            rows: rows.len(),
            bytes: step.caches.part_len(part) * rows.len() as u64,
            took: since.elapsed(),
            failed: failed.len(),
        });
        let counters = &self.shared.counters;
        counters.failed_saves.add(failed.len() as u64);
        counters.dropped_saves.add(dropped.len() as u64);
        failed.append(&mut dropped);
        self.revoke(open, &failed).await;
    }

    /// Revokes which of these rows their owners no longer vouch for, before another byte of them is read. None of
    /// them is being read.
    pub(super) async fn drop_cancelled(&self, open: &mut OpenStep, rows: &[usize]) {
        let given_up = open.step.given_up.load(Ordering::Acquire);
        let cancelled = self.shared.tracker(|tracker| {
            let gone = |row: &usize| {
                let kept = !given_up && tracker.may_write(&open.step.rows[*row].key);
                open.sessions[*row].is_some() && !kept
            };
            rows.iter().copied().filter(gone).collect::<Vec<_>>()
        });
        self.shared
            .counters
            .dropped_saves
            .add(cancelled.len() as u64);
        self.revoke(open, &cancelled).await;
    }

    /// Gives rows up, in calls of as many as may be started or committed in one.
    pub(super) async fn revoke(&self, open: &mut OpenStep, rows: &[usize]) {
        for rows in rows.chunks(self.shared.options.max_transfer_blocks.get()) {
            self.revoke_call(open, rows).await;
        }
    }

    async fn revoke_call(&self, open: &mut OpenStep, rows: &[usize]) {
        let taken = rows
            .iter()
            .filter_map(|&row| Some((row, open.sessions[row].take()?)));
        let (rows, sessions): (Vec<usize>, Vec<PutSession>) = taken.unzip();
        if sessions.is_empty() {
            return;
        }
        // What can't be revoked now is in the background, after its transfers have ended.
        let mut revoked = self.shared.store.revoke_puts(sessions).await.into_iter();
        for row in rows {
            let key = &open.step.rows[row].key;
            let error = revoked.next().and_then(Result::err);
            if let Some(error) = &error {
                tracing::debug!(%key, %error, "a put is left to be revoked later");
            }
            let error = error.as_ref().map(|error| error as &dyn std::fmt::Display);
            let audit = &self.shared.audit;
            audit.note(Operation::PutRevoke, key, None, error);
            self.shared.settle(key, PutOutcome::Lost);
        }
    }

    pub(super) fn is_given_up(&self) -> bool {
        let open = self.open.as_ref();
        open.is_some_and(|open| open.step.given_up.load(Ordering::Acquire))
    }

    /// The open step, if it is this one.
    pub(super) fn take(&mut self, step: &Arc<SaveStep>) -> Option<OpenStep> {
        self.open.take_if(|open| Arc::ptr_eq(&open.step, step))
    }

    /// Revokes what is left of a step that was not ended.
    pub(super) async fn leave(&mut self) {
        if let Some(open) = self.open.take() {
            self.give_up(open).await;
        }
    }

    pub(super) async fn give_up(&self, mut open: OpenStep) {
        let rows: Vec<usize> = open.rows().collect();
        self.shared.counters.dropped_saves.add(rows.len() as u64);
        self.revoke(&mut open, &rows).await;
    }
}

impl OpenStep {
    /// Rows that are not settled.
    pub(super) fn rows(&self) -> impl Iterator<Item = usize> {
        let sessions = self.sessions.iter().enumerate();
        sessions
            .filter(|(_, session)| session.is_some())
            .map(|(row, _)| row)
    }
}
