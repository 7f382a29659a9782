// One warp per row, 16 bytes per thread and access.
constexpr int WARPS = 8;

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
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane; c < COLS / V; c += 32) {
        const Vector r_x = g_x[c];
#pragma unroll
        for (int k = 0; k < V; ++k) sum += widen(r_x.e[k]);
    }
    const float mean = sum_of_warp(sum) / COLS;
    for (int c = lane; c < COLS / V; c += 32) {
        const Vector r_x = g_x[c];
#pragma unroll
        for (int k = 0; k < V; ++k) squares += (widen(r_x.e[k]) - mean) * (widen(r_x.e[k]) - mean);
    }
    const float rstd = rsqrtf(sum_of_warp(squares) / COLS + EPS);
    for (int c = lane; c < COLS / V; c += 32) {
        const Vector r_x = g_x[c], r_w = ((const Vector*)p.g_w)[c], r_b = ((const Vector*)p.g_b)[c];
        Vector r_y;
#pragma unroll
        for (int k = 0; k < V; ++k) r_y.e[k] = finished(widen(r_x.e[k]), mean, rstd, r_w.e[k], r_b.e[k]);
        g_y[c] = r_y;
    }
}
