//! A bounded queue from the thread that computes to a task.
//!
//! The sender waits on a condition variable, with a deadline; the receiver awaits. So the sender needs
//! no runtime, and may be called from inside of one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    room: Condvar,
    filled: Notify,
    capacity: usize,
}

struct State<T> {
    items: VecDeque<T>,
    closed: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            state: Mutex::new(State {
                items: VecDeque::with_capacity(capacity),
                closed: false,
            }),
            room: Condvar::new(),
            filled: Notify::new(),
            capacity,
        }
    }

    /// Adds an item; waits for room if there is none. `false`: there was none in time, or nobody takes
    /// items any more.
    pub(crate) fn push(&self, item: T, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.items.len() >= self.capacity && !state.closed {
            if self.room.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        if state.closed {
            return false;
        }
        state.items.push_back(item);
        drop(state);
        self.filled.notify_one();
        true
    }

    /// The next item; `None` once the queue is closed and empty.
    pub(crate) async fn pop(&self) -> Option<T> {
        loop {
            {
                let mut state = self.state.lock();
                if let Some(item) = state.items.pop_front() {
                    self.room.notify_one();
                    return Some(item);
                }
                if state.closed {
                    return None;
                }
            }
            // A permit is kept if an item came in between.
            self.filled.notified().await;
        }
    }

    /// No more items; those that are there can still be taken.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.room.notify_all();
        self.filled.notify_one();
    }

    /// Closes, and drops what is there.
    pub(crate) fn abandon(&self) {
        let items = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.items)
        };
        drop(items);
        self.room.notify_all();
        self.filled.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn items_come_in_order_a_full_queue_refuses_and_a_closed_one_ends() {
        let queue = Queue::new(2);
        assert!(queue.push(1, Duration::ZERO) && queue.push(2, Duration::ZERO));
        assert!(!queue.push(3, Duration::from_millis(1)), "no room");
        assert_eq!(queue.pop().await, Some(1));
        assert!(queue.push(3, Duration::ZERO));
        queue.close();
        assert!(!queue.push(4, Duration::ZERO));
        assert_eq!(
            (queue.pop().await, queue.pop().await, queue.pop().await),
            (Some(2), Some(3), None)
        );
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_sender_waits_for_room_and_a_receiver_for_items() {
        let queue = std::sync::Arc::new(Queue::new(1));
        let sender = std::sync::Arc::clone(&queue);
        let thread =
            std::thread::spawn(move || (0..1000).all(|n| sender.push(n, Duration::from_secs(20))));
        for n in 0..1000 {
            assert_eq!(queue.pop().await, Some(n));
        }
        assert!(thread.join().expect("no panic"));
    }
}
