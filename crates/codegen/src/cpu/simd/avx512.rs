//! AVX-512 (F, BW, DQ, VL): 16 lanes.

use std::arch::x86_64::*;

use super::lanes::{Arithmetic, Kernel, Simd, elements, methods};

/// Proof that this CPU has every feature named in [`Avx512::detect`]. Only `detect` makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Avx512> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Avx512(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn enabled<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Intrinsics that work on registers only.
macro_rules! register {
    ($($call:tt)*) => {
        // SAFETY: a method's `self` exists only if `detect` found every feature that this file uses, which is the only
        // condition of an intrinsic that takes no pointer.
        unsafe { $($call)* }
    };
}

impl Arithmetic for Avx512 {
    const WIDTH: usize = 16;
    type Float = __m512;
    type Int = __m512i;
    type Mask = __mmask16;
    type Half = __m256i;
    type Byte = __m128i;

    methods! { register =>
        fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(self, a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(self, a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn sqrt(self, a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fnmadd_ps(a, b, c) }
        fn lesser(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn greater(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn round(self, a: __m512) -> __m512 {
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        }
        fn floor(self, a: __m512) -> __m512 { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }

        fn less(self, a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        fn less_or_equal(self, a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
        fn equal(self, a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
        fn upper(self, a: __m512, half: usize) -> __m512 {
            match half {
                8 => _mm512_shuffle_f32x4::<0b11_10_11_10>(a, a),
                4 => _mm512_shuffle_f32x4::<0b01_01_01_01>(a, a),
                2 => _mm512_permute_ps::<0b11_10_11_10>(a),
                _ => _mm512_permute_ps::<0b01_01_01_01>(a),
            }
        }
        fn select(self, mask: __mmask16, yes: __m512, no: __m512) -> __m512 { _mm512_mask_blend_ps(mask, no, yes) }

        fn splat_int(self, x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn count_up(self) -> __m512i { _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) }
        fn bits(self, a: __m512) -> __m512i { _mm512_castps_si512(a) }
        fn reinterpret(self, a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
        fn add_int(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub_int(self, a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn and(self, a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(self, a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(self, a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn shift_left<const N: u32>(self, a: __m512i) -> __m512i { _mm512_slli_epi32::<N>(a) }
        fn shift_right<const N: u32>(self, a: __m512i) -> __m512i { _mm512_srli_epi32::<N>(a) }
        fn shift_right_signed<const N: u32>(self, a: __m512i) -> __m512i { _mm512_srai_epi32::<N>(a) }
        fn less_int(self, a: __m512i, b: __m512i) -> __mmask16 { _mm512_cmplt_epi32_mask(a, b) }
        fn equal_int(self, a: __m512i, b: __m512i) -> __mmask16 { _mm512_cmpeq_epi32_mask(a, b) }
        fn mul_even(self, a: __m512i, b: __m512i) -> __m512i { _mm512_mul_epu32(a, b) }
        fn odd_to_even(self, a: __m512i) -> __m512i { _mm512_srli_epi64::<32>(a) }
        fn alternate(self, even: __m512i, odd: __m512i) -> __m512i {
            _mm512_mask_shuffle_epi32::<0b10_10_00_00>(even, 0xAAAA, odd)
        }
        fn to_int(self, a: __m512) -> __m512i { _mm512_cvtps_epi32(a) }
        fn to_float(self, a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }

        fn zero_extend(self, a: __m256i) -> __m512i { _mm512_cvtepu16_epi32(a) }
        fn truncate(self, a: __m512i) -> __m256i { _mm512_cvtepi32_epi16(a) }
        fn sign_extend(self, a: __m128i) -> __m512i { _mm512_cvtepi8_epi32(a) }
        fn truncate_to_byte(self, a: __m512i) -> __m128i { _mm512_cvtepi32_epi8(a) }

        /// A division takes 16 cycles for 16 lanes; an estimate of 14 bits and one Newton step take 4.
        fn reciprocal_from_one(self, d: __m512) -> __m512 {
            let estimate = _mm512_rcp14_ps(d);
            let error = _mm512_fnmadd_ps(d, estimate, _mm512_set1_ps(1.0));
            // For d = inf the error is inf * 0, a NaN, for which the instruction gives its second operand; the estimate, 0, stays 0.
            _mm512_fmadd_ps(_mm512_max_ps(error, _mm512_set1_ps(-1.0)), estimate, estimate)
        }
        /// As integers, sizes are in the same order, with NaN above infinity.
        fn max_of_sizes(self, a: __m512, b: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
        }
        fn scale(self, p: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(p, n) }
        fn fraction(self, y: __m512) -> __m512 { _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(y) }
        fn scale_by_floor(self, p: __m512, y: __m512) -> __m512 { _mm512_scalef_ps(p, y) }
        fn widen_f16(self, a: __m256i) -> __m512 { _mm512_cvtph_ps(a) }
        fn narrow_f16(self, a: __m512) -> __m256i {
            _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        }
    }
    /// The next two take any exponent, but a power that is a denormal, or falls a little below the smallest one, takes the CPU hundreds of cycles.
    #[inline(always)]
    fn clamp_exponent(self, y: __m512) -> __m512 {
        self.greater(self.splat(-126.0), y)
    }
}

impl Simd for Avx512 {
    const REGISTERS: usize = 32;

    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        register!(enabled(self, kernel))
    }

    methods! { register =>
        fn first_lane(self, a: __m512) -> f32 { _mm512_cvtss_f32(a) }
        fn fence(self) { _mm_sfence() }
        fn prefetch(self, address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        fn prefetch_to_write(self, address: *const u8) { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) }
    }

    #[inline(always)]
    fn first(self, count: usize) -> __mmask16 {
        ((1u32 << count) - 1) as __mmask16
    }

    methods! { elements =>
        unsafe fn load(self, from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, a: __m512) { _mm512_storeu_ps(to, a) }
        unsafe fn stream(self, to: *mut f32, a: __m512) { _mm512_stream_ps(to, a) }
        unsafe fn load_half(self, from: *const u16) -> __m256i { _mm256_loadu_si256(from.cast()) }
        unsafe fn store_half(self, to: *mut u16, a: __m256i) { _mm256_storeu_si256(to.cast(), a) }
        unsafe fn stream_half(self, to: *mut u16, a: __m256i) { _mm256_stream_si256(to.cast(), a) }
        unsafe fn load_byte(self, from: *const u8) -> __m128i { _mm_loadu_si128(from.cast()) }
        unsafe fn store_byte(self, to: *mut u8, a: __m128i) { _mm_storeu_si128(to.cast(), a) }
        unsafe fn stream_byte(self, to: *mut u8, a: __m128i) { _mm_stream_si128(to.cast(), a) }
    }

    #[inline(always)]
    unsafe fn store_interleaved(self, to: *mut f32, [a, b, c, d]: [__m512; 4]) {
        // SAFETY: the caller lets us write 64 elements; the rest works on registers.
        unsafe {
            // Within each 128-bit quarter q: lanes 4q..4q+4 of a, b, c, d become four groups (a b c d).
            let (low_ab, high_ab) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let (low_cd, high_cd) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (p, q) = (_mm512_castps_pd(low_ab), _mm512_castps_pd(low_cd));
            let (r, s) = (_mm512_castps_pd(high_ab), _mm512_castps_pd(high_cd));
            let group = [
                _mm512_castpd_ps(_mm512_unpacklo_pd(p, q)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)),
                _mm512_castpd_ps(_mm512_unpacklo_pd(r, s)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(r, s)),
            ];
            // group[k] holds element groups k, 4 + k, 8 + k, 12 + k: a transpose of 4 x 4 quarters is left.
            let (even, odd) = (
                _mm512_shuffle_f32x4::<0b01_00_01_00>(group[0], group[1]),
                _mm512_shuffle_f32x4::<0b01_00_01_00>(group[2], group[3]),
            );
            let (even_high, odd_high) = (
                _mm512_shuffle_f32x4::<0b11_10_11_10>(group[0], group[1]),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(group[2], group[3]),
            );
            _mm512_storeu_ps(to, _mm512_shuffle_f32x4::<0b10_00_10_00>(even, odd));
            _mm512_storeu_ps(to.add(16), _mm512_shuffle_f32x4::<0b11_01_11_01>(even, odd));
            _mm512_storeu_ps(to.add(32), _mm512_shuffle_f32x4::<0b10_00_10_00>(even_high, odd_high));
            _mm512_storeu_ps(to.add(48), _mm512_shuffle_f32x4::<0b11_01_11_01>(even_high, odd_high));
        }
    }

    #[inline(always)]
    unsafe fn load_partial(self, from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller lets us read `count` elements, and masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(self.first(count), from) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, a: __m512, count: usize) {
        // SAFETY: the caller lets us write `count` elements, and masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(to, self.first(count), a) }
    }
}
