//! A word that the kernel changes when its owner ends: whether a process lives, without a system call.
//!
//! An owner's table begins with a line that peers map and can't write. One of its words is held like a
//! robust futex: it has the id of a thread of the owner, and the kernel was told of it
//! (`set_robust_list`). When that thread ends without having given the word back, the kernel takes the
//! id out of it before it lets go of anything else that the thread has, its memory and its sockets
//! among them. That happens on every end: a return, a panic, a signal to the process, another program
//! in its place (`exec`). A child that was forked has another id, and nothing of the list.
//!
//! So a word with an id in it says that the owner is there. A word without one says nothing: the owner
//! may be a version or on a kernel without this, or its thread alone has ended. Whoever finds it so asks
//! the owner's socket, which is what was always asked before. Only the bits count, not whose id they
//! are, so it does not matter that namespaces of processes number threads differently.
//!
//! The word is held by the service thread, from its first to its last instruction of ours. The C library
//! uses the same list for its robust mutexes: it is put back afterwards, and nothing that runs on this
//! thread may die holding such a mutex and have others be told. There is none in this crate; a waker
//! that locks one loses its robustness, and nothing else.
//!
//! That a kernel does as it says is tried once per process, with a thread that ends.
//!
//! # Invariant
//!
//! The kernel is given addresses of words that [`while_here`] borrows, and is made to forget them before
//! that returns, also if what it runs panics; the trial's thread has ended before its words go. The
//! list has one entry, and the kernel changes nothing but the word that it leads to, if the id there is
//! the ending thread's.
//!
//! The kernel has to reach the words when memory is short, too, which is when processes are killed: their
//! page is locked by whoever calls [`while_here`].

#![expect(
    unsafe_code,
    reason = "tells the kernel of the list; see the module's text"
)]

use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words that are needed: the one that is held, and the list that leads to it.
pub(super) const WORDS: usize = 5;

/// The futex, in the first four bytes of its word.
const HELD: usize = 0;
/// The list's head: its first entry, where from an entry its futex lies, an entry about to be added.
const HEAD: usize = 1;
const OFFSET: usize = 2;
const PENDING: usize = 3;
/// The one entry: the next one.
const ENTRY: usize = 4;

/// Bytes of the head, as the kernel wants to be told.
const HEAD_LEN: usize = 3 * size_of::<u64>();

/// The bits of a held futex that are the id of a thread.
const ID: u32 = 0x3FFF_FFFF;

/// Whether the thread that holds the word is there, and its process with it. `false` says nothing.
pub(super) fn is_here(words: &[AtomicU64; WORDS]) -> bool {
    id(words[HELD].load(Ordering::Acquire)) != 0
}

fn id(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d]) & ID
}

/// A word that holds an id.
fn with_id(id: u32) -> u64 {
    let [a, b, c, d] = id.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
}

/// Gives the word back before its thread ends: the owner is about to let go of what it shares.
pub(super) fn leave(words: &[AtomicU64; WORDS]) {
    words[HELD].store(0, Ordering::SeqCst);
}

/// Runs `work`, which is all that this thread does for its owner, and holds the word meanwhile if the
/// kernel can be relied on for that. The words lie in memory that is locked.
pub(super) fn while_here<T>(words: &[AtomicU64; WORDS], work: impl FnOnce() -> T) -> T {
    let held = is_reliable().then(|| Held::new(words));
    if let Some(Err(error)) = &held {
        tracing::debug!(%error, "peers have to ask the kernel whether this engine is there");
    }
    let result = work();
    drop(held);
    result
}

/// Whether this kernel does what it is relied on for: tried with a thread that ends.
fn is_reliable() -> bool {
    static RELIABLE: OnceLock<bool> = OnceLock::new();
    *RELIABLE.get_or_init(|| {
        let reliable = try_out().unwrap_or_else(|error| {
            tracing::debug!(%error, "can't try what the kernel does when a thread ends");
            false
        });
        if !reliable {
            tracing::debug!("peers have to ask the kernel whether an engine is there");
        }
        reliable
    })
}

