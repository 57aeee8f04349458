//! Which copies a peer has under way in this engine's memory.
//!
//! An initiator copies by itself, so the owner of the memory can't count. Each attached peer gets a
//! page of slots that both map writable. A thread of the peer takes a slot that no other thread of it
//! uses, makes its number odd ("raised") before it validates and copies, and even again afterwards.
//! The owner only reads. It waits for what was raised at one moment to have been lowered since: numbers
//! only grow, so a slot that is raised anew by later work does not keep it waiting.
//!
//! # Why the owner may rely on it
//!
//! The initiator stores its slot, then loads the region's entry in the table (or claims a tag). The
//! owner changes the entry (or the tag), then loads the slots. With a sequentially consistent fence
//! between each pair, at least one side sees the other's store: either the initiator finds the entry
//! withdrawn and copies nothing, or the owner finds the slot raised and waits. (Without the fences both
//! loads could pass both stores, and both sides go on: Dekker's problem.)
//!
//! Lowering is a release store after the copy's fence, and the owner's load that sees it acquires: the
//! copy's bytes are there, and its reads are over, once the slot is seen lowered.
//!
//! A peer that dies with a raised slot never lowers it; its socket's hang-up clears its page as a whole.
//! A peer that merely stands still with a raised slot may still write when it goes on, so the owner
//! waits, up to its deadline.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;

use super::raw::View;
use crate::racy::fence_after;

/// Slots per peer: threads of one process that copy at the same time.
const SLOTS: usize = 64;

/// Words between two slots, so that threads don't share cache lines.
const STRIDE: usize = 8;

/// Bytes of a peer's slots.
const LEN: u64 = (SLOTS * STRIDE * size_of::<u64>()) as u64;

/// The owner's side of one peer's slots.
#[derive(Debug)]
pub(super) struct OwnerSlots {
    view: View,
}

/// The slots that were raised at one moment, with their numbers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Raised(Vec<(usize, u64)>);

impl Raised {
    /// Whether there were none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl OwnerSlots {
    /// Makes a page of slots, and the file to send to the peer.
    pub(super) fn create() -> io::Result<(OwnedFd, Self)> {
        let (file, view) = View::create("layercake-slots", LEN, false)?;
        Ok((file, Self { view }))
    }

    /// The slots that are raised now. What the caller stored before is seen by every copy that is not
    /// among them.
    pub(super) fn raised(&self) -> Raised {
        raised(self.view.words())
    }

    /// Whether all of `raised` have been lowered since.
    pub(super) fn are_over(&self, raised: &Raised) -> bool {
        are_over(self.view.words(), raised)
    }
}

fn raised(words: &[AtomicU64]) -> Raised {
    fence(Ordering::SeqCst);
    let numbers = words.iter().step_by(STRIDE).take(SLOTS).enumerate();
    let numbers = numbers.map(|(slot, word)| (slot, word.load(Ordering::Acquire)));
    Raised(numbers.filter(|(_, number)| number & 1 == 1).collect())
}

fn are_over(words: &[AtomicU64], raised: &Raised) -> bool {
    let mut raised = raised.0.iter();
    raised.all(|(slot, number)| words[slot * STRIDE].load(Ordering::Acquire) != *number)
}

/// The initiator's side of its slots at one owner.
#[derive(Debug)]
pub(super) struct PeerSlots {
    view: View,
    /// One bit per slot: whether a thread of this process has it.
    taken: AtomicU64,
}

impl PeerSlots {
    /// Maps the slots that an owner sent.
    pub(super) fn map(file: impl AsFd) -> io::Result<Self> {
        Ok(Self {
            view: View::of_peer(file, LEN, true, SealFlags::empty())?,
            taken: AtomicU64::new(0),
        })
    }

    /// Raises a slot until the guard is dropped. What the caller loads afterwards is later than any
    /// store of an owner that did not see the slot raised.
    pub(super) fn raise(&self) -> RaisedSlot<'_> {
        raise(self.view.words(), &self.taken)
    }
}

fn raise<'a>(words: &'a [AtomicU64], taken: &'a AtomicU64) -> RaisedSlot<'a> {
    let mut bits = taken.load(Ordering::Relaxed);
    let slot = loop {
        let slot = bits.trailing_ones();
        if slot as usize == SLOTS {
            // More threads than slots: one of them is about to finish its unit.
            std::thread::yield_now();
            bits = taken.load(Ordering::Relaxed);
            continue;
        }
        let with = bits | 1 << slot;
        match taken.compare_exchange_weak(bits, with, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break slot,
            Err(now) => bits = now,
        }
    };
    let word = &words[slot as usize * STRIDE];
    let number = word.load(Ordering::Relaxed) | 1;
    word.store(number, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    RaisedSlot {
        word,
        number,
        taken,
        bit: 1 << slot,
    }
}

/// A raised slot; dropping it lowers the slot.
#[derive(Debug)]
pub(super) struct RaisedSlot<'a> {
    word: &'a AtomicU64,
    number: u64,
    taken: &'a AtomicU64,
    bit: u64,
}

