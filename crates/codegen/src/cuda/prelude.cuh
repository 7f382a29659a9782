// What every generated row kernel stands on: lanes, storage types, accesses of any alignment, functions, reductions.
// Written without #include, so that a driver and libnvrtc are all that is needed. V, T and the like are constants that
// the generated text defines before this file.
//
// A thread works on V neighbouring columns at a time: F holds them as floats, I as integers, B as truth values. What is
// one number for a whole row is a plain float or int; the functions take either.

typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

struct F { float v[V]; };
struct I { int v[V]; };
struct B { bool v[V]; };

static __device__ __forceinline__ float at(float x, int) { return x; }
static __device__ __forceinline__ int at(int x, int) { return x; }
static __device__ __forceinline__ bool at(bool x, int) { return x; }
static __device__ __forceinline__ float at(const F& x, int i) { return x.v[i]; }
static __device__ __forceinline__ int at(const I& x, int i) { return x.v[i]; }
static __device__ __forceinline__ bool at(const B& x, int i) { return x.v[i]; }

template <class R, class Function> static __device__ __forceinline__ R lanes(Function f) {
    R r;
#pragma unroll
    for (int i = 0; i < V; ++i) r.v[i] = f(i);
    return r;
}

// Functions of one float.

static __device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
static __device__ __forceinline__ float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

