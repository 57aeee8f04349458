//! A step's loads between the task that receives and the thread that computes.
//!
//! The results are published under the lock before anybody is woken (W5). The thread moves the cursor
//! when it asks for a layer, so that the task knows how far ahead it is; a consumer that saves nothing
//! moves it all the same. Whoever holds the [`Receiving`] end and lets it go, well or not, aborts what
//! has not arrived: the waiting thread is woken in any case.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, watch};

use super::busy::Busy;
use crate::contract::{BlockId, LayerReady};
use crate::convergence::Convergence;
use crate::stats::{Counters, MissReason};

pub(crate) struct Board {
    state: Mutex<State>,
    changed: Condvar,
    cursor: watch::Sender<usize>,
    pub(crate) loaded_bytes: AtomicU64,
}

struct State {
    loads: Convergence,
    /// Calls that are under way.
    flights: Busy,
    /// Those of them that nobody sees through: they end when nothing of the job moves any more.
    left: usize,
}

/// A call that is under way, or about to be.
pub(crate) struct Flight {
    board: Arc<Board>,
    rests: bool,
    left: bool,
}

impl Board {
    pub(crate) fn new(rows: Vec<Vec<BlockId>>, layers: usize) -> Self {
        Self {
            state: Mutex::new(State {
                loads: Convergence::new(rows, layers),
                flights: Busy::default(),
                left: 0,
            }),
            changed: Condvar::new(),
            cursor: watch::channel(0).0,
            loaded_bytes: AtomicU64::new(0),
        }
    }

    /// Runs `f` on the results, and wakes whoever waits for them.
    pub(crate) fn update<T>(&self, f: impl FnOnce(&mut Convergence) -> T) -> T {
        let result = f(&mut self.state.lock().loads);
        self.changed.notify_all();
        result
    }

    pub(crate) fn look<T>(&self, f: impl FnOnce(&Convergence) -> T) -> T {
        f(&self.state.lock().loads)
    }

    /// Waits until the layer is there; `None`: not in time.
    pub(crate) fn wait(&self, layer: usize, patience: Duration) -> Option<LayerReady> {
        self.cursor.send_replace(layer);
        self.wait_for(patience, |state| state.loads.ready(layer))
    }

    /// Waits until all layers are there and nothing is read any more. `false`: not in time.
    pub(crate) fn wait_all(&self, patience: Duration) -> bool {
        self.run_free();
        let over = |state: &State| (state.loads.is_over() && state.flights.is_idle()).then_some(());
        self.wait_for(patience, over).is_some()
    }

    /// A call is about to be made. Taken before looking which rows are worth it, so that whoever stops the
    /// loads either keeps them from being asked for or waits for them.
    pub(crate) fn take_off(self: &Arc<Self>) -> Flight {
        self.state.lock().flights.begin(Instant::now());
        Flight {
            board: Arc::clone(self),
            rests: false,
            left: false,
        }
    }

