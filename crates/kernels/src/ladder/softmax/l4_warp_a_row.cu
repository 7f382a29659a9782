// One warp per row: shuffles exchange values between the registers of its threads,
// without shared memory and without a barrier.
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS) row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const Element* g_x = (const Element*)(p.g_x + row * p.x_stride);
    Element* g_y = (Element*)(p.g_y + row * p.y_stride);
    float most = never(), sum = 0.0f;
    for (int c = lane; c < COLS; c += 32) most = fmaxf(most, widen(g_x[c]));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
    for (int c = lane; c < COLS; c += 32) sum += expf(widen(g_x[c]) - most);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    for (int c = lane; c < COLS; c += 32) g_y[c] = narrow(expf(widen(g_x[c]) - most) / sum);
}