static __device__ __forceinline__ float neg1(float x) { return -x; }
static __device__ __forceinline__ float abs1(float x) { return fabsf(x); }
static __device__ __forceinline__ float exp1(float x) { return expf(x); }
static __device__ __forceinline__ float log1(float x) { return logf(x); }
static __device__ __forceinline__ float sqrt1(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
static __device__ __forceinline__ float rsqrt1(float x) { return rsqrtf(x); }
// Quotients without a call: the operands are brought to where reciprocals are normal numbers, one step of Newton's makes
// them good to an ulp. What is infinite or NaN after the first guess stays.
static __device__ __forceinline__ float safe_scale(float x) { return fabsf(x) < 1e-30f ? 1.8446744e19f : fabsf(x) > 1e30f ? 5.4210109e-20f : 1.0f; }
static __device__ __forceinline__ float normal_reciprocal(float x) {
    const float r = rcp(x), e = fmaf(-x, r, 1.0f);
    return e == e ? fmaf(r, e, r) : r;
}
static __device__ __forceinline__ float reciprocal1(float x) {
    const float s = safe_scale(x);
    return normal_reciprocal(x * s) * s;
}
static __device__ __forceinline__ float round1(float x) { return rintf(x); }
static __device__ __forceinline__ float sigmoid1(float x) { return rcp(1.0f + ex2(-1.44269504f * x)); }

// Odd polynomial below 0.55, where the other form would cancel; 2 ulp. NaN takes the second branch and stays.
static __device__ __forceinline__ float tanh1(float x) {
    const float s = x * x;
    float p = fmaf(-0.00661575468f, s, 0.0213127453f);
    p = fmaf(p, s, -0.0539100654f);
    p = fmaf(p, s, 0.13333118f);
    p = fmaf(p, s, -0.333333313f);
    const float small = fmaf(p * s, x, x);
    const float e = ex2(2.88539008f * fabsf(x));
    const float large = copysignf(fmaf(-2.0f, rcp(e + 1.0f), 1.0f), x);
    return fabsf(x) < 0.55f ? small : large;
}
static __device__ __forceinline__ float erf1(float x) { return erff(x); }

// Activations as a whole. The slopes hold log2(e). The last product is never made part of a multiply-add.
static __device__ __forceinline__ float silu1(float x) { return __fmul_rn(x, sigmoid1(x)); }
static __device__ __forceinline__ float gelu_tanh1(float x) {
    return __fmul_rn(x, rcp(1.0f + ex2(x * fmaf(-0.102943240f, x * x, -2.30220819f))));
}
static __device__ __forceinline__ float gelu_tanh_gradient2(float g, float x) {
    const float square = x * x;
    const float s = rcp(1.0f + ex2(x * fmaf(-0.102943240f, square, -2.30220819f)));
    const float slope = fmaf(0.214064466f, square, 1.59576912f);
    return __fmul_rn(g, fmaf(x * fmaf(-s, s, s), slope, s));
}
// x Phi(x). Phi(-t) = 2^(t P(t) - 1) for t from 0 to 6, off by at most 4e-8; beyond it falls to 0 without a branch.
static __device__ __forceinline__ float gelu_erf1(float x) {
    const float all = fabsf(x), t = fminf(all, 6.0f);
    float p = fmaf(2.88600717e-7f, t, -6.4242513e-6f);
    p = fmaf(p, t, 5.74451005e-5f);
    p = fmaf(p, t, -2.33701736e-4f);
    p = fmaf(p, t, -6.65861371e-5f);
    p = fmaf(p, t, 7.00464426e-3f);
    p = fmaf(p, t, -5.24699241e-2f);
    p = fmaf(p, t, -4.59213674e-1f);
    p = fmaf(p, t, -1.15110481f);
    const float tail = ex2(fmaf(-40.0f, all - t, fmaf(p, t, -1.0f)));
    return __fmul_rn(x, x < 0.0f ? tail : 1.0f - tail);
}

static __device__ __forceinline__ float max2(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a > b || a != a ? a : b;
#endif
}
static __device__ __forceinline__ float min2(float a, float b) { return -max2(-a, -b); }
static __device__ __forceinline__ float add2(float a, float b) { return a + b; }
static __device__ __forceinline__ float sub2(float a, float b) { return a - b; }
static __device__ __forceinline__ float mul2(float a, float b) { return a * b; }
// A product that is never made part of a multiply-add: one number for all who read it.
static __device__ __forceinline__ float whole2(float a, float b) { return __fmul_rn(a, b); }
static __device__ __forceinline__ float div2(float a, float b) {
    const float s = safe_scale(b), d = b * s, n = a * s, r = normal_reciprocal(d), q = n * r;
    const float better = fmaf(fmaf(-d, q, n), r, q);
    return better == better ? better : q;
}

// The same on lanes, and on lanes with one number.

static __device__ __forceinline__ F neg1(const F& x) { return lanes<F>([&](int i) { return neg1(x.v[i]); }); }
static __device__ __forceinline__ F abs1(const F& x) { return lanes<F>([&](int i) { return abs1(x.v[i]); }); }
static __device__ __forceinline__ F exp1(const F& x) { return lanes<F>([&](int i) { return exp1(x.v[i]); }); }
static __device__ __forceinline__ F log1(const F& x) { return lanes<F>([&](int i) { return log1(x.v[i]); }); }
static __device__ __forceinline__ F sqrt1(const F& x) { return lanes<F>([&](int i) { return sqrt1(x.v[i]); }); }
static __device__ __forceinline__ F rsqrt1(const F& x) { return lanes<F>([&](int i) { return rsqrt1(x.v[i]); }); }
static __device__ __forceinline__ F reciprocal1(const F& x) { return lanes<F>([&](int i) { return reciprocal1(x.v[i]); }); }
static __device__ __forceinline__ F round1(const F& x) { return lanes<F>([&](int i) { return round1(x.v[i]); }); }
static __device__ __forceinline__ F sigmoid1(const F& x) { return lanes<F>([&](int i) { return sigmoid1(x.v[i]); }); }
static __device__ __forceinline__ F tanh1(const F& x) { return lanes<F>([&](int i) { return tanh1(x.v[i]); }); }
static __device__ __forceinline__ F erf1(const F& x) { return lanes<F>([&](int i) { return erf1(x.v[i]); }); }
static __device__ __forceinline__ F silu1(const F& x) { return lanes<F>([&](int i) { return silu1(x.v[i]); }); }
static __device__ __forceinline__ F gelu_tanh1(const F& x) { return lanes<F>([&](int i) { return gelu_tanh1(x.v[i]); }); }
static __device__ __forceinline__ F gelu_erf1(const F& x) { return lanes<F>([&](int i) { return gelu_erf1(x.v[i]); }); }
static __device__ __forceinline__ F gelu_tanh_gradient2(const F& a, const F& b) { return lanes<F>([&](int i) { return gelu_tanh_gradient2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F gelu_tanh_gradient2(const F& a, float b) { return lanes<F>([&](int i) { return gelu_tanh_gradient2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F gelu_tanh_gradient2(float a, const F& b) { return lanes<F>([&](int i) { return gelu_tanh_gradient2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F add2(const F& a, const F& b) { return lanes<F>([&](int i) { return add2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F add2(const F& a, float b) { return lanes<F>([&](int i) { return add2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F add2(float a, const F& b) { return lanes<F>([&](int i) { return add2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F sub2(const F& a, const F& b) { return lanes<F>([&](int i) { return sub2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F sub2(const F& a, float b) { return lanes<F>([&](int i) { return sub2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F sub2(float a, const F& b) { return lanes<F>([&](int i) { return sub2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F mul2(const F& a, const F& b) { return lanes<F>([&](int i) { return mul2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F mul2(const F& a, float b) { return lanes<F>([&](int i) { return mul2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F mul2(float a, const F& b) { return lanes<F>([&](int i) { return mul2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F whole2(const F& a, const F& b) { return lanes<F>([&](int i) { return whole2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F whole2(const F& a, float b) { return lanes<F>([&](int i) { return whole2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F whole2(float a, const F& b) { return lanes<F>([&](int i) { return whole2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F div2(const F& a, const F& b) { return lanes<F>([&](int i) { return div2(at(a, i), at(b, i)); }); }
// One reciprocal for all lanes.
static __device__ __forceinline__ F div2(const F& a, float b) {
    const float s = safe_scale(b), r = normal_reciprocal(b * s);
    if (s == 1.0f) return lanes<F>([&](int i) { return __fmul_rn(a.v[i], r); });
    return lanes<F>([&](int i) { return __fmul_rn(a.v[i] * s, r); });
}
static __device__ __forceinline__ F div2(float a, const F& b) { return lanes<F>([&](int i) { return div2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F max2(const F& a, const F& b) { return lanes<F>([&](int i) { return max2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F max2(const F& a, float b) { return lanes<F>([&](int i) { return max2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F max2(float a, const F& b) { return lanes<F>([&](int i) { return max2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F min2(const F& a, const F& b) { return lanes<F>([&](int i) { return min2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F min2(const F& a, float b) { return lanes<F>([&](int i) { return min2(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ F min2(float a, const F& b) { return lanes<F>([&](int i) { return min2(at(a, i), at(b, i)); }); }

template <class X, class Y> static __device__ __forceinline__ B lt(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) < at(b, i); }); }
template <class X, class Y> static __device__ __forceinline__ B le(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) <= at(b, i); }); }
template <class X, class Y> static __device__ __forceinline__ B eq(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) == at(b, i); }); }
template <class X, class Y> static __device__ __forceinline__ B ne(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) != at(b, i); }); }
template <class X, class Y> static __device__ __forceinline__ B gt(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) > at(b, i); }); }
template <class X, class Y> static __device__ __forceinline__ B ge(const X& a, const Y& b) { return lanes<B>([&](int i) { return at(a, i) >= at(b, i); }); }

template <class R, class C, class X, class Y> static __device__ __forceinline__ R select(const C& c, const X& a, const Y& b) {
    return lanes<R>([&](int i) { return at(c, i) ? at(a, i) : at(b, i); });
}

static __device__ __forceinline__ F as_float(const B& x) { return lanes<F>([&](int i) { return x.v[i] ? 1.0f : 0.0f; }); }
static __device__ __forceinline__ F as_float(const I& x) { return lanes<F>([&](int i) { return (float)x.v[i]; }); }
static __device__ __forceinline__ float as_float(bool x) { return x ? 1.0f : 0.0f; }
static __device__ __forceinline__ float as_float(int x) { return (float)x; }
static __device__ __forceinline__ B as_truth(const F& x) { return lanes<B>([&](int i) { return x.v[i] != 0.0f; }); }
static __device__ __forceinline__ B as_truth(const I& x) { return lanes<B>([&](int i) { return x.v[i] != 0; }); }
static __device__ __forceinline__ bool as_truth(float x) { return x != 0.0f; }
static __device__ __forceinline__ bool as_truth(int x) { return x != 0; }

// To the nearest value of a narrower type.

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
static __device__ __forceinline__ u32 f16x2(float low, float high) {
    u32 w;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(w) : "f"(low), "f"(high));
#endif
    return w;
}
static __device__ __forceinline__ float f16_low(u32 w) { float y; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(y) : "r"(w)); return y; }
static __device__ __forceinline__ float f16_high(u32 w) { float y; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(w)); return y; }
static __device__ __forceinline__ float bf16_low(u32 w) { return __uint_as_float(w << 16); }
static __device__ __forceinline__ float bf16_high(u32 w) { return __uint_as_float(w & 0xffff0000u); }

// To the nearest, saturating; NaN becomes 0.
static __device__ __forceinline__ int nearest(float x) { int y; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
static __device__ __forceinline__ u32 i8x2(int low, int high, u32 above) {
    u32 w;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(high), "r"(low), "r"(above));
    return w;
}
static __device__ __forceinline__ int to_i8(float x) { return min(max(nearest(x), -128), 127); }
static __device__ __forceinline__ float int8_1(float x) { return (float)to_i8(x); }
static __device__ __forceinline__ F int8_1(const F& x) { return lanes<F>([&](int i) { return (float)to_i8(x.v[i]); }); }

// The four highest fraction bits, ties to even, saturating at 448; NaN is 0x7f.
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

// Storage types: how many words V elements take, how an element is read from the words and how lanes are packed.

struct F32 { static constexpr int SIZE = 4; };
struct F16 { static constexpr int SIZE = 2; };
struct Bf16 { static constexpr int SIZE = 2; };
struct I32 { static constexpr int SIZE = 4; };
struct I8 { static constexpr int SIZE = 1; };
struct F8 { static constexpr int SIZE = 1; };
struct Bool { static constexpr int SIZE = 1; };

template <class Type> struct Words { static constexpr int COUNT = (V * Type::SIZE + 3) / 4; };
template <class Type> struct alignas(Words<Type>::COUNT < 4 ? 4 * Words<Type>::COUNT : 16) Raw { u32 w[Words<Type>::COUNT]; };

static __device__ __forceinline__ F value(const Raw<F32>& r) { return lanes<F>([&](int i) { return __uint_as_float(r.w[i]); }); }
static __device__ __forceinline__ F value(const Raw<Bf16>& r) {
    return lanes<F>([&](int i) { return i & 1 ? bf16_high(r.w[i / 2]) : bf16_low(r.w[i / 2]); });
}
static __device__ __forceinline__ F value(const Raw<F16>& r) {
    return lanes<F>([&](int i) { return i & 1 ? f16_high(r.w[i / 2]) : f16_low(r.w[i / 2]); });
}
static __device__ __forceinline__ I value(const Raw<I32>& r) { return lanes<I>([&](int i) { return (int)r.w[i]; }); }
static __device__ __forceinline__ F value(const Raw<I8>& r) {
    return lanes<F>([&](int i) { return (float)((int)(r.w[i / 4] << (24 - 8 * (i & 3))) >> 24); });
}
static __device__ __forceinline__ B value(const Raw<Bool>& r) {
    return lanes<B>([&](int i) { return ((r.w[i / 4] >> (8 * (i & 3))) & 0xffu) != 0; });
}

template <class Type> struct Packer;
template <> struct Packer<F32> {
    template <class X> static __device__ __forceinline__ Raw<F32> pack(const X& x) {
        Raw<F32> r;
#pragma unroll
        for (int i = 0; i < V; ++i) r.w[i] = __float_as_uint(at(x, i));
        return r;
    }
};
template <> struct Packer<I32> {
    template <class X> static __device__ __forceinline__ Raw<I32> pack(const X& x) {
        Raw<I32> r;
#pragma unroll
        for (int i = 0; i < V; ++i) r.w[i] = (u32)at(x, i);
        return r;
    }
};
template <> struct Packer<Bf16> {
    template <class X> static __device__ __forceinline__ Raw<Bf16> pack(const X& x) {
        Raw<Bf16> r;
#pragma unroll
        for (int i = 0; i < V; i += 2) r.w[i / 2] = bf16x2(at(x, i), i + 1 < V ? at(x, i + 1 < V ? i + 1 : i) : 0.0f);
        return r;
    }
};
template <> struct Packer<F16> {
    template <class X> static __device__ __forceinline__ Raw<F16> pack(const X& x) {
        Raw<F16> r;
#pragma unroll
        for (int i = 0; i < V; i += 2) r.w[i / 2] = f16x2(at(x, i), i + 1 < V ? at(x, i + 1 < V ? i + 1 : i) : 0.0f);
        return r;
    }
};
template <class Byte> struct BytePacker {
    template <class Type, class X> static __device__ __forceinline__ Raw<Type> pack(const X& x) {
        Raw<Type> r;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const u32 b = Byte::of(at(x, i)) << (8 * (i & 3));
            if (i & 3) r.w[i / 4] |= b;
            else r.w[i / 4] = b;
        }
        return r;
    }
};
struct I8Byte { static __device__ __forceinline__ u32 of(float x) { return (u32)to_i8(x) & 0xffu; } };
struct F8Byte { static __device__ __forceinline__ u32 of(float x) { return to_f8(x); } };
struct BoolByte {
    static __device__ __forceinline__ u32 of(float x) { return x != 0.0f; }
    static __device__ __forceinline__ u32 of(bool x) { return x; }
};
template <> struct Packer<I8> {
    template <class X> static __device__ __forceinline__ Raw<I8> pack(const X& x) {
        Raw<I8> r;
        if constexpr (V % 4 == 0) {
#pragma unroll
            for (int i = 0; i < V; i += 4) {
                const u32 above = i8x2(nearest(at(x, i + 2)), nearest(at(x, i + 3)), 0);
                r.w[i / 4] = i8x2(nearest(at(x, i)), nearest(at(x, i + 1)), above);
            }
        } else {
            r = BytePacker<I8Byte>::pack<I8>(x);
        }
        return r;
    }
};
template <> struct Packer<F8> { template <class X> static __device__ __forceinline__ Raw<F8> pack(const X& x) { return BytePacker<F8Byte>::pack<F8>(x); } };
template <> struct Packer<Bool> { template <class X> static __device__ __forceinline__ Raw<Bool> pack(const X& x) { return BytePacker<BoolByte>::pack<Bool>(x); } };

// Lanes as a 16-bit type would hold them.
static __device__ __forceinline__ F round_bf16(const F& x) { return value(Packer<Bf16>::pack(x)); }
static __device__ __forceinline__ F round_f16(const F& x) { return value(Packer<F16>::pack(x)); }
static __device__ __forceinline__ float round_bf16(float x) { return bf16_low(bf16x2(x, 0.0f)); }
static __device__ __forceinline__ float round_f16(float x) { return f16_low(f16x2(x, 0.0f)); }

// Accesses of V elements by pieces of A bytes, the alignment that the launch promises. Loads are volatile: otherwise the
// compiler may do one that a condition forbids, and choose afterwards. Stores go past L1, where
// what is written once is of no use.
//
// Memory that is constant is read past all order: the compiler moves such loads over barriers. So a grid that may run while earlier
// ones still write reads by ordinary loads, which stay behind its wait, and so does one whose blocks read what others of it wrote.
#if defined(MEETS) || defined(WAITS) && __CUDA_ARCH__ >= 900
#define READ "ld.global"
#else
#define READ "ld.global.nc"
#endif

template <int A> struct Access;
template <> struct Access<16> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) {
        asm volatile(READ ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
    }
    static __device__ __forceinline__ void store(char* p, const u32* w) {
        asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    }
};
template <> struct Access<8> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) {
        asm volatile(READ ".v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    }
    static __device__ __forceinline__ void store(char* p, const u32* w) {
        asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
    }
};
template <> struct Access<4> {
    static __device__ __forceinline__ void load(u32* w, const char* p) {
        asm volatile(READ ".L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
    }
    static __device__ __forceinline__ void load_again(u32* w, const char* p) { asm volatile(READ ".u32 %0, [%1];" : "=r"(w[0]) : "l"(p)); }
    static __device__ __forceinline__ void store(char* p, const u32* w) { asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
};

static __device__ __forceinline__ u32 load_u16(const char* p) {
    u16 x;
    asm volatile(READ ".u16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}
static __device__ __forceinline__ u32 load_u8(const char* p) {
    u32 x;
    asm volatile(READ ".u8 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
static __device__ __forceinline__ void store_u16(char* p, u32 x) { asm volatile("st.global.L1::no_allocate.u16 [%0], %1;" ::"l"(p), "h"((u16)x) : "memory"); }
static __device__ __forceinline__ void store_u8(char* p, u32 x) { asm volatile("st.global.L1::no_allocate.u8 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

// How a load goes by the caches: what is read once is not worth keeping.
enum Load { STREAM, AGAIN };

template <int BYTES, int A, Load HOW> static __device__ __forceinline__ void load_words(u32* w, const char* p) {
    if constexpr (A >= 4) {
#pragma unroll
        for (int i = 0; i < BYTES / A; ++i) {
            if constexpr (HOW == AGAIN) Access<A>::load_again(w + i * (A / 4), p + i * A);
            else Access<A>::load(w + i * (A / 4), p + i * A);
        }
    } else if constexpr (A == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; ++i) {
            const u32 x = load_u16(p + 2 * i) << (16 * (i & 1));
            if (i & 1) w[i / 2] |= x;
            else w[i / 2] = x;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) {
            const u32 x = load_u8(p + i) << (8 * (i & 3));
            if (i & 3) w[i / 4] |= x;
            else w[i / 4] = x;
        }
    }
}

// V elements; zeros where the mask does not hold. A is at most the bytes of all of them.
template <class Type, int A, Load HOW> static __device__ __forceinline__ Raw<Type> load(const char* p, bool in) {
    Raw<Type> r;
    constexpr int BYTES = V * Type::SIZE;
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) r.w[i] = 0;
    if (in) load_words<BYTES, A, HOW>(r.w, p);
    return r;
}

// V elements to shared memory, past the registers; zeros where the mask does not hold. Copies are done when the group they
// were committed with has been awaited; N groups may be left on their way.
template <class Type, int A> static __device__ __forceinline__ void copy(Raw<Type>* to, const char* p, bool in) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    const int bytes = in ? A : 0;
#pragma unroll
    for (int i = 0; i < V * Type::SIZE / A; ++i) {
        if constexpr (A == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + 16 * i), "l"(p + 16 * i), "r"(bytes) : "memory");
        else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at + A * i), "l"(p + A * i), "n"(A), "r"(bytes) : "memory");
    }
}
template <int N = 0> static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// The first `count` of V elements, one by one: the tail of a flat kernel.
template <class Type> static __device__ __forceinline__ Raw<Type> load_tail(const char* p, int count) {
    Raw<Type> r;
#pragma unroll
    for (int i = 0; i < (V * Type::SIZE + 3) / 4; ++i) r.w[i] = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i < count) {
            if constexpr (Type::SIZE == 4) {
                Access<4>::load(r.w + i, p + 4 * i);
            } else if constexpr (Type::SIZE == 2) {
                r.w[i / 2] |= load_u16(p + 2 * i) << (16 * (i & 1));
            } else {
                r.w[i / 4] |= load_u8(p + i) << (8 * (i & 3));
            }
        }
    }
    return r;
}

template <class Type, int A> static __device__ __forceinline__ void store_raw(char* p, const Raw<Type>& r) {
    constexpr int BYTES = V * Type::SIZE;
    if constexpr (A >= 4) {
#pragma unroll
        for (int i = 0; i < BYTES / A; ++i) Access<A>::store(p + i * A, r.w + i * (A / 4));
    } else if constexpr (A == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; ++i) store_u16(p + 2 * i, r.w[i / 2] >> (16 * (i & 1)));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; ++i) store_u8(p + i, r.w[i / 4] >> (8 * (i & 3)));
    }
}

template <class Type, int A, class X> static __device__ __forceinline__ void store(char* p, const X& x, bool in) {
    if (in) store_raw<Type, A>(p, Packer<Type>::pack(x));
}

template <class Type, class X> static __device__ __forceinline__ void store_tail(char* p, const X& x, int count) {
    const Raw<Type> r = Packer<Type>::pack(x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        if (i < count) {
            if constexpr (Type::SIZE == 4) Access<4>::store(p + 4 * i, r.w + i);
            else if constexpr (Type::SIZE == 2) store_u16(p + 2 * i, r.w[i / 2] >> (16 * (i & 1)));
            else store_u8(p + i, r.w[i / 4] >> (8 * (i & 3)));
        }
    }
}

// One number a row.
static __device__ __forceinline__ float load_one(F32, const char* p) { u32 w; Access<4>::load_again(&w, p); return __uint_as_float(w); }
static __device__ __forceinline__ float load_one(Bf16, const char* p) { return bf16_low(load_u16(p)); }
static __device__ __forceinline__ float load_one(F16, const char* p) { return f16_low(load_u16(p)); }
static __device__ __forceinline__ int load_one(I32, const char* p) { u32 w; Access<4>::load_again(&w, p); return (int)w; }
static __device__ __forceinline__ float load_one(I8, const char* p) { return (float)(signed char)load_u8(p); }
static __device__ __forceinline__ bool load_one(Bool, const char* p) { return load_u8(p) != 0; }

static __device__ __forceinline__ void store_one(F32, char* p, float x) { const u32 w = __float_as_uint(x); Access<4>::store(p, &w); }
static __device__ __forceinline__ void store_one(I32, char* p, int x) { const u32 w = (u32)x; Access<4>::store(p, &w); }
static __device__ __forceinline__ void store_one(Bf16, char* p, float x) { store_u16(p, bf16x2(x, 0.0f)); }
static __device__ __forceinline__ void store_one(F16, char* p, float x) { store_u16(p, f16x2(x, 0.0f)); }
static __device__ __forceinline__ void store_one(I8, char* p, float x) { store_u8(p, (u32)to_i8(x)); }
static __device__ __forceinline__ void store_one(F8, char* p, float x) { store_u8(p, to_f8(x)); }
static __device__ __forceinline__ void store_one(Bool, char* p, float x) { store_u8(p, x != 0.0f); }
static __device__ __forceinline__ void store_one(Bool, char* p, bool x) { store_u8(p, x); }

// Which of V elements from `first` on are kept. IN_STEP: `first` is always a multiple of the smaller of V and 4.
template <bool IN_STEP> static __device__ __forceinline__ B keep(u64 first, u32 seed, u32 offset, u32 threshold) {
    B kept;
    if constexpr (IN_STEP && V >= 4) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            const Words4 words = philox((first + i) >> 2, seed, offset);
#pragma unroll
            for (int k = 0; k < 4; ++k) kept.v[i + k] = words.w[k] >= threshold;
        }
    } else if constexpr (IN_STEP) {
        const Words4 words = philox(first >> 2, seed, offset);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            kept.v[i] = word(words, (u32)(first & 3) + i) >= threshold;
        }
    } else {
        u64 block = first >> 2;
        Words4 words = philox(block, seed, offset);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const u64 e = first + i;
            if ((e >> 2) != block) {
                block = e >> 2;
                words = philox(block, seed, offset);
            }
            kept.v[i] = word(words, (u32)(e & 3)) >= threshold;
        }
    }
    return kept;
}

// Reductions over the T threads of a row. Butterflies add the same pairs in every thread, so that all get the same bits.

struct Sum {
    typedef float Part;
    static __device__ __forceinline__ float start() { return 0.0f; }
    static __device__ __forceinline__ float both(float a, float b) { return a + b; }
};
struct Max {
    typedef float Part;
    static __device__ __forceinline__ float start() { return __int_as_float(0xff800000); }
    static __device__ __forceinline__ float both(float a, float b) { return max2(a, b); }
};
// Magnitudes, so the least is 0.
struct AbsMax {
    typedef float Part;
    static __device__ __forceinline__ float start() { return 0.0f; }
    static __device__ __forceinline__ float both(float a, float b) { return max2(a, b); }
};
struct Best { float v; int i; };
// The first of the largest, or the first NaN.
struct ArgMax {
    typedef Best Part;
    static __device__ __forceinline__ Best start() { return Best{__int_as_float(0xff800000), 0x7fffffff}; }
    static __device__ __forceinline__ Best both(Best a, Best b) {
        const bool nan_a = a.v != a.v, nan_b = b.v != b.v;
        const bool first = nan_a || nan_b ? nan_a && (!nan_b || a.i < b.i) : a.v > b.v || (a.v == b.v && a.i < b.i);
        return first ? a : b;
    }
};

static __device__ __forceinline__ float shuffle(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
static __device__ __forceinline__ Best shuffle(Best x, int mask) {
    return Best{__shfl_xor_sync(0xffffffffu, x.v, mask), __shfl_xor_sync(0xffffffffu, x.i, mask)};
}

// Over groups of WIDTH neighbouring threads, a power of two up to 32.
template <class Op, int WIDTH> static __device__ __forceinline__ typename Op::Part butterfly(typename Op::Part x) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) x = Op::both(x, shuffle(x, mask));
    return x;
}

// The partial of V lanes.
template <class Op> static __device__ __forceinline__ float gather_lanes(const F& x) {
    F y = x;
#pragma unroll
    for (int step = V / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < step; ++i) y.v[i] = Op::both(y.v[i], y.v[i + step]);
    }
    return y.v[0];
}

static __device__ __forceinline__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : n <= 8 ? 8 : n <= 16 ? 16 : 32; }

// What COUNT warps left in shared memory, combined by every thread.
template <class Op, int COUNT> static __device__ __forceinline__ typename Op::Part over_warps(const typename Op::Part* s) {
    constexpr int WIDTH = power_of_two(COUNT);
    const int lane = threadIdx.x & (WIDTH - 1);
    typename Op::Part x = lane < COUNT ? s[lane] : Op::start();
#pragma unroll
    for (int i = 32; i < COUNT; i += 32) {
        if (i + lane < COUNT) x = Op::both(x, s[i + lane]);
    }
    return butterfly<Op, WIDTH>(x);
}

#if __CUDA_ARCH__ >= 900
static __device__ __forceinline__ u32 cluster_rank() { u32 x; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
static __device__ __forceinline__ void put(float* s, float x, u32 rank) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote(s, rank)), "f"(x) : "memory");
}
static __device__ __forceinline__ void put(Best* s, Best x, u32 rank) {
    const u32 there = remote(s, rank);
    asm volatile("st.shared::cluster.f32 [%0], %1; st.shared::cluster.u32 [%0+4], %2;" ::"r"(there), "f"(x.v), "r"(x.i) : "memory");
}
#endif

// Finished column sums: the sums of all blocks added in one order, 32 threads a column.
template <class Type> static __device__ __forceinline__ void finish_columns(const float* g_partial, u64 blocks, int width, char* g_out) {
    __shared__ float s_sums[32][33];
    const int x = threadIdx.x & 31, y = threadIdx.x >> 5, column = blockIdx.x * 32 + x;
    float sum = 0.0f;
    if (column < width) {
        for (u64 block = y; block < blocks; block += 32) sum += g_partial[block * width + column];
    }
    s_sums[y][x] = sum;
    __syncthreads();
    if (y == 0 && column < width) {
        float total = s_sums[0][x];
#pragma unroll
        for (int i = 1; i < 32; ++i) total += s_sums[i][x];
        store_one(Type{}, g_out + (i64)column * Type::SIZE, total);
    }
}
