//! The initiator's side: which owners this engine is attached to, and what waits until it is.
//!
//! A batch needs an attachment to its owner, then each of its regions opened. Both take messages and
//! thus time, so a batch is parked meanwhile, with its link or in the attachment's [`Parking`]; the
//! service thread carries on with it when the answer is there, and ends it when its deadline or the
//! owner's has passed. Submitting never waits.
//!
//! An owner that can't be reached by shared memory at all (another user, no means) is left alone for a
//! while, and its batches take another transport.
//!
//! Lock order: `links`, then an attachment's parking, then its regions. Neither is held while a job is
//! given results, started or handed on.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::EngineId;
use mio::Waker;
use parking_lot::Mutex;

use super::attachment::Attachment;
use super::mover::{Key, Opened, ShmMover, Views};
use super::wire::{Message, NotOpenedReason};
use crate::backend::Context;
use crate::config::TransportKind;
use crate::copy_pool::{CopyPool, Moved, PieceRun};
use crate::endpoint::Endpoint;
use crate::error::{PieceError, Refusal};
use crate::job::{Job, PieceSet};

/// How long an owner that shared memory does not reach is left alone.
const UNUSABLE_FOR: Duration = Duration::from_secs(10);

/// Pieces of a job.
#[derive(Debug)]
struct Waiting {
    job: Arc<Job>,
    set: PieceSet,
}

enum Link {
    Attaching(Vec<Waiting>),
    Attached(Arc<Attachment>),
    Unusable { until: Instant },
}

/// Pieces of a job that wait for regions to be opened.
struct Parked {
    waiting: Waiting,
    missing: HashSet<Key>,
    views: Views,
}

/// What waits for an owner's answers. The default is an open one with nothing in it.
#[derive(Default)]
pub(super) struct Parking {
    parked: Vec<Parked>,
    /// Regions that were asked for and not answered yet, since when, and whether the question could
    /// be sent.
    asked: HashMap<Key, (Instant, bool)>,
    /// The owner hung up: nothing may be parked any more.
    closed: bool,
}

/// See the module's text.
pub(super) struct Initiator {
    context: Arc<Context>,
    pool: Arc<CopyPool>,
    waker: Arc<Waker>,
    links: Mutex<Links>,
}

#[derive(Default)]
struct Links {
    by_engine: BTreeMap<EngineId, Link>,
    to_attach: Vec<Arc<Endpoint>>,
    closed: bool,
}

/// How an attempt to attach ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotAttached {
    /// What waits fails with this.
    Fail(PieceError),
    /// What waits takes another transport, and so does what comes for a while.
    FallBack,
}

impl Initiator {
    pub(super) fn new(context: Arc<Context>, pool: Arc<CopyPool>, waker: Arc<Waker>) -> Self {
        Self {
            context,
            pool,
            waker,
            links: Mutex::default(),
        }
    }

    /// Starts pieces or parks them.
    pub(super) fn submit(&self, job: Arc<Job>, set: PieceSet) {
        let peer = Arc::clone(job.peer());
        let waiting = Waiting { job, set };
        let mut links = self.links.lock();
        if links.closed {
            drop(links);
            waiting.job.fail(&waiting.set, PieceError::ShutDown);
            return;
        }
        match links.by_engine.get_mut(&peer.engine) {
            Some(Link::Attached(attachment)) => {
                let attachment = Arc::clone(attachment);
                drop(links);
                self.begin(&attachment, waiting);
            }
            Some(Link::Attaching(others)) => others.push(waiting),
            Some(Link::Unusable { until }) if Instant::now() < *until => {
                drop(links);
                self.fall_back(waiting);
            }
            Some(Link::Unusable { .. }) | None => {
                let link = Link::Attaching(vec![waiting]);
                links.by_engine.insert(peer.engine, link);
                links.to_attach.push(peer);
                drop(links);
                self.wake();
            }
        }
    }

    /// The peers to attach to that came up since the last call.
    pub(super) fn take_to_attach(&self) -> Vec<Arc<Endpoint>> {
        std::mem::take(&mut self.links.lock().to_attach)
    }

