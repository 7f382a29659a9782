// The same two launches, but neighbouring threads read neighbouring bytes: 16 bytes per access in the sum, one warp per row in the norm.
struct __align__(16) Piece { Element e[8]; };

extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ Parameters p) {
    const long long i = ((long long)blockIdx.x * 256 + threadIdx.x) * 8, row = i / COLS;
    if (row >= p.rows) return;
    const Piece r_o = *(const Piece*)(p.g_o + merged(p, row, i % COLS)), r_r = *(const Piece*)(p.g_r + i);
    Piece r_s;
#pragma unroll
    for (int k = 0; k < 8; ++k) r_s.e[k] = narrow<STORAGE>(widen<STORAGE>(r_r.e[k]) + widen<STORAGE>(r_o.e[k]));
    *(Piece*)(p.g_s + i) = r_s;
}

__device__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(256) layer_norm(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const Element* g_s = p.g_s + row * COLS;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane; c < COLS; c += 32) sum += widen<STORAGE>(g_s[c]);
    const float mean = sum_of_warp(sum) / COLS;
    for (int c = lane; c < COLS; c += 32) {
        const float centred = widen<STORAGE>(g_s[c]) - mean;
        squares += centred * centred;
    }
    const float rstd = rsqrtf(sum_of_warp(squares) / COLS + EPS);
    for (int c = lane; c < COLS; c += 32) {
        const float normed = (widen<STORAGE>(g_s[c]) - mean) * rstd;
        p.g_y[row * COLS + c] = narrow<STORAGE>(normed * widen<STORAGE>(p.g_w[c]) + widen<STORAGE>(p.g_b[c]));
    }
}
