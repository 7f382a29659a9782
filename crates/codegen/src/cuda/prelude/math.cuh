// Functions of one float and of two, as row kernels compute them.

static __device__ __forceinline__ float neg1(float x) { return -x; }
static __device__ __forceinline__ float abs1(float x) { return fabsf(x); }
static __device__ __forceinline__ float exp1(float x) { return expf(x); }
static __device__ __forceinline__ float log1(float x) { return logf(x); }
static __device__ __forceinline__ float sqrt1(float x) { return sqrt_approx(x); }
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

static __device__ __forceinline__ float max2(float a, float b) { return max_nan(a, b); }
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
