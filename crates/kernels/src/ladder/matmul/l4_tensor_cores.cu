// Matmuls on the tensor cores: one instruction of a warp multiplies matrices of 16 x
// 16 and 16 x 8, which is 2,048 multiplications and additions. Operands stay 16-bit
// in shared memory, and `ldmatrix` loads them into registers in the layout that the
// instruction needs. Eight warps compute a tile of 128 x 128, 64 x 32 each. A thread
// has elements (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1) of every 16 x 8,
// where g = lane / 4 and t = lane % 4. Loads of operands do not overlap with
// multiplications yet.
constexpr int TILE = 128, DEPTH = 32, THREADS = 256;
constexpr int A_PITCH = DEPTH + 8, B_PITCH = TILE + 8;  // eight rows, 16 bytes of each, lie in different banks

extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul(const __grid_constant__ Parameters p) {
    __shared__ Vector s_a[TILE * A_PITCH / 8], s_b[DEPTH * B_PITCH / 8];
    const Tile tile = tile_of_block<TILE, TILE>(p);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp % 2 * 64, column = warp / 2 * 32;
    float r_c[4][4][4] = {};  // of 16 rows, of 8 columns, elements
    for (long long first = 0; first < p.k; first += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += THREADS) {
            const int a_row = i / (DEPTH / 8), a_piece = i % (DEPTH / 8), b_row = i / (TILE / 8), b_piece = i % (TILE / 8);
            s_a[a_row * A_PITCH / 8 + a_piece] = vector<A_ALIGNED>(p.g_a, p.m, p.k, tile.row + a_row, first + 8 * a_piece);
            s_b[b_row * B_PITCH / 8 + b_piece] = vector<B_ALIGNED>(p.g_b, p.k, p.n, first + b_row, tile.column + 8 * b_piece);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 r_a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) ldmatrix(r_a[i], (Element*)s_a + (row + 16 * i + lane % 16) * A_PITCH + k + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                u32 r_b[4];  // 16 rows of B, of eight columns and of the next eight
                ldmatrix_transposed(r_b, (Element*)s_b + (k + lane % 16) * B_PITCH + column + 8 * j + lane / 16 * 8);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    mma<KIND>(r_c[i][j], r_a[i], r_b[0], r_b[1]);
                    mma<KIND>(r_c[i][j + 1], r_a[i], r_b[2], r_b[3]);
                }
            }
        }
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const long long own_row = tile.row + row + 16 * i + lane / 4, own_column = tile.column + column + 8 * j + lane % 4 * 2;
            store_pair(p, own_row, own_column, r_c[i][j][0], r_c[i][j][1]);
            store_pair(p, own_row + 8, own_column, r_c[i][j][2], r_c[i][j][3]);
        }
    }
}
