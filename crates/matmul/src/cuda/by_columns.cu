
// B is [N, K]. A warp owns NEAR columns at a time, and its lanes run along K; SLICES warps share K. Blocks walk over the columns.

constexpr int STEP = 32 * WIDE;
constexpr int STEPS = (K + STEP - 1) / STEP;
constexpr int GROUPS = WARPS / SLICES;
constexpr int STRIP = GROUPS * NEAR;

// Adds the products of a lane's 16 bytes of NEAR columns with what lies beside them in a row of A.
static __device__ __forceinline__ void add_products(float* sums, const float* s_row, const Weights* weights) {
    float left[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; i += 4) {
        const float4 four = *(const float4*)(s_row + i * 32 + threadIdx.x % 32 * 4);
        left[i] = four.x, left[i + 1] = four.y, left[i + 2] = four.z, left[i + 3] = four.w;
    }
#pragma unroll
    for (int c = 0; c < NEAR; ++c) {
#pragma unroll
        for (int i = 0; i < WIDE; ++i) sums[c] = fmaf(left[i], element(Right{}, weights[c].w, i), sums[c]);
    }
}
static __device__ __forceinline__ void add_products(int* sums, const signed char* s_row, const Weights* weights) {
    const int4 left = *(const int4*)(s_row + threadIdx.x % 32 * 16);
#pragma unroll
    for (int c = 0; c < NEAR; ++c) {
        const u32* const w = weights[c].w;
        sums[c] = __dp4a(left.w, (int)w[3], __dp4a(left.z, (int)w[2], __dp4a(left.y, (int)w[1], __dp4a(left.x, (int)w[0], sums[c]))));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) skinny(const __grid_constant__ Parameters p) {
    extern __shared__ float4 s_dynamic[];
    Held* const s_left = (Held*)s_dynamic;
    __shared__ Total s_sums[WARPS][M * NEAR];
    start_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slice = warp % SLICES, beside = warp / SLICES * NEAR;
    const char* const g_right = (const char*)p.right + lane * 16;
    auto load = [&](Weights* to, int strip, int step) {
        const int width = K - step * STEP - lane * WIDE;
#pragma unroll
        for (int c = 0; c < NEAR; ++c) {
            const int column = strip + beside + c;
            to[c] = load_weights(g_right + (i64)column * (i64)p.right_next + (i64)step * (STEP * Right::SIZE), column < N ? width : 0);
        }
    };
    Weights now[NEAR], next[NEAR];
    int strip = blockIdx.x * STRIP, step = slice;
    if (p.right_given == 0) wait_for_previous();
    load(now, strip, step);
    prefetch_shared(p, blockIdx.x);
    wait_for_previous();
    fill_left(p, s_left, 0, K);
    __syncthreads();
    Total sums[M * NEAR];
#pragma unroll
    for (int i = 0; i < M * NEAR; ++i) sums[i] = 0;
    while (strip < N) {
        const bool done = step + SLICES >= STEPS;
        const int next_strip = done ? min(strip + (int)gridDim.x * STRIP, N) : strip, next_step = done ? slice : step + SLICES;
        load(next, next_strip, next_step);
#pragma unroll
        for (int r = 0; r < M; ++r) add_products(sums + r * NEAR, s_left + r * LEFT + step * STEP, now);
        if (done) {
            // A lane has one sum; with less than 32 of them, several lanes have the same.
            constexpr int ALIKE = 32 / (M * NEAR);
            constexpr int VECTORS = M * NEAR / V;
            add_lanes<M * NEAR, 16, 1>(sums);
            if (lane % ALIKE == 0) s_sums[warp][lane / ALIKE] = sums[0];
            if (SLICES == 1) {
                __syncwarp();
                for (int e = lane; e < VECTORS; e += 32) {
                    finish(p, e * V / NEAR, strip + beside + e * V % NEAR, add_pieces(s_sums[warp] + e * V, 1, 0));
                }
                __syncwarp();
            } else {
                __syncthreads();
                for (int e = threadIdx.x; e < GROUPS * VECTORS; e += THREADS) {
                    const int group = e / VECTORS, own = e % VECTORS * V;
                    const F sum = add_pieces(s_sums[group * SLICES] + own, SLICES, M * NEAR);
                    finish(p, own / NEAR, strip + group * NEAR + own % NEAR, sum);
                }
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < M * NEAR; ++i) sums[i] = 0;
        }
#pragma unroll
        for (int c = 0; c < NEAR; ++c) now[c] = next[c];
        strip = next_strip;
        step = next_step;
    }
}
