//! Places that this client has in advance (`docs/decisions/0013-small-puts-take-one-round-trip.md`).
//!
//! A hold comes with the answer to a put of small objects that asked for one. Slots are cut from it one
//! behind the other, and never twice: what becomes of a slot makes no difference to the others. A hold is given back
//! when it is cut up, when nothing was cut from it for [`IDLE`], and when something went wrong with it, each time once
//! none of its slots is in use. The master calls holds back as it does with sessions (see `events`).
//!
//! One lock, held for a few instructions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::replica::{GRANULE, Hold, ObjectRef, Replica};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::{Core, now};
use super::places::{Place, Target};

/// A hold that nothing was cut from for so long is given back.
const IDLE: Duration = Duration::from_secs(5);

/// Pause before the master is told again what it did not answer.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// With fewer granules left than this part of a hold, the next one is asked for.
const PART: u64 = 4;

/// The holds of a client.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: Mutex<Vec<Held>>,
    /// The next one is on its way.
    asked: AtomicBool,
    /// Something is to be given back, or there is a first hold.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Held {
    shared: Arc<Shared>,
    /// Granules that were cut off.
    cut: u64,
    last_cut: Instant,
}

impl Held {
    /// Granules that can still be cut off.
    fn left(&self) -> u64 {
        if self.shared.is_over() {
            0
        } else {
            self.shared.granules() - self.cut
        }
    }

    fn is_low(&self) -> bool {
        self.left() < self.shared.granules() / PART
    }

    fn number(&self) -> Generation {
        self.shared.hold.generation
    }

    fn is_due(&self, now: Instant) -> bool {
        let idle = now.saturating_duration_since(self.last_cut) >= IDLE;
        (idle || self.shared.is_over()) && self.shared.is_idle()
    }
}

/// A hold, as its slots know it.
#[derive(Debug)]
pub(super) struct Shared {
    hold: Hold,
    target: Arc<Target>,
    /// Slots that may be written to, or be committed.
    in_use: AtomicUsize,
    /// Nothing is cut from it any more.
    over: AtomicBool,
    idle: Notify,
    changed: Arc<Notify>,
}

impl Shared {
    fn granules(&self) -> u64 {
        self.hold.len / GRANULE
    }

    fn is_idle(&self) -> bool {
        self.in_use.load(Ordering::SeqCst) == 0
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Cuts nothing from it any more. Whoever is the last to use it has it given back.
    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.changed.notify_one();
    }

    /// Waits until none of its slots is in use. Nothing may be cut from it any more.
    pub(super) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.is_idle() {
                return;
            }
            idle.await;
        }
    }
}

/// A place for one object. In use until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    of: Arc<Shared>,
    granule: u64,
}

impl Slot {
    fn new(of: &Arc<Shared>, granule: u64) -> Self {
        of.in_use.fetch_add(1, Ordering::SeqCst);
        Self {
            of: Arc::clone(of),
            granule,
        }
    }

    /// The number of the object in it.
    pub(super) fn generation(&self) -> Generation {
        self.of.hold.slot(self.granule)
    }

    /// Offset in the segment, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.of.hold.offset + self.granule * GRANULE
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.of.target
    }

    /// Where its object lies, behind a header of so many bytes.
    pub(super) fn place(&self, header_len: u32) -> Place {
        Place {
            target: Arc::clone(self.target()),
            replica: Replica {
                segment: self.of.target.segment,
                offset: self.offset(),
                header_len,
                generation: self.generation(),
            },
        }
    }

    /// What the object's header says.
    pub(super) fn epoch(&self) -> Epoch {
        self.of.hold.epoch
    }

    /// The hold's number.
    pub(super) fn hold(&self) -> Generation {
        self.of.hold.generation
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.of.in_use.fetch_sub(1, Ordering::SeqCst) == 1 && self.of.is_over() {
            self.of.idle.notify_waiters();
            self.of.changed.notify_one();
        }
    }
}

/// A question for the next hold is under way.
#[derive(Debug)]
pub(super) struct Asking<'a>(&'a Holds);

