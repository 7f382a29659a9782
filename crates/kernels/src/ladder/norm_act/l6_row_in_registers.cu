// One warp per row, held in registers: the row is read once, with all loads in
// flight, and later passes do not access memory.
constexpr int WARPS = 4;
constexpr int CHUNKS = (COLS / V + 31) / 32;

__device__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const Vector* g_x = (const Vector*)(p.g_x + row * p.x_stride);
    Vector* g_y = (Vector*)(p.g_y + row * p.y_stride);
    Vector r_row[CHUNKS];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * 32 + lane < COLS / V) r_row[c] = g_x[c * 32 + lane];
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * 32 + lane >= COLS / V) continue;
#pragma unroll
        for (int k = 0; k < V; ++k) sum += widen(r_row[c].e[k]);
    }
    const float mean = sum_of_warp(sum) / COLS;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * 32 + lane >= COLS / V) continue;
#pragma unroll
        for (int k = 0; k < V; ++k) squares += (widen(r_row[c].e[k]) - mean) * (widen(r_row[c].e[k]) - mean);
    }
    const float rstd = rsqrtf(sum_of_warp(squares) / COLS + EPS);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = c * 32 + lane;
        if (at >= COLS / V) continue;
        const Vector r_w = ((const Vector*)p.g_w)[at], r_b = ((const Vector*)p.g_b)[at];
        Vector r_y;
#pragma unroll
        for (int k = 0; k < V; ++k) r_y.e[k] = finished(widen(r_row[c].e[k]), mean, rstd, r_w.e[k], r_b.e[k]);
        g_y[at] = r_y;
    }
}
