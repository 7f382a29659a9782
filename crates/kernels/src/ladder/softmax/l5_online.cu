// 16 bytes per access, and two passes instead of three, by an online softmax: when a
// larger value appears, the sum of exponentials so far is rescaled to the new
// maximum. The same step combines the lanes of a warp.
constexpr int WARPS = 8;

struct Softmax { float most, sum; };

// Two parts of a row as one. A part without elements has the largest value -infinity and adds nothing.
__device__ Softmax joined(Softmax a, Softmax b) {
    const float most = fmaxf(a.most, b.most);
    if (most == never()) return {never(), 0.0f};
    return {most, a.sum * expf(a.most - most) + b.sum * expf(b.most - most)};
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const Vector* g_x = (const Vector*)(p.g_x + row * p.x_stride);
    Vector* g_y = (Vector*)(p.g_y + row * p.y_stride);
    Softmax all = {never(), 0.0f};
    for (int c = lane; c < COLS / V; c += 32) {
        const Vector r_x = g_x[c];
        Softmax own = {widen(r_x.e[0]), 0.0f};
#pragma unroll
        for (int k = 1; k < V; ++k) own.most = fmaxf(own.most, widen(r_x.e[k]));
#pragma unroll
        for (int k = 0; k < V; ++k) own.sum += expf(widen(r_x.e[k]) - own.most);
        all = joined(all, own);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        const float most = __shfl_xor_sync(0xffffffffu, all.most, mask), sum = __shfl_xor_sync(0xffffffffu, all.sum, mask);
        all = joined(all, {most, sum});
    }
    for (int c = lane; c < COLS / V; c += 32) {
        const Vector r_x = g_x[c];
        Vector r_y;
#pragma unroll
        for (int k = 0; k < V; ++k) r_y.e[k] = narrow(expf(widen(r_x.e[k]) - all.most) / all.sum);
        g_y[c] = r_y;
    }
}
