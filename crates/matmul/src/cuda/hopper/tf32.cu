// ---- matmuls of f32 by products of TF32: sums that these cannot give
//
// Infinity times a rest of zero is no number, numbers that are none have rests that are, and a sum of the products may pass the largest f32 where
// fused multiply-adds do not. All of that comes out infinite or as no number.

static __device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000u); }

// A sum by fused multiply-adds, in the order of K.
static __device__ __forceinline__ float sum_again(const Parameters& p, i64 row, int column) {
    const u64 batch = (u64)row / p.m, k = p.inner;
    const char* g_a = p.given[0].g_first + batch * p.given[0].matrix + (u64)row % p.m * p.given[0].line;
    const char* g_b = p.given[1].g_first + batch * p.given[1].matrix + column * p.given[1].line;
    float sum = 0.0f;
#pragma unroll 1
    for (u64 i = 0; i < k; ++i, g_a += p.given[0].along, g_b += p.given[1].along) {
        u32 a, b;
        Access<4>::load_again(&a, g_a);
        Access<4>::load_again(&b, g_b);
        sum = fmaf(__uint_as_float(a), __uint_as_float(b), sum);
    }
    return sum;
}
