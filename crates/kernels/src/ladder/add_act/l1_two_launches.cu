// One launch per operation: the sum, then the GELU. The sum is written to memory and
// read again, so five tensors are moved where three are enough.
extern "C" __global__ void add(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    p.g_sum[i] = narrow(widen(p.g_x[i]) + widen(p.g_r[i]));
}

extern "C" __global__ void activate(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    p.g_y[i] = narrow(gelu(widen(p.g_sum[i])));
}
