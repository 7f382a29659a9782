// Lanes of row kernels. V and T are constants that the generated text defines before the prelude.
//
// A thread works on V neighbouring columns at a time: F holds them as floats, I as integers, B as truth values. One number per row is a
// plain float or int; the functions take either.

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

// Arithmetic of integers wraps.
static __device__ __forceinline__ int add_int(int a, int b) { return (int)((u32)a + (u32)b); }
static __device__ __forceinline__ int sub_int(int a, int b) { return (int)((u32)a - (u32)b); }
static __device__ __forceinline__ int mul_int(int a, int b) { return (int)((u32)a * (u32)b); }
template <class X, class Y> static __device__ __forceinline__ I add_int(const X& a, const Y& b) { return lanes<I>([&](int i) { return add_int(at(a, i), at(b, i)); }); }
template <class X, class Y> static __device__ __forceinline__ I sub_int(const X& a, const Y& b) { return lanes<I>([&](int i) { return sub_int(at(a, i), at(b, i)); }); }
template <class X, class Y> static __device__ __forceinline__ I mul_int(const X& a, const Y& b) { return lanes<I>([&](int i) { return mul_int(at(a, i), at(b, i)); }); }
static __device__ __forceinline__ int nearest_int(float x) { return nearest(x); }
static __device__ __forceinline__ I nearest_int(const F& x) { return lanes<I>([&](int i) { return nearest(x.v[i]); }); }

static __device__ __forceinline__ F as_float(const B& x) { return lanes<F>([&](int i) { return x.v[i] ? 1.0f : 0.0f; }); }
static __device__ __forceinline__ F as_float(const I& x) { return lanes<F>([&](int i) { return (float)x.v[i]; }); }
static __device__ __forceinline__ float as_float(bool x) { return x ? 1.0f : 0.0f; }
static __device__ __forceinline__ float as_float(int x) { return (float)x; }
static __device__ __forceinline__ B as_truth(const F& x) { return lanes<B>([&](int i) { return x.v[i] != 0.0f; }); }
static __device__ __forceinline__ B as_truth(const I& x) { return lanes<B>([&](int i) { return x.v[i] != 0; }); }
static __device__ __forceinline__ bool as_truth(float x) { return x != 0.0f; }
static __device__ __forceinline__ bool as_truth(int x) { return x != 0; }
