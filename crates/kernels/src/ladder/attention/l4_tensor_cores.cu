// Matmuls on the tensor cores: one instruction of a warp multiplies matrices of 16 x
// 16 and 16 x 8, which is 2,048 multiplications and additions. A warp owns 16
// queries. The accumulator layout of the scores is the operand layout of the next
// matmul, so probabilities stay in registers, rounded to bf16. A thread has elements
// of rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next one of every
// eight; four neighbouring lanes have a row. Loads of keys and values do not overlap
// with computation yet.
constexpr int TILE = 64, THREADS = 128;
constexpr int PITCH = WIDTH + 8;  // eight rows, 16 bytes of each, lie in different banks

// Rows of a tile from `first` on, 16 bytes at a time; zeros beyond `length`, which is not read.
__device__ void load_tile(Element* s_rows, const Element* g_rows, int first, int length) {
    for (int i = threadIdx.x; i < TILE * WIDTH / 8; i += THREADS) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        uint4 r_piece = make_uint4(0, 0, 0, 0);
        if (first + row < length) r_piece = *(const uint4*)(g_rows + (long long)(first + row) * WIDTH + column);
        *(uint4*)(s_rows + row * PITCH + column) = r_piece;
    }
}

// Converts scores in rows `query` and `query` + 8 to probabilities, and rescales the sums so far to the new maximum.
__device__ void soften(float (&r_s)[TILE / 8][4], float (&r_o)[WIDTH / 8][4], float (&r_most)[2], float (&r_sum)[2], int query,
                       int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = r_most[half];
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            float& score = r_s[i / 2][2 * half + i % 2];
            const bool seen = key + i / 2 * 8 + i % 2 <= query + 8 * half;
            score = seen ? score * (SCALE * LOG2E) : never();
            most = fmaxf(most, score);
        }
        most = fmaxf(most, shuffle_xor(most, 1));
        most = fmaxf(most, shuffle_xor(most, 2));
        const float factor = ex2(r_most[half] - most);
        r_most[half] = most;
        r_sum[half] *= factor;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) r_o[i / 2][2 * half + i % 2] *= factor;
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            float& score = r_s[i / 2][2 * half + i % 2];
            score = ex2(score - most);
            r_sum[half] += score;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) Element s_q[TILE * PITCH], s_k[TILE * PITCH], s_v[TILE * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = (gridDim.x - 1 - blockIdx.x) * TILE;
    const int query = first + 16 * warp + lane / 4;
    const long long start = blockIdx.y * p.length;
    load_tile(s_q, p.g_q + start * WIDTH, first, p.length);
    __syncthreads();
    u32 r_q[WIDTH / 16][4];
#pragma unroll
    for (int c = 0; c < WIDTH / 16; ++c) ldmatrix(r_q[c], s_q + (16 * warp + lane % 16) * PITCH + 16 * c + lane / 16 * 8);
    float r_o[WIDTH / 8][4] = {}, r_most[2] = {never(), never()}, r_sum[2] = {};
    for (int key = 0; key <= first; key += TILE) {
        load_tile(s_k, p.g_k + start * WIDTH, key, p.length);
        load_tile(s_v, p.g_v + start * WIDTH, key, p.length);
        __syncthreads();
        float r_s[TILE / 8][4] = {};
#pragma unroll
        for (int c = 0; c < WIDTH / 16; ++c) {
#pragma unroll
            for (int k = 0; k < TILE / 16; ++k) {
                u32 r_k[4];  // keys 16 k to 16 k + 7, then the next eight, 16 columns of each
                ldmatrix(r_k, s_k + (16 * k + lane % 8 + lane / 16 * 8) * PITCH + 16 * c + lane / 8 % 2 * 8);
                mma<STORAGE>(r_s[2 * k], r_q[c], r_k[0], r_k[1]);
                mma<STORAGE>(r_s[2 * k + 1], r_q[c], r_k[2], r_k[3]);
            }
        }
        soften(r_s, r_o, r_most, r_sum, query, key + lane % 4 * 2);
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            const float(&a)[4] = r_s[2 * k], (&b)[4] = r_s[2 * k + 1];
            const u32 r_p[4] = {narrow2<STORAGE>(a[0], a[1]), narrow2<STORAGE>(a[2], a[3]), narrow2<STORAGE>(b[0], b[1]),
                                narrow2<STORAGE>(b[2], b[3])};
#pragma unroll
            for (int c = 0; c < WIDTH / 16; ++c) {
                u32 r_v[4];  // 16 keys of columns 16 c to 16 c + 7, then of the next eight
                ldmatrix_transposed(r_v, s_v + (16 * k + lane % 16) * PITCH + 16 * c + lane / 16 * 8);
                mma<STORAGE>(r_o[2 * c], r_p, r_v[0], r_v[1]);
                mma<STORAGE>(r_o[2 * c + 1], r_p, r_v[2], r_v[3]);
            }
        }
        __syncthreads();  // before the tiles are overwritten
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = r_sum[half] + shuffle_xor(r_sum[half], 1);
        sum += shuffle_xor(sum, 2);
        const int row = query + 8 * half;
        if (row >= p.length) continue;
        Element* g_o = p.g_o + (start + row) * WIDTH + lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < WIDTH / 8; ++c) {
            *(u32*)(g_o + 8 * c) = narrow2<STORAGE>(r_o[c][2 * half] / sum, r_o[c][2 * half + 1] / sum);
        }
    }
}
