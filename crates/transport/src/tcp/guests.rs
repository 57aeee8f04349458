//! How many peers may be connected to an engine.
//!
//! Each connection costs a descriptor and a buffer before its peer has proven anything, so both those
//! that greet and all of them are bounded. Who comes when there is no room is turned away without a
//! word, by closing, and counted. The event loops of an engine share the counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::EngineConfig;

/// The peers that are connected to this engine, and those among them that have not greeted it yet.
#[derive(Debug)]
pub(super) struct Guests {
    all: Room,
    greeting: Room,
}

/// Counters only: nothing else is ordered by them.
#[derive(Debug)]
struct Room {
    taken: AtomicU32,
    places: u32,
}

impl Room {
    fn new(places: u32) -> Self {
        Self {
            taken: AtomicU32::new(0),
            places,
        }
    }

    fn enter(&self) -> bool {
        let taken = |taken| (taken < self.places).then_some(taken + 1);
        let entered = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        entered.is_ok()
    }

    fn leave(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Guests {
    pub(super) fn new(config: &EngineConfig) -> Arc<Self> {
        Arc::new(Self {
            all: Room::new(config.max_connections.get()),
            greeting: Room::new(config.max_greetings.get()),
        })
    }

    /// A place for a peer that is about to greet, if there is one.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Guest> {
        if !self.greeting.enter() {
            return None;
        }
        if !self.all.enter() {
            self.greeting.leave();
            return None;
        }
        Some(Guest {
            guests: Arc::clone(self),
            greets: true,
        })
    }
}

/// The place of one peer, until it is dropped.
#[derive(Debug)]
pub(super) struct Guest {
    guests: Arc<Guests>,
    greets: bool,
}

impl Guest {
    /// Its greeting is over.
    pub(super) fn has_greeted(&mut self) {
        if std::mem::take(&mut self.greets) {
            self.guests.greeting.leave();
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.has_greeted();
        self.guests.all.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    #[test]
    fn places_are_given_until_there_are_none_and_again_when_they_are_free() {
        let places = |places| NonZero::new(places).expect("some");
        let guests = Guests::new(&EngineConfig {
            max_connections: places(3),
            max_greetings: places(2),
            ..EngineConfig::default()
        });
        let mut first = guests.admit().expect("there is room");
        let second = guests.admit().expect("there is room");
        assert!(guests.admit().is_none(), "two greet");
        first.has_greeted();
        first.has_greeted();
        let third = guests.admit().expect("one greets");
        drop(second);
        let mut fourth = guests.admit().expect("two are there, one greets");
        fourth.has_greeted();
        assert!(guests.admit().is_none(), "three are there");
        drop(first);
        assert!(guests.admit().is_some());
        drop((third, fourth));
    }
}
