//! Events of the engine's computation (T5): the seam to devices.
//!
//! A copy from or to the engine's blocks starts only after the event that the engine gave with it.
//! [`HostEvent`] is the implementation for engines that compute on the CPU; one for a device wraps
//! the device's own event.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// A point in the engine's computation that is reached once, and stays reached.
pub trait ComputeEvent: Send + Sync + fmt::Debug {
    /// Whether it has been reached.
    fn is_done(&self) -> bool;

    /// Calls `then` once the event has been reached: at once, on this thread, if it has; else on a
    /// thread of the implementation's. `then` is short and does not block.
    fn notify(&self, then: Box<dyn FnOnce() + Send>);
}

/// A shared event.
pub type Event = Arc<dyn ComputeEvent>;

/// An event of computation on the CPU. Clones are the same event.
#[derive(Clone, Default)]
pub struct HostEvent(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    done: bool,
    waiting: Vec<Box<dyn FnOnce() + Send>>,
}

impl HostEvent {
    /// An event that is still to come.
    pub fn pending() -> Self {
        Self::default()
    }

    /// An event that has been reached: for an engine that calls only after its computation.
    pub fn done() -> Event {
        let event = Self::default();
        event.set();
        Arc::new(event)
    }

    /// The event has been reached. What memory writes came before is visible to whoever was waiting.
    pub fn set(&self) {
        let waiting = {
            let mut state = self.0.lock();
            state.done = true;
            std::mem::take(&mut state.waiting)
        };
        for then in waiting {
            then();
        }
    }
}

impl ComputeEvent for HostEvent {
    fn is_done(&self) -> bool {
        self.0.lock().done
    }

    fn notify(&self, then: Box<dyn FnOnce() + Send>) {
        {
            let mut state = self.0.lock();
            if !state.done {
                state.waiting.push(then);
                return;
            }
        }
        then();
    }
}

impl fmt::Debug for HostEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostEvent").field(&self.is_done()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn everybody_is_told_once_and_latecomers_at_once() {
        let event = HostEvent::pending();
        let told = Arc::new(AtomicU32::new(0));
        let tell = || {
            let told = Arc::clone(&told);
            Box::new(move || {
                told.fetch_add(1, Ordering::SeqCst);
            })
        };
        event.notify(tell());
        event.notify(tell());
        assert!(!event.is_done());
        assert_eq!(told.load(Ordering::SeqCst), 0);
        event.set();
        assert_eq!(told.load(Ordering::SeqCst), 2);
        event.set();
        assert_eq!(told.load(Ordering::SeqCst), 2);
        event.notify(tell());
        assert_eq!(told.load(Ordering::SeqCst), 3);
        assert!(HostEvent::done().is_done());
    }
}
