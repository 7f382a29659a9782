// Two more launches: the sum, one thread per element, and the norm, one thread per row. o and s are written by one launch and read by
// the next; the norm reads s three times, neighbouring threads at addresses a row apart.

extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ Parameters p) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x, row = i / COLS;
    if (row >= p.rows) return;
    const float o = widen<STORAGE>(p.g_o[merged(p, row, i % COLS)]);
    p.g_s[i] = narrow<STORAGE>(widen<STORAGE>(p.g_r[i]) + o);
}

extern "C" __global__ void __launch_bounds__(256) layer_norm(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * 256 + threadIdx.x;
    if (row >= p.rows) return;
    const Element* g_s = p.g_s + row * COLS;
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < COLS; ++c) sum += widen<STORAGE>(g_s[c]);
    const float mean = sum / COLS;
    for (int c = 0; c < COLS; ++c) {
        const float centred = widen<STORAGE>(g_s[c]) - mean;
        squares += centred * centred;
    }
    const float rstd = rsqrtf(squares / COLS + EPS);
    for (int c = 0; c < COLS; ++c) {
        const float normed = (widen<STORAGE>(g_s[c]) - mean) * rstd;
        p.g_y[row * COLS + c] = narrow<STORAGE>(normed * widen<STORAGE>(p.g_w[c]) + widen<STORAGE>(p.g_b[c]));
    }
}
