//! Knowing when every operation that had begun at one moment is over, however much begins later.
//!
//! After a fence has raised tags, a write that had claimed its granules before may still be under way:
//! a frame whose payload is arriving, a copy in the pool. Operations on behalf of peers therefore
//! count themselves in the current epoch. A [`Mark`] closes that epoch and begins the next one: it is
//! over when no operation of its epoch or an earlier one is left, and nothing that begins later counts
//! there. So asking about the same mark again and again gets somewhere under any traffic, as long as
//! each operation ends.
//!
//! The counts are a ring. The next epoch can begin only when its place is empty; while an operation
//! that is [`RING`] - 1 epochs old keeps it, marks stay open and take in what begins meanwhile. They are
//! not over anyway, that operation being earlier than they are; whoever asks when it has ended closes
//! them.
//!
//! # Ordering
//!
//! Counting in and then reading the epoch once more, and beginning an epoch and then reading counts,
//! are sequentially consistent. So either the reader of the counts sees the operation, or the operation
//! sees the new epoch and counts itself anew. Epochs begin with the lock held under which marks are
//! taken: an operation that counted itself in an epoch after a mark's has read a number that was stored
//! after the mark was taken, and sees what had been stored before that, raised tags in particular.
//!
//! A waiter announces itself and then reads counts; an operation that ends takes itself off and then
//! looks for waiters. All four are sequentially consistent, so the last one to end wakes a waiter that
//! counted it; the lock keeps the call from falling between that waiter's look and its sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Epochs that can have operations at the same time.
const RING: u64 = 8;
const SLOTS: usize = 8;
const _: () = assert!(SLOTS as u64 == RING);

/// Counts the operations at work.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    /// The current epoch; stored with `lock` held.
    epoch: AtomicU64,
    begun: [AtomicU64; SLOTS],
    waiting: AtomicUsize,
    lock: Mutex<()>,
    ended: Condvar,
}

/// An operation at work.
#[derive(Debug)]
pub(crate) struct Begun {
    grace: Arc<Grace>,
    epoch: u64,
}

/// The operations that had begun at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The last epoch that belongs to it.
    epoch: u64,
}

