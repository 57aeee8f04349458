use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use layercake_protocol::error::Refusal;

use super::*;

/// A store of numbered keys.
struct Fake {
    /// What probes say of each key, and what is said of it when it is asked for in particular.
    keys: Vec<(Presence, Progress)>,
    /// Calls that are answered; the one after is as told.
    answered: usize,
    then: Then,
    calls: AtomicUsize,
}

#[derive(Clone, Copy)]
enum Then {
    Hangs,
    Fails,
}

impl Fake {
    fn new(keys: Vec<(Presence, Progress)>, answered: usize, then: Then) -> Self {
        Self {
            keys,
            answered,
            then,
            calls: AtomicUsize::new(0),
        }
    }

    async fn call(&self) -> Result<usize, StoreError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.then {
            _ if call < self.answered => Ok(call),
            Then::Hangs => std::future::pending().await,
            Then::Fails => Err(Refusal::Unreachable.into()),
        }
    }

    fn of(&self, keys: &[ObjectKey]) -> Vec<(Presence, Progress)> {
        let number = |key: &ObjectKey| key.as_str().parse::<usize>().expect("a number");
        keys.iter().map(|key| self.keys[number(key)]).collect()
    }
}

impl Store for Fake {
    async fn probe(&self, keys: &[ObjectKey], recency: Recency) -> Result<Existence, StoreError> {
        let call = self.call().await?;
        // What a writer had not finished at the first call is complete at the next.
        let states = self
            .of(keys)
            .into_iter()
            .map(|(presence, progress)| match progress {
                Progress::Complete if call > 0 => Presence::Complete,
                _ => presence,
            });
        let states: Vec<Presence> = states.collect();
        assert_eq!(recency.first_index.to_string(), keys[0].as_str());
        Ok(Existence {
            keys_queried: keys.len() as u64,
            states,
            epoch: Epoch(5),
        })
    }

    async fn progress(&self, keys: &[ObjectKey]) -> Result<Vec<Progress>, StoreError> {
        self.call().await?;
        Ok(self
            .of(keys)
            .into_iter()
            .map(|(_, progress)| progress)
            .collect())
    }
}

const THERE: (Presence, Progress) = (Presence::Complete, Progress::Complete);
const PUBLISHING: (Presence, Progress) = (Presence::Reserved, Progress::Publishing);
const COMMITTED: (Presence, Progress) = (Presence::Reserved, Progress::Complete);
const HIDDEN: (Presence, Progress) = (Presence::Reserved, Progress::Unreadable);

/// Looks up blocks of two ranks, four blocks at a time.
async fn look_up(store: &Fake, early: bool) -> Found {
    let keys = (0..store.keys.len()).map(|n| ObjectKey::new(&n.to_string()).expect("a key"));
    let keys: Vec<ObjectKey> = keys.collect();
    let window = NonZeroUsize::new(4).expect("above 0");
    let lookup = Lookup::new(keys.len() / 2, 2, window);
    // What does not answer at once does not answer.
    ask(store, &keys, lookup, early, Instant::now()).await
}

#[tokio::test]
async fn what_was_verified_before_a_call_failed_counts() {
    for (then, reason) in [
        (Then::Hangs, MissReason::TimeOut),
        (Then::Fails, MissReason::Master),
    ] {
        for answered in 0..4 {
            let store = Fake::new(vec![THERE; 40], answered, then);
            let found = look_up(&store, false).await;
            assert_eq!(found.blocks, 4 * answered);
            assert_eq!(found.failure, Some(reason));
            let asked = 8 * (answered as u64 + 1);
            assert_eq!(found.keys_queried, asked, "the failed call's, too");
        }
        let store = Fake::new(vec![THERE; 40], 5, then);
        let found = look_up(&store, false).await;
        assert_eq!((found.blocks, found.failure), (20, None));
    }
}

#[tokio::test]
async fn within_a_window_too() {
    // Three keys are there; how far the writers of the others are is not answered.
    let mut keys = vec![THERE; 3];
    keys.extend([PUBLISHING; 5]);
    let store = Fake::new(keys, 1, Then::Hangs);
    let found = look_up(&store, true).await;
    assert_eq!((found.blocks, found.keys_queried), (1, 8 + 5));
    assert_eq!(found.failure, Some(MissReason::TimeOut));
}

#[tokio::test]
async fn what_is_committed_between_two_questions_is_complete() {
    let mut keys = vec![THERE, PUBLISHING, COMMITTED, COMMITTED];
    keys.extend([PUBLISHING; 4]);
    let store = Fake::new(keys.clone(), 9, Then::Hangs);
    let found = look_up(&store, true).await;
    assert_eq!((found.blocks, found.missing), (4, None));
    assert_eq!(found.keys_queried, 8 + 7 + 2);
    let found = look_up(&Fake::new(keys.clone(), 9, Then::Hangs), false).await;
    assert_eq!((found.blocks, found.missing), (0, Some(KeyState::Reserved)));
    keys[5] = HIDDEN;
    let found = look_up(&Fake::new(keys, 9, Then::Hangs), true).await;
    assert_eq!((found.blocks, found.missing), (2, Some(KeyState::Reserved)));
}
