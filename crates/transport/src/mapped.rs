//! Parts of a batch whose both ends are mapped here: checked, copied, and checked again, some at a time.
//!
//! What a check says of bytes holds only with a fence between the two, and such a fence waits for all stores before it:
//! after each part of 4 KiB it would cost a tenth of the copy. So some parts are checked before the first of them moves
//! and again when the last one has, and share the fences. They also share what is fetched ahead: tags when a part is
//! found, bytes while the part before it moves.

use std::sync::atomic::AtomicU64;

use layercake_protocol::ids::Generation;
use smallvec::SmallVec;

use crate::batch::Direction;
use crate::error::Refusal;
use crate::job::Job;
use crate::memory::{are_at, raise_to, settle, warm_tags};
use crate::racy::{Copies, Source, Target, fence_after, fence_before, prefetch};

/// The most parts that are checked together. On the stack: a unit asks for no memory.
pub(crate) const TOGETHER: usize = 32;

/// A list of so many.
pub(crate) type Few<T> = SmallVec<[T; TOGETHER]>;

/// A part that was validated and moves next. Both ends have one length.
#[derive(Debug)]
pub(crate) struct MappedPart<'a> {
    target: Target<'a>,
    source: Source<'a>,
    /// Those of the granules that it touches in the owner's region, and what they have to be.
    tags: Option<(&'a [AtomicU64], Generation)>,
}

impl<'a> MappedPart<'a> {
    /// Also has the tags fetched.
    pub(crate) fn new(
        target: Target<'a>,
        source: Source<'a>,
        tags: Option<(&'a [AtomicU64], Generation)>,
    ) -> Self {
        if let Some((tags, _)) = tags {
            warm_tags(tags);
        }
        Self {
            target,
            source,
            tags,
        }
    }
}

/// How the parts of a batch are moved.
#[derive(Debug)]
pub(crate) struct MappedCopy {
    direction: Direction,
    sums: bool,
    bytes: u64,
}

impl MappedCopy {
    pub(crate) fn of(job: &Job) -> Self {
        Self {
            direction: job.direction(),
            sums: job.wants_checksum(),
            bytes: job.bytes(),
        }
    }

    /// Moves them, in order. Their checksums, where wanted, else 0; refused are those whose tags are not what they have
    /// to be, before or after.
    pub(crate) fn run(&self, parts: &[MappedPart<'_>]) -> Few<Result<u32, Refusal>> {
        // The first is fetched while its tags are waited for, the others while the one before moves.
        if let Some(first) = parts.first() {
            prefetch(first.source);
        }
        let tagged = Tagged::of(parts);
        let mut moved: Few<Result<u32, Refusal>> = parts.iter().map(|_| Ok(0)).collect();
        let before = match self.direction {
            Direction::Read => are_at,
            Direction::Write => raise_to,
        };
        check(parts, &mut moved, before);
        if tagged.differ && self.direction == Direction::Write {
            // One that was overtaken by another of these must not land any more.
            check(parts, &mut moved, are_at);
        }
        fence_before();
        self.copy(parts, &mut moved);
        fence_after();
        if tagged.any && self.direction == Direction::Write {
            settle();
        }
        check(parts, &mut moved, are_at);
        moved
    }

    fn copy(&self, parts: &[MappedPart<'_>], moved: &mut [Result<u32, Refusal>]) {
        let copies = Copies::of(self.bytes);
        let mut following = parts.iter().skip(1).map(|part| part.source);
        for (part, moved) in parts.iter().zip(moved) {
            let next = following.next();
            let Ok(sum) = moved else {
                continue;
            };
            if self.sums {
                *sum = copies.copy_crc(part.target, part.source, next);
            } else {
                copies.copy(part.target, part.source, next);
            }
        }
    }
}

/// What the generations of some parts have to do with each other.
struct Tagged {
    any: bool,
    differ: bool,
}

impl Tagged {
    fn of(parts: &[MappedPart<'_>]) -> Self {
        let mut generations = parts.iter().filter_map(|part| Some(part.tags?.1));
        let first = generations.next();
        Self {
            any: first.is_some(),
            differ: generations.any(|generation| Some(generation) != first),
        }
    }
}

/// Refuses those whose tags `check` refuses.
fn check(
    parts: &[MappedPart<'_>],
    moved: &mut [Result<u32, Refusal>],
    check: fn(&[AtomicU64], Generation) -> Result<(), Refusal>,
) {
    for (part, moved) in parts.iter().zip(moved) {
        if let Some((tags, generation)) = part.tags
            && moved.is_ok()
            && let Err(refusal) = check(tags, generation)
        {
            *moved = Err(refusal);
        }
    }
}
