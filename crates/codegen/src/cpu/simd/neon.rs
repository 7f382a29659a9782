//! NEON: 4 lanes.

use std::arch::aarch64::*;

use super::lanes::{Arithmetic, Kernel, Simd, methods};

/// Proof that this CPU has NEON. Only `detect` makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

#[target_feature(enable = "neon")]
fn enabled<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Intrinsics that work on registers only.
macro_rules! register {
    ($($call:tt)*) => {
        // SAFETY: a method's `self` exists only if `detect` found NEON, which is the only condition of an intrinsic
        // that takes no pointer.
        unsafe { $($call)* }
    };
}

impl Arithmetic for Neon {
    const WIDTH: usize = 4;
    type Float = float32x4_t;
    type Int = int32x4_t;
    /// All bits of a true lane are set.
    type Mask = uint32x4_t;
    type Half = uint16x4_t;
    /// In the low 4 bytes.
    type Byte = uint8x8_t;

    methods! { register =>
        fn splat(self, x: f32) -> float32x4_t { vdupq_n_f32(x) }
        fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        fn sqrt(self, a: float32x4_t) -> float32x4_t { vsqrtq_f32(a) }
        fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn neg_mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmsq_f32(c, a, b) }
        fn lesser(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vminq_f32(a, b) }
        fn greater(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vmaxq_f32(a, b) }
        fn round(self, a: float32x4_t) -> float32x4_t { vrndnq_f32(a) }
        fn floor(self, a: float32x4_t) -> float32x4_t { vrndmq_f32(a) }

        fn upper(self, a: float32x4_t, half: usize) -> float32x4_t {
            if half == 2 { vextq_f32::<2>(a, a) } else { vextq_f32::<1>(a, a) }
        }

        fn less(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t { vcltq_f32(a, b) }
        fn less_or_equal(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t { vcleq_f32(a, b) }
        fn equal(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t { vceqq_f32(a, b) }
        fn select(self, mask: uint32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t { vbslq_f32(mask, yes, no) }

        fn splat_int(self, x: i32) -> int32x4_t { vdupq_n_s32(x) }
        fn bits(self, a: float32x4_t) -> int32x4_t { vreinterpretq_s32_f32(a) }
        fn reinterpret(self, a: int32x4_t) -> float32x4_t { vreinterpretq_f32_s32(a) }
        fn add_int(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vaddq_s32(a, b) }
        fn sub_int(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vsubq_s32(a, b) }
        fn and(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vandq_s32(a, b) }
        fn or(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vorrq_s32(a, b) }
        fn xor(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { veorq_s32(a, b) }
        // Shifts take a register of counts, negative to the right: the immediate forms want an `i32` constant.
        fn shift_left<const N: u32>(self, a: int32x4_t) -> int32x4_t { vshlq_s32(a, vdupq_n_s32(N as i32)) }
        fn shift_right<const N: u32>(self, a: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(N as i32))))
        }
        fn shift_right_signed<const N: u32>(self, a: int32x4_t) -> int32x4_t { vshlq_s32(a, vdupq_n_s32(-(N as i32))) }
        fn less_int(self, a: int32x4_t, b: int32x4_t) -> uint32x4_t { vcltq_s32(a, b) }
        fn equal_int(self, a: int32x4_t, b: int32x4_t) -> uint32x4_t { vceqq_s32(a, b) }
        fn mul_even(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            let (a, b) = (vmovn_u64(vreinterpretq_u64_s32(a)), vmovn_u64(vreinterpretq_u64_s32(b)));
            vreinterpretq_s32_u64(vmull_u32(a, b))
        }
        fn odd_to_even(self, a: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_u64(vshrq_n_u64::<32>(vreinterpretq_u64_s32(a)))
        }
        fn alternate(self, even: int32x4_t, odd: int32x4_t) -> int32x4_t { vtrn1q_s32(even, odd) }
        fn to_int(self, a: float32x4_t) -> int32x4_t { vcvtnq_s32_f32(a) }
        fn to_float(self, a: int32x4_t) -> float32x4_t { vcvtq_f32_s32(a) }

        fn zero_extend(self, a: uint16x4_t) -> int32x4_t { vreinterpretq_s32_u32(vmovl_u16(a)) }
        fn truncate(self, a: int32x4_t) -> uint16x4_t { vmovn_u32(vreinterpretq_u32_s32(a)) }
        fn sign_extend(self, a: uint8x8_t) -> int32x4_t { vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(a)))) }
        fn truncate_to_byte(self, a: int32x4_t) -> uint8x8_t {
            let half = vmovn_u32(vreinterpretq_u32_s32(a));
            vmovn_u16(vcombine_u16(half, half))
        }
    }

    #[inline(always)]
    fn count_up(self) -> int32x4_t {
        let lanes = [0i32, 1, 2, 3];
        // SAFETY: `lanes` holds 4 elements.
        unsafe { vld1q_s32(lanes.as_ptr()) }
    }
}

impl Simd for Neon {
    const REGISTERS: usize = 32;

    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        register!(enabled(self, kernel))
    }

    methods! { register =>
        fn first_lane(self, a: float32x4_t) -> f32 { vgetq_lane_f32::<0>(a) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        // SAFETY: the caller lets us read 4 elements; read as bytes, since an element may be misaligned.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: float32x4_t) {
        // SAFETY: the caller lets us write 4 elements; written as bytes, since an element may be misaligned.
        unsafe { vst1q_u8(to.cast(), vreinterpretq_u8_f32(a)) }
    }
    #[inline(always)]
    unsafe fn load_half(self, from: *const u16) -> uint16x4_t {
        // SAFETY: the caller lets us read 4 elements; read as bytes, since an element may be misaligned.
        unsafe { vreinterpret_u16_u8(vld1_u8(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_half(self, to: *mut u16, a: uint16x4_t) {
        // SAFETY: the caller lets us write 4 elements; written as bytes, since an element may be misaligned.
        unsafe { vst1_u8(to.cast(), vreinterpret_u8_u16(a)) }
    }
    #[inline(always)]
    unsafe fn load_byte(self, from: *const u8) -> uint8x8_t {
        // SAFETY: the caller lets us read 4 bytes, and `read_unaligned` takes any alignment.
        let word = unsafe { from.cast::<u32>().read_unaligned() };
        register!(vreinterpret_u8_u32(vdup_n_u32(word)))
    }
    #[inline(always)]
    unsafe fn store_byte(self, to: *mut u8, a: uint8x8_t) {
        let word = register!(vget_lane_u32::<0>(vreinterpret_u32_u8(a)));
        // SAFETY: the caller lets us write 4 bytes, and `write_unaligned` takes any alignment.
        unsafe { to.cast::<u32>().write_unaligned(word) }
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, to: *mut f32, [a, b, c, d]: [float32x4_t; 4]) {
        // SAFETY: the caller lets us write 16 elements.
        unsafe { vst4q_f32(to, float32x4x4_t(a, b, c, d)) }
    }
}
