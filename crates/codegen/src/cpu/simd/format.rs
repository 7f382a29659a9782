//! Storage formats: conversion of elements to `f32` (or `i32`) lanes, and back.
//!
//! | format  | to lanes             | from lanes                                                     |
//! |---------|----------------------|----------------------------------------------------------------|
//! | f32     | the same bits        | the same bits (NaN payloads too)                               |
//! | i32     | the same bits        | the same bits                                                  |
//! | f16     | exact                | nearest even, infinite from 65520 on, NaN stays NaN            |
//! | bf16    | exact                | nearest even, NaN stays NaN                                    |
//! | i8      | exact, as `f32`      | nearest even, saturates to [-128, 127], NaN gives 0            |
//! | bool    | 1.0 or 0.0           | `x != 0` (NaN is true)                                         |
//! | f8e4m3  | not read             | nearest even, saturates to +-448, NaN gives 0x7f               |

use super::lanes::{Arithmetic, Simd};

/// How one dtype is read into lanes and written from them. `partial` methods touch `count < WIDTH` elements.
pub trait Format: Copy {
    /// Of an element.
    const BYTES: usize;

    /// # Safety
    /// `WIDTH` elements at `from` can be read; any alignment.
    unsafe fn read<S: Simd>(simd: S, from: *const u8) -> S::Float;
    /// # Safety
    /// `count < WIDTH` elements at `from` can be read.
    unsafe fn read_partial<S: Simd>(simd: S, from: *const u8, count: usize) -> S::Float;
    /// # Safety
    /// `WIDTH` elements at `to` can be written; if `stream`, `to` is a multiple of `WIDTH * BYTES`.
    unsafe fn write<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, stream: bool);
    /// # Safety
    /// `count < WIDTH` elements at `to` can be written.
    unsafe fn write_partial<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, count: usize);
}

/// `f32` and `i32`: lanes as they are.
#[derive(Clone, Copy)]
pub struct Word;

impl Format for Word {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn read<S: Simd>(simd: S, from: *const u8) -> S::Float {
        // SAFETY: the caller's promise is that of `load`.
        unsafe { simd.load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn read_partial<S: Simd>(simd: S, from: *const u8, count: usize) -> S::Float {
        // SAFETY: the caller's promise is that of `load_partial`.
        unsafe { simd.load_partial(from.cast(), count) }
    }
    #[inline(always)]
    unsafe fn write<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, stream: bool) {
        // SAFETY: the caller's promise is that of `store`, and of `stream` if it asks for that.
        unsafe { if stream { simd.stream(to.cast(), lanes) } else { simd.store(to.cast(), lanes) } }
    }
    #[inline(always)]
    unsafe fn write_partial<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, count: usize) {
        // SAFETY: the caller's promise is that of `store_partial`.
        unsafe { simd.store_partial(to.cast(), lanes, count) }
    }
}

/// A format of 16 bits, as functions of lanes.
pub(crate) trait HalfFormat: Copy {
    fn widen<S: Arithmetic>(simd: S, a: S::Half) -> S::Float;
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Half;
    /// The value after a store and a load.
    #[inline(always)]
    fn round<S: Arithmetic>(simd: S, a: S::Float) -> S::Float {
        Self::widen(simd, Self::narrow(simd, a))
    }
}

/// A format of 8 bits, as functions of lanes.
pub(crate) trait ByteFormat: Copy {
    fn widen<S: Arithmetic>(simd: S, a: S::Byte) -> S::Float;
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Byte;
}

/// Reads and writes of the two narrow widths differ only in the vector type.
macro_rules! narrow_format {
    ($format:ty, $shape:ident, $element:ty, $load:ident, $store:ident, $stream:ident) => {
        impl Format for $format {
            const BYTES: usize = size_of::<$element>();

            #[inline(always)]
            unsafe fn read<S: Simd>(simd: S, from: *const u8) -> S::Float {
                // SAFETY: the caller's promise is that of a full load.
                <$format as $shape>::widen(simd, unsafe { simd.$load(from.cast()) })
            }
            #[inline(always)]
            unsafe fn read_partial<S: Simd>(simd: S, from: *const u8, count: usize) -> S::Float {
                let mut elements = [0 as $element; 16];
                let bytes = count * size_of::<$element>();
                // SAFETY: the caller lets us read `count` elements; `count < WIDTH <= 16`, the length of `elements`.
                let loaded = unsafe {
                    std::ptr::copy_nonoverlapping(from, elements.as_mut_ptr().cast::<u8>(), bytes);
                    simd.$load(elements.as_ptr())
                };
                <$format as $shape>::widen(simd, loaded)
            }
            #[inline(always)]
            unsafe fn write<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, stream: bool) {
                let narrow = <$format as $shape>::narrow(simd, lanes);
                // SAFETY: the caller's promise is that of a full store, and of a streaming one if it asks for that.
                unsafe { if stream { simd.$stream(to.cast(), narrow) } else { simd.$store(to.cast(), narrow) } }
            }
            #[inline(always)]
            unsafe fn write_partial<S: Simd>(simd: S, to: *mut u8, lanes: S::Float, count: usize) {
                let mut elements = [0 as $element; 16];
                let bytes = count * size_of::<$element>();
                // SAFETY: `elements` holds a vector; the caller lets us write `count < WIDTH` elements.
                unsafe {
                    simd.$store(elements.as_mut_ptr(), <$format as $shape>::narrow(simd, lanes));
                    std::ptr::copy_nonoverlapping(elements.as_ptr().cast::<u8>(), to, bytes);
                }
            }
        }
    };
}

