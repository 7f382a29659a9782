// Threads share operands: a block computes a tile of 64 x 64 and loads 16 columns of
// A and 16 rows of B at a time into shared memory, where each number is used 64
// times. A thread computes 4 x 4 elements: eight numbers read from shared memory
// serve sixteen multiplications. Memory is still read one element at a time.
constexpr int TILE = 64, DEPTH = 16, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) matmul(const __grid_constant__ Parameters p) {
    __shared__ float s_a[TILE][DEPTH + 1], s_b[DEPTH][TILE];  // one float more: rows of A start in different banks
    const Tile tile = tile_of_block<TILE, TILE>(p);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float r_c[4][4] = {};
    for (long long first = 0; first < p.k; first += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            s_a[i / DEPTH][i % DEPTH] = element(p.g_a, p.m, p.k, tile.row + i / DEPTH, first + i % DEPTH);
            s_b[i / TILE][i % TILE] = element(p.g_b, p.k, p.n, first + i / TILE, tile.column + i % TILE);
        }
        __syncthreads();
#pragma unroll
        for (int l = 0; l < DEPTH; ++l) {
            float r_a[4], r_b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r_a[i] = s_a[4 * y + i][l];
#pragma unroll
            for (int j = 0; j < 4; ++j) r_b[j] = s_b[l][16 * j + x];
#pragma unroll
            for (int i = 0; i < 16; ++i) r_c[i / 4][i % 4] += r_a[i / 4] * r_b[i % 4];
        }
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const long long row = tile.row + 4 * y + i / 4, column = tile.column + 16 * (i % 4) + x;
        if (row < p.m && column < p.n) p.g_c[row * p.n + column] = narrow<KIND>(r_c[i / 4][i % 4]);
    }
}
