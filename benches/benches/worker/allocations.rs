//! How often memory is asked for, by all threads of the process and by each.
//!
//! The system's allocator with counters in front of it. The invariant: every call goes on to the system's
//! allocator as it came, so its promises are those of this one.

#![expect(unsafe_code, reason = "an allocator's methods are unsafe to call")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// Requests of all threads so far.
pub(crate) fn of_all() -> u64 {
    ALL.load(Ordering::Relaxed)
}

/// Requests of this thread so far.
pub(crate) fn of_this_thread() -> u64 {
    OWN.get()
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Counting;

impl Counting {
    fn note() {
        ALL.fetch_add(1, Ordering::Relaxed);
        OWN.set(OWN.get() + 1);
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
