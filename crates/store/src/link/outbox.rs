//! What the link still has to tell the master on nobody's behalf.
//!
//! Answers to the master's commands, and reservations that were made for a caller who had gone away
//! by then. (Leases are left to run out: giving one back would end it for every session of this
//! member on the same object.) They are delivered one after the other while the link is up, and void once
//! the membership or the term that they belong to is over. The queue is bounded: when it is full, the
//! oldest entry goes, which costs memory at the master until a time-out there, never correctness.

use std::collections::VecDeque;

use layercake_protocol::key::Tenant;
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::types::{CommandId, Life};
use super::unanswered::Start;

const MAX_CHORES: usize = 65_536;

/// One thing to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chore {
    /// A command was carried out.
    FenceDone {
        command: CommandId,
        writer_attached: bool,
    },
    /// Nobody will use these reservations; nothing was written.
    Revoke {
        life: Life,
        tenant: Tenant,
        objects: Vec<ObjectRef>,
    },
    /// Nobody knows what this start reserved; nothing was written.
    TakeBack { life: Life, start: Start },
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    chores: Mutex<VecDeque<Chore>>,
    changed: Notify,
}

impl Outbox {
    pub(super) fn push(&self, chore: Chore) {
        {
            let mut chores = self.chores.lock();
            if chores.len() == MAX_CHORES {
                chores.pop_front();
            }
            chores.push_back(chore);
        }
        self.changed.notify_one();
    }

    /// Waits for a chore and gives a copy of the first; it stays until [`Self::done`].
    pub(super) async fn first(&self) -> Chore {
        loop {
            let first = self.chores.lock().front().cloned();
            match first {
                Some(chore) => return chore,
                None => self.changed.notified().await,
            }
        }
    }

    /// Removes the first chore, if it is still this one.
    pub(super) fn done(&self, chore: &Chore) {
        let mut chores = self.chores.lock();
        if chores.front() == Some(chore) {
            chores.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::ids::Term;

    use super::*;

    fn chore(id: u64) -> Chore {
        Chore::FenceDone {
            command: CommandId { term: Term(1), id },
            writer_attached: false,
        }
    }

    #[tokio::test]
    async fn chores_come_in_order_and_stay_until_done() {
        let outbox = Outbox::default();
        outbox.push(chore(1));
        outbox.push(chore(2));
        assert_eq!(outbox.first().await, chore(1));
        assert_eq!(outbox.first().await, chore(1));
        outbox.done(&chore(1));
        assert_eq!(outbox.first().await, chore(2));
    }

    #[tokio::test]
    async fn a_full_outbox_forgets_the_oldest() {
        let outbox = Outbox::default();
        for id in 0..=MAX_CHORES as u64 {
            outbox.push(chore(id));
        }
        assert_eq!(outbox.first().await, chore(1));
    }
}