    /// Something waits now: the service has to look at the time.
    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "the shared-memory thread can't be woken");
        }
    }

    /// Whether batches to this engine take another transport for now.
    pub(super) fn is_unusable(&self, engine: EngineId) -> bool {
        let links = self.links.lock();
        matches!(
            links.by_engine.get(&engine),
            Some(Link::Unusable { until }) if Instant::now() < *until
        )
    }

    fn fall_back(&self, waiting: Waiting) {
        self.context
            .fall_back(waiting.job, waiting.set, TransportKind::Shm);
    }

    /// The greeting succeeded. `false` if this side is closing.
    pub(super) fn attached(&self, attachment: &Arc<Attachment>) -> bool {
        let link = {
            let mut links = self.links.lock();
            if links.closed {
                return false;
            }
            let link = Link::Attached(Arc::clone(attachment));
            links.by_engine.insert(attachment.owner, link)
        };
        if let Some(Link::Attaching(waiting)) = link {
            for waiting in waiting {
                self.begin(attachment, waiting);
            }
        }
        true
    }

    /// The greeting failed.
    pub(super) fn not_attached(&self, owner: EngineId, how: NotAttached) {
        let link = {
            let mut links = self.links.lock();
            let link = links.by_engine.remove(&owner);
            if how == NotAttached::FallBack {
                let until = Instant::now() + UNUSABLE_FOR;
                links.by_engine.insert(owner, Link::Unusable { until });
            }
            link
        };
        if let Some(Link::Attaching(waiting)) = link {
            for waiting in waiting {
                match how {
                    NotAttached::Fail(error) => waiting.job.fail(&waiting.set, error),
                    NotAttached::FallBack => self.fall_back(waiting),
                }
            }
        }
    }

    /// The owner hung up: what waits for it fails, and the next batch attaches anew.
    pub(super) fn detached(&self, attachment: &Arc<Attachment>) {
        {
            let mut links = self.links.lock();
            if let Some(Link::Attached(current)) = links.by_engine.get(&attachment.owner)
                && Arc::ptr_eq(current, attachment)
            {
                links.by_engine.remove(&attachment.owner);
            }
        }
        end_parked(attachment, PieceError::PeerGone);
    }

    /// Runs pieces if all their regions are open; parks them and asks otherwise.
    fn begin(&self, attachment: &Arc<Attachment>, waiting: Waiting) {
        let mut views = Views::default();
        let mut missing = HashSet::new();
        let mut last = None;
        for piece in waiting.job.pending(&waiting.set) {
            let Some(piece) = waiting.job.pieces().get(piece) else {
                continue;
            };
            let key = (piece.remote.region, piece.remote.capability);
            // Pieces of one region mostly come together.
            if last.replace(key) == Some(key) || views.has(key) || missing.contains(&key) {
                continue;
            }
            match opened(attachment, &key) {
                Some(view) => views.insert(key, view),
                None => {
                    missing.insert(key);
                }
            }
        }
        if missing.is_empty() {
            self.run(attachment, waiting, views);
            return;
        }
        let mut parking = attachment.parking.lock();
        if parking.closed {
            drop(parking);
            waiting.job.fail(&waiting.set, PieceError::PeerGone);
            return;
        }
        // Answers are taken in under this lock: one may have come just now.
        missing.retain(|key| match opened(attachment, key) {
            Some(view) => {
                views.insert(*key, view);
                false
            }
            None => true,
        });
        if missing.is_empty() {
            drop(parking);
            self.run(attachment, waiting, views);
            return;
        }
        let now = Instant::now();
        for key in &missing {
            let asked = parking.asked.entry(*key);
            asked.or_insert_with(|| (now, ask(attachment, key)));
        }
        parking.parked.push(Parked {
            waiting,
            missing,
            views,
        });
        drop(parking);
        self.wake();
    }

    fn run(&self, attachment: &Arc<Attachment>, waiting: Waiting, views: Views) {
        let context = Arc::clone(&self.context);
        let mover = ShmMover::new(context, Arc::clone(attachment), views);
        PieceRun::start(waiting.job, waiting.set, mover, &self.pool);
    }

    /// The owner answered that a region is open. `Err` if what it sent is not what it must be.
    pub(super) fn opened(
        &self,
        attachment: &Arc<Attachment>,
        key: Key,
        index: u32,
        files: (Option<OwnedFd>, Option<OwnedFd>),
    ) -> std::io::Result<()> {
        let mut parking = attachment.parking.lock();
        let view = attachment.open(key.0, key.1, index, files)?;
        let view = view.map_err(|refusal| Moved::Failed(PieceError::Refused(refusal)));
        let ready = parking.answer(key, &view);
        drop(parking);
        for parked in ready {
            self.run(attachment, parked.waiting, parked.views);
        }
        Ok(())
    }

    /// The owner answered that it does not open a region.
    pub(super) fn not_opened(
        &self,
        attachment: &Arc<Attachment>,
        key: Key,
        reason: NotOpenedReason,
    ) {
        let answer = match reason {
            NotOpenedReason::Refused(refusal) => Moved::Failed(PieceError::Refused(refusal)),
            NotOpenedReason::NotShared => Moved::HandBack,
        };
        let ready = attachment.parking.lock().answer(key, &Err(answer));
        for parked in ready {
            self.run(attachment, parked.waiting, parked.views);
        }
    }

    /// Ends what has waited too long. Returns whether anything still waits.
    pub(super) fn tick(&self, now: Instant) -> bool {
        let mut over = Vec::new();
        let attached: Vec<_> = {
            let mut links = self.links.lock();
            for link in links.by_engine.values_mut() {
                if let Link::Attaching(waiting) = link {
                    over.extend(waiting.extract_if(.., |w| w.job.stop_reason(now).is_some()));
                }
            }
            let attached = links.by_engine.values().filter_map(|link| match link {
                Link::Attached(attachment) => Some(Arc::clone(attachment)),
                Link::Attaching(_) | Link::Unusable { .. } => None,
            });
            attached.collect()
        };
        for waiting in over {
            let reason = waiting.job.stop_reason(now).unwrap_or(PieceError::Timeout);
            waiting.job.fail(&waiting.set, reason);
        }
        let mut waits = self.is_attaching();
        for attachment in attached {
            waits |= self.tick_parked(&attachment, now);
        }
        waits
    }

    fn is_attaching(&self) -> bool {
        let links = self.links.lock();
        let mut links = links.by_engine.values();
        links.any(|link| matches!(link, Link::Attaching(_)))
    }

    fn tick_parked(&self, attachment: &Arc<Attachment>, now: Instant) -> bool {
        let patience = self.context.config.deadlines.progress;
        let mut parking = attachment.parking.lock();
        for (key, (_, sent)) in &mut parking.asked {
            if !*sent {
                *sent = ask(attachment, key);
            }
        }
        let expired = parking
            .asked
            .extract_if(|_, (since, _)| now.duration_since(*since) >= patience);
        let expired: HashSet<Key> = expired.map(|(key, _)| key).collect();
        let is_over = |parked: &mut Parked| {
            parked.waiting.job.stop_reason(now).is_some() || !parked.missing.is_disjoint(&expired)
        };
        let over: Vec<_> = parking.parked.extract_if(.., is_over).collect();
        let waits = !parking.parked.is_empty() || !parking.asked.is_empty();
        drop(parking);
        for Parked { waiting, .. } in over {
            let reason = waiting.job.stop_reason(now).unwrap_or(PieceError::Stalled);
            waiting.job.fail(&waiting.set, reason);
        }
        waits
    }

    /// Ends everything that waits; later batches end at once.
    pub(super) fn close(&self) {
        let links = {
            let mut links = self.links.lock();
            links.closed = true;
            std::mem::take(&mut links.by_engine)
        };
        for link in links.into_values() {
            match link {
                Link::Attaching(waiting) => {
                    for waiting in waiting {
                        waiting.job.fail(&waiting.set, PieceError::ShutDown);
                    }
                }
                Link::Attached(attachment) => end_parked(&attachment, PieceError::ShutDown),
                Link::Unusable { .. } => {}
            }
        }
    }
}

