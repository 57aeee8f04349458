//! The task that removes damaged objects, so that whoever computes their blocks again can save them.
//!
//! A removal names the version that was found damaged: what replaced it meanwhile stays, and of several workers
//! that come upon the same damage, one removes it. Nobody waits for it. A task of its own asks the master, and what
//! its queue has no room for is left to the next reader.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::replica::ObjectRef;
use layercake_store::StoreError;

use super::queue::Queue;
use super::shared::Shared;
use crate::audit::Operation;

/// Steps whose damaged objects may wait.
pub(super) const QUEUED: usize = 16;

/// Damaged objects of a step.
pub(super) type Damaged = Vec<ObjectRef>;

/// Leaves objects to the task. Waits for nothing.
pub(super) fn leave(queue: &Queue<Damaged>, damaged: Damaged) {
    let (count, mut patience) = (damaged.len(), Duration::ZERO);
    if count > 0 && !queue.push(damaged, &mut patience) {
        tracing::warn!(
            count,
            "damaged objects stay: earlier ones are still being removed"
        );
    }
}

pub(super) async fn run(shared: Arc<Shared>, queue: Arc<Queue<Damaged>>) {
    let _taker = queue.taker();
    while let Some(damaged) = queue.pop().await {
        let removed = shared.store.remove_versions(&damaged).await;
        for (object, removed) in damaged.iter().zip(removed) {
            over(&shared, object, removed);
        }
    }
}

fn over(shared: &Shared, object: &ObjectRef, removed: Result<(), StoreError>) {
    let ObjectRef { key, generation } = object;
    let error = removed.as_ref().err();
    let noted = error.map(|error| error as &dyn std::fmt::Display);
    shared.audit.note(Operation::Remove, key, None, noted);
    match removed {
        Ok(()) => {
            shared.counters.removed_damaged.add(1);
            tracing::warn!(%key, %generation, "an object was damaged, and is removed");
        }
        Err(StoreError::Refused(Refusal::NotFound)) => {
            tracing::debug!(%key, %generation, "a damaged object is gone already");
        }
        Err(error) => {
            tracing::warn!(%key, %generation, %error, "a damaged object could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::ids::Generation;
    use layercake_protocol::key::ObjectKey;

    use super::*;

    #[tokio::test]
    async fn what_the_queue_has_no_room_for_is_left_and_nobody_waits() {
        let of_step = |step: u64| {
            let key = ObjectKey::new(&format!("step-{step}")).expect("a key");
            let generation = Generation(step);
            vec![ObjectRef { key, generation }]
        };
        let queue = Queue::new(2);
        for step in 1..=4 {
            leave(&queue, of_step(step));
            leave(&queue, Vec::new());
        }
        queue.close();
        assert_eq!(queue.pop().await, Some(of_step(1)));
        assert_eq!(queue.pop().await, Some(of_step(2)));
        assert_eq!(
            queue.pop().await,
            None,
            "steps without damage take no place"
        );
    }
}
