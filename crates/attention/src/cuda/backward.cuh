// What the kernels of the gradient share: the parameter, statistics of rows, slopes of scores.
//
//   p = exp(s - logsumexp), dp = kept (do v^T), delta = sum of p dp over the row, ds = p (dp - delta)
//   dq = scale ds k, dk = scale ds^T q, dv = (kept p)^T do
//
// - Numbers: delta is a sum over the very products that it is subtracted from, in f32, not over a rounded result: where one
//   key has all the weight, slopes that cancel still do.
// - Every head has keys of its own, at a stride of 0 where they are shared, and gradients of its own; by warpgroups heads of a group share keys,
//   whose gradients are the sums over the group. Gradients are stored in the order of heads or of positions, each in a buffer or side by side.
// - Every element is written once, by one block, its sum in one order: the same bits on every run.

// The parameter: that of attention, whose result is here the gradient that comes in, then what is made.
struct Backward {
    Attention of;
    // Of each row of queries: logsumexp as a power of 2, infinite where nothing is seen, and delta; or as the kernels say. Behind them, on the
    // matrix units beside a mask that is added, 1 over the sum of each row.
    float2* g_rows;
    Element* g_dq;
    Element* g_dk;
    Element* g_dv;
    Strides dq, dk, dv;
};

// Of a row, as far as a thread has seen it: the largest score, sums of powers of 2 below it, alone and times slopes.
struct Statistics {
    float maximum, sum, slope;
};

static __device__ __forceinline__ void clear(Statistics& r) {
    r.maximum = never();
    r.sum = r.slope = 0.0f;
}

// Scores follow of which `most` is the largest, as a power of 2.
static __device__ __forceinline__ void raise(Statistics& r, float most) {
    const float now = fmaxf(r.maximum, most), factor = fading(r.maximum, now);
    r.maximum = now;
    r.sum *= factor;
    r.slope *= factor;
}

// Joins what LANES neighbouring lanes have seen.
template <int LANES> static __device__ __forceinline__ Statistics join(Statistics r) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float maximum = shuffle_xor(r.maximum, mask), most = fmaxf(r.maximum, maximum);
        const float own = fading(r.maximum, most), other = fading(maximum, most);
        r.maximum = most;
        r.sum = r.sum * own + shuffle_xor(r.sum, mask) * other;
        r.slope = r.slope * own + shuffle_xor(r.slope, mask) * other;
    }
    return r;
}

// Logsumexp and delta of a row, of which all is joined. Beside a maximum that is FAR below 0, as masks make it, the logsumexp would have few digits
// left: then the maximum stands in its place, and the sum apart.
constexpr float FAR = -8192.0f;
static __device__ __forceinline__ bool is_far(float logsumexp) { return MASK == ADDITIVE && logsumexp < FAR; }
static __device__ __forceinline__ float2 ended(const Statistics& r) {
    if (r.sum == 0.0f) return make_float2(-never(), 0.0f);
    return make_float2(is_far(r.maximum) ? r.maximum : r.maximum + log2f(r.sum), r.slope * ending(r.sum));
}
template <int LANES> static __device__ __forceinline__ float2 finish(const Statistics& r) { return ended(join<LANES>(r)); }

// ds but for the scale: of a probability, its slope where it is kept, else 0, and its row.
static __device__ __forceinline__ float slope_of(float probability, float slope, float delta) {
    return probability * (DROPOUT ? fmaf(slope, KEPT, -delta) : slope - delta);
}

// The first query that sees a key.
static __device__ __forceinline__ int first_query(const Attention& p, long long last, int key) {
    const long long first = MASK == CAUSAL ? (long long)key - last : 0;
    return (int)max(0ll, min(first, (long long)p.queries));
}
