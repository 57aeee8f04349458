//! Calls that wait until something happens to a key or a segment.
//!
//! A call registers a topic *before* it looks at the state, so nothing that happens in between is
//! missed; what it then hears is only a reason to look again. Dropping the call takes its topics away.
//! Each event wakes just the calls that wait for it, and tells them which of their topics it was.
//!
//! Lock order: the table, then a waiter's own list. Neither is held across an await.

use std::collections::HashMap;
use std::sync::Arc;

use layercake_protocol::ids::SegmentId;
use layercake_protocol::key::{ObjectKey, Tenant};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What a call can wait for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// The reservation of this key ends.
    Settled(Tenant, ObjectKey),
    /// Nothing holds this segment any more.
    Drained(SegmentId),
    /// Memory that was kept from late writers is free.
    Room,
}

/// Index of a topic among those of one call.
type Index = usize;

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    topics: Mutex<HashMap<Topic, Vec<Waiting>>>,
}

/// A call, and which of its topics it is.
type Waiting = (Index, Arc<Inbox>);

#[derive(Debug, Default)]
struct Inbox {
    happened: Mutex<Vec<Index>>,
    wake: Notify,
}

/// One call's topics.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    waiters: &'a Waiters,
    inbox: Arc<Inbox>,
    topics: HashMap<Index, Topic>,
}

impl Waiters {
    /// A call that waits for nothing yet.
    pub(crate) fn begin(&self) -> Wait<'_> {
        Wait {
            waiters: self,
            inbox: Arc::default(),
            topics: HashMap::new(),
        }
    }

    /// It happened.
    pub(crate) fn happened(&self, topic: &Topic) {
        let topics = self.topics.lock();
        for (index, inbox) in topics.get(topic).into_iter().flatten() {
            inbox.happened.lock().push(*index);
            inbox.wake.notify_one();
        }
    }

    /// Topics that somebody waits for.
    pub(crate) fn len(&self) -> usize {
        self.topics.lock().len()
    }
}

impl Wait<'_> {
    /// Also waits for this topic, under an index of the caller's.
    pub(crate) fn watch(&mut self, index: Index, topic: Topic) {
        let mut topics = self.waiters.topics.lock();
        let waiting = topics.entry(topic.clone()).or_default();
        waiting.push((index, Arc::clone(&self.inbox)));
        self.topics.insert(index, topic);
    }

    /// Waits no longer for the topic of this index.
    pub(crate) fn unwatch(&mut self, index: Index) {
        if let Some(topic) = self.topics.remove(&index) {
            self.take_out(index, &topic);
        }
    }

    fn take_out(&self, index: Index, topic: &Topic) {
        let mut topics = self.waiters.topics.lock();
        if let Some(waiting) = topics.get_mut(topic) {
            waiting.retain(|(i, inbox)| *i != index || !Arc::ptr_eq(inbox, &self.inbox));
            if waiting.is_empty() {
                topics.remove(topic);
            }
        }
    }

    /// Waits until something happens; the indices of the topics. Nothing is lost if it is cancelled.
    pub(crate) async fn next(&self) -> Vec<Index> {
        loop {
            let happened = std::mem::take(&mut *self.inbox.happened.lock());
            if !happened.is_empty() {
                return happened;
            }
            self.inbox.wake.notified().await;
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        for (index, topic) in std::mem::take(&mut self.topics) {
            self.take_out(index, &topic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(key: &str) -> Topic {
        Topic::Settled(Tenant::default(), ObjectKey::new(key).expect("a key"))
    }

    #[tokio::test]
    async fn each_wait_hears_of_its_own_topics() {
        let waiters = Waiters::default();
        let mut first = waiters.begin();
        first.watch(0, topic("a"));
        first.watch(1, topic("b"));
        let mut second = waiters.begin();
        second.watch(5, topic("b"));
        second.watch(6, Topic::Drained(SegmentId(1)));
        waiters.happened(&topic("c"));
        waiters.happened(&topic("b"));
        assert_eq!(first.next().await, [1]);
        assert_eq!(second.next().await, [5]);
        second.unwatch(5);
        waiters.happened(&topic("b"));
        waiters.happened(&Topic::Drained(SegmentId(1)));
        assert_eq!(first.next().await, [1]);
        assert_eq!(second.next().await, [6]);
    }

    #[tokio::test]
    async fn what_happened_before_the_wait_is_not_missed() {
        let waiters = Waiters::default();
        let mut wait = waiters.begin();
        wait.watch(0, topic("a"));
        wait.watch(1, topic("b"));
        waiters.happened(&topic("a"));
        waiters.happened(&topic("b"));
        assert_eq!(wait.next().await, [0, 1]);
    }

    #[tokio::test]
    async fn waits_that_are_over_leave_nothing_behind() {
        let waiters = Waiters::default();
        let mut kept = waiters.begin();
        kept.watch(0, topic("a"));
        let mut dropped = waiters.begin();
        dropped.watch(0, topic("a"));
        dropped.watch(1, topic("b"));
        drop(dropped);
        assert_eq!(waiters.len(), 1);
        waiters.happened(&topic("a"));
        assert_eq!(kept.next().await, [0]);
        drop(kept);
        assert_eq!(waiters.len(), 0);
    }
}
