//! What waits to be sent to one peer, and how it is cut into frames.
//!
//! A [`Run`] is a job's pieces with a cursor; the queue serves its runs in turn, a frame at a time, so
//! a large batch does not hold up a small one. Lanes take frames when they have room for them, which
//! spreads the work over the lanes by itself. Nothing is copied per piece: a run holds the job, and
//! the list of a frame's operations is reused.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Instant;

use layercake_protocol::checksum::combine;

use super::frame::{MAX_OPS, MAX_PAYLOAD, WireOp, WireRegion};
use super::raw::{self, Span};
use crate::error::PieceError;
use crate::job::{Job, PieceSet};
use crate::transfer::PieceDone;

/// A piece that is larger than a frame, under way in chunks.
#[derive(Debug)]
pub(super) struct Split {
    piece: usize,
    len: u64,
    left: AtomicU32,
    /// Code of the first error, plus one.
    error: AtomicU8,
    crcs: Box<[AtomicU32]>,
}

const CHUNK: u64 = MAX_PAYLOAD as u64;

impl Split {
    fn new(piece: usize, len: u64) -> Arc<Self> {
        let chunks = u32::try_from(len.div_ceil(CHUNK)).expect("a mapped length has fewer chunks");
        Arc::new(Self {
            piece,
            len,
            left: AtomicU32::new(chunks),
            error: AtomicU8::new(0),
            crcs: (0..chunks).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    /// `count` chunks have ended, the first of them with this result.
    fn finish(&self, job: &Job, chunk: u32, count: u32, result: Result<u32, PieceError>) {
        match result {
            Ok(crc) => {
                if let Some(slot) = usize::try_from(chunk)
                    .ok()
                    .and_then(|chunk| self.crcs.get(chunk))
                {
                    slot.store(crc, Ordering::Release);
                }
            }
            Err(error) => {
                let code = error.code() + 1;
                let _first_error_stays =
                    self.error
                        .compare_exchange(0, code, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        if self.left.fetch_sub(count, Ordering::AcqRel) == count {
            job.finish(self.piece, self.result(job.wants_checksum()));
        }
    }

    fn result(&self, checksum: bool) -> Result<PieceDone, PieceError> {
        if let Some(code) = self.error.load(Ordering::Acquire).checked_sub(1) {
            return Err(PieceError::from_code(code).unwrap_or(PieceError::Protocol));
        }
        if !checksum {
            return Ok(PieceDone { crc32c: None });
        }
        let mut whole = 0;
        let mut rest = self.len;
        for crc in &self.crcs {
            let len = rest.min(CHUNK);
            whole = combine(whole, crc.load(Ordering::Acquire), len);
            rest -= len;
        }
        Ok(PieceDone {
            crc32c: Some(whole),
        })
    }
}

/// One operation of a frame, on this side.
#[derive(Debug)]
pub(super) struct FrameOp {
    pub(super) local: Span,
    /// Continued as bytes arrive, or before they are sent.
    pub(super) crc: u32,
    pub(super) result: Result<(), PieceError>,
    piece: u32,
    /// For a chunk: the piece it belongs to, and which chunk it is.
    split: Option<(Arc<Split>, u32)>,
}

/// A frame under way: what was asked, until it is answered.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) job: Arc<Job>,
    pub(super) ops: Vec<FrameOp>,
    pub(super) payload: u32,
    /// The owner reports on the tags once more behind the payload of a read.
    pub(super) has_generation: bool,
    /// What the lane has sent when all of this frame is out.
    pub(super) end: u64,
}

impl Frame {
    /// A question without operations.
    fn probe(job: Arc<Job>) -> Self {
        Self {
            job,
            ops: Vec::new(),
            payload: 0,
            has_generation: false,
            end: 0,
        }
    }

    pub(super) fn is_probe(&self) -> bool {
        self.ops.is_empty()
    }

    /// What it counts for in the window: its payload, and something for each operation.
    pub(super) fn cost(&self) -> u64 {
        u64::from(self.payload) + 64 * (self.ops.len() as u64 + 1)
    }

    /// Bytes of an operation go out next.
    pub(super) fn leaving(&mut self, op: usize, bytes: Span) {
        if self.job.wants_checksum()
            && let Some(op) = self.ops.get_mut(op)
        {
            op.crc = raw::checksum(op.crc, bytes);
        }
    }

    /// Gives every operation its result. `error` overrides them all.
    pub(super) fn deliver(&mut self, error: Option<PieceError>) {
        let checksum = self.job.wants_checksum();
        if self.is_probe() {
            self.job
                .finish(0, error.map_or(Ok(PieceDone { crc32c: None }), Err));
        }
        for op in self.ops.drain(..) {
            let result = match error {
                Some(error) => Err(error),
                None => op.result.map(|()| op.crc),
            };
            if let Some((split, chunk)) = op.split {
                split.finish(&self.job, chunk, 1, result);
            } else {
                let done = result.map(|crc| PieceDone {
                    crc32c: checksum.then_some(crc),
                });
                self.job.finish(op.piece as usize, done);
            }
        }
    }
}

/// Scratch space for a frame's wire form.
#[derive(Debug, Default)]
pub(super) struct WireScratch {
    pub(super) regions: Vec<WireRegion>,
    pub(super) ops: Vec<WireOp>,
}

impl WireScratch {
    /// How far back a region is looked for before it is named again.
    const NEAR: usize = 8;

    fn clear(&mut self) {
        self.regions.clear();
        self.ops.clear();
    }

    fn region(&mut self, wanted: WireRegion) -> u16 {
        let start = self.regions.len().saturating_sub(Self::NEAR);
        let near = self.regions[start..]
            .iter()
            .rposition(|known| *known == wanted);
        let index = near.map_or(self.regions.len(), |near| start + near);
        if near.is_none() {
            self.regions.push(wanted);
        }
        u16::try_from(index).expect("a frame has few operations")
    }
}

/// A job's pieces that are still to be sent.
#[derive(Debug)]
pub(super) struct Run {
    job: Arc<Job>,
    pieces: PieceSet,
    /// Position in the set.
    next: usize,
    /// The piece at `next`, if it was begun, and its next chunk.
    split: Option<(Arc<Split>, u32)>,
}

impl Run {
    pub(super) fn new(job: Arc<Job>, pieces: PieceSet) -> Self {
        Self {
            job,
            pieces,
            next: 0,
            split: None,
        }
    }

    pub(super) fn job(&self) -> &Job {
        &self.job
    }

    fn piece(&self, position: usize) -> Option<usize> {
        match &self.pieces {
            PieceSet::All => (position < self.job.pieces().len()).then_some(position),
            PieceSet::Some(indices) => indices.get(position).map(|index| *index as usize),
        }
    }

    /// Whether few bytes are to be moved: then the calling thread may do it at once.
    pub(super) fn is_small(&self) -> bool {
        const SMALL_BYTES: u64 = 64 << 10;
        const SMALL_PIECES: usize = 64;
        let mut bytes = 0;
        for position in 0..=SMALL_PIECES {
            let Some(piece) = self.piece(position) else {
                return true;
            };
            bytes += self.job.pieces()[piece].remote.len;
            if bytes > SMALL_BYTES {
                return false;
            }
        }
        false
    }

    /// Takes the next frame's operations. None when everything was taken.
    fn take(
        &mut self,
        wire: &mut WireScratch,
        mut ops: Vec<FrameOp>,
    ) -> Result<Frame, Vec<FrameOp>> {
        wire.clear();
        let mut payload = 0;
        let mut has_generation = false;
        while ops.len() < MAX_OPS && payload < CHUNK {
            let Some(piece) = self.piece(self.next) else {
                break;
            };
            if self.split.is_none() && self.job.is_terminal(piece) {
                self.next += 1;
                continue;
            }
            let len = self.job.pieces()[piece].remote.len;
            let op = if len > CHUNK {
                if payload > 0 {
                    break;
                }
                self.take_chunk(piece, len)
            } else {
                if payload + len > CHUNK {
                    break;
                }
                self.next += 1;
                (0, len, None)
            };
            let (start, len, split) = op;
            let (local, remote) = {
                let piece = &self.job.pieces()[piece];
                (piece.local.addr(), piece.remote)
            };
            has_generation |= remote.generation.is_some();
            let region = wire.region(WireRegion {
                region: remote.region,
                capability: remote.capability,
            });
            // A sum that would wrap is out of bounds at the owner, as the offset itself is.
            let offset = remote.offset.saturating_add(start);
            wire.ops.push(WireOp {
                region,
                offset,
                len,
                generation: remote.generation,
            });
            let in_memory =
                |n: u64| usize::try_from(n).expect("a local slice fits the address space");
            ops.push(FrameOp {
                local: Span {
                    addr: local + in_memory(start),
                    len: in_memory(len),
                },
                crc: 0,
                result: Ok(()),
                piece: u32::try_from(piece).expect("a batch has fewer pieces"),
                split,
            });
            payload += len;
        }
        if ops.is_empty() {
            return Err(ops);
        }
        Ok(Frame {
            job: Arc::clone(&self.job),
            ops,
            payload: u32::try_from(payload).expect("at most a chunk"),
            has_generation,
            end: 0,
        })
    }

    /// The next chunk of a large piece: start, length, and what it belongs to.
    fn take_chunk(&mut self, piece: usize, len: u64) -> (u64, u64, Option<(Arc<Split>, u32)>) {
        let (split, chunk) = self
            .split
            .take()
            .unwrap_or_else(|| (Split::new(piece, len), 0));
        let start = u64::from(chunk) * CHUNK;
        let chunk_len = CHUNK.min(len - start);
        if start + chunk_len < len {
            self.split = Some((Arc::clone(&split), chunk + 1));
        } else {
            self.next += 1;
        }
        (start, chunk_len, Some((split, chunk)))
    }

    /// A probe that was not sent.
    fn probe(job: Arc<Job>) -> Self {
        Self::new(job, PieceSet::Some(vec![0]))
    }

    /// Fails what was not sent.
    pub(super) fn fail(mut self, error: PieceError) {
        if let Some((split, chunk)) = self.split.take() {
            let unsent = u32::try_from(split.crcs.len()).unwrap_or(u32::MAX) - chunk;
            split.finish(&self.job, chunk, unsent, Err(error));
            self.next += 1;
        }
        while let Some(piece) = self.piece(self.next) {
            self.job.finish(piece, Err(error));
            self.next += 1;
        }
    }
}

/// Runs of one peer.
#[derive(Debug, Default)]
pub(super) struct WorkQueue {
    runs: VecDeque<Run>,
    /// Jobs of no pieces, whose only question is whether the peer answers.
    probes: VecDeque<Arc<Job>>,
}

/// What a lane is to do next.
#[derive(Debug)]
pub(super) enum Next {
    Send(Frame),
    /// A run whose time is up; to be failed outside of all locks.
    Stopped(Run, PieceError),
    /// Nothing; gives the list back.
    Nothing(Vec<FrameOp>),
}

impl WorkQueue {
    pub(super) fn push(&mut self, run: Run) {
        self.runs.push_back(run);
    }

    pub(super) fn push_probe(&mut self, job: Arc<Job>) {
        self.probes.push_back(job);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.probes.is_empty()
    }

    /// Takes the next frame, in turn.
    pub(super) fn next(
        &mut self,
        now: Instant,
        wire: &mut WireScratch,
        mut ops: Vec<FrameOp>,
    ) -> Next {
        if let Some(job) = self.probes.pop_front() {
            wire.clear();
            return Next::Send(Frame::probe(job));
        }
        while let Some(mut run) = self.runs.pop_front() {
            if let Some(error) = run.job.stop_reason(now) {
                return Next::Stopped(run, error);
            }
            match run.take(wire, ops) {
                Ok(frame) => {
                    if run.piece(run.next).is_some() {
                        self.runs.push_back(run);
                    }
                    return Next::Send(frame);
                }
                Err(unused) => ops = unused,
            }
        }
        Next::Nothing(ops)
    }

    /// Takes the runs whose time is up.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<(Run, PieceError)> {
        let mut expired = Vec::new();
        let mut index = 0;
        while index < self.runs.len() {
            let stop = self.runs[index].job.stop_reason(now);
            match stop {
                Some(error) => expired.extend(self.runs.remove(index).map(|run| (run, error))),
                None => index += 1,
            }
        }
        let (late, waiting) = self
            .probes
            .drain(..)
            .partition(|job| job.stop_reason(now).is_some());
        self.probes = waiting;
        let late: VecDeque<Arc<Job>> = late;
        expired.extend(
            late.into_iter()
                .map(|job| (Run::probe(job), PieceError::Timeout)),
        );
        expired
    }

    /// Takes everything.
    pub(super) fn drain(&mut self) -> Vec<Run> {
        let probes = self.probes.drain(..).map(Run::probe);
        self.runs.drain(..).chain(probes).collect()
    }
}

#[cfg(test)]
pub(super) mod tests;
