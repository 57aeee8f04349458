//! Gathers the pieces of one call into one batch per peer, and brings the results back.
//!
//! All batches of a [`Fanout`] are handed to the transport together and run in parallel. Each piece
//! carries a tag by which the caller finds what the piece belongs to.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use layercake_protocol::endpoint::Endpoint;
use layercake_transport::{
    Batch, Direction, Ended, Engine, Kept, LocalSlice, Piece, PieceDone, PieceError, RemoteSlice,
    Transfer, TransportKind,
};
use smallvec::SmallVec;

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
    /// One for each peer: seldom more than one.
    parts: SmallVec<[Part<T>; 1]>,
    spare: Spare<T>,
    kept: Option<Kept>,
}

#[derive(Debug)]
struct Part<T> {
    peer: Arc<Endpoint>,
    pieces: Vec<Piece>,
    tags: Vec<T>,
    bytes: u64,
}

/// One for each peer.
pub(crate) type Transfers = SmallVec<[Transfer; 1]>;

/// Memory of a flight that has landed, for the next one: the tags of each peer, which also say how many pieces
/// to make room for.
#[derive(Debug)]
pub(crate) struct Spare<T>(SmallVec<[Vec<T>; 1]>);

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self(SmallVec::new())
    }
}

impl<T> Fanout<T> {
    pub(crate) fn new(direction: Direction, checksum: bool) -> Self {
        Self {
            direction,
            checksum,
            parts: SmallVec::new(),
            spare: Spare::default(),
            kept: None,
        }
    }

    /// The same in the memory of an earlier flight.
    pub(crate) fn reusing(self, spare: Spare<T>) -> Self {
        Self { spare, ..self }
    }

    /// The same, and what it keeps lives until nothing moves any more.
    pub(crate) fn keeping(self, kept: Option<Kept>) -> Self {
        Self { kept, ..self }
    }

    pub(crate) fn push(&mut self, target: &Target, local: LocalSlice, remote: RemoteSlice, tag: T) {
        let peer = &target.peer;
        let known = self
            .parts
            .iter()
            .position(|part| part.peer.engine == peer.engine);
        let at = known.unwrap_or_else(|| {
            let mut tags = self.spare.0.pop().unwrap_or_default();
            let pieces = Vec::with_capacity(tags.len());
            tags.clear();
            self.parts.push(Part {
                peer: Arc::clone(peer),
                pieces,
                tags,
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
            let batch = Batch {
                peer: part.peer,
                direction: self.direction,
                pieces: part.pieces,
                checksum: self.checksum,
                deadline: Some(BASE_DEADLINE + Duration::from_secs(part.bytes / SLOWEST)),
            };
            let transfer = engine.submit_keeping(batch, self.kept.clone());
            (transfer, part.tags)
        });
        Flight {
            parts: parts.collect(),
            landed: 0,
        }
    }
}

/// Pieces under way.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    parts: SmallVec<[(Transfer, Vec<T>); 1]>,
    /// How many of them were reported.
    landed: usize,
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self {
            parts: SmallVec::new(),
            landed: 0,
        }
    }
}

impl<T: Copy> Flight<T> {
    /// Waits for all pieces and reports each. The transfers' deadlines bound the wait.
    pub(crate) async fn land(self, mut each: impl FnMut(T, Result<PieceDone, PieceError>)) {
        self.land_writes(|tag, result| each(tag, result.map_err(|failure| failure.error)))
            .await;
    }

    /// As [`land`](Self::land), with what a failed write leaves open.
    pub(crate) async fn land_writes(mut self, mut each: impl FnMut(T, Result<PieceDone, Failure>)) {
        poll_fn(|cx| self.poll_landed(cx, &mut each)).await;
    }

    /// Reports each piece of the transfers that have ended since the last call. Ready when all have.
    pub(crate) fn poll_landed(
        &mut self,
        cx: &Context<'_>,
        each: &mut impl FnMut(T, Result<PieceDone, Failure>),
    ) -> Poll<()> {
        while let Some((transfer, tags)) = self.parts.get(self.landed) {
            report(tags, ready!(transfer.poll_ended(cx)), each);
            self.landed += 1;
        }
        Poll::Ready(())
    }

    /// Looks after the transfers while something else is waited for: whoever waits for this task knows of them.
    pub(super) fn poll_along(&self, cx: &Context<'_>) {
        for (transfer, _) in &self.parts {
            // Its outcome stays.
            let _ = transfer.poll_ended(cx);
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
        let mut each = |tag, result: Result<_, Failure>| {
            each(tag, result.map_err(|failure| failure.error));
        };
        for (transfer, tags) in &self.parts {
            if tags.iter().any(&wanted) {
                let ended = poll_fn(|cx| {
                    let ended = transfer.poll_ended(cx);
                    ended.map(|ended| report(tags, ended, &mut each))
                });
                ended.await;
            } else {
                transfer.cancel();
                still &= transfer.is_done();
            }
        }
        still
    }

    /// Handles on the transfers, to be waited for.
    pub(crate) fn transfers(&self) -> Transfers {
        let transfers = self.parts.iter();
        transfers.map(|(transfer, _)| transfer.clone()).collect()
    }

    /// Reports each piece, and gives the memory for the next flight. The caller has waited for all transfers; one that
    /// has not ended reports nothing.
    pub(crate) fn collect(self, mut each: impl FnMut(T, Result<PieceDone, Failure>)) -> Spare<T> {
        for (transfer, tags) in &self.parts {
            if let Some(ended) = transfer.ended() {
                report(tags, ended, &mut each);
            }
        }
        self.into_spare()
    }

    /// Its memory, for the next flight.
    pub(crate) fn into_spare(self) -> Spare<T> {
        Spare(self.parts.into_iter().map(|(_, tags)| tags).collect())
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

fn report<T: Copy>(
    tags: &[T],
    ended: Ended<'_>,
    each: &mut impl FnMut(T, Result<PieceDone, Failure>),
) {
    let transport = ended.transport();
    for (&tag, result) in tags.iter().zip(ended.pieces()) {
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
