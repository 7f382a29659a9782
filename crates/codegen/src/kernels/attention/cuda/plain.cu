// Attention for any storage, any width, any strides, in f32 arithmetic.
//
//   o = dropout(softmax(scale q k^T + mask)) v, a block 64 queries of one head, 64 keys after another
//
// - Numbers: products and sums in f32, in an order that the sizes alone decide.
// - A thread makes 4 x 4 scores: rows 4 y to 4 y + 3, keys x, x + 16, x + 32, x + 48; of the result the same rows, and every
//   16th column. Queries and keys pass through shared memory 32 of the width at a time, values 16 keys at a time.
// - Keys that no query of the block sees are not read. Those beyond the last that is seen are zeros in shared memory.
//   Tiles of late queries, which see most, come first.

constexpr int TILE = 64;
constexpr int THREADS = 256;
constexpr int DEPTH = 32;
// A row more than the depth: eight rows, read four numbers at a time, lie in different banks.
constexpr int PADDED = DEPTH + 4;
constexpr int VALUES = 16;
// Two blocks of a multiprocessor where their registers are enough: one loads while the other computes.
constexpr int BLOCKS = WIDTH <= 64 && !DROPOUT && MASK <= CAUSAL ? 2 : 1;
constexpr int COLUMNS = (WIDTH + 15) / 16;
constexpr int WIDE = 16 * COLUMNS;
constexpr int OPERANDS = 2 * TILE * PADDED > VALUES * WIDE ? 2 * TILE * PADDED : VALUES * WIDE;

// Rows of a tile, `COUNT` columns of them from `column` on, into rows of PITCH; zeros beyond `end` and beyond the width.
template <int KIND, int ROWS, int COUNT, int PITCH>
static __device__ __forceinline__ void load_tile(float* s_to, const typename Stored<KIND>::Element* g_from, u64 stride, int first,
                                                 int end, int column) {
    for (int i = threadIdx.x; i < ROWS * COUNT; i += THREADS) {
        const int row = i / COUNT, at = i % COUNT;
        const bool in = first + row < end && column + at < WIDTH;
        s_to[row * PITCH + at] = in ? widen<KIND>(g_from[(u64)(first + row) * stride + column + at]) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_plain(const __grid_constant__ Attention p) {
    __shared__ __align__(16) float s_operands[OPERANDS];
    __shared__ __align__(16) float s_p[TILE][TILE + 4];
    float *s_q = s_operands, *s_k = s_operands + TILE * PADDED, *s_v = s_operands;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const u64 all_heads = p.batch * p.heads, of_all = blockIdx.x % all_heads;
    const u64 sequence = of_all / p.heads, head = of_all % p.heads;
    const int first = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads) * TILE;
    const int end = min(first + TILE, (int)p.queries);
    const Element* g_q = p.g_q + start(p.q, sequence, head);
    const KeyElement* g_k = p.g_k + start(p.k, sequence, head / p.group);
    const KeyElement* g_v = p.g_v + start(p.v, sequence, head / p.group);
    const long long last = last_key(p, sequence);
    const int keys = seen(p, last, end - 1);
    const u32 seed = DROPOUT ? (u32)*p.g_seed : 0;

    float r_o[4][COLUMNS] = {}, r_sum[4] = {}, r_maximum[4] = {never(), never(), never(), never()};
    for (int key = 0; key < keys; key += TILE) {
        float r_s[4][4] = {};
        for (int depth = 0; depth < WIDTH; depth += DEPTH) {
            __syncthreads();
            load_tile<STORAGE, TILE, DEPTH, PADDED>(s_q, g_q, p.q.position, first, end, depth);
            load_tile<KV_STORAGE, TILE, DEPTH, PADDED>(s_k, g_k, p.k.position, key, keys, depth);
            __syncthreads();
#pragma unroll 2
            for (int l = 0; l < DEPTH; l += 4) {
                float4 r_q[4], r_k[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) r_q[i] = *(const float4*)(s_q + (4 * y + i) * PADDED + l);
#pragma unroll
                for (int j = 0; j < 4; ++j) r_k[j] = *(const float4*)(s_k + (x + 16 * j) * PADDED + l);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        r_s[i][j] = fmaf(r_q[i].x, r_k[j].x, r_s[i][j]);
                        r_s[i][j] = fmaf(r_q[i].y, r_k[j].y, r_s[i][j]);
                        r_s[i][j] = fmaf(r_q[i].z, r_k[j].z, r_s[i][j]);
                        r_s[i][j] = fmaf(r_q[i].w, r_k[j].w, r_s[i][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int query = first + 4 * y + i, row_end = seen(p, last, query);
            const bool exists = query < (int)p.queries;
            const MaskElement* g_mask = mask_row(p, sequence, head, exists ? query : 0);
            const u64 elements = row_elements(p, sequence, head, query);
            float most = never();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = key + x + 16 * j;
                float s = r_s[i][j] * SCALE;
                if constexpr (MASK == ADDITIVE) {
                    if (at < (int)p.keys) s += widen<MASK_STORAGE>(g_mask[at]);
                }
                r_s[i][j] = at < row_end ? s : never();
                most = fmaxf(most, r_s[i][j]);
            }
#pragma unroll
            for (int mask = 1; mask < 16; mask *= 2) most = fmaxf(most, neighbour(most, mask));
            most = fmaxf(most * LOG2E, r_maximum[i]);
            const float shift = shift_of(most), factor = ex2(r_maximum[i] - shift);
            r_maximum[i] = most;
            r_sum[i] *= factor;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) r_o[i][c] *= factor;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float probability = ex2(fmaf(r_s[i][j], LOG2E, -shift));
                r_sum[i] += probability;
                if constexpr (DROPOUT) {
                    if (!keeps(elements + key + x + 16 * j, seed)) probability = 0.0f;
                }
                s_p[4 * y + i][x + 16 * j] = probability;
            }
        }
        for (int part = 0; part < TILE && key + part < keys; part += VALUES) {
            __syncthreads();
            load_tile<KV_STORAGE, VALUES, WIDE, WIDE>(s_v, g_v, p.v.position, key + part, keys, 0);
            __syncthreads();
#pragma unroll 1
            for (int l = 0; l < VALUES; l += 4) {
                float4 r_p[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) r_p[i] = *(const float4*)&s_p[4 * y + i][part + l];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const float* s_column = s_v + l * WIDE + x + 16 * c;
                    const float a = s_column[0], b = s_column[WIDE], d = s_column[2 * WIDE], e = s_column[3 * WIDE];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float sum = fmaf(r_p[i].x, a, r_o[i][c]);
                        sum = fmaf(r_p[i].y, b, sum);
                        sum = fmaf(r_p[i].z, d, sum);
                        r_o[i][c] = fmaf(r_p[i].w, e, sum);
                    }
                }
            }
        }
    }
    Element* g_o = p.g_o + start(p.o, sequence, head);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = first + 4 * y + i;
        float sum = r_sum[i];
#pragma unroll
        for (int mask = 1; mask < 16; mask *= 2) sum += neighbour(sum, mask);
        const float factor = ending(sum);
        if (query >= end) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + 16 * c;
            // A row without a key is zeros whatever was multiplied by 0.
            const float value = sum == 0.0f ? 0.0f : r_o[i][c] * factor;
            if (column < WIDTH) g_o[(u64)query * p.o.position + column] = narrow<STORAGE>(value);
        }
    }
}
