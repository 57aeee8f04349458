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
use crate::mapped::{Few, MappedCopy, MappedPart, TOGETHER};
use crate::racy::{self, Source, Target, fence_after, fence_before};

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
        Ok(Place {
            piece,
            view,
            offset: remote.offset + part.offset,
            part,
        })
    }

    /// The ends of a part in a region that is mapped here; its pages are there from here on.
    fn map<'a>(
        &self,
        direction: Direction,
        place: &Place<'a>,
        memory: &'a View,
    ) -> Result<MappedPart<'a>, Moved> {
        let (offset, len) = (place.offset, place.part.len);
        let generation = place.piece.remote.generation;
        let checks = self.context.config.generation_checks;
        let tags = match generation.filter(|_| checks) {
            Some(generation) => {
                let tags = place.view.tags_of(offset, len);
                let tags = tags.map_err(|refusal| self.refuse(place.part, refusal))?;
                Some((tags, generation))
            }
            None => None,
        };
        memory.make_present(offset, len);
        let ends = match direction {
            Direction::Read => (Some(local_target(place)), memory.source(offset, len)),
            Direction::Write => (memory.target(offset, len), Some(local_source(place))),
        };
        let (Some(target), Some(source)) = ends else {
            return Err(self.refuse(place.part, Refusal::OutOfBounds));
        };
        Ok(MappedPart::new(target, source, tags))
    }

    /// Moves a few parts and adds a result for each. Those that are reached by address are kept for later instead, with
    /// the places of their results.
    fn move_few<'a>(
        &'a self,
        job: &'a Job,
        parts: &'a [Part],
        moved: &mut Results,
        by_address: &mut Vec<(usize, Place<'a>)>,
    ) {
        let mut mapped = Few::new();
        let mut views: Few<Result<&RegionView, Moved>> = Few::new();
        for part in parts {
            let place = self.locate(job, part);
            views.push(place.and_then(|place| match &place.view.backing {
                Backing::Mapped { memory, .. } => {
                    mapped.push(self.map(job.direction(), &place, memory)?);
                    Ok(place.view)
                }
                Backing::ByAddress => {
                    by_address.push((moved.len() + views.len(), place));
                    Err(Moved::HandBack)
                }
            }));
        }
        let copied = MappedCopy::of(job).run(&mapped);
        let mut copied = copied.iter();
        for (part, view) in parts.iter().zip(&views) {
            moved.push(match view {
                Err(reason) => *reason,
                Ok(view) => match copied.next().expect("one result for each") {
                    Ok(crc) => self.recheck(view, Moved::Done(*crc)),
                    Err(refusal) => self.refuse(part, *refusal),
                },
            });
        }
    }

    /// Moves the parts whose memory is reached by address, all in as few calls as possible.
    fn copy_by_address(&self, job: &Job, places: &[Place<'_>]) -> Vec<Moved> {
        if !self.attachment.reaches_by_address() {
            return vec![Moved::HandBack; places.len()];
        }
        // Such regions have no tags: a generation can't be checked.
        let checks = self.context.config.generation_checks;
        let untagged = |place: &Place<'_>| !checks || place.piece.remote.generation.is_none();
        let sums = job.wants_checksum();
        let (mut ranges, mut crcs) = (Vec::new(), Vec::new());
        for place in places.iter().filter(|place| untagged(place)) {
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
        places
            .iter()
            .map(|place| {
                if untagged(place) {
                    next()
                } else {
                    self.refuse(place.part, Refusal::NoTags)
                }
            })
            .collect()
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
        for parts in parts.chunks(TOGETHER) {
            self.move_few(job, parts, moved, &mut by_address);
        }
        if !by_address.is_empty() {
            let (at, places): (Vec<_>, Vec<_>) = by_address.into_iter().unzip();
            let results = self.copy_by_address(job, &places);
            for ((at, place), result) in at.into_iter().zip(&places).zip(results) {
                moved[at] = self.recheck(place.view, result);
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
    fn recheck(&self, view: &RegionView, moved: Moved) -> Moved {
        match moved {
            Moved::Done(_) if !self.attachment.is_current(view) => {
                Moved::Failed(PieceError::Refused(Refusal::UnknownRegion))
            }
            moved => moved,
        }
    }
}
