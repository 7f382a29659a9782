// The instructions that attention is made of, each a function.

typedef unsigned short u16;

static __device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Storage: 0 is f32, 1 is f16, 2 is bf16.
template <int KIND> struct Stored { typedef u16 Element; };
template <> struct Stored<0> { typedef float Element; };

template <int KIND> static __device__ __forceinline__ float widen(typename Stored<KIND>::Element x) {
    if constexpr (KIND == 0) {
        return x;
    } else if constexpr (KIND == 1) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    } else {
        return __uint_as_float((u32)x << 16);
    }
}

template <int KIND> static __device__ __forceinline__ typename Stored<KIND>::Element narrow(float x) {
    if constexpr (KIND == 0) {
        return x;
    } else if constexpr (KIND == 1) {
        u16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    } else {
        // To the nearest, ties to even; NaN stays NaN.
        const u32 bits = __float_as_uint(x);
        return (u16)(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
}

// Two numbers in one word, the first in the lower half.
template <int KIND> static __device__ __forceinline__ u32 narrow2(float low, float high) {
    u32 w;
    if constexpr (KIND == 1) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    }
    return w;
}

static __device__ __forceinline__ float neighbour(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
static __device__ __forceinline__ u32 from_lane(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
static __device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }

// Sixteen bytes of global memory on their way to shared memory; zeros where `in` is not true.
static __device__ __forceinline__ void copy_async(void* s_to, const void* g_from, bool in) {
    const u32 to = (u32)__cvta_generic_to_shared(s_to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(g_from), "r"(in ? 16 : 0) : "memory");
}
// The same of two numbers.
static __device__ __forceinline__ void copy_two_async(float2* s_to, const float2* g_from, bool in) {
    const u32 to = (u32)__cvta_generic_to_shared(s_to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(g_from), "r"(in ? 8 : 0) : "memory");
}
// All that this thread has on its way is there.
static __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 x 8 from rows of shared memory: lane l holds the address of row l % 8 of matrix l / 8, and gets
// elements 2 (l % 4) and the next of row l / 4 of each.
static __device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* s_row) {
    const u32 from = (u32)__cvta_generic_to_shared(s_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
// The same, rows and columns exchanged.
static __device__ __forceinline__ void load_turned_matrices(u32 (&r)[4], const void* s_row) {
    const u32 from = (u32)__cvta_generic_to_shared(s_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// c += a b, of 16 x 16 and 16 x 8, in f32. With g = lane / 4 and t = lane % 4, c holds (g, 2t), (g, 2t + 1), (g + 8, 2t),
// (g + 8, 2t + 1); a holds pairs from (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b pairs down from (2t, g), (2t + 8, g).
template <int KIND>
static __device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (KIND == 1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
