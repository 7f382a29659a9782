// One launch per step of the formula: the mean of each row, its deviation, the
// normalised elements, scale and shift, the GELU. A thread processes a row or an
// element. x is read three times, and the result of each step is written to memory
// and read again.
__device__ const Element* row_of(const Parameters& p, long long row) { return (const Element*)(p.g_x + row * p.x_stride); }
__device__ float* means(const Parameters& p) { return p.g_scratch + p.rows * COLS; }
__device__ float* deviations(const Parameters& p) { return p.g_scratch + p.rows * (COLS + 1); }

extern "C" __global__ void average(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    float sum = 0.0f;
    for (int c = 0; c < COLS; ++c) sum += widen(row_of(p, row)[c]);
    means(p)[row] = sum / COLS;
}

extern "C" __global__ void deviate(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    float squares = 0.0f;
    for (int c = 0; c < COLS; ++c) {
        const float centred = widen(row_of(p, row)[c]) - means(p)[row];
        squares += centred * centred;
    }
    deviations(p)[row] = sqrtf(squares / COLS + EPS);
}

extern "C" __global__ void normalise(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / COLS;
    if (row >= p.rows) return;
    p.g_scratch[i] = (widen(row_of(p, row)[i % COLS]) - means(p)[row]) / deviations(p)[row];
}

extern "C" __global__ void scale_and_shift(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.rows * COLS) return;
    p.g_scratch[i] = rounded(p.g_scratch[i] * widen(p.g_w[i % COLS]) + widen(p.g_b[i % COLS]));
}

extern "C" __global__ void activate(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = i / COLS;
    if (row >= p.rows) return;
    ((Element*)(p.g_y + row * p.y_stride))[i % COLS] = narrow(gelu(p.g_scratch[i]));
}
