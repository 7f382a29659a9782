//! AVX2 with FMA and F16C: 8 lanes.

use std::arch::x86_64::*;

use super::lanes::{Arithmetic, Kernel, Simd, elements, methods};

/// Proof that this CPU has AVX2, FMA and F16C. Only `detect` makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Avx2(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
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

impl Arithmetic for Avx2 {
    const WIDTH: usize = 8;
    type Float = __m256;
    type Int = __m256i;
    /// All bits of a true lane are set.
    type Mask = __m256;
    type Half = __m128i;
    /// In the low 8 bytes.
    type Byte = __m128i;

    methods! { register =>
        fn splat(self, x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn add(self, a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub(self, a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul(self, a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn div(self, a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn sqrt(self, a: __m256) -> __m256 { _mm256_sqrt_ps(a) }
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn neg_mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fnmadd_ps(a, b, c) }
        fn lesser(self, a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn greater(self, a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn round(self, a: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        fn floor(self, a: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }

        fn less(self, a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
        fn less_or_equal(self, a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LE_OQ>(a, b) }
        fn equal(self, a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
        fn upper(self, a: __m256, half: usize) -> __m256 {
            match half {
                4 => _mm256_permute2f128_ps::<0x11>(a, a),
                2 => _mm256_permute_ps::<0b11_10_11_10>(a),
                _ => _mm256_permute_ps::<0b01_01_01_01>(a),
            }
        }
        fn select(self, mask: __m256, yes: __m256, no: __m256) -> __m256 { _mm256_blendv_ps(no, yes, mask) }

        fn splat_int(self, x: i32) -> __m256i { _mm256_set1_epi32(x) }
        fn count_up(self) -> __m256i { _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) }
        fn bits(self, a: __m256) -> __m256i { _mm256_castps_si256(a) }
        fn reinterpret(self, a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
        fn add_int(self, a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn sub_int(self, a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn and(self, a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(self, a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(self, a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        // The shift counts go through `sll`, `srl` and `sra`, which take a register: the immediate forms want an `i32`
        // constant and the trait has a `u32`. LLVM makes immediates of them.
        fn shift_left<const N: u32>(self, a: __m256i) -> __m256i { _mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32)) }
        fn shift_right<const N: u32>(self, a: __m256i) -> __m256i { _mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32)) }
        fn shift_right_signed<const N: u32>(self, a: __m256i) -> __m256i {
            _mm256_sra_epi32(a, _mm_cvtsi32_si128(N as i32))
        }
        fn less_int(self, a: __m256i, b: __m256i) -> __m256 { _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)) }
        fn equal_int(self, a: __m256i, b: __m256i) -> __m256 { _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)) }
        fn mul_even(self, a: __m256i, b: __m256i) -> __m256i { _mm256_mul_epu32(a, b) }
        fn odd_to_even(self, a: __m256i) -> __m256i { _mm256_srli_epi64::<32>(a) }
        fn alternate(self, even: __m256i, odd: __m256i) -> __m256i {
            _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd))
        }
        fn to_int(self, a: __m256) -> __m256i { _mm256_cvtps_epi32(a) }
        fn to_float(self, a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }

        fn zero_extend(self, a: __m128i) -> __m256i { _mm256_cvtepu16_epi32(a) }
        fn truncate(self, a: __m256i) -> __m128i {
            // The masked lanes fit in 16 bits, so that the unsigned saturation of the packing never bites.
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low))
        }
        /// As integers, sizes are in the same order, with NaN above infinity.
        fn max_of_sizes(self, a: __m256, b: __m256) -> __m256 {
            _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
        }
        fn sign_extend(self, a: __m128i) -> __m256i { _mm256_cvtepi8_epi32(a) }
        fn truncate_to_byte(self, a: __m256i) -> __m128i {
            let half = self.truncate(_mm256_and_si256(a, _mm256_set1_epi32(0xff)));
            _mm_packus_epi16(half, half)
        }

        fn widen_f16(self, a: __m128i) -> __m256 { _mm256_cvtph_ps(a) }
        fn narrow_f16(self, a: __m256) -> __m128i { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a) }
    }
}

impl Simd for Avx2 {
    const REGISTERS: usize = 16;

    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        register!(enabled(self, kernel))
    }

    methods! { register =>
        fn first_lane(self, a: __m256) -> f32 { _mm256_cvtss_f32(a) }
        fn fence(self) { _mm_sfence() }
        fn prefetch(self, address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        fn prefetch_to_write(self, address: *const u8) { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) }
    }

    methods! { elements =>
        unsafe fn load(self, from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        unsafe fn store(self, to: *mut f32, a: __m256) { _mm256_storeu_ps(to, a) }
        unsafe fn stream(self, to: *mut f32, a: __m256) { _mm256_stream_ps(to, a) }
        unsafe fn load_half(self, from: *const u16) -> __m128i { _mm_loadu_si128(from.cast()) }
        unsafe fn store_half(self, to: *mut u16, a: __m128i) { _mm_storeu_si128(to.cast(), a) }
        unsafe fn stream_half(self, to: *mut u16, a: __m128i) { _mm_stream_si128(to.cast(), a) }
        unsafe fn load_byte(self, from: *const u8) -> __m128i { _mm_loadl_epi64(from.cast()) }
        unsafe fn store_byte(self, to: *mut u8, a: __m128i) { _mm_storel_epi64(to.cast(), a) }
        unsafe fn stream_byte(self, to: *mut u8, a: __m128i) { _mm_stream_si64(to.cast(), _mm_cvtsi128_si64(a)) }
    }

    #[inline(always)]
    unsafe fn store_interleaved(self, to: *mut f32, [a, b, c, d]: [__m256; 4]) {
        // SAFETY: the caller lets us write 32 elements; the rest works on registers.
        unsafe {
            let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let (p, q) = (_mm256_castps_pd(low_ab), _mm256_castps_pd(low_cd));
            let (r, s) = (_mm256_castps_pd(high_ab), _mm256_castps_pd(high_cd));
            // group[k] holds element groups k and 4 + k, one in each half.
            let group = [
                _mm256_castpd_ps(_mm256_unpacklo_pd(p, q)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(p, q)),
                _mm256_castpd_ps(_mm256_unpacklo_pd(r, s)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(r, s)),
            ];
            _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(group[0], group[1]));
            _mm256_storeu_ps(to.add(8), _mm256_permute2f128_ps::<0x20>(group[2], group[3]));
            _mm256_storeu_ps(to.add(16), _mm256_permute2f128_ps::<0x31>(group[0], group[1]));
            _mm256_storeu_ps(to.add(24), _mm256_permute2f128_ps::<0x31>(group[2], group[3]));
        }
    }

    #[inline(always)]
    unsafe fn load_partial(self, from: *const f32, count: usize) -> __m256 {
        // SAFETY: the caller lets us read `count` elements, and masked lanes are not read.
        unsafe { _mm256_maskload_ps(from, self.bits(self.first(count))) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, a: __m256, count: usize) {
        // SAFETY: the caller lets us write `count` elements, and masked lanes are not written.
        unsafe { _mm256_maskstore_ps(to, self.bits(self.first(count)), a) }
    }
}
