// One launch and no scores in memory: a block keeps its 64 queries and processes the
// keys tile by tile, with an online softmax: when a larger score appears, all sums so
// far, of exponentials relative to the old maximum, are rescaled to the new one. The
// division comes last. Tiles of late queries have the most keys and are scheduled
// first, so that no long tile runs alone at the end.

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention(const __grid_constant__ Parameters p) {
    extern __shared__ Tile s_tiles[];
    Tile &s_q = s_tiles[0], &s_k = s_tiles[1], &s_v = s_tiles[2], &s_p = s_tiles[3];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, first = (gridDim.x - 1 - blockIdx.x) * TILE;
    const long long start = blockIdx.y * p.length;
    float r_o[4][4] = {}, r_sum[4] = {}, r_most[4] = {never(), never(), never(), never()};
    load_tile(s_q, p.g_q + start * WIDTH, first, p.length);
    for (int key = 0; key <= first; key += TILE) {
        load_tile(s_k, p.g_k + start * WIDTH, key, p.length);
        load_tile(s_v, p.g_v + start * WIDTH, key, p.length);
        __syncthreads();
        float r_s[4][4] = {};
        multiply_rows(r_s, s_q, s_k, x, y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float most = r_most[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool seen = key + 16 * j + x <= first + 4 * y + i;
                r_s[i][j] = seen ? r_s[i][j] * (SCALE * LOG2E) : never();  // exp(s) = 2^(s log2 e)
                most = fmaxf(most, r_s[i][j]);
            }
            // Over the sixteen threads of a row. Every query sees key 0, so the maximum is finite from the first tile on.
#pragma unroll
            for (int mask = 8; mask > 0; mask /= 2) most = fmaxf(most, shuffle_xor(most, mask));
            const float factor = ex2(r_most[i] - most);
            r_most[i] = most;
            r_sum[i] *= factor;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                r_o[i][j] *= factor;
                const float probability = ex2(r_s[i][j] - most);
                r_sum[i] += probability;
                at(s_p, 4 * y + i, 16 * j + x) = probability;
            }
        }
        __syncthreads();
        multiply_columns(r_o, s_p, s_v, x, y);
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Each thread has summed only its own columns.
#pragma unroll
        for (int mask = 8; mask > 0; mask /= 2) r_sum[i] += shuffle_xor(r_sum[i], mask);
        const int row = first + 4 * y + i;
        if (row >= p.length) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) p.g_o[(start + row) * WIDTH + 4 * x + j] = narrow<STORAGE>(r_o[i][j] / r_sum[i]);
    }
}
