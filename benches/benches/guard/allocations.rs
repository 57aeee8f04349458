//! How often memory is asked for, by a thread and by all of them.
//!
//! The system's allocator with counters in front of it. The invariant: every call goes on to the system's
//! allocator as it came, so its promises are those of this one.

#![expect(unsafe_code, reason = "an allocator's methods are unsafe to call")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static OF_ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static REQUESTS: Cell<u64> = const { Cell::new(0) };
    static COUNTED: Cell<u64> = const { Cell::new(0) };
}

/// Requests for memory that this thread has made so far.
pub(crate) fn so_far() -> u64 {
    REQUESTS.get()
}

/// Requests of all threads so far.
pub(crate) fn of_all() -> u64 {
    OF_ALL.load(Ordering::Relaxed)
}

/// Keeps how many requests the counted part of a path made.
pub(crate) fn note_counted(requests: u64) {
    COUNTED.set(requests);
}

/// What was kept last.
pub(crate) fn counted() -> u64 {
    COUNTED.get()
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Counting;

impl Counting {
    fn note() {
        REQUESTS.set(REQUESTS.get() + 1);
        OF_ALL.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: hands every call on to the system's allocator, unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::note();
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::note();
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::note();
        // SAFETY: the caller's promise about the memory, which came from the system's allocator.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise about the memory, which came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}
