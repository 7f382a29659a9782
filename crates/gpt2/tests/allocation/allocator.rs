//! The system's allocator, except that one large allocation fails.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes from which an allocation counts: tensors, workspaces and files reach it, names and plans do not. `docs/trust.md` promises no more.
pub const LARGE: usize = 1 << 20;

struct Failing;

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Whether large allocations are counted, on all threads.
static COUNTS: AtomicBool = AtomicBool::new(false);
/// Those so far.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The first that fails.
static FIRST: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The last that fails.
static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Which large allocations fail, counted from 1.
#[derive(Debug, Clone, Copy)]
pub enum Fails {
    None,
    /// this one
    One(usize),
    /// this one and all that follow
    From(usize),
}

/// Runs something while large allocations are counted. Gives its result, and how many there were.
pub fn with<T>(fails: Fails, run: impl FnOnce() -> T) -> (T, usize) {
    let (first, last) = match fails {
        Fails::None => (usize::MAX, usize::MAX),
        Fails::One(number) => (number, number),
        Fails::From(number) => (number, usize::MAX),
    };
    FIRST.store(first, Ordering::SeqCst);
    LAST.store(last, Ordering::SeqCst);
    COUNT.store(0, Ordering::SeqCst);
    COUNTS.store(true, Ordering::SeqCst);
    let result = run();
    COUNTS.store(false, Ordering::SeqCst);
    (result, COUNT.load(Ordering::SeqCst))
}

/// Whether an allocation is one that must fail.
fn fails(bytes: usize) -> bool {
    if bytes < LARGE || !COUNTS.load(Ordering::SeqCst) {
        return false;
    }
    let number = COUNT.fetch_add(1, Ordering::SeqCst) + 1;
    (FIRST.load(Ordering::SeqCst)..=LAST.load(Ordering::SeqCst)).contains(&number)
}

// SAFETY: every call is handed to the system's allocator unchanged, or answered with null, which says that there is no memory.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() && fails(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}
