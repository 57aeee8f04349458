//! Upserts of one key take turns within a client, in the order in which they came.
//!
//! An upsert takes a key from whoever is writing it, another upsert included, which is then refused. Threads that
//! replace one key at the same time would do so to each other; so each waits for those before it.
//!
//! A call joins the lines of all its keys at once, so two calls stand in the same order wherever they meet: none waits
//! for one that came later, and many small calls don't keep a large one waiting. It waits on the calling thread, not in a
//! task, and looks up now and then, so that a person can end it. Whoever waits too long goes ahead, and keeps
//! its place: what happens then is as between two clients.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::time::{Duration, Instant};

use layercake_protocol::key::ObjectKey;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// How often a call that waits looks up.
const LOOK_UP_EVERY: Duration = Duration::from_millis(100);

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
        let (ticket, keys) = self.lines.lock().join(keys);
        // Behind this the lock is let go of first, whatever happens: an end of the turn takes it.
        let turn = Turn {
            turns: self,
            ticket,
            keys,
        };
        let until = Instant::now() + self.patience;
        let mut lines = self.lines.lock();
        while lines.waiting.contains_key(&ticket) && Instant::now() < until {
            let slice = until.min(Instant::now() + LOOK_UP_EVERY);
            if self.given.wait_until(&mut lines, slice).timed_out() {
                MutexGuard::unlocked(&mut lines, &mut look_up)?;
            }
        }
        drop(lines);
        Ok(turn)
    }
}

impl Lines {
    /// Puts a call at the end of the lines of its keys.
    fn join<'a>(&mut self, keys: impl Iterator<Item = &'a ObjectKey>) -> (Ticket, Vec<ObjectKey>) {
        self.last += 1;
        let ticket = self.last;
        let mut joined = Vec::with_capacity(keys.size_hint().0);
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
            joined.push(key.clone());
        }
        if waits_in > 0 {
            self.waiting.insert(ticket, waits_in);
        }
        (ticket, joined)
    }

    /// Takes a call out of the lines of its keys; whether another has its turn now.
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
