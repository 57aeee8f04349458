//! Waiting for the store's runtime, by a thread that may be one of a runtime itself.
//!
//! The work is a task of the store's runtime, and the thread waits outside of it: so it may be any that may block, also one that a
//! runtime keeps for blocking work. One that the store's runtime needs to go on waits in vain, and no longer than its deadline. A task
//! of a `LocalSet` may not block, and panics.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::block_in_place;

/// Why work came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InVain {
    /// It was not over within the time given.
    TimedOut,
    /// The runtime has ended.
    Ended,
}

/// Runs `work` on `runtime`, and gives what it comes to within this time.
pub(super) fn wait_for<T: Send + 'static>(
    runtime: &Handle,
    within: Duration,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, InVain> {
    let (tell, told) = channel();
    let task = runtime.spawn(async move {
        // Nobody listens once the time is over.
        drop(tell.send(work.await));
    });
    let wait = || {
        told.recv_timeout(within).map_err(|error| match error {
            RecvTimeoutError::Timeout => InVain::TimedOut,
            RecvTimeoutError::Disconnected => InVain::Ended,
        })
    };
    let here = Handle::try_current().map(|here| here.runtime_flavor());
    let over = match here {
        // Its tasks go on elsewhere. There is no elsewhere in a runtime of one thread.
        Ok(RuntimeFlavor::MultiThread) => block_in_place(wait),
        _ => wait(),
    };
    if over.is_err() {
        task.abort();
    }
    over
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    fn threads(count: usize) -> Runtime {
        let mut builder = Builder::new_multi_thread();
        let built = builder.worker_threads(count).enable_all().build();
        built.expect("a runtime")
    }

    /// Takes a turn of the runtime's.
    async fn work() -> u32 {
        tokio::task::yield_now().await;
        7
    }

    #[test]
    fn any_thread_waits_that_may_block() {
        let (one, alone) = (threads(1), Builder::new_current_thread().build());
        let alone = alone.expect("a runtime");
        let handle = one.handle().clone();
        let wait = move || wait_for(&handle, LONG, work());
        assert_eq!(wait(), Ok(7), "outside of runtimes");
        for runtime in [&one, &alone] {
            let wait = wait.clone();
            let blocking = runtime.block_on(runtime.spawn_blocking(wait));
            assert_eq!(blocking.expect("no panic"), Ok(7));
        }
        let task = one.spawn(async move { wait() });
        let task = one.block_on(task);
        assert_eq!(task.expect("no panic"), Ok(7), "its only thread");
        // A runtime of one thread waits for another one.
        let handle = one.handle().clone();
        let other = alone.block_on(async { wait_for(&handle, LONG, work()) });
        assert_eq!(other, Ok(7));
    }

    #[test]
    fn who_waits_in_vain_waits_no_longer_than_the_deadline() {
        let soon = Duration::from_millis(10);
        let alone = Builder::new_current_thread().build().expect("a runtime");
        let handle = alone.handle().clone();
        assert_eq!(
            alone.block_on(async { wait_for(&handle, soon, work()) }),
            Err(InVain::TimedOut),
            "it waits for itself"
        );
        let never = wait_for(threads(1).handle(), soon, pending::<u32>());
        assert_eq!(never, Err(InVain::TimedOut));
        let ended = threads(1);
        let handle = ended.handle().clone();
        drop(ended);
        assert_eq!(wait_for(&handle, LONG, work()), Err(InVain::Ended));
    }
}
