// A thread per element. Neighbouring threads take neighbouring elements, so memory is used in whole lines; but a thread asks for
// 4 or 2 bytes at a time, and pays an address, a bound and an instruction for each.
extern "C" __global__ void row(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    const float sum = rounded(widen(p.g_x[i]) + widen(p.g_r[i]));
    p.g_y[i] = narrow(gelu(sum));
}
