//! Segments that this client can't reach, whatever the master thinks (requirement S10).
//!
//! A transfer that fails because of the peer puts its segment here; from then on lookups and starts tell
//! the master to leave it out, so what only it holds counts as absent, and nothing new is placed there.
//! A later transfer that succeeds, or the prober's, takes it off the list. It stays there for as long
//! as the master lists the segment, which is looked up every [`LOOK_UP_AFTER`]; what the master has
//! dropped is in nobody's answers, and is dropped here as well.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::ids::SegmentId;
use layercake_transport::{Direction, PieceError, Refusal};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::{Core, now};
use super::fanout::Fanout;
use super::places::Target;

/// How long a segment is on the list before the master is asked whether it has dropped it, and how long
/// before it is asked again.
const LOOK_UP_AFTER: Duration = Duration::from_mins(1);

/// The list.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// Its length, so that the common case costs no lock.
    count: AtomicUsize,
    list: Mutex<HashMap<SegmentId, Suspect>>,
    added: Notify,
}

#[derive(Debug)]
struct Suspect {
    target: Arc<Target>,
    look_up: Instant,
}

impl Suspects {
    /// A piece to or from this segment failed.
    pub(crate) fn failed(&self, target: &Arc<Target>, error: PieceError) {
        if blames_peer(error) {
            self.add(target);
        }
    }

    fn add(&self, target: &Arc<Target>) {
        let mut list = self.list.lock();
        list.entry(target.segment).or_insert_with(|| {
            tracing::debug!(segment = %target.segment, peer = %target.peer, "segment is out of reach");
            Suspect { target: Arc::clone(target), look_up: now() + LOOK_UP_AFTER }
        });
        self.count.store(list.len(), Ordering::Release);
        self.added.notify_one();
    }

    /// A piece to or from this segment arrived.
    pub(crate) fn clear(&self, segment: SegmentId) {
        if self.is_empty() {
            return;
        }
        let mut list = self.list.lock();
        if list.remove(&segment).is_some() {
            tracing::debug!(%segment, "segment is in reach again");
        }
        self.count.store(list.len(), Ordering::Release);
    }

    /// Whether one has been here for so long that the master may have dropped it.
    fn is_look_up_due(&self, now: Instant) -> bool {
        self.list
            .lock()
            .values()
            .any(|suspect| now >= suspect.look_up)
    }

    /// Drops those that were to be looked up and are not among what the master `lists`.
    fn looked_up(&self, lists: &HashSet<SegmentId>, now: Instant) {
        let mut list = self.list.lock();
        list.retain(|segment, suspect| {
            if now < suspect.look_up {
                return true;
            }
            suspect.look_up = now + LOOK_UP_AFTER;
            lists.contains(segment)
        });
        self.count.store(list.len(), Ordering::Release);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The segments to leave out.
    pub(crate) fn segments(&self) -> Vec<SegmentId> {
        if self.is_empty() {
            return Vec::new();
        }
        self.list.lock().keys().copied().collect()
    }

    pub(super) fn targets(&self) -> Vec<Arc<Target>> {
        let list = self.list.lock();
        list.values()
            .map(|suspect| Arc::clone(&suspect.target))
            .collect()
    }

    /// Waits until there is something on the list.
    pub(super) async fn any(&self) {
        while self.is_empty() {
            self.added.notified().await;
        }
    }
}

/// Whether a piece failed because of the peer or the way to it, rather than for its own sake.
pub(super) fn blames_peer(error: PieceError) -> bool {
    match error {
        PieceError::Refused(refusal) => matches!(
            refusal,
            Refusal::UnknownRegion | Refusal::BadCapability | Refusal::AccessDenied
        ),
        PieceError::Cancelled
        | PieceError::LocalInvalid
        | PieceError::LengthMismatch
        | PieceError::ShutDown => false,
        _ => true,
    }
}

/// Pauses between two probes of what is on the list.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The task that looks whether suspects are back, by reading one byte of each. Runs until it is
/// dropped.
pub(super) async fn probe_task(core: Arc<Core>) {
    let mut pause = FIRST_PAUSE;
    loop {
        core.suspects.any().await;
        tokio::time::sleep(pause).await;
        look_up(&core).await;
        probe(&core).await;
        pause = if core.suspects.is_empty() {
            FIRST_PAUSE
        } else {
            (pause * 2).min(LONGEST_PAUSE)
        };
    }
}

/// Drops those that the master has dropped. If it can't be asked, they stay.
async fn look_up(core: &Core) {
    let asked = now();
    if core.suspects.is_look_up_due(asked)
        && let Ok(segments) = core.link.segments().await
    {
        let lists = segments.iter().map(|stat| stat.segment.id).collect();
        core.suspects.looked_up(&lists, asked);
    }
}

async fn probe(core: &Core) {
    let targets = core.suspects.targets();
    let Ok(scratch) = core.scratch.take(targets.len() as u64) else {
        return;
    };
    let mut fanout = Fanout::new(Direction::Read, false);
    for (at, target) in (0..).zip(&targets) {
        if let Ok(local) = scratch.slice(at, 1) {
            fanout.push(target, local, target.untagged(0, 1), target.segment);
        }
    }
    let flight = fanout.submit(&core.engine);
    flight
        .land(|segment, result| {
            if result.is_ok() {
                core.suspects.clear(segment);
            }
        })
        .await;
    scratch.recycle();
}

#[cfg(test)]
mod tests {
    use layercake_protocol::endpoint::{Endpoint, HostId};
    use layercake_protocol::ids::{Capability, EngineId, MemoryKind, RegionId};
    use layercake_protocol::replica::Segment;

    use super::super::places::Targets;
    use super::*;

    fn target(segment: u64) -> Arc<Target> {
        let segment = Segment {
            id: SegmentId(segment),
            name: "n".to_owned(),
            endpoint: Endpoint {
                engine: EngineId(1),
                tcp: "127.0.0.1:1".to_owned(),
                host: HostId([0; 16]),
                shm: None,
                pid: 1,
            },
            region: RegionId(1),
            capability: Capability([1; 16]),
            len: 4096,
            kind: MemoryKind::Host,
        };
        Targets::new([&Arc::new(segment)]).first().expect("one")
    }

    // contract: session-16
    #[test]
    fn a_segment_stays_out_for_as_long_as_the_master_lists_it() {
        let suspects = Suspects::default();
        for segment in [1, 2] {
            suspects.failed(&target(segment), PieceError::Unreachable);
        }
        let mut time = now();
        assert!(!suspects.is_look_up_due(time));
        suspects.looked_up(&HashSet::new(), time);
        assert_eq!(suspects.len(), 2, "too early to tell");
        let lists = HashSet::from([SegmentId(1)]);
        for _ in 0..3 {
            time += LOOK_UP_AFTER * 20;
            assert!(suspects.is_look_up_due(time));
            suspects.looked_up(&lists, time);
            assert_eq!(suspects.segments(), [SegmentId(1)]);
            assert!(!suspects.is_look_up_due(time), "not before the next time");
        }
        suspects.clear(SegmentId(1));
        assert!(suspects.is_empty(), "it is in reach again");
    }
}