/// IEEE half floats.
#[derive(Clone, Copy)]
pub struct HalfFloat;
narrow_format!(HalfFloat, HalfFormat, u16, load_half, store_half, stream_half);

impl HalfFormat for HalfFloat {
    #[inline(always)]
    fn widen<S: Arithmetic>(simd: S, a: S::Half) -> S::Float {
        simd.widen_f16(a)
    }
    #[inline(always)]
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Half {
        simd.narrow_f16(a)
    }
}

/// The upper half of an `f32`.
#[derive(Clone, Copy)]
pub struct BrainFloat;
narrow_format!(BrainFloat, HalfFormat, u16, load_half, store_half, stream_half);

impl HalfFormat for BrainFloat {
    #[inline(always)]
    fn widen<S: Arithmetic>(simd: S, a: S::Half) -> S::Float {
        simd.reinterpret(simd.shift_left::<16>(simd.zero_extend(a)))
    }
    #[inline(always)]
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Half {
        simd.truncate(simd.shift_right::<16>(rounded_to_upper_half(simd, a)))
    }
    #[inline(always)]
    fn round<S: Arithmetic>(simd: S, a: S::Float) -> S::Float {
        let upper = simd.splat_int(0xffff_0000_u32 as i32);
        simd.reinterpret(simd.and(rounded_to_upper_half(simd, a), upper))
    }
}

/// Bits whose upper half is the nearest bf16, ties to even; the lower half is anything.
#[inline(always)]
fn rounded_to_upper_half<S: Arithmetic>(simd: S, a: S::Float) -> S::Int {
    let bits = simd.bits(a);
    let odd = simd.and(simd.shift_right::<16>(bits), simd.splat_int(1));
    // `odd` is to be added. Setting bit 0 does the same to the upper half: where the bit is set already the value is not halfway between two
    // results, and a carry needs no 1 more. AVX-512 has one instruction for both operations.
    let rounded = simd.add_int(simd.or(bits, odd), simd.splat_int(0x7fff));
    // Rounding could carry a NaN into infinity, or cut its payload to one: set the quiet bit instead.
    simd.or_quiet_nan(rounded, a)
}

/// Signed bytes.
#[derive(Clone, Copy)]
pub struct SignedByte;
narrow_format!(SignedByte, ByteFormat, u8, load_byte, store_byte, stream_byte);

impl ByteFormat for SignedByte {
    #[inline(always)]
    fn widen<S: Arithmetic>(simd: S, a: S::Byte) -> S::Float {
        simd.to_float(simd.sign_extend(a))
    }
    #[inline(always)]
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Byte {
        // The selection follows the maximum, which AVX-512 does under its mask.
        let least = simd.select(simd.equal(a, a), simd.greater(simd.splat(-128.0), a), simd.splat(0.0));
        simd.truncate_to_byte(simd.to_int(simd.lesser(simd.splat(127.0), least)))
    }
}

/// Truth values: one byte, 0 or 1.
#[derive(Clone, Copy)]
pub(crate) struct Truth;
narrow_format!(Truth, ByteFormat, u8, load_byte, store_byte, stream_byte);

impl ByteFormat for Truth {
    #[inline(always)]
    fn widen<S: Arithmetic>(simd: S, a: S::Byte) -> S::Float {
        simd.to_float(simd.sign_extend(a))
    }
    #[inline(always)]
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Byte {
        let zero = simd.equal(a, simd.splat(0.0));
        simd.truncate_to_byte(simd.select_int(zero, simd.splat_int(0), simd.splat_int(1)))
    }
}

