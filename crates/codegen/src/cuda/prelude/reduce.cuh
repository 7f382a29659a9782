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

static __device__ __forceinline__ Best shuffle_xor(Best x, int mask) {
    return Best{__shfl_xor_sync(0xffffffffu, x.v, mask), __shfl_xor_sync(0xffffffffu, x.i, mask)};
}

// Over groups of WIDTH neighbouring threads, a power of two up to 32.
template <class Op, int WIDTH> static __device__ __forceinline__ typename Op::Part butterfly(typename Op::Part x) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) x = Op::both(x, shuffle_xor(x, mask));
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
// Stores a partial to the same place in the block of some rank of the cluster.
static __device__ __forceinline__ void put(float* s, float x, u32 rank) { store_remote(remote(s, rank), x); }
static __device__ __forceinline__ void put(Best* s, Best x, u32 rank) {
    const u32 there = remote(s, rank);
    store_remote(there, x.v);
    store_remote(there + 4, x.i);
}
#endif

// Finished column sums: the sums of all blocks added in one order, 32 threads per column.
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
