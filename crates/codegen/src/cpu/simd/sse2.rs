//! The baseline of every x86-64: 4 lanes.
//!
//! There is no fused multiply-add, so that all results are those of arrays of four (`plain.rs`), to the bit.

use std::arch::x86_64::*;

use super::lanes::{Arithmetic, Kernel, Simd, elements, methods};

/// Needs nothing that this architecture could be without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sse2;

/// Intrinsics that work on registers only.
macro_rules! register {
    ($($call:tt)*) => {
        // SAFETY: SSE2 is part of x86-64, which is the only condition of an intrinsic that takes no pointer.
        unsafe { $($call)* }
    };
}

impl Arithmetic for Sse2 {
    const WIDTH: usize = 4;
    type Float = __m128;
    type Int = __m128i;
    /// All bits of a true lane are set.
    type Mask = __m128;
    /// In the low 8 bytes.
    type Half = __m128i;
    /// In the low 4 bytes.
    type Byte = __m128i;

    methods! { register =>
        fn splat(self, x: f32) -> __m128 { _mm_set1_ps(x) }
        fn add(self, a: __m128, b: __m128) -> __m128 { _mm_add_ps(a, b) }
        fn sub(self, a: __m128, b: __m128) -> __m128 { _mm_sub_ps(a, b) }
        fn mul(self, a: __m128, b: __m128) -> __m128 { _mm_mul_ps(a, b) }
        fn div(self, a: __m128, b: __m128) -> __m128 { _mm_div_ps(a, b) }
        fn sqrt(self, a: __m128) -> __m128 { _mm_sqrt_ps(a) }
        fn lesser(self, a: __m128, b: __m128) -> __m128 { _mm_min_ps(a, b) }
        fn greater(self, a: __m128, b: __m128) -> __m128 { _mm_max_ps(a, b) }

        fn upper(self, a: __m128, half: usize) -> __m128 {
            if half == 2 { _mm_movehl_ps(a, a) } else { _mm_shuffle_ps::<0b01_01_01_01>(a, a) }
        }

        fn less(self, a: __m128, b: __m128) -> __m128 { _mm_cmplt_ps(a, b) }
        fn less_or_equal(self, a: __m128, b: __m128) -> __m128 { _mm_cmple_ps(a, b) }
        fn equal(self, a: __m128, b: __m128) -> __m128 { _mm_cmpeq_ps(a, b) }
        fn select(self, mask: __m128, yes: __m128, no: __m128) -> __m128 {
            _mm_or_ps(_mm_and_ps(mask, yes), _mm_andnot_ps(mask, no))
        }

        fn splat_int(self, x: i32) -> __m128i { _mm_set1_epi32(x) }
        fn count_up(self) -> __m128i { _mm_setr_epi32(0, 1, 2, 3) }
        fn bits(self, a: __m128) -> __m128i { _mm_castps_si128(a) }
        fn reinterpret(self, a: __m128i) -> __m128 { _mm_castsi128_ps(a) }
        fn add_int(self, a: __m128i, b: __m128i) -> __m128i { _mm_add_epi32(a, b) }
        fn sub_int(self, a: __m128i, b: __m128i) -> __m128i { _mm_sub_epi32(a, b) }
        fn and(self, a: __m128i, b: __m128i) -> __m128i { _mm_and_si128(a, b) }
        fn or(self, a: __m128i, b: __m128i) -> __m128i { _mm_or_si128(a, b) }
        fn xor(self, a: __m128i, b: __m128i) -> __m128i { _mm_xor_si128(a, b) }
        // As in `avx2.rs`, the shift counts go through registers, and LLVM makes immediates of them.
        fn shift_left<const N: u32>(self, a: __m128i) -> __m128i { _mm_sll_epi32(a, _mm_cvtsi32_si128(N as i32)) }
        fn shift_right<const N: u32>(self, a: __m128i) -> __m128i { _mm_srl_epi32(a, _mm_cvtsi32_si128(N as i32)) }
        fn shift_right_signed<const N: u32>(self, a: __m128i) -> __m128i {
            _mm_sra_epi32(a, _mm_cvtsi32_si128(N as i32))
        }
        fn mul_even(self, a: __m128i, b: __m128i) -> __m128i { _mm_mul_epu32(a, b) }
        fn odd_to_even(self, a: __m128i) -> __m128i { _mm_srli_epi64::<32>(a) }
        fn alternate(self, even: __m128i, odd: __m128i) -> __m128i {
            // Both even lanes first.
            const EVEN: i32 = 0b11_01_10_00;
            _mm_unpacklo_epi32(_mm_shuffle_epi32::<EVEN>(even), _mm_shuffle_epi32::<EVEN>(odd))
        }
        fn to_int(self, a: __m128) -> __m128i { _mm_cvtps_epi32(a) }
        fn to_float(self, a: __m128i) -> __m128 { _mm_cvtepi32_ps(a) }

        fn zero_extend(self, a: __m128i) -> __m128i { _mm_unpacklo_epi16(a, _mm_setzero_si128()) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m128, b: __m128, c: __m128) -> __m128 {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn neg_mul_add(self, a: __m128, b: __m128, c: __m128) -> __m128 {
        self.sub(c, self.mul(a, b))
    }
    #[inline(always)]
    fn round(self, a: __m128) -> __m128 {
        // From 2^23 on every float is whole; below, adding 2^23 with the sign of `a` leaves no fraction bits.
        let sign = self.and(self.bits(a), self.splat_int(i32::MIN));
        let signed = |x: __m128| self.reinterpret(self.or(self.bits(x), sign));
        let whole = self.splat(8_388_608.0);
        let magic = signed(whole);
        let near = signed(self.abs(self.sub(self.add(a, magic), magic)));
        self.select(self.less(self.abs(a), whole), near, a)
    }
    #[inline(always)]
    fn floor(self, a: __m128) -> __m128 {
        let nearest = self.round(a);
        self.select(self.less(a, nearest), self.sub(nearest, self.splat(1.0)), nearest)
    }
    #[inline(always)]
    fn less_int(self, a: __m128i, b: __m128i) -> __m128 {
        self.reinterpret(register!(_mm_cmplt_epi32(a, b)))
    }
    #[inline(always)]
    fn equal_int(self, a: __m128i, b: __m128i) -> __m128 {
        self.reinterpret(register!(_mm_cmpeq_epi32(a, b)))
    }
    #[inline(always)]
    fn truncate(self, a: __m128i) -> __m128i {
        // Sixteen bits with their sign, so that the signed saturation of the packing never bites.
        let low = self.shift_right_signed::<16>(self.shift_left::<16>(a));
        register!(_mm_packs_epi32(low, low))
    }
    #[inline(always)]
    fn sign_extend(self, a: __m128i) -> __m128i {
        // Each byte four times; its last copy brings the sign.
        let twofold = register!(_mm_unpacklo_epi8(a, a));
        let fourfold = register!(_mm_unpacklo_epi16(twofold, twofold));
        self.shift_right_signed::<24>(fourfold)
    }
    #[inline(always)]
    fn truncate_to_byte(self, a: __m128i) -> __m128i {
        let low = self.and(a, self.splat_int(0xff));
        let half = register!(_mm_packs_epi32(low, low));
        register!(_mm_packus_epi16(half, half))
    }
}

impl Simd for Sse2 {
    const REGISTERS: usize = 16;

    #[inline(never)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    methods! { register =>
        fn first_lane(self, a: __m128) -> f32 { _mm_cvtss_f32(a) }
        fn fence(self) { _mm_sfence() }
        fn prefetch(self, address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        fn prefetch_to_write(self, address: *const u8) { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) }
    }

    methods! { elements =>
        unsafe fn load(self, from: *const f32) -> __m128 { _mm_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, a: __m128) { _mm_storeu_ps(to, a) }
        unsafe fn stream(self, to: *mut f32, a: __m128) { _mm_stream_ps(to, a) }
        unsafe fn load_half(self, from: *const u16) -> __m128i { _mm_loadl_epi64(from.cast()) }
        unsafe fn store_half(self, to: *mut u16, a: __m128i) { _mm_storel_epi64(to.cast(), a) }
        unsafe fn stream_half(self, to: *mut u16, a: __m128i) { _mm_stream_si64(to.cast(), _mm_cvtsi128_si64(a)) }
        unsafe fn load_byte(self, from: *const u8) -> __m128i { _mm_cvtsi32_si128(from.cast::<i32>().read_unaligned()) }
        unsafe fn store_byte(self, to: *mut u8, a: __m128i) { to.cast::<i32>().write_unaligned(_mm_cvtsi128_si32(a)) }
        unsafe fn stream_byte(self, to: *mut u8, a: __m128i) { _mm_stream_si32(to.cast(), _mm_cvtsi128_si32(a)) }
    }

    #[inline(always)]
    unsafe fn store_interleaved(self, to: *mut f32, [mut a, mut b, mut c, mut d]: [__m128; 4]) {
        // SAFETY: the caller lets us write 16 elements; the rest works on registers.
        unsafe {
            _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
            _mm_storeu_ps(to, a);
            _mm_storeu_ps(to.add(4), b);
            _mm_storeu_ps(to.add(8), c);
            _mm_storeu_ps(to.add(12), d);
        }
    }
}