/// 8-bit floats with 4 exponent bits, bias 7, no infinity. Written only; reading gives NaN everywhere.
#[derive(Clone, Copy)]
pub(crate) struct EightBitFloat;
narrow_format!(EightBitFloat, ByteFormat, u8, load_byte, store_byte, stream_byte);

impl ByteFormat for EightBitFloat {
    #[inline(always)]
    fn widen<S: Arithmetic>(simd: S, _: S::Byte) -> S::Float {
        simd.splat(f32::NAN)
    }
    #[inline(always)]
    fn narrow<S: Arithmetic>(simd: S, a: S::Float) -> S::Byte {
        let sign = simd.and(simd.shift_right::<24>(simd.bits(a)), simd.splat_int(0x80));
        let size = simd.lesser(simd.splat(448.0), simd.abs(a));
        // Normal, from 2^-6 on: round 23 fraction bits to 3, then change the exponent's bias from 127 to 7.
        let normal = round_bits::<S, 20>(simd, simd.sub_int(simd.bits(size), simd.splat_int(120 << 23)));
        // Denormal: a multiple of 2^-9, which is the last fraction bit of a float in [2^14, 2^15).
        let denormal = shifted_sum(simd, size, 16384.0);
        let code = simd.select_int(simd.less(size, simd.splat(f32::from_bits(0x3c80_0000))), denormal, normal);
        let signed = simd.or(code, sign);
        simd.truncate_to_byte(simd.select_int(simd.equal(a, a), signed, simd.splat_int(0x7f)))
    }
}

/// `bits >> N`, to the nearest, ties to even.
#[inline(always)]
fn round_bits<S: Arithmetic, const N: u32>(simd: S, bits: S::Int) -> S::Int {
    let odd = simd.and(simd.shift_right::<N>(bits), simd.splat_int(1));
    let bias = simd.add_int(odd, simd.splat_int((1 << (N - 1)) - 1));
    simd.shift_right::<N>(simd.add_int(bits, bias))
}

/// `size` in units of the last place of `magic`, a power of two that is larger than it: the addition does the rounding.
#[inline(always)]
fn shifted_sum<S: Arithmetic>(simd: S, size: S::Float, magic: f32) -> S::Int {
    let sum = simd.add(size, simd.splat(magic));
    simd.sub_int(simd.bits(sum), simd.splat_int(magic.to_bits() as i32))
}

/// IEEE half floats in the low 16 bits of lanes, to `f32`: the path of machines that have no instruction for it.
#[inline(always)]
pub(super) fn widen_f16_bits<S: Arithmetic>(simd: S, half: S::Int) -> S::Float {
    let sign = simd.shift_left::<16>(simd.and(half, simd.splat_int(0x8000)));
    let size = simd.shift_left::<13>(simd.and(half, simd.splat_int(0x7fff)));
    // The exponent's bias changes from 15 to 127; a multiplication does it for denormals as well.
    let scaled = simd.mul(simd.reinterpret(size), simd.splat(f32::from_bits((127 + 112) << 23)));
    let special = simd.or(size, simd.splat_int(0x7f80_0000));
    let finite = simd.less_int(size, simd.splat_int(0x7c00 << 13));
    simd.reinterpret(simd.or(sign, simd.select_int(finite, simd.bits(scaled), special)))
}

/// `f32` to IEEE half floats in the low 16 bits of lanes, nearest even.
#[inline(always)]
pub(super) fn narrow_f16_bits<S: Arithmetic>(simd: S, a: S::Float) -> S::Int {
    let bits = simd.bits(a);
    let sign = simd.and(simd.shift_right::<16>(bits), simd.splat_int(0x8000));
    let size = simd.abs(a);
    let normal = round_bits::<S, 13>(simd, simd.sub_int(simd.bits(size), simd.splat_int(112 << 23)));
    // Below 2^-14: a multiple of 2^-24, which is the last fraction bit of a float in [1/2, 1).
    let denormal = shifted_sum(simd, size, 0.5);
    let finite = simd.select_int(simd.less(size, simd.splat(f32::from_bits(0x3880_0000))), denormal, normal);
    let bounded = simd.select_int(simd.less(size, simd.splat(65520.0)), finite, simd.splat_int(0x7c00));
    let payload = simd.and(simd.shift_right::<13>(bits), simd.splat_int(0x3ff));
    let quiet = simd.or(payload, simd.splat_int(0x7e00));
    simd.or(sign, simd.select_int(simd.equal(a, a), bounded, quiet))
}
