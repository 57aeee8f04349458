//! A named thread whose end can be awaited.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::error::StoreError;

/// A thread that ends when what it listens to is dropped.
pub(super) struct Thread {
    name: &'static str,
    handle: std::thread::JoinHandle<()>,
    /// Resolves when the thread has dropped everything that it had.
    ended: oneshot::Receiver<()>,
}

impl Thread {
    pub(super) fn start(
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (guard, ended) = oneshot::channel::<()>();
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _guard = guard;
                work();
            })
            .map_err(|source| StoreError::Thread {
                name,
                source: Arc::new(source),
            })?;
        Ok(Self {
            name,
            handle,
            ended,
        })
    }

    /// Waits for its end. False: it goes on, and ends by itself later.
    pub(super) async fn join(self, until: Instant) -> bool {
        if timeout_at(until, self.ended).await.is_err() {
            return false;
        }
        // It has nothing left to do but to return.
        if self.handle.join().is_err() {
            tracing::error!(thread = self.name, "the thread panicked");
        }
        true
    }
}
