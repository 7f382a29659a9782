// One launch, one thread per row: only x and y are in memory. Neighbouring threads
// read addresses a whole row apart, so a warp's 32 accesses need 32 sectors of memory
// where 4 would be enough.
extern "C" __global__ void row(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    const Element* g_x = (const Element*)(p.g_x + row * p.x_stride);
    Element* g_y = (Element*)(p.g_y + row * p.y_stride);
    float most = never(), sum = 0.0f;
    for (int c = 0; c < COLS; ++c) most = fmaxf(most, widen(g_x[c]));
    for (int c = 0; c < COLS; ++c) sum += expf(widen(g_x[c]) - most);
    for (int c = 0; c < COLS; ++c) g_y[c] = narrow(expf(widen(g_x[c]) - most) / sum);
}
