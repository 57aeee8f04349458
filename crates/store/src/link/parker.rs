//! A thread that waits: parked, or in a look at a socket.
//!
//! Its waker ends either wait. `state` says which it is, so that a wake-up costs a system call only if the
//! thread does wait, and the right one.

use std::cell::Cell;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Wake;
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};
use smallvec::SmallVec;

const RUNS: u8 = 0;
const WOKEN: u8 = 1;
const PARKED: u8 = 2;
const POLLS: u8 = 3;

/// Nothing is waited for without another look from time to time: so often where nobody says how often.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

thread_local! {
    /// This thread's, while it is not in use.
    static IDLE: Cell<Option<Arc<Parker>>> = const { Cell::new(None) };
}

/// See the module's text. Only its own thread waits.
#[derive(Debug)]
pub(super) struct Parker {
    state: AtomicU8,
    thread: Thread,
    wakes: OwnedFd,
    /// How long it waits at a time, in microseconds.
    look_again: AtomicU64,
}

impl Parker {
    /// One for this thread, which looks again so often.
    pub(super) fn take(look_again: Option<Duration>) -> io::Result<Arc<Self>> {
        let parker = if let Some(idle) = IDLE.take() {
            idle
        } else {
            Arc::new(Self {
                state: AtomicU8::new(RUNS),
                thread: thread::current(),
                wakes: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                look_again: AtomicU64::new(0),
            })
        };
        let micros = look_again.unwrap_or(LOOK_AGAIN).as_micros();
        let micros = u64::try_from(micros).unwrap_or(u64::MAX);
        parker.look_again.store(micros, Ordering::Relaxed);
        Ok(parker)
    }

    /// How long it waits at a time.
    pub(super) fn look_again(&self) -> Duration {
        Duration::from_micros(self.look_again.load(Ordering::Relaxed))
    }

    /// Keeps it for this thread's next time.
    pub(super) fn keep(self: Arc<Self>) {
        IDLE.set(Some(self));
    }

    /// Forgets that it was woken.
    pub(super) fn reset(&self) {
        self.state.swap(RUNS, Ordering::AcqRel);
    }

    pub(super) fn is_woken(&self) -> bool {
        self.state.load(Ordering::Acquire) == WOKEN
    }

    /// Begins to wait; `false`: it was woken before.
    fn begin(&self, how: u8) -> bool {
        let begun = self
            .state
            .compare_exchange(RUNS, how, Ordering::AcqRel, Ordering::Acquire);
        begun.is_ok()
    }

    fn end(&self, how: u8) {
        // If it was woken meanwhile, it stays so.
        let _ = self
            .state
            .compare_exchange(how, RUNS, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Waits until it is woken or called, or for no reason.
    pub(super) fn park(&self) {
        if self.begin(PARKED) {
            thread::park_timeout(self.look_again());
            self.end(PARKED);
        }
    }

    /// Has a parked one look around without being woken.
    pub(super) fn call(&self) {
        self.thread.unpark();
    }

    /// Waits until the socket has something to read, or room if that is wanted too, it is woken, or for no reason.
    /// Tells whether the socket is ready.
    pub(super) fn poll(&self, socket: Awaited<'_>) -> io::Result<bool> {
        let [ready] = self.poll_all([socket])?;
        Ok(ready)
    }

    /// As [`poll`](Self::poll), for several sockets: of each whether it is ready.
    pub(super) fn poll_all<const N: usize>(
        &self,
        sockets: [Awaited<'_>; N],
    ) -> io::Result<[bool; N]> {
        if !self.begin(POLLS) {
            return Ok([false; N]);
        }
        let mut fds: SmallVec<[PollFd<'_>; 3]> = sockets.into_iter().map(Awaited::events).collect();
        fds.push(PollFd::new(&self.wakes, PollFlags::IN));
        let look_again = Timespec::try_from(self.look_again()).ok();
        let polled = poll(&mut fds, look_again.as_ref());
        self.end(POLLS);
        match polled {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok([false; N]),
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if fds.last().is_some_and(is_ready) {
            let mut count = [0; 8];
            // Only whether there were any counts, and that the next poll begins anew.
            let _ = read(&self.wakes, &mut count);
        }
        Ok(std::array::from_fn(|at| is_ready(&fds[at])))
    }
}

/// A socket that is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited<'a> {
    pub(super) socket: BorrowedFd<'a>,
    /// For room to write in it, too.
    pub(super) room: bool,
}

impl<'a> Awaited<'a> {
    fn events(self) -> PollFd<'a> {
        let mut events = PollFlags::IN;
        events.set(PollFlags::OUT, self.room);
        PollFd::from_borrowed_fd(self.socket, events)
    }

    /// One that is to be read.
    pub(super) fn to_read(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            room: false,
        }
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match self.state.swap(WOKEN, Ordering::AcqRel) {
            PARKED => self.thread.unpark(),
            POLLS => {
                // It can only fail when the count is at its limit, and then the thread is being woken.
                let _ = write(&self.wakes, &1_u64.to_ne_bytes());
            }
            _ => {}
        }
    }
}
