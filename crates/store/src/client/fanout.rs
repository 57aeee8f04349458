//! Gathers the pieces of one call into one batch per peer, and brings the results back.
//!
//! All batches of a [`Fanout`] are handed to the transport together and run in parallel. Each piece
//! carries a tag by which the caller finds what the piece belongs to.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::endpoint::Endpoint;
use layercake_transport::{
    Batch, Direction, Engine, LocalSlice, Outcome, Piece, PieceDone, PieceError, RemoteSlice,
    Transfer,
};

use super::places::Target;

/// Time that a batch gets besides [`SLOWEST`], as long as its peers make progress.
const BASE_DEADLINE: Duration = Duration::from_secs(30);

/// Bytes per second that a batch may always take its time for: a large batch is slow, never refused.
const SLOWEST: u64 = 16 << 20;

/// Pieces that are about to be moved.
#[derive(Debug)]
pub(crate) struct Fanout<T> {
    direction: Direction,
    checksum: bool,
    parts: Vec<Part<T>>,
}

#[derive(Debug)]
struct Part<T> {
    peer: Arc<Endpoint>,
    pieces: Vec<Piece>,
    tags: Vec<T>,
    bytes: u64,
}

impl<T> Fanout<T> {
    pub(crate) fn new(direction: Direction, checksum: bool) -> Self {
        Self {
            direction,
            checksum,
            parts: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, target: &Target, local: LocalSlice, remote: RemoteSlice, tag: T) {
        let peer = &target.peer;
        let known = self
            .parts
            .iter()
            .position(|part| part.peer.engine == peer.engine);
        let at = known.unwrap_or_else(|| {
            self.parts.push(Part {
                peer: Arc::clone(peer),
                pieces: Vec::new(),
                tags: Vec::new(),
                bytes: 0,
            });
            self.parts.len() - 1
        });
        let part = &mut self.parts[at];
        part.bytes = part.bytes.saturating_add(remote.len);
        part.pieces.push(Piece { local, remote });
        part.tags.push(tag);
    }

    /// Hands everything to the transport.
    pub(crate) fn submit(self, engine: &Engine) -> Flight<T> {
        let parts = self.parts.into_iter().map(|part| {
            let transfer = engine.submit(Batch {
                peer: part.peer,
                direction: self.direction,
                pieces: part.pieces,
                checksum: self.checksum,
                deadline: Some(BASE_DEADLINE + Duration::from_secs(part.bytes / SLOWEST)),
            });
            (transfer, part.tags)
        });
        Flight {
            parts: parts.collect(),
        }
    }
}

/// Pieces under way.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    parts: Vec<(Transfer, Vec<T>)>,
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self { parts: Vec::new() }
    }
}

impl<T> Flight<T> {
    /// Waits for all pieces and reports each. The transfers' deadlines bound the wait.
    pub(crate) async fn land(mut self, mut each: impl FnMut(T, Result<PieceDone, PieceError>)) {
        for (transfer, tags) in self.parts.drain(..) {
            report(tags, transfer.await, &mut each);
        }
    }

    /// Handles on the transfers, to be waited for.
    pub(crate) fn transfers(&self) -> Vec<Transfer> {
        self.parts
            .iter()
            .map(|(transfer, _)| transfer.clone())
            .collect()
    }

    /// Reports each piece. The caller has waited for all transfers; one that is not done reports nothing.
    pub(crate) fn collect(self, mut each: impl FnMut(T, Result<PieceDone, PieceError>)) {
        for (transfer, tags) in self.parts {
            if let Some(outcome) = transfer.poll() {
                report(tags, outcome, &mut each);
            }
        }
    }
}

fn report<T>(
    tags: Vec<T>,
    outcome: Outcome,
    each: &mut impl FnMut(T, Result<PieceDone, PieceError>),
) {
    for (tag, result) in tags.into_iter().zip(outcome.pieces) {
        each(tag, result);
    }
}