impl Asking<'_> {
    /// The answer.
    pub(super) fn granted(self, hold: Hold, target: Arc<Target>) {
        self.0.held.lock().push(Held {
            shared: Arc::new(Shared {
                hold,
                target,
                in_use: AtomicUsize::new(0),
                over: AtomicBool::new(false),
                idle: Notify::new(),
                changed: Arc::clone(&self.0.changed),
            }),
            cut: 0,
            last_cut: now(),
        });
        self.0.changed.notify_one();
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asked.store(false, Ordering::Release);
    }
}

impl Holds {
    /// Cuts a slot for each of these lengths in bytes, or none.
    pub(super) fn cut(&self, lens: &[u64]) -> Option<Vec<Slot>> {
        let mut held = self.held.lock();
        let mut cuts: Vec<u64> = held.iter().map(|held| held.cut).collect();
        let mut places = Vec::with_capacity(lens.len());
        for len in lens {
            let granules = len.div_ceil(GRANULE);
            let room = |(held, cut): (&Held, &u64)| {
                !held.shared.is_over() && held.shared.granules() - cut >= granules
            };
            let Some(at) = held.iter().zip(&cuts).position(room) else {
                // What is left is too little: the next hold takes its place.
                for held in held.iter().filter(|held| held.is_low()) {
                    held.shared.end();
                }
                return None;
            };
            places.push((at, cuts[at]));
            cuts[at] += granules;
        }
        let now = now();
        let slots = places.iter().map(|(at, granule)| {
            let held = &mut held[*at];
            held.last_cut = now;
            Slot::new(&held.shared, *granule)
        });
        let slots = slots.collect();
        for (held, cut) in held.iter_mut().zip(cuts) {
            held.cut = cut;
            if held.left() == 0 {
                held.shared.end();
            }
        }
        Some(slots)
    }

    /// Whether the next call should ask for a hold; then nobody else does until the answer is here.
    pub(super) fn ask(&self) -> Option<Asking<'_>> {
        if self.held.lock().iter().any(|held| !held.is_low()) {
            return None;
        }
        let first = !self.asked.swap(true, Ordering::AcqRel);
        first.then(|| Asking(self))
    }

    /// Cuts nothing from this hold any more: it was lost, or something in it failed.
    pub(super) fn give_up(&self, number: Generation) {
        let held = self.held.lock();
        for held in held.iter().filter(|held| held.number() == number) {
            held.shared.end();
        }
    }

    /// Lets go of a hold that the master has called back. `None`: it was given back before.
    pub(super) fn take(&self, number: Generation) -> Option<Arc<Shared>> {
        let mut held = self.held.lock();
        let at = held.iter().position(|held| held.number() == number)?;
        let shared = held.remove(at).shared;
        shared.over.store(true, Ordering::SeqCst);
        Some(shared)
    }

    /// Takes the holds out that are to be given back now.
    fn take_due(&self, now: Instant) -> Vec<ObjectRef> {
        let mut held = self.held.lock();
        let due = held.extract_if(.., |held| held.is_due(now));
        due.map(|held| ObjectRef::of_hold(held.number())).collect()
    }

    /// When the next one may be idle for too long.
    fn next_due(&self) -> Option<Instant> {
        let held = self.held.lock();
        held.iter().map(|held| held.last_cut + IDLE).min()
    }

    /// Gives all holds back. No slot may be in use.
    pub(super) async fn give_back(&self, core: &Core) {
        for held in self.held.lock().iter() {
            held.shared.end();
        }
        let due = self.take_due(now());
        if !due.is_empty()
            && let Err(error) = core.link.put_revoke(&due).await
        {
            tracing::debug!(%error, "holds are left to the master's time-outs");
        }
    }
}

/// The task that gives holds back. Runs until it is dropped.
pub(super) async fn tend_task(core: Arc<Core>) {
    loop {
        let due = core.holds.take_due(now());
        if !due.is_empty() {
            while let Err(error) = core.link.put_revoke(&due).await {
                // In a later membership it names nothing, which is an answer as well.
                tracing::debug!(%error, "holds wait to be given back");
                tokio::time::sleep(RETRY_AFTER).await;
            }
            continue;
        }
        let changed = core.holds.changed.notified();
        match core.holds.next_due() {
            None => changed.await,
            Some(due) => {
                // A hold in use is looked at again when it is not.
                let due = due.max(now() + RETRY_AFTER).into();
                let _ = tokio::time::timeout_at(due, changed).await;
            }
        }
    }
}
