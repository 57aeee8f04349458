//! Events in the order of their virtual time; those of one moment in the order they were added. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

pub(super) struct Schedule<E> {
    now: Duration,
    next: u64,
    events: BTreeMap<(Duration, u64), E>,
}

impl<E> Default for Schedule<E> {
    fn default() -> Self {
        Self {
            now: Duration::ZERO,
            next: 0,
            events: BTreeMap::new(),
        }
    }
}

impl<E> Schedule<E> {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) fn push(&mut self, at: Duration, event: E) {
        self.events.insert((at.max(self.now), self.next), event);
        self.next += 1;
    }

    /// Whether there is an event by `until`, or at all.
    pub(super) fn is_due(&self, until: Option<Duration>) -> bool {
        let first = self.events.first_key_value();
        first.is_some_and(|((at, _), _)| until.is_none_or(|until| *at <= until))
    }

    /// Takes the next event that is due by `until`, or the next one; time moves to it. When none is
    /// left, time moves to `until`.
    pub(super) fn pop(&mut self, until: Option<Duration>) -> Option<E> {
        if self.is_due(until) {
            let ((at, _), event) = self.events.pop_first()?;
            self.now = at;
            return Some(event);
        }
        self.now = until.unwrap_or(self.now).max(self.now);
        None
    }

    /// Replaces each event by what `keep` makes of it, or takes it out.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(E) -> Option<E>) {
        let events = std::mem::take(&mut self.events);
        self.events = events
            .into_iter()
            .filter_map(|(at, event)| Some((at, keep(event)?)))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_time_never_goes_back() {
        let at = Duration::from_millis;
        let mut schedule = Schedule::default();
        schedule.push(at(5), 'c');
        schedule.push(at(1), 'a');
        schedule.push(at(1), 'b');
        assert_eq!(schedule.pop(Some(at(3))), Some('a'));
        assert_eq!(schedule.pop(Some(at(3))), Some('b'));
        assert_eq!(schedule.pop(Some(at(3))), None);
        assert_eq!(schedule.now(), at(3));
        schedule.push(at(2), 'd');
        assert_eq!(schedule.pop(None), Some('d'));
        assert_eq!(schedule.now(), at(3));
        assert_eq!(schedule.pop(None), Some('c'));
        assert_eq!(schedule.pop(None), None);
        assert_eq!(schedule.now(), at(5));
    }
}