impl Drop for RaisedSlot<'_> {
    fn drop(&mut self) {
        fence_after();
        self.word
            .store(self.number.wrapping_add(1), Ordering::Release);
        self.taken.fetch_and(!self.bit, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn page() -> (Vec<AtomicU64>, AtomicU64) {
        let words = (0..SLOTS * STRIDE).map(|_| AtomicU64::new(0)).collect();
        (words, AtomicU64::new(0))
    }

    #[test]
    fn the_owner_waits_for_what_was_raised_and_for_nothing_later() {
        let (words, taken) = page();
        assert!(raised(&words).is_empty());
        let first = raise(&words, &taken);
        let second = raise(&words, &taken);
        let seen = raised(&words);
        assert_eq!(seen.0.len(), 2);
        drop(first);
        assert!(!are_over(&words, &seen));
        // The same slot, raised anew: that is later work.
        let third = raise(&words, &taken);
        drop(second);
        assert!(are_over(&words, &seen));
        assert_eq!(raised(&words).0.len(), 1);
        drop(third);
        assert!(raised(&words).is_empty());
    }

    #[test]
    fn both_sides_see_one_page() {
        let (file, owner) = OwnerSlots::create().expect("created");
        let peer = PeerSlots::map(file).expect("mapped");
        let guard = peer.raise();
        let seen = owner.raised();
        assert!(!seen.is_empty() && !owner.are_over(&seen));
        drop(guard);
        assert!(owner.are_over(&seen));
    }

    #[test]
    fn more_threads_than_slots_take_turns() {
        let (words, taken) = page();
        let holders: Vec<_> = (0..SLOTS).map(|_| raise(&words, &taken)).collect();
        std::thread::scope(|scope| {
            let late = scope.spawn(|| drop(raise(&words, &taken)));
            assert!(!late.is_finished());
            drop(holders);
            late.join().expect("gets a slot");
        });
        assert!(raised(&words).is_empty());
    }

    /// The argument of the header as a litmus test: a copy begins and a region is withdrawn at the same
    /// moment, many times, and each time at least one side sees the other.
    #[test]
    fn withdrawing_and_raising_never_miss_each_other() {
        const ROUNDS: u64 = 30_000;
        let (words, taken) = page();
        let [entry, copier, owner] = [const { AtomicU64::new(0) }; 3];
        let owner_saw = AtomicBool::new(false);
        let wait_for = |side: &AtomicU64, step: u64| {
            let mut spins = 0_u32;
            while side.load(Ordering::Acquire) < step {
                spins += 1;
                if spins.is_multiple_of(64) {
                    std::thread::yield_now();
                }
            }
        };
        // Shifts the two sides against each other, differently in every round.
        let linger = |round: u64, factor: u64| {
            for _ in 0..round.wrapping_mul(factor) >> 59 {
                std::hint::spin_loop();
            }
        };
        let rounds = || (0..ROUNDS).map(|round| 2 * round);
        std::thread::scope(|scope| {
            let missed = scope.spawn(|| {
                let mut missed = Vec::new();
                for round in rounds() {
                    copier.store(round + 1, Ordering::Release);
                    wait_for(&owner, round + 1);
                    linger(round, 0x9E37_79B9_7F4A_7C15);
                    let slot = raise(&words, &taken);
                    let withdrawn = entry.load(Ordering::Relaxed) > round;
                    copier.store(round + 2, Ordering::Release);
                    // The slot stays raised until the owner has looked.
                    wait_for(&owner, round + 2);
                    if !withdrawn && !owner_saw.load(Ordering::Relaxed) {
                        missed.push(round);
                    }
                    drop(slot);
                }
                missed
            });
            for round in rounds() {
                owner.store(round + 1, Ordering::Release);
                wait_for(&copier, round + 1);
                linger(round, 0xC2B2_AE3D_27D4_EB4F);
                entry.store(round + 1, Ordering::Relaxed);
                owner_saw.store(!raised(&words).is_empty(), Ordering::Relaxed);
                owner.store(round + 2, Ordering::Release);
                wait_for(&copier, round + 2);
            }
            let missed = missed.join().expect("runs");
            assert_eq!(missed, [0; 0], "rounds in which both went on");
        });
    }
}
