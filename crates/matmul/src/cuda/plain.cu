// A batched matrix product over any strides, with an epilogue: what runs where the vendor's library does not.
//
//   c[i, j] = f(sum over l of a[i, l] b[l, j] + bias[j]) + residual[i, j]
//
// - Shapes: a [m, k], b [k, n], c and residual [m, n], each with a row and a column stride; bias [n]. Batch axes, outermost
//   first, shift a, b, c and the residual by a stride each; a stride of 0 repeats.
// - Numerics: f32 sums, added in the order of l by one thread: the same bits every time. k may be 0. Rounded once, in the
//   store. Sums of bytes are exact for k below 2^17, and stored as f32.
// - A block makes a tile of 64 x 64, a thread 4 x 4 of it; operands pass through shared memory 16 of l at a time, read along
//   whichever axis is contiguous. Blocks take further tiles where there are more tiles than blocks.
//
// STORAGE (0 f32, 1 f16, 2 bf16, 3 i8 with an f32 result), BIAS, GELU and RESIDUAL are constants that stand before this file.

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int THREADS = 256;
constexpr int AXES = 6;

// What operands and result are stored as, and what is multiplied and summed.
template <int S> struct Types { typedef u16 Element; typedef u16 Result; typedef float Lane; };
template <> struct Types<0> { typedef float Element; typedef float Result; typedef float Lane; };
template <> struct Types<3> { typedef signed char Element; typedef float Result; typedef int Lane; };
typedef Types<STORAGE>::Element Element;
typedef Types<STORAGE>::Result Result;
typedef Types<STORAGE>::Lane Lane;

// The parameter: 64-bit words, in the order in which the launch lists them.
struct Product {
    const Element* g_a;
    const Element* g_b;
    const Result* g_bias;
    const Result* g_residual;
    Result* g_c;
    u64 m, n, k;
    u64 a_row, a_column, b_row, b_column, c_row, c_column;
    u64 batches;
    // size, stride in a, in b, in c
    u64 axes[AXES][4];
};

template <class E> static __device__ __forceinline__ Lane to_lane(E x) {
    if constexpr (STORAGE == 3) {
        return x;
    } else {
        return widen<STORAGE>(x);
    }
}

static __device__ __forceinline__ Lane multiply_add(Lane a, Lane b, Lane c) {
    if constexpr (STORAGE == 3) {
        return a * b + c;
    } else {
        return fmaf(a, b, c);
    }
}

static __device__ __forceinline__ Result to_result(float x) {
    if constexpr (STORAGE == 3) {
        return x;
    } else {
        return narrow<STORAGE>(x);
    }
}

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form without its cancellation.
static __device__ __forceinline__ float gelu(float x) {
    const float slope = 1.5957691216f;
    return x / (1.0f + expf(-(x * slope) * fmaf(0.044715f, x * x, 1.0f)));
}

static __device__ __forceinline__ u64 tiles(u64 size) { return (size + TILE - 1) / TILE; }

extern "C" __global__ void __launch_bounds__(THREADS) product(const Product p) {
    // One column more than a tile, so that a column of threads does not write to one bank.
    __shared__ Lane s_a[DEPTH][TILE + 1];
    __shared__ Lane s_b[DEPTH][TILE + 1];
    const int thread = threadIdx.x, x = thread % 16, y = thread / 16;
    const u64 across = tiles(p.n), down = tiles(p.m);
    for (u64 tile = blockIdx.x; tile < p.batches * down * across; tile += gridDim.x) {
        const u64 first_column = tile % across * TILE, first_row = tile / across % down * TILE;
        u64 batch = tile / across / down, a_start = 0, b_start = 0, c_start = 0;
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const u64 index = batch % p.axes[axis][0];
            batch /= p.axes[axis][0];
            a_start += index * p.axes[axis][1];
            b_start += index * p.axes[axis][2];
            c_start += index * p.axes[axis][3];
        }
        Lane r_sum[4][4] = {};
        for (u64 first = 0; first < p.k; first += DEPTH) {
#pragma unroll
            for (int i = 0; i < TILE * DEPTH / THREADS; ++i) {
                // Neighbouring threads follow l in a and the columns in b, or the other axis where that one is contiguous.
                const int short_l = thread % DEPTH, short_at = thread / DEPTH + i * (THREADS / DEPTH);
                const int long_l = thread / TILE + i * (THREADS / TILE), long_at = thread % TILE;
                const bool a_turned = p.a_row == 1 && p.a_column != 1, b_turned = p.b_row == 1 && p.b_column != 1;
                const int a_l = a_turned ? long_l : short_l, a_at = a_turned ? long_at : short_at;
                const int b_l = b_turned ? short_l : long_l, b_at = b_turned ? short_at : long_at;
                const u64 row = first_row + a_at, column = first_column + b_at;
                const bool a_in = row < p.m && first + a_l < p.k, b_in = column < p.n && first + b_l < p.k;
                s_a[a_l][a_at] = a_in ? to_lane(p.g_a[a_start + row * p.a_row + (first + a_l) * p.a_column]) : Lane(0);
                s_b[b_l][b_at] = b_in ? to_lane(p.g_b[b_start + (first + b_l) * p.b_row + column * p.b_column]) : Lane(0);
            }
            __syncthreads();
#pragma unroll
            for (int l = 0; l < DEPTH; ++l) {
                Lane r_a[4], r_b[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) r_a[i] = s_a[l][y + 16 * i];
#pragma unroll
                for (int j = 0; j < 4; ++j) r_b[j] = s_b[l][x + 16 * j];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) r_sum[i][j] = multiply_add(r_a[i], r_b[j], r_sum[i][j]);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u64 row = first_row + y + 16 * i, column = first_column + x + 16 * j;
                if (row >= p.m || column >= p.n) continue;
                const u64 at = c_start + row * p.c_row + column * p.c_column;
                float value = (float)r_sum[i][j];
                if constexpr (BIAS) value += to_lane(p.g_bias[column]);
                if constexpr (GELU) value = gelu(value);
                if constexpr (RESIDUAL) value += to_lane(p.g_residual[at]);
                p.g_c[at] = to_result(value);
            }
        }
    }
}