impl Grace {
    /// An operation begins; it ends when the answer is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Begun {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            self.count(epoch).fetch_add(1, Ordering::SeqCst);
            let begun = Begun {
                grace: Arc::clone(self),
                epoch,
            };
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return begun;
            }
        }
    }

    /// Remembers what has begun by now.
    pub(crate) fn mark(&self) -> Mark {
        let _guard = self.lock.lock();
        let mark = Mark {
            epoch: self.epoch.load(Ordering::SeqCst),
        };
        self.close(mark);
        mark
    }

    /// Whether all operations of a mark are over.
    pub(crate) fn is_over(&self, mark: Mark) -> bool {
        let _guard = self.lock.lock();
        self.look(mark)
    }

    /// Waits for the operations of a mark; says whether they are over.
    pub(crate) fn wait_over(&self, mark: Mark, until: Instant) -> bool {
        let mut guard = self.lock.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let over = loop {
            if self.look(mark) {
                break true;
            }
            if self.ended.wait_until(&mut guard, until).timed_out() {
                break self.look(mark);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        over
    }

    /// [`Self::is_over`], with the lock held.
    fn look(&self, mark: Mark) -> bool {
        // Earlier epochs had to be empty for their places to be used again.
        let first = (self.epoch.load(Ordering::SeqCst) + 1).saturating_sub(RING);
        self.close(mark)
            && (first..=mark.epoch).all(|epoch| self.count(epoch).load(Ordering::SeqCst) == 0)
    }

    /// Sees to it that later operations count in a later epoch, if there is a place for one; with the
    /// lock held.
    fn close(&self, mark: Mark) -> bool {
        if mark.epoch < self.epoch.load(Ordering::SeqCst) {
            return true;
        }
        let next = mark.epoch + 1;
        let free = self.count(next).load(Ordering::SeqCst) == 0;
        if free {
            self.epoch.store(next, Ordering::SeqCst);
        }
        free
    }

    fn count(&self, epoch: u64) -> &AtomicU64 {
        &self.begun[(epoch % RING) as usize]
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let grace = &self.grace;
        let last = grace.count(self.epoch).fetch_sub(1, Ordering::SeqCst) == 1;
        if last && grace.waiting.load(Ordering::SeqCst) > 0 {
            // With the lock held, a waiter is either before its look or asleep.
            let _guard = grace.lock.lock();
            grace.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn what_had_begun_is_waited_for_and_what_begins_later_is_not() {
        let grace = Arc::new(Grace::default());
        assert!(grace.is_over(grace.mark()));
        let early = grace.begin();
        let mark = grace.mark();
        assert!(!grace.is_over(mark));
        assert!(!grace.wait_over(mark, Instant::now()));
        let later = grace.begin();
        assert!(!grace.is_over(grace.mark()));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| grace.wait_over(mark, late()));
            drop(early);
            assert!(waiter.join().expect("the waiter ends"));
        });
        assert!(grace.is_over(mark));
        assert!(!grace.is_over(grace.mark()));
        drop(later);
        assert!(grace.wait_over(grace.mark(), late()));
    }

    #[test]
    fn operations_that_overlap_without_a_gap_keep_no_mark_for_ever() {
        let grace = Arc::new(Grace::default());
        let mut running = grace.begin();
        for _ in 0..100 {
            let mark = grace.mark();
            for _ in 0..3 {
                assert!(!grace.is_over(mark));
                // Asking moves nothing into the mark that begins later.
                let _begins_and_ends = grace.begin();
            }
            let next = grace.begin();
            drop(std::mem::replace(&mut running, next));
            assert!(grace.is_over(mark), "though there always was an operation");
        }
    }

    #[test]
    fn more_marks_than_the_ring_has_places_end_with_the_operation_that_holds_them() {
        let grace = Arc::new(Grace::default());
        let old = grace.begin();
        let mut running = Vec::new();
        let marks: Vec<_> = (0..3 * RING)
            .map(|_| {
                running.push(grace.begin());
                grace.mark()
            })
            .collect();
        running.clear();
        assert!(marks.iter().all(|mark| !grace.is_over(*mark)));
        let meanwhile = grace.begin();
        drop(old);
        // The last marks had taken in what began while they could not be closed, and no more.
        let open = marks.iter().filter(|mark| !grace.is_over(**mark));
        assert!(open.count() <= marks.len() - SLOTS + 1);
        let later = grace.begin();
        drop(meanwhile);
        assert!(marks.iter().all(|mark| grace.is_over(*mark)));
        drop(later);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Begin,
        End(usize),
        Mark,
        Ask(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            Just(Step::Begin),
            any::<usize>().prop_map(Step::End),
            Just(Step::Mark),
            any::<usize>().prop_map(Step::Ask),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// Against a list of what had begun at each mark.
        #[test]
        fn a_mark_is_over_when_all_that_had_begun_is(steps in vec(step(), 0..200)) {
            let grace = Arc::new(Grace::default());
            let mut running: Vec<(usize, Begun)> = Vec::new();
            let mut begun = 0;
            // Each mark, and how many operations had begun before it.
            let mut marks: Vec<(Mark, usize)> = Vec::new();
            for step in steps {
                match step {
                    Step::Begin => {
                        running.push((begun, grace.begin()));
                        begun += 1;
                    }
                    Step::End(which) if !running.is_empty() => {
                        let which = which % running.len();
                        running.swap_remove(which);
                    }
                    Step::Mark => marks.push((grace.mark(), begun)),
                    Step::Ask(which) if !marks.is_empty() => {
                        let (mark, before) = marks[which % marks.len()];
                        let ended = running.iter().all(|(number, _)| *number >= before);
                        if grace.is_over(mark) {
                            prop_assert!(ended, "an operation of the mark is at work");
                        } else if marks.len() < SLOTS {
                            prop_assert!(!ended, "nothing of the mark is left");
                        }
                    }
                    Step::End(_) | Step::Ask(_) => {}
                }
            }
            running.clear();
            prop_assert!(marks.iter().all(|(mark, _)| grace.is_over(*mark)));
        }
    }

    #[test]
    fn no_operation_is_missed_under_load() {
        let grace = Arc::new(Grace::default());
        let clock = AtomicU64::new(1);
        let stop = std::sync::atomic::AtomicBool::new(false);
        // Each slot: the time at which its operation began, 0 between operations.
        let running = [const { AtomicU64::new(0) }; 3];
        std::thread::scope(|scope| {
            for slot in &running {
                let (grace, clock, stop) = (&grace, &clock, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::SeqCst) {
                        let begun = grace.begin();
                        slot.store(clock.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                        std::hint::spin_loop();
                        slot.store(0, Ordering::SeqCst);
                        drop(begun);
                    }
                });
            }
            for round in 0..2000 {
                let now = clock.fetch_add(1, Ordering::SeqCst);
                let mark = grace.mark();
                if round % 2 == 0 {
                    assert!(grace.wait_over(mark, late()));
                } else {
                    while !grace.is_over(mark) {
                        std::thread::yield_now();
                    }
                }
                for slot in &running {
                    let began = slot.load(Ordering::SeqCst);
                    assert!(began == 0 || began > now, "an earlier operation is at work");
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
