//! Whether the master gives signs of life.
//!
//! A call that ran out of time while nothing else came from the master either puts it in doubt, until something
//! comes. One that is only slow with that call answers others, and the heartbeat that is sent at once. Calls
//! wait a moment for that, counted from the beginning of the doubt, and then are not sent: a master that
//! stands still costs one deadline, not one for each of them. The heartbeat's end ends the doubt.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Signs {
    /// Frames that came.
    heard: AtomicU64,
    /// One more than had come when the doubt began; 0: there was none yet.
    doubted: AtomicU64,
    since: Mutex<Instant>,
    came: Notify,
}

impl Signs {
    pub(super) fn new() -> Self {
        Self {
            heard: AtomicU64::new(0),
            doubted: AtomicU64::new(0),
            since: Mutex::new(Instant::now()),
            came: Notify::new(),
        }
    }

    /// Something came.
    pub(super) fn hear(&self) {
        self.heard.fetch_add(1, Ordering::SeqCst);
        if self.doubted.load(Ordering::SeqCst) != 0 {
            self.came.notify_waiters();
        }
    }

    /// How often something came.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::SeqCst)
    }

    /// A call ran out of time that began when so much had come. True: that is in doubt now, and was not before.
    pub(super) fn doubt(&self, heard: u64) -> bool {
        if self.heard() != heard || self.in_doubt() {
            return false;
        }
        *self.since.lock() = Instant::now();
        self.doubted.store(heard + 1, Ordering::SeqCst);
        true
    }

    pub(super) fn in_doubt(&self) -> bool {
        let doubted = self.doubted.load(Ordering::SeqCst);
        doubted != 0 && doubted == self.heard() + 1
    }

    /// Waits for the end of a doubt, until it is so old. False: it has not ended.
    pub(super) async fn are_there(&self, patience: Duration) -> bool {
        while self.in_doubt() {
            let came = self.came.notified();
            tokio::pin!(came);
            came.as_mut().enable();
            let until = *self.since.lock() + patience;
            if self.in_doubt() && timeout_at(until, came).await.is_err() {
                return !self.in_doubt();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(250);

    #[tokio::test(start_paused = true)]
    async fn a_doubt_is_waited_for_once_and_ends_with_the_next_sign() {
        let signs = Signs::new();
        assert!(signs.are_there(PATIENCE).await);
        let heard = signs.heard();
        signs.hear();
        assert!(!signs.doubt(heard), "something came during the call");
        assert!(signs.doubt(signs.heard()));
        assert!(!signs.doubt(signs.heard()), "it was in doubt already");
        let start = Instant::now();
        for _ in 0..3 {
            assert!(!signs.are_there(PATIENCE).await);
            assert_eq!(start.elapsed(), PATIENCE);
        }
        signs.hear();
        assert!(signs.are_there(PATIENCE).await && !signs.in_doubt());
        assert!(signs.doubt(signs.heard()), "a new one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_sign_lets_those_go_on_that_wait_for_it() {
        let signs = Signs::new();
        assert!(signs.doubt(0));
        let waiting = signs.are_there(PATIENCE);
        let sign = async {
            tokio::time::advance(PATIENCE / 2).await;
            signs.hear();
        };
        let (there, ()) = tokio::join!(waiting, sign);
        assert!(there);
    }
}
