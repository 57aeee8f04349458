//! Moves the parts of a batch between local memory and an owner's, as the initiator.
//!
//! For each unit: raise a slot, validate each part (region, capability, access, bounds, and that the
//! entry is still current), check or claim generation tags, copy, check the tags and the entry again,
//! lower the slot. What was validated stays in place while the slot is raised, since the owner waits
//! for it. Once per batch, after the last byte, it is made sure that the owner is still there: bytes
//! exchanged with the memory of a dead process are worth nothing.
//!
//! Pieces that this side refuses on the owner's behalf are reported to it, to be counted there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use layercake_protocol::ids::{Capability, RegionId};
use smallvec::SmallVec;

use super::attachment::{Attachment, Backing, RegionView};
use super::cma::{self, Failure, Range};
use super::raw::View;
use crate::backend::Context;
use crate::batch::{Direction, Piece};
use crate::config::TransportKind;
use crate::copy_pool::{Moved, Part, PartMover, Results};
use crate::error::{PieceError, Refusal};
use crate::job::{Job, PieceSet};
use crate::racy::{self, Source, Target, fence_after, fence_before};

/// Parts that are validated before the first of them moves, so that what their tags lie in has been fetched. On the
/// stack: a unit asks for no memory.
const LOCATED: usize = 32;

/// A region and the capability that it was asked for with.
pub(super) type Key = (RegionId, Capability);

/// A region that was opened, or what asking for it came to.
pub(super) type Opened = Result<Arc<RegionView>, Moved>;

/// The regions of a batch. Most have one.
#[derive(Debug, Default)]
pub(super) struct Views(SmallVec<[(Key, Opened); 1]>);

impl Views {
    pub(super) fn insert(&mut self, key: Key, view: Opened) {
        let at = self.0.partition_point(|(known, _)| known.0 < key.0);
        self.0.insert(at, (key, view));
    }

    pub(super) fn has(&self, key: Key) -> bool {
        self.find(key).is_some()
    }

    fn find(&self, key: Key) -> Option<&Opened> {
        let from = self.0.partition_point(|(known, _)| known.0 < key.0);
        let same_region = self.0[from..]
            .iter()
            .take_while(|(known, _)| known.0 == key.0);
        let mut found = same_region.filter(|(known, _)| known.1 == key.1);
        found.next().map(|(_, view)| view)
    }
}

/// See the module's text.
pub(super) struct ShmMover {
    context: Arc<Context>,
    attachment: Arc<Attachment>,
    views: Views,
    violations: AtomicU32,
}

/// A part that was validated and moves next.
struct Place<'a> {
    piece: &'a Piece,
    view: &'a RegionView,
    /// First byte in the region.
    offset: u64,
    part: &'a Part,
}

impl ShmMover {
    pub(super) fn new(context: Arc<Context>, attachment: Arc<Attachment>, views: Views) -> Self {
        Self {
            context,
            attachment,
            views,
            violations: AtomicU32::new(0),
        }
    }

    /// Refuses a part. Its piece is counted once, by its first part.
    fn refuse(&self, part: &Part, refusal: Refusal) -> Moved {
        if refusal.is_security() && part.offset == 0 {
            self.violations.fetch_add(1, Ordering::Relaxed);
        }
        Moved::Failed(PieceError::Refused(refusal))
    }

