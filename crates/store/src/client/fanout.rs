//! Gathers the pieces of one call into one batch per peer, and brings the results back.
//!
//! All batches of a [`Fanout`] are handed to the transport together and run in parallel. Each piece
//! carries a tag by which the caller finds what the piece belongs to.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use layercake_protocol::endpoint::Endpoint;
use layercake_transport::{
    Batch, Direction, Engine, LocalSlice, Outcome, Piece, PieceDone, PieceError, RemoteSlice,
    Transfer, TransportKind,
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
    pub(crate) async fn land(self, mut each: impl FnMut(T, Result<PieceDone, PieceError>)) {
        self.land_writes(|tag, result| each(tag, result.map_err(|failure| failure.error)))
            .await;
    }

    /// As [`land`](Self::land), with what a failed write leaves open.
    pub(crate) async fn land_writes(mut self, mut each: impl FnMut(T, Result<PieceDone, Failure>)) {
        for (transfer, tags) in self.parts.drain(..) {
            report(tags, transfer.await, &mut each);
        }
    }

    /// Looks after the transfers while something else is waited for: whoever waits for this task knows of them.
    pub(super) fn poll_along(&mut self, cx: &mut Context<'_>) {
        for (transfer, _) in &mut self.parts {
            // Its outcome stays.
            let _ = Pin::new(transfer).poll(cx);
        }
    }

    /// Waits for the batches in which anything is `wanted`, and reports each of their pieces. The others are given
    /// up. Tells whether nothing moves any more.
    pub(super) async fn land_some(
        self,
        wanted: impl Fn(&T) -> bool,
        mut each: impl FnMut(T, Result<PieceDone, PieceError>),
    ) -> bool {
        let mut still = true;
        for (transfer, tags) in self.parts {
            if tags.iter().any(&wanted) {
                report(
                    tags,
                    transfer.await,
                    &mut |tag, result: Result<_, Failure>| {
                        each(tag, result.map_err(|failure| failure.error));
                    },
                );
            } else {
                transfer.cancel();
                still &= transfer.is_done();
            }
        }
        still
    }

    /// Handles on the transfers, to be waited for.
    pub(crate) fn transfers(&self) -> Vec<Transfer> {
        self.parts
            .iter()
            .map(|(transfer, _)| transfer.clone())
            .collect()
    }

    /// Reports each piece. The caller has waited for all transfers; one that is not done reports nothing.
    pub(crate) fn collect(self, mut each: impl FnMut(T, Result<PieceDone, Failure>)) {
        for (transfer, tags) in self.parts {
            if let Some(outcome) = transfer.poll() {
                report(tags, outcome, &mut each);
            }
        }
    }
}

/// Why a piece failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) error: PieceError,
    /// Nobody answered for the piece: if it was a write, its bytes may be before the owner of the memory, who
    /// may still carry it out.
    pub(crate) in_doubt: bool,
}

impl Failure {
    /// Over shared memory this side copies by itself, and a piece that ended moves no more. Over TCP the
    /// owner does, and what it does is known from its answer alone.
    fn new(error: PieceError, transport: Option<TransportKind>) -> Self {
        let unanswered = matches!(
            error,
            PieceError::PeerGone
                | PieceError::Timeout
                | PieceError::Stalled
                | PieceError::Protocol
                | PieceError::ShutDown
        );
        Self {
            error,
            in_doubt: unanswered && transport == Some(TransportKind::Tcp),
        }
    }
}

fn report<T>(tags: Vec<T>, outcome: Outcome, each: &mut impl FnMut(T, Result<PieceDone, Failure>)) {
    let transport = outcome.transport;
    for (tag, result) in tags.into_iter().zip(outcome.pieces) {
        each(tag, result.map_err(|error| Failure::new(error, transport)));
    }
}

#[cfg(test)]
mod tests {
    use layercake_transport::Refusal;

    use super::*;

    // contract: session-3
    #[test]
    fn a_write_over_tcp_that_nobody_answered_is_in_doubt() {
        let doubted = |error, transport| Failure::new(error, transport).in_doubt;
        for error in [
            PieceError::PeerGone,
            PieceError::Timeout,
            PieceError::Stalled,
            PieceError::Protocol,
            PieceError::ShutDown,
        ] {
            assert!(doubted(error, Some(TransportKind::Tcp)), "{error}");
            for sure in [None, Some(TransportKind::Shm), Some(TransportKind::Local)] {
                assert!(!doubted(error, sure), "{error}");
            }
        }
        for answered in [
            PieceError::Refused(Refusal::StaleGeneration),
            PieceError::Unreachable,
            PieceError::NotTrusted,
            PieceError::Cancelled,
            PieceError::LocalInvalid,
        ] {
            assert!(!doubted(answered, Some(TransportKind::Tcp)), "{answered}");
        }
    }
}
