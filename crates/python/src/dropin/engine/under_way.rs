//! Transfers that were started and are asked about later, by number.
//!
//! A number stays good after its transfer has ended, until so many newer ones were started that it is
//! forgotten; then it is as unknown as one that never was.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::watch;

/// Transfers that are remembered. Those under way are never forgotten.
const REMEMBERED: usize = 16 << 10;

/// How a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Running,
    Done,
    Failed,
}

/// Reports how a transfer ended; one that is dropped before that failed.
#[derive(Debug)]
pub(super) struct Report(watch::Sender<Status>);

impl Report {
    pub(super) fn end(self, well: bool) {
        self.0
            .send_replace(if well { Status::Done } else { Status::Failed });
    }
}

/// Waits for the end of a transfer.
#[derive(Clone, Debug)]
pub(super) struct Waiter(watch::Receiver<Status>);

impl Waiter {
    fn status(&self) -> Status {
        let status = *self.0.borrow();
        if status == Status::Running && self.0.has_changed().is_err() {
            // The task ended without a word. It may have said one in between.
            return match *self.0.borrow() {
                Status::Running => Status::Failed,
                ended => ended,
            };
        }
        status
    }

    /// Whether it ended well.
    pub(super) async fn ended_well(mut self) -> bool {
        let ended = self.0.wait_for(|status| *status != Status::Running).await;
        ended.is_ok_and(|status| *status == Status::Done)
    }
}

/// The transfers of an engine.
#[derive(Debug, Default)]
pub(super) struct UnderWay(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    last: u64,
    by_id: BTreeMap<u64, Waiter>,
}

impl UnderWay {
    /// A number, and what its transfer reports to.
    pub(super) fn begin(&self) -> (u64, Report) {
        let (report, waiter) = watch::channel(Status::Running);
        let mut table = self.0.lock();
        table.last += 1;
        let id = table.last;
        table.by_id.insert(id, Waiter(waiter));
        if table.by_id.len() > REMEMBERED {
            let ended = table
                .by_id
                .iter()
                .find(|(_, waiter)| waiter.status() != Status::Running)
                .map(|(id, _)| *id);
            ended.and_then(|id| table.by_id.remove(&id));
        }
        (id, Report(report))
    }

    /// How a transfer stands; `None` if the number means nothing.
    pub(super) fn status(&self, id: u64) -> Option<Status> {
        self.0.lock().by_id.get(&id).map(Waiter::status)
    }

    /// What to wait with for these; `None` if one of the numbers means nothing.
    pub(super) fn waiters(&self, ids: &[u64]) -> Option<Vec<Waiter>> {
        let table = self.0.lock();
        ids.iter().map(|id| table.by_id.get(id).cloned()).collect()
    }
}
