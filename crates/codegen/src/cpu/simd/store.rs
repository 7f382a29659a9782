//! Stores lanes to the elements of an argument, with streaming stores on request.
//!
//! A streaming store writes whole cache lines: elements before the first 64-byte boundary and after the last one go
//! through the caches. A store that misses them would first read the line it overwrites, a third of a copy's traffic.

use deuteron_graph::Dtype;

use super::format::{BrainFloat, EightBitFloat, Format, HalfFloat, SignedByte, Truth, Word};
use super::lanes::Simd;
use super::sweep::{Body, Input, sweep};

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Where elements go.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    pub base: *mut u8,
    pub dtype: Dtype,
    pub streaming: bool,
}

/// Converts `length` lanes of `from`.
///
/// # Safety
/// `length` lanes of `from` can be read and `length` elements of `to` written; they do not overlap.
pub(super) unsafe fn store<S: Simd>(simd: S, length: usize, from: Input, to: Elements) {
    // SAFETY: passed on to the caller.
    unsafe {
        match to.dtype {
            Dtype::F32 | Dtype::I32 => store_as(simd, length, Word, from, to),
            Dtype::F16 => store_as(simd, length, HalfFloat, from, to),
            Dtype::Bf16 => store_as(simd, length, BrainFloat, from, to),
            Dtype::I8 => store_as(simd, length, SignedByte, from, to),
            Dtype::Bool => store_as(simd, length, Truth, from, to),
            Dtype::F8e4m3 => store_as(simd, length, EightBitFloat, from, to),
        }
    }
}

/// # Safety
/// As [`store`].
unsafe fn store_as<S: Simd, T: Format>(simd: S, length: usize, format: T, from: Input, to: Elements) {
    let lines = if to.streaming { whole_lines(to.base as usize, T::BYTES, length) } else { 0..0 };
    let part = |first: usize, stream: bool| Narrow {
        _format: format,
        // SAFETY: `first <= length`, and the caller's lanes and elements reach that far.
        from: unsafe { from.from(first) },
        // SAFETY: as above.
        to: unsafe { to.base.add(first * T::BYTES) },
        stream,
    };
    // SAFETY: the three parts cover `0 .. length` once; the middle one starts at a multiple of 64 bytes.
    unsafe {
        if lines.is_empty() {
            sweep(simd, length, part(0, false));
        } else {
            if lines.start > 0 {
                sweep(simd, lines.start, part(0, false));
            }
            sweep(simd, lines.len(), part(lines.start, true));
            if lines.end < length {
                sweep(simd, length - lines.end, part(lines.end, false));
            }
        }
    }
}

/// The elements of `address .. address + length * bytes` that fill cache lines.
fn whole_lines(address: usize, bytes: usize, length: usize) -> std::ops::Range<usize> {
    if !address.is_multiple_of(bytes) {
        return 0..0;
    }
    let first = (address.next_multiple_of(LINE) - address) / bytes;
    let line = LINE / bytes;
    if first + line > length {
        return 0..0;
    }
    first..first + (length - first) / line * line
}

struct Narrow<T> {
    _format: T,
    from: Input,
    to: *mut u8,
    stream: bool,
}

impl<T: Format> Body for Narrow<T> {
    #[inline(always)]
    fn streamed(&self) -> usize {
        if self.stream { usize::MAX } else { 0 }
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        // SAFETY: the caller's promise. Streaming: `to` is a multiple of 64 bytes, and `i` of `WIDTH`.
        unsafe { T::write(simd, self.to.add(i * T::BYTES), self.from.load(simd, i), STREAM) }
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = self.from.load_partial(simd, i, count);
            T::write_partial(simd, self.to.add(i * T::BYTES), lanes, count)
        }
    }

    /// Of several rows each is stored by a sweep of its own.
    fn next_row(&mut self) {}
}