    /// Nothing of the job is read any more: what was left has ended, too.
    pub(crate) fn landed(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        for _ in 0..std::mem::take(&mut state.left) {
            state.flights.end(now);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// For how long at least one call has been under way and did not rest.
    pub(crate) fn busy(&self) -> Duration {
        self.state.lock().flights.total(Instant::now())
    }

    /// Nothing more is asked for: what has not arrived is void.
    pub(crate) fn stop(&self, counters: &Counters, reason: MissReason) {
        self.run_free();
        self.abort(counters, reason);
    }

    /// What has not arrived is void, for this reason. Counted before anybody is woken.
    pub(crate) fn abort(&self, counters: &Counters, reason: MissReason) {
        self.update(|state| {
            let blocks = state.abort() as u64;
            counters.failed_loads.add(blocks);
            counters.miss(reason, blocks);
        });
    }

    /// What is void, now that all layers are there.
    pub(crate) fn ready(&self) -> Option<LayerReady> {
        self.look(|state| state.ready(0))
    }

    fn wait_for<T>(&self, patience: Duration, ready: impl Fn(&State) -> Option<T>) -> Option<T> {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        loop {
            if let Some(ready) = ready(&state) {
                return Some(ready);
            }
            if self.changed.wait_until(&mut state, until).timed_out() {
                return ready(&state);
            }
        }
    }

    /// Nobody asks for layers one by one any more: all may be loaded.
    pub(crate) fn run_free(&self) {
        self.cursor.send_replace(usize::MAX);
    }

    pub(crate) fn cursor(&self) -> watch::Receiver<usize> {
        self.cursor.subscribe()
    }
}

impl Flight {
    /// Whether it only waits, for somebody who has not written yet.
    pub(crate) fn rest(&mut self, rests: bool) {
        if self.rests != rests {
            self.rests = rests;
            let flights = &mut self.board.state.lock().flights;
            let turn = if rests { Busy::rest } else { Busy::go_on };
            turn(flights, Instant::now());
        }
    }

    /// Its bytes may be under way, and nobody will hear when they are not. It ends with the job's [`Loading`].
    pub(crate) fn leave(mut self) {
        self.left = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.rest(false);
        let mut state = self.board.state.lock();
        if self.left {
            state.left += 1;
            return;
        }
        state.flights.end(Instant::now());
        drop(state);
        self.board.changed.notify_all();
    }
}

/// A job's reads may be under way as long as this lives: transfers keep it, so that it outlives all who wait for them.
pub(crate) struct Loading {
    board: Arc<Board>,
    loads: Arc<Loads>,
}

impl Loading {
    /// A job's reads may begin.
    pub(crate) fn begin(board: &Arc<Board>, loads: &Arc<Loads>) -> Arc<Self> {
        *loads.under_way.lock() += 1;
        Arc::new(Self {
            board: Arc::clone(board),
            loads: Arc::clone(loads),
        })
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.board.landed();
        *self.loads.under_way.lock() -= 1;
        self.loads.quiet.notify_all();
        self.loads.told.notify_waiters();
    }
}

/// Jobs whose reads may be under way.
#[derive(Default)]
pub(crate) struct Loads {
    under_way: Mutex<usize>,
    quiet: Condvar,
    told: Notify,
}

impl Loads {
    /// Waits until no reads are under way, but no longer than this. `false`: some are.
    pub(crate) fn wait_quiet(&self, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            if self.quiet.wait_until(&mut under_way, until).timed_out() {
                break;
            }
        }
        *under_way == 0
    }

    /// The same for a task, for as long as it takes.
    pub(crate) async fn quiet(&self) {
        loop {
            // Counts from here on, polled or not.
            let told = self.told.notified();
            if *self.under_way.lock() == 0 {
                return;
            }
            told.await;
        }
    }
}

/// The receiving end of a board. When it goes, every block is counted as loaded or not.
pub(crate) struct Receiving(pub(crate) Arc<Board>, pub(crate) Arc<Counters>);

impl Drop for Receiving {
    fn drop(&mut self) {
        let Self(board, counters) = self;
        board.abort(counters, MissReason::Aborted);
        let loaded = board.look(Convergence::loaded_blocks);
        counters.loaded_blocks.add(loaded as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // contract: connector-15
    #[test]
    fn a_receiver_that_dies_wakes_the_thread_with_the_failure_published() {
        let board = Arc::new(Board::new(vec![vec![1], vec![2, 3]], 4));
        let counters = Arc::new(Counters::default());
        let receiving = Receiving(Arc::clone(&board), Arc::clone(&counters));
        let waiting = Arc::clone(&board);
        let thread = std::thread::spawn(move || waiting.wait(3, Duration::from_secs(20)));
        for layer in 0..3 {
            board.update(|state| state.answered(layer, &[0, 1], &[true, true]));
        }
        let dies = std::thread::spawn(move || {
            let _receiving = receiving;
            panic!("the receiver dies");
        });
        assert!(dies.join().is_err());
        let ready = thread.join().expect("no panic").expect("woken");
        assert_eq!(ready.invalid_blocks, [1, 2, 3]);
        let stats = counters.snapshot();
        assert_eq!((stats.loaded_blocks, stats.failed_loads), (0, 3));
        assert_eq!(stats.missed(MissReason::Aborted), 3);
    }

    // contract: connector-13
    #[test]
    fn loads_are_over_when_every_call_has_come_back() {
        let board = Arc::new(Board::new(vec![vec![1]], 2));
        let first = board.take_off();
        let second = board.take_off();
        board.update(|state| state.answered(0, &[0], &[false]));
        drop(first);
        assert!(
            board.wait(1, Duration::ZERO).is_some(),
            "nothing is to come"
        );
        assert!(!board.wait_all(Duration::ZERO), "the second is under way");
        drop(second);
        assert!(board.wait_all(Duration::ZERO));
        // The same for loads that are stopped.
        let board = Arc::new(Board::new(vec![vec![1], vec![2]], 2));
        let flight = board.take_off();
        board.stop(&Counters::default(), MissReason::Aborted);
        assert_eq!(board.ready().expect("all void").invalid_blocks, [1, 2]);
        assert!(!board.wait_all(Duration::ZERO));
        drop(flight);
        assert!(board.wait_all(Duration::ZERO));
    }

    #[test]
    fn a_wait_has_an_end() {
        let board = Board::new(vec![vec![1]], 1);
        assert_eq!(board.wait(0, Duration::from_millis(1)), None);
        assert!(!board.wait_all(Duration::from_millis(1)));
    }
}
