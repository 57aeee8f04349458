//! Knowing when every operation that had begun is over.
//!
//! After a fence has raised tags, a write that had claimed its granules before may still be under way:
//! a frame whose payload is arriving, a copy in the pool. Operations on behalf of peers therefore
//! count themselves in one of two buckets, the current one. A waiter switches the current bucket and
//! waits for the other to be empty: then all that had begun before has ended, however much has begun
//! since. An operation that was counted in a bucket sees tags as they were raised before the switch,
//! unless it is waited for.
//!
//! Ordering: counting in and reading the current bucket again, and switching and reading the count, are
//! sequentially consistent; so either the waiter sees the operation, or the operation sees the switch
//! and counts itself anew. One waiter at a time; a bucket that an earlier waiter gave up on must be empty
//! before it becomes current again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Counts the operations at work.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    current: AtomicUsize,
    begun: [AtomicU64; 2],
    /// Held by the waiter.
    turn: Mutex<()>,
    lock: Mutex<()>,
    ended: Condvar,
}

/// An operation at work.
#[derive(Debug)]
pub(crate) struct Begun {
    grace: Arc<Grace>,
    bucket: usize,
}

impl Grace {
    /// An operation begins; it ends when the answer is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Begun {
        loop {
            let bucket = self.current.load(Ordering::SeqCst);
            self.begun[bucket].fetch_add(1, Ordering::SeqCst);
            let begun = Begun {
                grace: Arc::clone(self),
                bucket,
            };
            if self.current.load(Ordering::SeqCst) == bucket {
                return begun;
            }
        }
    }

    /// Waits for all operations that had begun when this was called; says whether they are over.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let Some(_turn) = self.turn.try_lock_until(until) else {
            return false;
        };
        let before = self.current.load(Ordering::SeqCst);
        let next = 1 - before;
        if !self.wait_empty(next, until) {
            return false;
        }
        self.current.store(next, Ordering::SeqCst);
        self.wait_empty(before, until)
    }

    fn wait_empty(&self, bucket: usize, until: Instant) -> bool {
        let empty = || self.begun[bucket].load(Ordering::SeqCst) == 0;
        let mut guard = self.lock.lock();
        while !empty() {
            if self.ended.wait_until(&mut guard, until).timed_out() {
                return empty();
            }
        }
        true
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let grace = &self.grace;
        let last = grace.begun[self.bucket].fetch_sub(1, Ordering::SeqCst) == 1;
        if last && grace.turn.is_locked() {
            // With the lock held, the waiter is either before its check or asleep.
            let _guard = grace.lock.lock();
            grace.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn what_had_begun_is_waited_for_and_what_begins_later_is_not() {
        let grace = Arc::new(Grace::default());
        assert!(grace.wait(soon()));
        let early = grace.begin();
        assert!(!grace.wait(soon()));
        // The earlier waiter gave up; the operation is still waited for.
        let later = grace.begin();
        assert!(!grace.wait(soon()));
        drop(early);
        drop(later);
        assert!(grace.wait(late()));

        let during = std::thread::scope(|scope| {
            let early = grace.begin();
            let waiter = scope.spawn(|| grace.wait(late()));
            while grace.current.load(Ordering::SeqCst) == early.bucket {
                std::thread::yield_now();
            }
            let during = grace.begin();
            drop(early);
            assert!(waiter.join().expect("the waiter ends"));
            during
        });
        drop(during);
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
            for _ in 0..2000 {
                let now = clock.fetch_add(1, Ordering::SeqCst);
                assert!(grace.wait(late()));
                for slot in &running {
                    let began = slot.load(Ordering::SeqCst);
                    assert!(began == 0 || began > now, "an earlier operation is at work");
                }
            }
            stop.store(true, Ordering::SeqCst);
        });
    }
}
