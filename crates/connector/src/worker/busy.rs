//! The time in which at least one of several things is under way, and does not wait for something else. Pure: time
//! comes in as a value.
//!
//! What loads cost is measured by it (C6): a load that is asked for layer by layer, beside the
//! computation, lasts as long as that does, but is under way for part of it only.

use std::time::{Duration, Instant};

/// A clock that runs while something is under way and does not rest.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    under_way: usize,
    resting: usize,
    since: Option<Instant>,
    total: Duration,
}

impl Busy {
    /// One more is under way.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.under_way += 1;
        self.turn(now);
    }

    /// One of them is over.
    pub(crate) fn end(&mut self, now: Instant) {
        self.under_way = self.under_way.saturating_sub(1);
        self.turn(now);
    }

    /// One of them waits for something else: it goes on before it ends.
    pub(crate) fn rest(&mut self, now: Instant) {
        self.resting += 1;
        self.turn(now);
    }

    /// One that rested goes on.
    pub(crate) fn go_on(&mut self, now: Instant) {
        self.resting = self.resting.saturating_sub(1);
        self.turn(now);
    }

    fn turn(&mut self, now: Instant) {
        if self.under_way > self.resting {
            self.since.get_or_insert(now);
        } else if let Some(since) = self.since.take() {
            self.total += now.saturating_duration_since(since);
        }
    }

    /// Nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// For how long something has been under way without resting.
    pub(crate) fn total(&self, now: Instant) -> Duration {
        let running = self.since.map(|since| now.saturating_duration_since(since));
        self.total + running.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_do_not_count_and_what_overlaps_counts_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut busy = Busy::default();
        assert_eq!(busy.total(at(5)), Duration::ZERO);
        busy.begin(at(10));
        busy.begin(at(11));
        busy.end(at(13));
        assert_eq!(busy.total(at(14)), Duration::from_secs(4));
        assert!(!busy.is_idle());
        busy.end(at(15));
        assert!(busy.is_idle());
        assert_eq!(busy.total(at(100)), Duration::from_secs(5));
        busy.begin(at(200));
        busy.end(at(201));
        busy.end(at(202));
        assert_eq!(busy.total(at(300)), Duration::from_secs(6));
    }

    #[test]
    fn what_rests_is_under_way_and_does_not_count() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut busy = Busy::default();
        busy.begin(at(0));
        busy.rest(at(2));
        assert!(!busy.is_idle());
        assert_eq!(busy.total(at(10)), Duration::from_secs(2));
        // Another one runs meanwhile.
        busy.begin(at(10));
        busy.end(at(13));
        assert_eq!(busy.total(at(20)), Duration::from_secs(5));
        busy.go_on(at(20));
        busy.end(at(21));
        assert!(busy.is_idle());
        assert_eq!(busy.total(at(30)), Duration::from_secs(6));
    }
}
