// Approximate functions of one f32, and conversions between f32 and the storage types. A word holds two 16-bit numbers, the first in
// the lower half.

// 2^x; results below the normal numbers are 0.
static __device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 / x within an ulp; denormals count as 0.
static __device__ __forceinline__ float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// The square root within an ulp.
static __device__ __forceinline__ float sqrt_approx(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// The larger of two; NaN if one is NaN.
static __device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a > b || a != a ? a : b;
#endif
}

// Two numbers rounded to bf16, to nearest even.
static __device__ __forceinline__ u32 bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
#else
    u32 a = __float_as_uint(low), b = __float_as_uint(high);
    a = low != low ? 0x7fffu : (a + 0x7fffu + ((a >> 16) & 1)) >> 16;
    b = high != high ? 0x7fff0000u : (b + 0x7fffu + ((b >> 16) & 1)) & 0xffff0000u;
    return a | b;
#endif
}
// Two numbers rounded to f16, to nearest even.
static __device__ __forceinline__ u32 f16x2(float low, float high) {
    u32 w;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(w) : "f"(low), "f"(high));
#endif
    return w;
}
// One half of a word as f32, exactly.
static __device__ __forceinline__ float f16_low(u32 w) { float y; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(w)); return y; }
static __device__ __forceinline__ float f16_high(u32 w) { float y; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(w)); return y; }
static __device__ __forceinline__ float bf16_low(u32 w) { return __uint_as_float(w << 16); }
static __device__ __forceinline__ float bf16_high(u32 w) { return __uint_as_float(w & 0xffff0000u); }

// One f16 as f32, exactly; one f32 rounded to f16, to nearest even.
static __device__ __forceinline__ float from_f16(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
static __device__ __forceinline__ u16 to_f16(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }

// To the nearest integer, ties to even, saturating; NaN becomes 0.
static __device__ __forceinline__ int nearest(float x) { int y; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
// Two integers saturated to i8 in the lower half of a word, the lower half of `above` in its upper half.
static __device__ __forceinline__ u32 i8x2(int low, int high, u32 above) {
    u32 w;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(high), "r"(low), "r"(above));
    return w;
}

// To e4m3: the four highest fraction bits, ties to even, saturating at 448; NaN is 0x7f.
static __device__ __forceinline__ u32 to_f8(float x) {
#if __CUDA_ARCH__ >= 890
    u32 y;
    asm("{ .reg .b16 w; cvt.rn.satfinite.e4m3x2.f32 w, %1, %2; cvt.u32.u16 %0, w; }" : "=r"(y) : "f"(0.0f), "f"(x));
    return y & 0xffu;
#else
    const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
    const float a = fabsf(x);
    if (a != a) return 0x7fu | sign;
    if (a >= 464.0f) return sign | 0x7eu;
    if (a < 0.015625f) return sign | (u32)rintf(a * 512.0f);
    const u32 bits = __float_as_uint(a);
    const u32 rounded = bits + 0x7ffffu + ((bits >> 20) & 1);
    const u32 code = (rounded >> 20) - (120u << 3);
    return sign | (code > 0x7eu ? 0x7eu : code);
#endif
}

// KIND names a storage type: 0 is f32, 1 is f16, 2 is bf16.
template <int KIND> struct Stored { typedef u16 Element; };
template <> struct Stored<0> { typedef float Element; };

// An element as f32, exactly.
template <int KIND> static __device__ __forceinline__ float widen(typename Stored<KIND>::Element x) {
    if constexpr (KIND == 0) {
        return x;
    } else if constexpr (KIND == 1) {
        return from_f16(x);
    } else {
        return __uint_as_float((u32)x << 16);
    }
}

// An f32 rounded to an element, to nearest even; NaN stays NaN.
template <int KIND> static __device__ __forceinline__ typename Stored<KIND>::Element narrow(float x) {
    if constexpr (KIND == 0) {
        return x;
    } else if constexpr (KIND == 1) {
        return to_f16(x);
    } else {
        const u32 bits = __float_as_uint(x);
        return (u16)(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
}

// Two numbers rounded to a 16-bit type, in one word.
template <int KIND> static __device__ __forceinline__ u32 narrow2(float low, float high) {
    if constexpr (KIND == 1) {
        return f16x2(low, high);
    } else {
        return bf16x2(low, high);
    }
}

// The sums of two words, half by half, rounded once: rounding to f32 in between would not change them. bf16 needs Hopper.
template <int KIND> static __device__ __forceinline__ u32 add_packed(u32 a, u32 b) {
    u32 sums;
    if constexpr (KIND == 2) {
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    } else {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    }
    return sums;
}
