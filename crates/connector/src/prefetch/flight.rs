//! How fast layers are asked for (W6). Pure: time is passed in.
//!
//! A link is shared by all calls that are under way: what is asked for early takes from what is needed
//! first, and with all layers under way the first arrives when nearly all do. So layers are asked for at the
//! pace at which they arrive, and a little faster: then the link has one or two of them at a time, in order,
//! however many are still on a long way. The pace is what arrived while anything was under way; it finds
//! what the link, or the computation, makes of it by itself, since a little more is always asked for. Two
//! layers may be under way at any pace, so that the link does not rest.

use std::time::{Duration, Instant};

/// What may be under way before a pace is known, which is once, in a worker's first step. Too little, and a fast link
/// rests until the first answer: this is a millisecond of 8 GB/s, and answers take less. Too much, and the first layer shares
/// the link with what is not needed yet: on 1 Gbit/s this is 67 ms, once.
const START: u64 = 8 << 20;
/// What is asked for, of what arrives. Only what is above 1 finds out that a link has become faster, a tenth with every
/// fading of the measurement. But on a link that gives no more it piles up, a tenth of a layer with each: after the
/// 48 layers of a large model five are under way that need not be.
const FASTER: f64 = 1.1;
/// What is left of a measurement with each further call: the last fifty count, about a step of a large model. With fewer, one
/// call in forty that is stuck would slow the pace down and let it up again within a step; with more, a link that has changed
/// would be followed steps later.
const FADE: f64 = 0.98;
/// How exact timers are, in seconds. What was due within it may be asked for at once.
const TIMER: f64 = 1e-3;

/// The pace, and what is under way.
#[derive(Clone, Debug, Default)]
pub(super) struct Flight {
    flying: u64,
    /// Bytes asked for since there was room, and the most of it: a layer.
    asked: u64,
    layer: u64,
    /// What arrived, and in how much time with anything under way; both fade.
    bytes: f64,
    seconds: f64,
    /// Up to when that time is counted.
    counted: Option<Instant>,
    /// Bytes that may be asked for by the pace, as of then.
    due: f64,
    since: Option<Instant>,
}

impl Flight {
    /// Nothing is under way, whatever was heard of it.
    pub(super) fn clear(&mut self) {
        self.flying = 0;
        self.due = 0.0;
        self.since = None;
    }

    /// Whether another layer may be asked for; if not, when that is to be asked again, or after a call. `typical`:
    /// seconds that a layer takes to arrive.
    pub(super) fn has_room(&mut self, now: Instant, typical: f64) -> Result<(), Option<Duration>> {
        self.asked = 0;
        if self.seconds <= 0.0 {
            return if self.flying < START {
                Ok(())
            } else {
                Err(None)
            };
        }
        let pace = self.bytes / self.seconds * FASTER;
        let since = self.since.replace(now).unwrap_or(now);
        let passed = now.saturating_duration_since(since).as_secs_f64();
        // Where layers arrive faster than timers go off, their arrival is what one goes by.
        let early = if typical > TIMER { pace * TIMER } else { 0.0 };
        self.due = (self.due + passed * pace).min(early.max(self.layer as f64));
        if self.flying <= self.layer || self.due + early >= 0.0 {
            return Ok(());
        }
        let wait = Duration::try_from_secs_f64(-(self.due + early) / pace);
        Err(wait.ok())
    }

    pub(super) fn ask(&mut self, bytes: u64, now: Instant) {
        if self.flying == 0 {
            self.counted = Some(now);
        }
        self.flying = self.flying.saturating_add(bytes);
        self.asked = self.asked.saturating_add(bytes);
        self.layer = self.layer.max(self.asked);
        self.due -= bytes as f64;
    }

    pub(super) fn land(&mut self, bytes: u64, now: Instant) {
        self.flying = self.flying.saturating_sub(bytes);
        let counted = self.counted.replace(now).unwrap_or(now);
        let passed = now.saturating_duration_since(counted).as_secs_f64();
        self.bytes = self.bytes * FADE + bytes as f64;
        self.seconds = self.seconds * FADE + passed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn before_a_pace_is_known_little_is_under_way_and_never_less_than_a_layer() {
        let now = Instant::now();
        let mut flight = Flight::default();
        for _ in 0..2 {
            assert_eq!(flight.has_room(now, 0.0), Ok(()));
            flight.ask(4 * MIB, now);
        }
        assert_eq!(
            flight.has_room(now, 0.0),
            Err(None),
            "a call must land first"
        );
        flight.clear();
        assert_eq!(flight.has_room(now, 0.0), Ok(()));
        for _ in 0..4 {
            // The calls of one layer.
            flight.ask(16 * MIB, now);
        }
        assert_eq!(flight.layer, 64 * MIB);
    }

    /// Layers of a mebibyte have arrived one after the other, each in so much time.
    fn paced(begun: Instant, micros: u64) -> Flight {
        let mut flight = Flight::default();
        for layer in 0..50 {
            let now = begun + US(layer * micros);
            assert_eq!(flight.has_room(now, 0.0), Ok(()));
            flight.ask(MIB, now);
            flight.land(MIB, now + US(micros));
        }
        flight
    }

    #[test]
    fn layers_are_asked_for_as_they_arrive() {
        let begun = Instant::now();
        // A mebibyte a millisecond.
        let mut flight = paced(begun, 1000);
        let now = begun + US(50_000);
        flight.clear();
        // As if all were on a long way: none lands.
        let mut asked = Vec::new();
        for at in 0..=10_000 {
            let time = now + US(at);
            while flight.has_room(time, 0.0).is_ok() {
                flight.ask(MIB, time);
                asked.push(at);
            }
        }
        assert_eq!(&asked[..2], [0, 0], "two at any pace");
        let apart = asked[2..].windows(2).map(|pair| pair[1] - pair[0]);
        assert!(apart.clone().count() >= 7, "{asked:?}");
        assert!(
            apart.clone().all(|apart| (900..920).contains(&apart)),
            "{asked:?}"
        );
        // What is due before a timer would go off is asked for early, where layers take that long.
        let mut early = paced(begun, 300);
        early.clear();
        let mut at_once = 0_u32;
        while early.has_room(now, 0.005).is_ok() {
            early.ask(MIB, now);
            at_once += 1;
        }
        assert_eq!(at_once, 4, "two, and those of a millisecond");
        let wait = early
            .has_room(now, 0.005)
            .expect_err("enough")
            .expect("a time");
        assert_eq!(early.has_room(now + wait + US(1), 0.005), Ok(()));
    }

    #[test]
    fn a_computation_that_rests_does_not_let_layers_pile_up() {
        let begun = Instant::now();
        let mut flight = paced(begun, 100);
        flight.clear();
        assert_eq!(flight.has_room(begun, 0.0), Ok(()));
        let late = begun + Duration::from_mins(1);
        let mut at_once = 0_u32;
        while flight.has_room(late, 0.0).is_ok() {
            flight.ask(MIB, late);
            at_once += 1;
        }
        assert_eq!(at_once, 2);
    }
}
