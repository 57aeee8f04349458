//! Upserts of one key take turns within a client, in the order in which they came.
//!
//! An upsert takes a key from whoever is writing it, another upsert included, which is then refused. Threads that
//! replace one key at the same time would do so to each other; so each waits for those before it.
//!
//! A call joins the lines of all its keys at once, so two calls stand in the same order wherever they meet: none waits
//! for one that came later, and many small calls don't keep a large one waiting. It waits on the calling thread, not in a
//! task, and looks up now and then, so that a person can end it. Whoever waits too long goes ahead, and keeps
//! its place: what happens then is as between two clients. So does a call that is made by what looks up, a signal's
//! handler: whoever it would wait for may be waiting for the call that it interrupts.

use std::cell::Cell;
use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::time::{Duration, Instant};

use layercake_protocol::key::ObjectKey;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// How often a call that waits looks up.
const LOOK_UP_EVERY: Duration = Duration::from_millis(100);

thread_local! {
    /// Whether a call waits below on this thread, and looks up.
    static LOOKS_UP: Cell<bool> = const { Cell::new(false) };
}

/// The turns of a client.
#[derive(Debug)]
pub(crate) struct Turns {
    /// How long a call waits for others.
    patience: Duration,
    lines: Mutex<Lines>,
    given: Condvar,
}

/// A call, by when it came.
type Ticket = u64;

#[derive(Debug, Default)]
struct Lines {
    last: Ticket,
    by_key: HashMap<ObjectKey, Line>,
    /// Calls that wait, and in how many lines each is not the first.
    waiting: HashMap<Ticket, usize>,
}

/// Who wants a key.
#[derive(Debug)]
struct Line {
    first: Ticket,
    behind: VecDeque<Ticket>,
}

impl Turns {
    /// Calls wait so long at most.
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            patience,
            lines: Mutex::default(),
            given: Condvar::new(),
        }
    }

    /// Waits until nobody who came before replaces any of these keys; whoever comes later waits for as long as the
    /// answer lives. Meanwhile `look_up` is called now and then, without a lock: its error ends the wait.
    pub(crate) fn take<'a, E>(
        &self,
        keys: impl Iterator<Item = &'a ObjectKey>,
        mut look_up: impl FnMut() -> Result<(), E>,
    ) -> Result<Turn<'_>, E> {
        let keys: Vec<ObjectKey> = keys.cloned().collect();
        let ticket = self.lines.lock().join(&keys);
        // Behind this the lock is let go of first, whatever happens: an end of the turn takes it.
        let turn = Turn {
            turns: self,
            ticket,
            keys,
        };
        if LOOKS_UP.get() {
            return Ok(turn);
        }
        let until = Instant::now() + self.patience;
        // Also while others get their turns all the time.
        let mut next_look = Instant::now() + LOOK_UP_EVERY;
        let mut lines = self.lines.lock();
        while lines.waiting.contains_key(&ticket) && Instant::now() < until {
            if Instant::now() >= next_look {
                MutexGuard::unlocked(&mut lines, || marked(&mut look_up))?;
                next_look = Instant::now() + LOOK_UP_EVERY;
            } else {
                self.given.wait_until(&mut lines, until.min(next_look));
            }
        }
        drop(lines);
        Ok(turn)
    }
}

/// Runs `look_up`, with calls that it makes known as such.
fn marked<T>(look_up: impl FnOnce() -> T) -> T {
    struct Unmark;
    impl Drop for Unmark {
        fn drop(&mut self) {
            LOOKS_UP.set(false);
        }
    }
    LOOKS_UP.set(true);
    let _unmark = Unmark;
    look_up()
}

impl Lines {
    /// Puts a call at the end of the lines of its keys.
    fn join(&mut self, keys: &[ObjectKey]) -> Ticket {
        self.last += 1;
        let ticket = self.last;
        let mut waits_in = 0;
        for key in keys {
            match self.by_key.entry(key.clone()) {
                Entry::Vacant(entry) => {
                    entry.insert(Line {
                        first: ticket,
                        behind: VecDeque::new(),
                    });
                }
                Entry::Occupied(mut entry) => {
                    let line = entry.get_mut();
                    if *line.behind.back().unwrap_or(&line.first) == ticket {
                        // Named twice.
                        continue;
                    }
                    line.behind.push_back(ticket);
                    waits_in += 1;
                }
            }
        }
        if waits_in > 0 {
            self.waiting.insert(ticket, waits_in);
        }
        ticket
    }

    /// Takes a call out of the lines of its keys, which may be named twice; whether another has its turn now.
    fn leave(&mut self, ticket: Ticket, keys: &[ObjectKey]) -> bool {
        let mut given = false;
        for key in keys {
            let Some(line) = self.by_key.get_mut(key) else {
                continue;
            };
            if line.first != ticket {
                line.behind.retain(|behind| *behind != ticket);
                continue;
            }
            let Some(next) = line.behind.pop_front() else {
                self.by_key.remove(key);
                continue;
            };
            line.first = next;
            if let Some(waits_in) = self.waiting.get_mut(&next) {
                *waits_in -= 1;
                if *waits_in == 0 {
                    self.waiting.remove(&next);
                    given = true;
                }
            }
        }
        self.waiting.remove(&ticket);
        given
    }
}

/// The turn of a call.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    ticket: Ticket,
    keys: Vec<ObjectKey>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.turns.lines.lock().leave(self.ticket, &self.keys) {
            self.turns.given.notify_all();
        }
    }
}

#[cfg(test)]
#[path = "turns_tests.rs"]
mod tests;