fn try_out() -> io::Result<bool> {
    let words = [const { AtomicU64::new(0) }; WORDS];
    let was_held = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("lc-trial".to_owned());
        let thread = thread.spawn_scoped(scope, || {
            let held = Held::new(&words).map(std::mem::forget);
            held.map(|()| is_here(&words))
        })?;
        // Returns when the thread has ended for the kernel, too, which has read its list by then.
        thread.join().unwrap_or(Ok(false))
    })?;
    Ok(was_held && !is_here(&words) && words[HELD].load(Ordering::Acquire) != 0)
}

/// The word, held by the thread that made this: it stays on it.
struct Held<'a> {
    words: &'a [AtomicU64; WORDS],
    /// What the kernel was told by the C library.
    before: *mut c_void,
}

impl<'a> Held<'a> {
    fn new(words: &'a [AtomicU64; WORDS]) -> io::Result<Self> {
        if size_of::<usize>() != size_of::<u64>() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let address = |word: usize| words[word].as_ptr() as u64;
        words[HEAD].store(address(ENTRY), Ordering::Relaxed);
        words[ENTRY].store(address(HEAD), Ordering::Relaxed);
        let offset = address(HELD).wrapping_sub(address(ENTRY));
        words[OFFSET].store(offset, Ordering::Relaxed);
        words[PENDING].store(0, Ordering::Relaxed);
        let before = told()?;
        tell(words[HEAD].as_ptr().cast())?;
        let id = rustix::thread::gettid().as_raw_nonzero().get();
        words[HELD].store(with_id(id.unsigned_abs()), Ordering::SeqCst);
        Ok(Self { words, before })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        leave(self.words);
        if let Err(error) = tell(self.before) {
            // It was taken before. What it would read is checked before it is changed.
            tracing::error!(%error, "the kernel keeps a list of robust futexes");
        }
    }
}

/// The head of this thread's list, as the kernel knows it.
fn told() -> io::Result<*mut c_void> {
    let mut head = ptr::null_mut::<c_void>();
    let mut len = 0_usize;
    // SAFETY: the call stores a pointer and a size to these two variables.
    let done = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &raw mut head, &raw mut len) };
    if done == 0 {
        Ok(head)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Has the kernel know another head of this thread's list.
fn tell(head: *mut c_void) -> io::Result<()> {
    // SAFETY: nothing is read before this thread ends. A head of ours is given back before its words
    // are gone, see the module's text; any other is what the C library had told.
    let done = unsafe { libc::syscall(libc::SYS_set_robust_list, head, HEAD_LEN) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn words() -> [AtomicU64; WORDS] {
        [const { AtomicU64::new(0) }; WORDS]
    }

    #[test]
    fn the_word_is_held_as_long_as_the_work_lasts() {
        let words = words();
        let before = told().expect("asked");
        assert!(!is_here(&words));
        for _ in 0..2 {
            assert!(while_here(&words, || is_here(&words)));
            assert!(!is_here(&words));
            assert_eq!(told().expect("asked"), before);
        }
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            while_here(&words, || panic!("in the work"));
        }));
        assert!(panicked.is_err() && !is_here(&words));
        assert_eq!(told().expect("asked"), before);
    }

    #[test]
    fn a_word_that_was_given_back_stays_so() {
        let words = words();
        while_here(&words, || {
            leave(&words);
            assert!(!is_here(&words));
        });
        assert_eq!(words[HELD].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_kernel_takes_the_word_from_a_thread_that_ends() {
        assert!(try_out().expect("tried"));
        // What it does with one that another thread holds: nothing.
        let words = words();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let held = Held::new(&words).map(std::mem::forget);
                held.expect("held");
                words[HELD].store(with_id(1), Ordering::Relaxed);
            });
            thread.join().expect("ends");
        });
        assert!(is_here(&words));
    }
}