    /// Validates a part. The slot is raised.
    fn locate<'a>(&'a self, job: &'a Job, part: &'a Part) -> Result<Place<'a>, Moved> {
        let piece = &job.pieces()[part.piece];
        let remote = &piece.remote;
        let view = match self.views.find((remote.region, remote.capability)) {
            Some(Ok(view)) => view,
            Some(Err(Moved::Failed(PieceError::Refused(refusal)))) => {
                return Err(self.refuse(part, *refusal));
            }
            Some(Err(other)) => return Err(*other),
            None => return Err(self.refuse(part, Refusal::UnknownRegion)),
        };
        view.check(job.direction(), remote)
            .map_err(|refusal| self.refuse(part, refusal))?;
        if !self.attachment.is_current(view) {
            return Err(self.refuse(part, Refusal::UnknownRegion));
        }
        let offset = remote.offset + part.offset;
        if remote.generation.is_some() {
            view.warm_tags(offset, part.len);
        }
        Ok(Place {
            piece,
            view,
            offset,
            part,
        })
    }

    /// The tag rule, before and after; nothing to check without a generation.
    fn check_tags(&self, job: &Job, place: &Place<'_>, before: bool) -> Result<(), Moved> {
        let Some(generation) = place.piece.remote.generation else {
            return Ok(());
        };
        if !self.context.config.generation_checks {
            return Ok(());
        }
        let (offset, len) = (place.offset, place.part.len);
        let direction = job.direction();
        let checked = if before {
            place.view.check_before(direction, offset, len, generation)
        } else {
            place.view.check_after(direction, offset, len, generation)
        };
        checked.map_err(|refusal| self.refuse(place.part, refusal))
    }

    fn copy_mapped(&self, job: &Job, place: &Place<'_>, memory: &View) -> Result<u32, Moved> {
        self.check_tags(job, place, true)?;
        let outside = || self.refuse(place.part, Refusal::OutOfBounds);
        let (offset, len) = (place.offset, place.part.len);
        memory.make_present(offset, len);
        let (target, source) = match job.direction() {
            Direction::Read => (
                local_target(place),
                memory.source(offset, len).ok_or_else(outside)?,
            ),
            Direction::Write => (
                memory.target(offset, len).ok_or_else(outside)?,
                local_source(place),
            ),
        };
        fence_before();
        let crc = if job.wants_checksum() {
            racy::copy_crc(target, source, 0)
        } else {
            racy::copy_past(target, source);
            0
        };
        fence_after();
        self.check_tags(job, place, false)?;
        Ok(crc)
    }

    /// Moves the parts whose memory is reached by address, all in as few calls as possible.
    fn copy_by_address(&self, job: &Job, places: &[Place<'_>]) -> Vec<Moved> {
        if !self.attachment.reaches_by_address() {
            return vec![Moved::HandBack; places.len()];
        }
        // Such regions have no tags: a generation can't be checked.
        let tags: Vec<_> = places
            .iter()
            .map(|place| self.check_tags(job, place, true))
            .collect();
        let sums = job.wants_checksum();
        let (mut ranges, mut crcs) = (Vec::new(), Vec::new());
        for (place, _) in places.iter().zip(&tags).filter(|(_, tags)| tags.is_ok()) {
            let remote = place.view.entry.base.wrapping_add(place.offset);
            ranges.push(match job.direction() {
                Direction::Read => Range::Read {
                    remote,
                    local: local_target(place),
                },
                Direction::Write => {
                    let local = local_source(place);
                    crcs.push(if sums { racy::crc(local, 0) } else { 0 });
                    Range::Write { remote, local }
                }
            });
        }
        fence_before();
        let results = cma::transfer(self.attachment.pid, &ranges, || self.attachment.is_alive());
        fence_after();
        let mut crcs = crcs.into_iter();
        let mut moved = ranges.iter().zip(results).map(|(range, result)| {
            let crc = match range {
                Range::Read { local, .. } if sums && result.is_ok() => {
                    racy::crc(local.as_source(), 0)
                }
                Range::Read { .. } => 0,
                Range::Write { .. } => crcs.next().unwrap_or(0),
            };
            match result {
                Ok(()) => Moved::Done(crc),
                Err(Failure::Forbidden) => {
                    self.attachment.give_up_by_address();
                    Moved::HandBack
                }
                Err(Failure::Gone) => Moved::Failed(PieceError::PeerGone),
                // Its owner unmapped it without a word, or protected it.
                Err(Failure::BadAddress) => {
                    Moved::Failed(PieceError::Refused(Refusal::UnknownRegion))
                }
            }
        });
        let mut next = || moved.next().unwrap_or(Moved::HandBack);
        tags.into_iter()
            .map(|tags| tags.map_or_else(|refused| refused, |()| next()))
            .collect()
    }
}

