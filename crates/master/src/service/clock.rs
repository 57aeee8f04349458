//! Where the state machine's time comes from.

use tokio::time::Instant;

use crate::state::Moment;

/// Time since this master started. It is tokio's clock, so that tests can pause it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    /// Starts at this instant.
    pub(crate) fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Now.
    pub(crate) fn now(&self) -> Moment {
        Moment::START + self.start.elapsed()
    }
}
