//! Loads go before saves (C6).
//!
//! A load is waited for by the computation, a save by nobody. So a call that saves waits while calls that
//! load are under way, unless saves pile up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// How often a save that waits looks whether saves have piled up.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Calls that load.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    loading: AtomicUsize,
    quiet: Notify,
}

/// A call that loads.
#[derive(Debug)]
pub(crate) struct Passage(Arc<Traffic>);

impl Traffic {
    pub(crate) fn load(self: &Arc<Self>) -> Passage {
        self.loading.fetch_add(1, Ordering::AcqRel);
        Passage(Arc::clone(self))
    }

    /// Waits until nothing is loaded, or until there is a reason not to wait. Whether it had to.
    pub(crate) async fn give_way(&self, hurry: impl Fn() -> bool) -> bool {
        let mut waited = false;
        while self.loading.load(Ordering::Acquire) > 0 && !hurry() {
            waited = true;
            // The time-out is no failure: it is time to look again.
            drop(tokio::time::timeout(LOOK_AGAIN, self.quiet.notified()).await);
        }
        waited
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if self.0.loading.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.quiet.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn saves_wait_for_loads_unless_they_pile_up() {
        let traffic = Arc::new(Traffic::default());
        assert!(!traffic.give_way(|| false).await, "nothing is loaded");
        let (one, other) = (traffic.load(), traffic.load());
        let piled_up = Cell::new(false);
        let looks = Cell::new(0);
        let waiting = traffic.give_way(|| {
            looks.set(looks.get() + 1);
            // The second time something is still being loaded.
            piled_up.replace(looks.get() == 2)
        });
        assert!(waiting.await);
        assert_eq!(looks.get(), 3);
        let mut waiting = std::pin::pin!(traffic.give_way(|| false));
        drop(one);
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("one is loading"),
            () = tokio::task::yield_now() => {}
        }
        drop(other);
        assert!(waiting.await);
    }
}
