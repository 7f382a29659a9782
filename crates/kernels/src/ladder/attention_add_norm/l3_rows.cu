// Sum and norm in one launch: one warp per row, held in registers. s is written
// because it is a result, but is not read again. o still passes through memory,
// because different blocks compute the heads of a row.
constexpr int HELD = (COLS + 255) / 256;  // pieces of a row per thread
struct __align__(16) Piece { Element e[8]; };

__device__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(128) add_norm(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    Piece r_s[HELD];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (32 * h + lane) * 8;
        if (column >= COLS) continue;
        const Piece r_o = *(const Piece*)(p.g_o + merged(p, row, column));
        const Piece r_r = *(const Piece*)(p.g_r + row * COLS + column);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            r_s[h].e[k] = narrow<STORAGE>(widen<STORAGE>(r_r.e[k]) + widen<STORAGE>(r_o.e[k]));
            sum += widen<STORAGE>(r_s[h].e[k]);
        }
        *(Piece*)(p.g_s + row * COLS + column) = r_s[h];
    }
    const float mean = sum_of_warp(sum) / COLS;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        if ((32 * h + lane) * 8 >= COLS) continue;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float centred = widen<STORAGE>(r_s[h].e[k]) - mean;
            squares += centred * centred;
        }
    }
    const float rstd = rsqrtf(sum_of_warp(squares) / COLS + EPS);
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (32 * h + lane) * 8;
        if (column >= COLS) continue;
        const Piece r_w = *(const Piece*)(p.g_w + column), r_b = *(const Piece*)(p.g_b + column);
        Piece r_y;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float normed = (widen<STORAGE>(r_s[h].e[k]) - mean) * rstd;
            r_y.e[k] = narrow<STORAGE>(normed * widen<STORAGE>(r_w.e[k]) + widen<STORAGE>(r_b.e[k]));
        }
        *(Piece*)(p.g_y + row * COLS + column) = r_y;
    }
}
