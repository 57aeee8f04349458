//! A bounded queue from the thread that computes to a task.
//!
//! The sender waits on a condition variable, with a deadline; the receiver awaits. So the sender needs
//! no runtime, and may be called from inside of one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    room: Condvar,
    filled: Notify,
    capacity: usize,
}

/// The taking end. Letting it go drops what is there, and nothing more is taken.
pub(crate) struct Taker<T>(Arc<Queue<T>>);

impl<T> Drop for Taker<T> {
    fn drop(&mut self) {
        self.0.abandon();
    }
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

    /// Adds an item; waits for room if there is none, and takes the time off `patience`. `false`: there
    /// was none in time, or nobody takes items any more.
    pub(crate) fn push(&self, item: T, patience: &mut Duration) -> bool {
        let mut state = self.state.lock();
        if state.items.len() >= self.capacity && !state.closed {
            let begun = Instant::now();
            let until = begun + *patience;
            while state.items.len() >= self.capacity && !state.closed {
                if self.room.wait_until(&mut state, until).timed_out() {
                    *patience = Duration::ZERO;
                    return false;
                }
            }
            *patience = patience.saturating_sub(begun.elapsed());
        }
        if state.closed {
            return false;
        }
        state.items.push_back(item);
        drop(state);
        self.filled.notify_one();
        true
    }

    /// Whether at least half of the room is taken.
    pub(crate) fn fills_up(&self) -> bool {
        self.state.lock().items.len() * 2 >= self.capacity
    }

    /// Who takes items: however it ends, nobody waits for it afterwards.
    pub(crate) fn taker(self: &Arc<Self>) -> Taker<T> {
        Taker(Arc::clone(self))
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

    const LONG: Duration = Duration::from_secs(20);

    fn push(queue: &Queue<i32>, item: i32, patience: Duration) -> bool {
        queue.push(item, &mut patience.clone())
    }

    #[tokio::test]
    async fn items_come_in_order_a_full_queue_refuses_and_a_closed_one_ends() {
        let queue = Queue::new(2);
        assert!(!queue.fills_up());
        assert!(push(&queue, 1, Duration::ZERO) && push(&queue, 2, Duration::ZERO));
        assert!(queue.fills_up());
        let mut patience = Duration::from_millis(1);
        assert!(!queue.push(3, &mut patience), "no room");
        assert_eq!(patience, Duration::ZERO, "it is used up");
        assert_eq!(queue.pop().await, Some(1));
        let mut patience = LONG;
        assert!(queue.push(3, &mut patience));
        assert_eq!(patience, LONG, "there was room");
        queue.close();
        assert!(!push(&queue, 4, Duration::ZERO));
        assert_eq!(
            (queue.pop().await, queue.pop().await, queue.pop().await),
            (Some(2), Some(3), None)
        );
    }

    // contract: connector-15
    #[test]
    fn nobody_waits_for_a_taker_that_is_gone() {
        let queue = Arc::new(Queue::new(1));
        let taker = queue.taker();
        assert!(push(&queue, 1, Duration::ZERO));
        let sender = Arc::clone(&queue);
        let thread = std::thread::spawn(move || {
            let mut patience = LONG;
            (sender.push(2, &mut patience), patience)
        });
        drop(taker);
        let (pushed, patience) = thread.join().expect("no panic");
        assert!(!pushed && patience > Duration::ZERO);
        assert!(!push(&queue, 3, Duration::ZERO));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_sender_waits_for_room_and_a_receiver_for_items() {
        let queue = Arc::new(Queue::new(1));
        let sender = Arc::clone(&queue);
        let thread = std::thread::spawn(move || (0..1000).all(|n| push(&sender, n, LONG)));
        for n in 0..1000 {
            assert_eq!(queue.pop().await, Some(n));
        }
        assert!(thread.join().expect("no panic"));
    }
}
