// One block per row: neighbouring threads read neighbouring columns. Sums are reduced
// by a tree in shared memory, in eight steps with a barrier after each. The row is
// read three times, the second and third time from a cache.
constexpr int THREADS = 256;

__device__ float sum_of_block(float x, float* s_sums) {
    s_sums[threadIdx.x] = x;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) s_sums[threadIdx.x] += s_sums[threadIdx.x + step];
        __syncthreads();
    }
    const float sum = s_sums[0];
    __syncthreads();
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) row(const __grid_constant__ Parameters p) {
    __shared__ float s_sums[THREADS];
    const long long row = blockIdx.x;
    const Element* g_x = (const Element*)(p.g_x + row * p.x_stride);
    Element* g_y = (Element*)(p.g_y + row * p.y_stride);
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x; c < COLS; c += THREADS) sum += widen(g_x[c]);
    const float mean = sum_of_block(sum, s_sums) / COLS;
    for (int c = threadIdx.x; c < COLS; c += THREADS) {
        const float centred = widen(g_x[c]) - mean;
        squares += centred * centred;
    }
    const float rstd = rsqrtf(sum_of_block(squares, s_sums) / COLS + EPS);
    for (int c = threadIdx.x; c < COLS; c += THREADS) {
        g_y[c] = finished(widen(g_x[c]), mean, rstd, p.g_w[c], p.g_b[c]);
    }
}
