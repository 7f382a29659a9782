// Storage types of row kernels: how many words V elements take, how an element is read from the words and how lanes are packed.

// To i8: to the nearest, saturating; NaN becomes 0.
static __device__ __forceinline__ int to_i8(float x) { return min(max(nearest(x), -128), 127); }
static __device__ __forceinline__ float int8_1(float x) { return (float)to_i8(x); }
static __device__ __forceinline__ F int8_1(const F& x) { return lanes<F>([&](int i) { return (float)to_i8(x.v[i]); }); }

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