/// Has the bytes fetched that are read first when this part is copied.
fn prefetch(direction: Direction, place: &Place<'_>) {
    match (direction, &place.view.backing) {
        (Direction::Write, Backing::Mapped { .. }) => racy::prefetch(local_source(place)),
        (Direction::Read, Backing::Mapped { memory, .. }) => {
            if let Some(source) = memory.source(place.offset, place.part.len) {
                racy::prefetch(source);
            }
        }
        (_, Backing::ByAddress) => {}
    }
}

fn local_source<'a>(place: &Place<'a>) -> Source<'a> {
    let (offset, len) = local_range(place.part);
    let part = place.piece.local.source().part(offset, len);
    part.expect("a part lies inside its piece, whose ends have one length")
}

fn local_target<'a>(place: &Place<'a>) -> Target<'a> {
    let (offset, len) = local_range(place.part);
    let part = place.piece.local.target().part(offset, len);
    part.expect("a part lies inside its piece, whose ends have one length")
}

fn local_range(part: &Part) -> (usize, usize) {
    let size = |n| usize::try_from(n).expect("a range inside mapped memory fits");
    (size(part.offset), size(part.len))
}

impl PartMover for ShmMover {
    fn move_unit(&self, job: &Job, parts: &[Part], moved: &mut Results) {
        let slot = self.attachment.slots.raise();
        let mut by_address = Vec::new();
        let first = moved.len();
        let mut located = SmallVec::<[_; LOCATED]>::new();
        for parts in parts.chunks(LOCATED) {
            located.extend(parts.iter().map(|part| self.locate(job, part)));
            let mut places = located.drain(..).peekable();
            while let Some(place) = places.next() {
                if let Some(Ok(next)) = places.peek() {
                    prefetch(job.direction(), next);
                }
                match place {
                    Err(reason) => moved.push(reason),
                    Ok(place) => match &place.view.backing {
                        Backing::Mapped { memory, .. } => {
                            let copied = self.copy_mapped(job, &place, memory);
                            let copied = copied.map(|crc| self.recheck(&place, Moved::Done(crc)));
                            moved.push(copied.unwrap_or_else(|reason| reason));
                        }
                        Backing::ByAddress => {
                            moved.push(Moved::HandBack);
                            by_address.push((moved.len() - 1, place));
                        }
                    },
                }
            }
        }
        if !by_address.is_empty() {
            let (at, places): (Vec<_>, Vec<_>) = by_address.into_iter().unzip();
            let results = self.copy_by_address(job, &places);
            for ((at, place), result) in at.into_iter().zip(&places).zip(results) {
                moved[at] = self.recheck(place, result);
            }
        }
        debug_assert_eq!(moved.len() - first, parts.len());
        drop(slot);
    }

    fn is_mere_copy(&self, job: &Job, parts: &[Part]) -> bool {
        parts.iter().all(|part| {
            let remote = &job.pieces()[part.piece].remote;
            match self.views.find((remote.region, remote.capability)) {
                Some(Ok(view)) => {
                    view.is_present(remote.offset.saturating_add(part.offset), part.len)
                }
                // Refused, or handed on: nothing is moved.
                _ => true,
            }
        })
    }

    fn conclude(&self, _job: &Job) -> Result<(), PieceError> {
        let violations = self.violations.load(Ordering::Relaxed);
        if violations > 0 {
            self.attachment.report_violations(violations);
        }
        if self.attachment.is_alive() {
            Ok(())
        } else {
            Err(PieceError::PeerGone)
        }
    }

    fn hand_back(&self, job: Arc<Job>, pieces: PieceSet) {
        self.context.fall_back(job, pieces, TransportKind::Shm);
    }
}

impl ShmMover {
    /// What a part came to, now that its bytes have moved: it counts only if its region is still
    /// there.
    fn recheck(&self, place: &Place<'_>, moved: Moved) -> Moved {
        match moved {
            Moved::Done(_) if !self.attachment.is_current(place.view) => {
                Moved::Failed(PieceError::Refused(Refusal::UnknownRegion))
            }
            moved => moved,
        }
    }
}
