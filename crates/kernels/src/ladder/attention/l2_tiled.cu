// The same three launches with shared operands: a block loads tiles of 64 rows into
// shared memory, where each number is used 64 times. One warp per row of the softmax,
// with coalesced accesses. The scores are still in memory.

extern "C" __global__ void __launch_bounds__(THREADS, 2) scores(const __grid_constant__ Parameters p) {
    __shared__ Tile s_q, s_k;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, first = blockIdx.y * TILE, key = blockIdx.x * TILE;
    if (key > first) return;  // no query of the tile sees a key of the tile
    const long long start = blockIdx.z * p.length;
    load_tile(s_q, p.g_q + start * WIDTH, first, p.length);
    load_tile(s_k, p.g_k + start * WIDTH, key, p.length);
    __syncthreads();
    float r_s[4][4] = {};
    multiply_rows(r_s, s_q, s_k, x, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = first + 4 * y + i, column = key + 16 * j + x;
            if (row < p.length && column <= row) p.g_scores[(start + row) * p.length + column] = r_s[i][j] * SCALE;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ Parameters p) {
    const long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.heads * p.length) return;
    const int seen = row % p.length + 1;
    float* g_row = p.g_scores + row * p.length;
    float most = never(), sum = 0.0f;
    for (int j = lane; j < seen; j += 32) most = fmaxf(most, g_row[j]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, shuffle_xor(most, mask));
    for (int j = lane; j < seen; j += 32) sum += expf(g_row[j] - most);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    for (int j = lane; j < seen; j += 32) g_row[j] = expf(g_row[j] - most) / sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) values(const __grid_constant__ Parameters p) {
    __shared__ Tile s_p, s_v;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, first = blockIdx.x * TILE;
    const long long start = blockIdx.y * p.length;
    float r_o[4][4] = {};
    for (int key = 0; key <= first; key += TILE) {
        for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
            const int row = first + i / TILE, column = key + i % TILE;
            const bool seen = row < p.length && column <= row;
            at(s_p, i / TILE, i % TILE) = seen ? p.g_scores[(start + row) * p.length + column] : 0.0f;
        }
        load_tile(s_v, p.g_v + start * WIDTH, key, p.length);
        __syncthreads();
        multiply_columns(r_o, s_p, s_v, x, y);
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        if (row >= p.length) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) p.g_o[(start + row) * WIDTH + 4 * x + j] = narrow<STORAGE>(r_o[i][j]);
    }
}
