// Fewer and wider instructions: 16 bytes per global load, and four floats per shared
// load, for which A is stored transposed. A tile is 128 x 128, and a thread computes
// 8 x 8 elements, in four squares of 4 x 4: sixteen numbers from shared memory serve
// 64 multiplications. From here on the FMA units are the bottleneck: a thread
// multiplies one pair of numbers per instruction.
constexpr int TILE = 128, DEPTH = 16, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul(const __grid_constant__ Parameters p) {
    __shared__ float4 s_a[DEPTH][TILE / 4], s_b[DEPTH][TILE / 4];
    const Tile tile = tile_of_block<TILE, TILE>(p);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int a_row = threadIdx.x / 2, a_column = threadIdx.x % 2 * 8, b_row = threadIdx.x / 16, b_column = threadIdx.x % 16 * 8;
    float r_c[8][8] = {};
    for (long long first = 0; first < p.k; first += DEPTH) {
        const Vector r_left = vector<A_ALIGNED>(p.g_a, p.m, p.k, tile.row + a_row, first + a_column);
        const Vector r_right = vector<B_ALIGNED>(p.g_b, p.k, p.n, first + b_row, tile.column + b_column);
#pragma unroll
        for (int i = 0; i < 8; ++i) ((float*)s_a[a_column + i])[a_row] = widen<KIND>(r_left.e[i]);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Element* r_four = r_right.e + i;
            s_b[b_row][(b_column + i) / 4] =
                make_float4(widen<KIND>(r_four[0]), widen<KIND>(r_four[1]), widen<KIND>(r_four[2]), widen<KIND>(r_four[3]));
        }
        __syncthreads();
#pragma unroll
        for (int l = 0; l < DEPTH; ++l) {
            const float4 r_fours[4] = {s_a[l][y], s_a[l][16 + y], s_b[l][x], s_b[l][16 + x]};
            const float* r_a = (const float*)r_fours;
            const float* r_b = r_a + 8;
#pragma unroll
            for (int i = 0; i < 64; ++i) r_c[i / 8][i % 8] += r_a[i / 8] * r_b[i % 8];
        }
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const long long row = tile.row + i / 4 * 64 + 4 * y + i % 4;
#pragma unroll
        for (int j = 0; j < 8; j += 2) store_pair(p, row, tile.column + j / 4 * 64 + 4 * x + j % 4, r_c[i][j], r_c[i][j + 1]);
    }
}