/// The region, if it is open; an error if it is, but not with this capability.
fn opened(attachment: &Attachment, key: &Key) -> Option<Opened> {
    let view = attachment.region(key.0)?;
    Some(if view.capability.matches(&key.1) {
        Ok(view)
    } else {
        let refusal = Refusal::BadCapability;
        Err(Moved::Failed(PieceError::Refused(refusal)))
    })
}

/// Asks the owner to open a region; says whether the question was sent.
fn ask(attachment: &Attachment, key: &Key) -> bool {
    let message = Message::Open {
        region: key.0,
        capability: key.1,
    };
    let sent = attachment.channel.send(&message.encode(), &[]);
    if let Err(error) = &sent
        && error.kind() != std::io::ErrorKind::WouldBlock
    {
        tracing::debug!(owner = %attachment.owner, %error, "can't ask for a region");
    }
    sent.is_ok()
}

fn end_parked(attachment: &Attachment, error: PieceError) {
    let parked = {
        let mut parking = attachment.parking.lock();
        parking.closed = true;
        parking.asked.clear();
        std::mem::take(&mut parking.parked)
    };
    for Parked { waiting, .. } in parked {
        waiting.job.fail(&waiting.set, error);
    }
}

impl Parking {
    /// Notes an answer; returns what waits for nothing more.
    fn answer(&mut self, key: Key, view: &Opened) -> Vec<Parked> {
        self.asked.remove(&key);
        let mut ready = Vec::new();
        for mut parked in std::mem::take(&mut self.parked) {
            if parked.missing.remove(&key) {
                parked.views.insert(key, view.clone());
            }
            if parked.missing.is_empty() {
                ready.push(parked);
            } else {
                self.parked.push(parked);
            }
        }
        ready
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links = self.links.lock();
        f.debug_struct("Initiator")
            .field("links", &links.by_engine.len())
            .finish_non_exhaustive()
    }
}
