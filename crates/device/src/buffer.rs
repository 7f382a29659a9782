//! Host memory aligned for the widest vector.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use crate::error::DeviceError;

/// Small buffers start at a cache line; large ones at a huge page, which the kernel then can use.
const CACHE_LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed bytes of host memory.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    length: usize,
}

// SAFETY: a buffer owns its memory, and all access goes through `&self` and `&mut self`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates zeroed memory.
    pub fn new(length: usize) -> Result<Buffer, DeviceError> {
        let alignment = if length >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let failed = DeviceError::OutOfMemory { bytes: length };
        let layout = Layout::from_size_align(length.max(1), alignment).map_err(|_| failed.clone())?;
        // SAFETY: the layout's size is at least 1.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(failed)?;
        // Asked before the first touch: pages already there stay small.
        if alignment == HUGE_PAGE {
            ask_for_huge_pages(start, length);
        }
        // SAFETY: just allocated with this size.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Ok(Buffer { start, layout, length })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is valid for `length` bytes while `self` lives, all initialised (zeroed at least), and `&self`
        // excludes writers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` excludes all others.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    pub(crate) fn address(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// Fewer faults and fewer address translations. A kernel that refuses costs nothing.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: NonNull<u8>, length: usize) {
    // SAFETY: the range is ours and starts at a page; the advice changes no contents.
    unsafe { libc::madvise(start.as_ptr().cast(), length, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_start: NonNull<u8>, _length: usize) {}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout, and dropped once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
