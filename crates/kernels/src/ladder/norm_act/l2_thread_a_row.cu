// One thread per row: the loop that one would write for a CPU. Neighbouring threads
// read addresses a whole row apart, so each sector is fetched for one element, and is
// often evicted before its other elements are read.
extern "C" __global__ void row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    const Element* g_x = (const Element*)(p.g_x + row * p.x_stride);
    Element* g_y = (Element*)(p.g_y + row * p.y_stride);
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < COLS; ++c) sum += widen(g_x[c]);
    const float mean = sum / COLS;
    for (int c = 0; c < COLS; ++c) {
        const float centred = widen(g_x[c]) - mean;
        squares += centred * centred;
    }
    const float rstd = rsqrtf(squares / COLS + EPS);
    for (int c = 0; c < COLS; ++c) g_y[c] = finished(widen(g_x[c]), mean, rstd, p.g_w[c], p.g_b[c]);
}
