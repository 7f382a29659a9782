// One launch per step of the formula: the largest value per row, exponentials, their
// sum per row, quotients. A thread processes a row or an element. Every element is
// moved four times more than necessary: x is read twice, and the exponentials are
// written once and read twice.
__device__ const Element* row_of(const Parameters& p, long long row) { return (const Element*)(p.g_x + row * p.x_stride); }
__device__ float* largest(const Parameters& p) { return p.g_scratch + p.rows * COLS; }
__device__ float* sums(const Parameters& p) { return p.g_scratch + p.rows * (COLS + 1); }

extern "C" __global__ void find_largest(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    float most = never();
    for (int c = 0; c < COLS; ++c) most = fmaxf(most, widen(row_of(p, row)[c]));
    largest(p)[row] = most;
}

extern "C" __global__ void exponentials(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / COLS;
    if (row >= p.rows) return;
    p.g_scratch[i] = expf(widen(row_of(p, row)[i % COLS]) - largest(p)[row]);
}

extern "C" __global__ void add_up(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    float sum = 0.0f;
    for (int c = 0; c < COLS; ++c) sum += p.g_scratch[row * COLS + c];
    sums(p)[row] = sum;
}

extern "C" __global__ void divide(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / COLS;
    if (row >= p.rows) return;
    ((Element*)(p.g_y + row * p.y_stride))[i % COLS] = narrow(p.g_scratch[i] / sums(p)[row]);
}
