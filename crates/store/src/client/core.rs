//! What all methods, sessions and background tasks of one client share.
//!
//! Each part has a lock of its own, and none is held while another is taken, across an await or while
//! bytes move.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use layercake_protocol::ids::{Generation, SegmentId};
use layercake_transport::Engine;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::ClientConfig;
use super::finisher::Finisher;
use super::hints::Hints;
use super::holds::Holds;
use super::leases::Leases;
use super::read::ReadCall;
use super::scratch::ScratchPool;
use super::spares::Spares;
use super::stats::Counters;
use super::suspects::Suspects;
use super::write::WriteCall;
use crate::link::MasterLink;
use crate::session::PutShared;
use crate::session::put_state::Phase;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) link: MasterLink,
    pub(crate) engine: Engine,
    pub(crate) config: ClientConfig,
    pub(crate) leases: Leases,
    pub(crate) finisher: Finisher,
    pub(crate) holds: Holds,
    pub(crate) hints: Hints,
    pub(crate) suspects: Suspects,
    pub(crate) puts: Puts,
    pub(crate) scratch: ScratchPool,
    pub(super) reads: Spares<ReadCall>,
    pub(super) writes: Spares<WriteCall>,
    pub(crate) counters: Counters,
    /// Transfers whose callers went away.
    orphans: TaskTracker,
    runtime: Handle,
}

impl Core {
    pub(super) fn new(
        link: MasterLink,
        engine: Engine,
        config: ClientConfig,
        runtime: Handle,
    ) -> Self {
        Self {
            link,
            scratch: ScratchPool::new(engine.clone()),
            engine,
            config,
            leases: Leases::default(),
            finisher: Finisher::default(),
            holds: Holds::default(),
            hints: Hints::default(),
            suspects: Suspects::default(),
            puts: Puts::default(),
            reads: Spares::default(),
            writes: Spares::default(),
            counters: Counters::default(),
            orphans: TaskTracker::new(),
            runtime,
        }
    }

    /// Work that goes on in the background if its future is dropped. All methods that change something
    /// are made of it: no state hangs on whether a caller is still interested.
    pub(crate) fn see_through<F>(self: &Arc<Self>, work: F) -> SeenThrough<F>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        SeenThrough {
            core: Arc::clone(self),
            work: Some(Box::pin(work)),
        }
    }

    /// Lets work go on in the background.
    pub(super) fn background(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.orphans.spawn_on(work, &self.runtime);
    }

    pub(super) fn orphans(&self) -> &TaskTracker {
        &self.orphans
    }

    /// Segments that calls to the master must leave out.
    pub(crate) fn unreachable(&self) -> Vec<SegmentId> {
        self.suspects.segments()
    }

    /// A write of a session ended without an answer from the owner, who may still carry it out.
    pub(super) fn in_doubt(&self, put: &PutShared) {
        self.link.put_in_doubt(&put.object);
        put.doubt();
    }

    /// A put session has come to its end.
    pub(crate) fn settled(&self, put: &PutShared, phase: Phase) {
        if !put.settle(phase) {
            return;
        }
        if put.is_still() {
            self.puts.remove(put.object.generation);
        }
        match phase {
            Phase::Committed => self.counters.puts_committed.one(),
            Phase::Superseded => self.counters.puts_superseded.one(),
            _ => self.counters.puts_revoked.one(),
        }
    }
}

/// See [`Core::see_through`].
pub(crate) struct SeenThrough<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    core: Arc<Core>,
    work: Option<Pin<Box<F>>>,
}

impl<F> Future for SeenThrough<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let work = self
            .work
            .as_mut()
            .expect("a future is not polled after it is done");
        let answer = std::task::ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(answer)
    }
}

impl<F> Drop for SeenThrough<F>
where
    F: Future<Output: Send> + Send + 'static,
{
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            let rest = async move { drop(work.await) };
            self.core.orphans.spawn_on(rest, &self.core.runtime);
            self.core.link.mind_calls();
        }
    }
}

/// The put sessions by reservation, for as long as anything can move their bytes: until they are settled and nothing
/// of them is under way, or their owner and all of their transfers have let go of them.
#[derive(Debug, Default)]
pub(crate) struct Puts(Mutex<PutMap>);

type PutMap = HashMap<Generation, Weak<PutShared>, BuildHasherDefault<SideBySide>>;

impl Puts {
    pub(crate) fn add(&self, put: &Arc<PutShared>) {
        let mut puts = self.0.lock();
        if puts.len() == puts.capacity() {
            puts.retain(|_, put| put.strong_count() > 0);
        }
        puts.insert(put.object.generation, Arc::downgrade(put));
    }

    fn remove(&self, generation: Generation) {
        self.0.lock().remove(&generation);
    }

    pub(super) fn find(&self, generation: Generation) -> Option<Arc<PutShared>> {
        self.0.lock().get(&generation).and_then(Weak::upgrade)
    }

    pub(super) fn all(&self) -> Vec<Arc<PutShared>> {
        self.0.lock().values().filter_map(Weak::upgrade).collect()
    }
}

/// Hashes numbers that the master draws one after the other, so that those of one call lie side by side in a table:
/// its place is the number's own. What tells the numbers of neighbouring places apart are the highest bits.
#[derive(Clone, Copy, Debug, Default)]
struct SideBySide(u64);

impl Hasher for SideBySide {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 << 8 | u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let spread = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) & !(u64::MAX >> 7);
        self.0 = number ^ spread;
    }
}

/// The time by which leases and waits are counted; a test may pause it.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::hash::BuildHasher as _;

    use super::*;

    #[test]
    fn numbers_of_one_call_lie_side_by_side_and_are_told_apart() {
        let state = BuildHasherDefault::<SideBySide>::default();
        let hashes = (1000..1016).map(|number| state.hash_one(Generation(number)));
        let hashes: Vec<u64> = hashes.collect();
        let places = hashes.iter().map(|hash| hash & 0xFFFF);
        assert!(places.eq(1000..1016));
        let marks: BTreeSet<u64> = hashes.iter().map(|hash| hash >> 57).collect();
        assert_eq!(marks.len(), hashes.len());
    }
}
