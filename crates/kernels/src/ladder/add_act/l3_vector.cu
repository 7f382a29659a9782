// 16 bytes per thread, the widest access: a quarter (f32) or an eighth (bf16) of the
// instructions and addresses.
extern "C" __global__ void row(const __grid_constant__ Parameters p) {
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (i + V > p.count) {
        for (long long k = i; k < p.count; ++k) {
            p.g_y[k] = narrow(gelu(rounded(widen(p.g_x[k]) + widen(p.g_r[k]))));
        }
        return;
    }
    const Vector r_x = *(const Vector*)(p.g_x + i), r_r = *(const Vector*)(p.g_r + i);
    Vector r_y;
#pragma unroll
    for (int k = 0; k < V; ++k) r_y.e[k] = narrow(gelu(rounded(widen(r_x.e[k]) + widen(r_r.e[k]))));
    *(Vector*)(p.g_y + i) = r_y;
}
