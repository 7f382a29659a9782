// One warp per row, held in registers: the row is read once, and each exponential is
// computed once.
constexpr int WARPS = 4;
constexpr int CHUNKS = (COLS / V + 31) / 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS) row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const Vector* g_x = (const Vector*)(p.g_x + row * p.x_stride);
    Vector* g_y = (Vector*)(p.g_y + row * p.y_stride);
    Vector r_row[CHUNKS];
    float r_e[CHUNKS][V], most = never(), sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * 32 + lane < COLS / V) r_row[c] = g_x[c * 32 + lane];
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const bool in = c * 32 + lane < COLS / V;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            r_e[c][k] = in ? widen(r_row[c].e[k]) : never();
            most = fmaxf(most, r_e[c][k]);
        }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            r_e[c][k] = expf(r_e[c][k] - most);
            sum += r_e[c][k];
        }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * 32 + lane >= COLS / V) continue;
        Vector r_y;
#pragma unroll
        for (int k = 0; k < V; ++k) r_y.e[k] = narrow(r_e[c][k] / sum);
        g_y[c * 32 + lane] = r_y;
    }
}
