//! What moving bytes cost (requirement T8).
//!
//! Counters are relaxed atomics in fixed arrays, indexed by transport, direction and error code:
//! counting never allocates, locks or fails. A snapshot is not a cut through time, each number only
//! grows, and gauges may be off by what is under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::batch::Direction;
use crate::config::TransportKind;
use crate::error::PieceError;

#[derive(Debug, Default)]
pub(crate) struct OpCounters {
    bytes: AtomicU64,
    pieces: AtomicU64,
    batches: AtomicU64,
    queue_nanos: AtomicU64,
    wire_nanos: AtomicU64,
    copy_nanos: AtomicU64,
    served_bytes: AtomicU64,
    served_pieces: AtomicU64,
    errors: ErrorCounters,
}

#[derive(Debug)]
struct ErrorCounters([AtomicU64; PieceError::CODES]);

impl Default for ErrorCounters {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; PieceError::CODES])
    }
}

impl OpCounters {
    pub(crate) fn add_pieces(&self, pieces: u64, bytes: u64) {
        self.pieces.fetch_add(pieces, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add_error(&self, error: PieceError, pieces: u64) {
        if let Some(counter) = self.errors.0.get(usize::from(error.code())) {
            counter.fetch_add(pieces, Relaxed);
        }
    }

    pub(crate) fn add_batch(&self, queue: Duration, wire: Duration, copy: Duration) {
        self.batches.fetch_add(1, Relaxed);
        self.queue_nanos.fetch_add(nanos(queue), Relaxed);
        self.wire_nanos.fetch_add(nanos(wire), Relaxed);
        self.copy_nanos.fetch_add(nanos(copy), Relaxed);
    }

    /// Counts operations that this engine carried out for a peer.
    pub(crate) fn add_served(&self, pieces: u64, bytes: u64) {
        self.served_pieces.fetch_add(pieces, Relaxed);
        self.served_bytes.fetch_add(bytes, Relaxed);
    }
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Something that exists, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicU64>);

impl Counted {
    fn new(gauge: &Arc<AtomicU64>) -> Self {
        gauge.fetch_add(1, Relaxed);
        Self(Arc::clone(gauge))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The live counters of one engine.
#[derive(Debug, Default)]
pub(crate) struct StatsTable {
    operations: [[OpCounters; Direction::ALL.len()]; TransportKind::ALL.len()],
    /// Pieces that failed before a transport was chosen.
    unrouted: ErrorCounters,
    security_refusals: AtomicU64,
    malformed: AtomicU64,
    untrusted: AtomicU64,
    turned_away: AtomicU64,
    tcp_connections: Arc<AtomicU64>,
    tcp_peers: Arc<AtomicU64>,
}

impl StatsTable {
    pub(crate) fn operation(&self, kind: TransportKind, direction: Direction) -> &OpCounters {
        &self.operations[kind.index()][direction.index()]
    }

    pub(crate) fn add_unrouted(&self, error: PieceError, pieces: u64) {
        if let Some(counter) = self.unrouted.0.get(usize::from(error.code())) {
            counter.fetch_add(pieces, Relaxed);
        }
    }

    /// A peer asked for what it was not given.
    pub(crate) fn add_security_refusal(&self) {
        self.security_refusals.fetch_add(1, Relaxed);
    }

    /// A peer refused that many of its own pieces on this engine's behalf.
    pub(crate) fn add_security_refusals(&self, pieces: u64) {
        self.security_refusals.fetch_add(pieces, Relaxed);
    }

    /// A peer sent bytes that are no frame.
    pub(crate) fn add_malformed(&self) {
        self.malformed.fetch_add(1, Relaxed);
    }

    /// A peer could not prove the shared token.
    pub(crate) fn add_untrusted(&self) {
        self.untrusted.fetch_add(1, Relaxed);
    }

    /// A peer connected when there was no room for it.
    pub(crate) fn add_turned_away(&self) {
        self.turned_away.fetch_add(1, Relaxed);
    }

    /// Counts a TCP connection for as long as the guard lives.
    pub(crate) fn connection(&self) -> Counted {
        Counted::new(&self.tcp_connections)
    }

    /// Counts a TCP peer for as long as the guard lives.
    pub(crate) fn peer(&self) -> Counted {
        Counted::new(&self.tcp_peers)
    }

    pub(crate) fn snapshot(&self, regions: u64) -> Stats {
        let mut operations = Vec::new();
        for transport in TransportKind::ALL {
            for direction in Direction::ALL {
                let c = self.operation(transport, direction);
                operations.push(OperationStats {
                    transport,
                    direction,
                    bytes: c.bytes.load(Relaxed),
                    pieces: c.pieces.load(Relaxed),
                    batches: c.batches.load(Relaxed),
                    queue: Duration::from_nanos(c.queue_nanos.load(Relaxed)),
                    wire: Duration::from_nanos(c.wire_nanos.load(Relaxed)),
                    copy: Duration::from_nanos(c.copy_nanos.load(Relaxed)),
                    served_bytes: c.served_bytes.load(Relaxed),
                    served_pieces: c.served_pieces.load(Relaxed),
                    errors: snapshot_errors(&c.errors),
                });
            }
        }
        Stats {
            operations,
            unrouted: snapshot_errors(&self.unrouted),
            security_refusals: self.security_refusals.load(Relaxed),
            malformed: self.malformed.load(Relaxed),
            untrusted: self.untrusted.load(Relaxed),
            turned_away: self.turned_away.load(Relaxed),
            tcp_connections: self.tcp_connections.load(Relaxed),
            tcp_peers: self.tcp_peers.load(Relaxed),
            regions,
        }
    }
}

fn snapshot_errors(counters: &ErrorCounters) -> Vec<(PieceError, u64)> {
    let count = |(code, counter): (usize, &AtomicU64)| {
        let error = PieceError::from_code(u8::try_from(code).ok()?)?;
        let count = counter.load(Relaxed);
        (count > 0).then_some((error, count))
    };
    counters.0.iter().enumerate().filter_map(count).collect()
}

/// What one transport did in one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationStats {
    /// The transport.
    pub transport: TransportKind,
    /// The direction, seen from the engine that asked.
    pub direction: Direction,
    /// Bytes of pieces that arrived.
    pub bytes: u64,
    /// Pieces that arrived.
    pub pieces: u64,
    /// Batches that ended, whatever their pieces' results.
    pub batches: u64,
    /// Time from submission until a batch's first byte was handed on, summed over batches.
    pub queue: Duration,
    /// Time from there until its last piece was terminal, summed over batches.
    pub wire: Duration,
    /// Time that threads spent copying or in socket calls for the bytes, summed over threads.
    pub copy: Duration,
    /// Bytes moved on behalf of peers that asked this engine.
    pub served_bytes: u64,
    /// Operations carried out on behalf of peers.
    pub served_pieces: u64,
    /// Pieces that failed, by error; those with a count only.
    pub errors: Vec<(PieceError, u64)>,
}

/// A snapshot of an engine's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// One entry per transport and direction, all of them.
    pub operations: Vec<OperationStats>,
    /// Pieces that failed before a transport was chosen, by error.
    pub unrouted: Vec<(PieceError, u64)>,
    /// Operations of peers that were refused because they were not entitled to them.
    pub security_refusals: u64,
    /// Connections that were closed because a peer broke the protocol.
    pub malformed: u64,
    /// Connections that were closed because a peer could not prove the shared token.
    pub untrusted: u64,
    /// TCP connections that were closed at once, since [`crate::EngineConfig::max_connections`] were open
    /// or [`crate::EngineConfig::max_greetings`] under way.
    pub turned_away: u64,
    /// TCP connections open now, in either role.
    pub tcp_connections: u64,
    /// Peers that this engine keeps state for now, because it sends to them over TCP.
    pub tcp_peers: u64,
    /// Regions registered now.
    pub regions: u64,
}

impl Stats {
    /// The entry of one transport and direction.
    pub fn operation(
        &self,
        transport: TransportKind,
        direction: Direction,
    ) -> Option<&OperationStats> {
        self.operations
            .iter()
            .find(|entry| entry.transport == transport && entry.direction == direction)
    }
}
