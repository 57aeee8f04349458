//! The threads that copy memory, shared by the transports of one engine that move bytes by themselves.
//!
//! A [`Work`] is a batch cut into units of bounded size. Threads take units from the works in turn, so
//! a large batch neither occupies one thread only nor keeps later ones waiting. The queue holds one
//! entry per batch, never one per unit: it grows with what callers hold anyway, and a batch is never
//! refused for its size. Threads that wait for a batch may run its units as well
//! ([`PieceRun`] offers that), in which case the pool merely takes part.
//!
//! Units don't block: they copy, and a stopped peer does not stop a copy. The queue's lock is held to
//! take an entry, never while a unit runs. [`CopyPool::shutdown`] lets units under way finish, abandons
//! the rest, and joins the threads.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

mod cut;
mod inline;
mod run;
mod unit;

pub(crate) use cut::Part;
pub(crate) use run::{Moved, PartMover, PieceRun, Results};

/// Something to be done in units, by several threads at once.
pub(crate) trait Work: Send + Sync {
    /// Takes the next unit and runs it. `false` if there was none left to take; others may still be
    /// running.
    fn run_unit(&self) -> bool;

    /// Whether no unit is left to take.
    fn is_exhausted(&self) -> bool;

    /// No unit will be taken any more: what is left ends with an error.
    fn abandon(&self);
}

/// A fixed number of copy threads. See the module's text.
pub(crate) struct CopyPool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    size: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wanted: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    works: VecDeque<Arc<dyn Work>>,
    running: usize,
    closed: bool,
}

impl CopyPool {
    /// Starts the threads.
    pub(crate) fn start(threads: NonZero<u8>) -> io::Result<Self> {
        let pool = Self {
            shared: Arc::default(),
            threads: Mutex::default(),
            size: usize::from(threads.get()),
        };
        for number in 0..pool.size {
            let shared = Arc::clone(&pool.shared);
            shared.queue.lock().running += 1;
            let thread = std::thread::Builder::new()
                .name(format!("lc-copy-{number}"))
                .spawn(move || shared.serve());
            match thread {
                Ok(thread) => pool.threads.lock().push(thread),
                Err(error) => {
                    pool.shared.queue.lock().running -= 1;
                    pool.shutdown(Instant::now());
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    /// Queues a work of about this many units. After shutdown it is abandoned at once.
    pub(crate) fn submit(&self, work: Arc<dyn Work>, units: usize) {
        {
            let mut queue = self.shared.queue.lock();
            if queue.closed {
                drop(queue);
                work.abandon();
                return;
            }
            queue.works.push_back(work);
        }
        for _ in 0..units.min(self.size) {
            if !self.shared.wanted.notify_one() {
                break;
            }
        }
    }

    /// Abandons what is queued and waits for the threads until `deadline`; says whether they ended.
    /// A thread that is still copying then ends by itself after its unit.
    pub(crate) fn shutdown(&self, deadline: Instant) -> bool {
        let left = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.works)
        };
        self.shared.wanted.notify_all();
        for work in left {
            work.abandon();
        }
        let mut queue = self.shared.queue.lock();
        while queue.running > 0 {
            if self
                .shared
                .ended
                .wait_until(&mut queue, deadline)
                .timed_out()
            {
                break;
            }
        }
        let ended = queue.running == 0;
        drop(queue);
        let current = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // A last handle may be dropped by a copy thread, which can't join itself.
            if ended && thread.thread().id() != current && thread.join().is_err() {
                tracing::error!("a copy thread panicked");
            }
        }
        ended
    }
}

impl Drop for CopyPool {
    fn drop(&mut self) {
        self.shutdown(Instant::now());
    }
}

impl fmt::Debug for CopyPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyPool")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn serve(&self) {
        while let Some(work) = self.next() {
            let run = catch_unwind(AssertUnwindSafe(|| work.run_unit()));
            if run.is_err() {
                // The bug is reported by the panic itself; the batch must end all the same.
                work.abandon();
            }
        }
        self.queue.lock().running -= 1;
        self.ended.notify_all();
    }

    /// The next work with something left, which goes to the queue's end; none when closed.
    fn next(&self) -> Option<Arc<dyn Work>> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            match queue.works.pop_front() {
                Some(work) if work.is_exhausted() => {
                    // It may be the last handle on a batch: not under the lock.
                    MutexGuard::unlocked(&mut queue, || drop(work));
                }
                Some(work) => {
                    queue.works.push_back(Arc::clone(&work));
                    return Some(work);
                }
                None => self.wanted.wait(&mut queue),
            }
        }
    }
}

#[cfg(test)]
mod tests;
