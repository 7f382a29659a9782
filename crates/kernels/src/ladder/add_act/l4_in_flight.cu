// Two vectors per thread, with all loads before any arithmetic: twice as many bytes
// are in flight per thread, so fewer threads saturate memory.
constexpr int N = 2;

extern "C" __global__ void row(const __grid_constant__ Parameters p) {
    const long long first = ((long long)blockIdx.x * blockDim.x * N + threadIdx.x) * V;
    const long long step = (long long)blockDim.x * V;
    Vector r_x[N], r_r[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const long long i = first + n * step;
        if (i + V > p.count) continue;
        r_x[n] = *(const Vector*)(p.g_x + i);
        r_r[n] = *(const Vector*)(p.g_r + i);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const long long i = first + n * step;
        if (i + V > p.count) {
            for (long long k = i; k < p.count; ++k) {
                p.g_y[k] = narrow(gelu(rounded(widen(p.g_x[k]) + widen(p.g_r[k]))));
            }
            continue;
        }
        Vector r_y;
#pragma unroll
        for (int k = 0; k < V; ++k) r_y.e[k] = narrow(gelu(rounded(widen(r_x[n].e[k]) + widen(r_r[n].e[k]))));
        *(Vector*)(p.g_y + i) = r_y;
    }
}
