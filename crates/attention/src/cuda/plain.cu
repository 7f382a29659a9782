// Attention for any storage, any width, any strides, in f32 arithmetic.
//
//   o = dropout(softmax(scale q k^T + mask)) v, a block 64 queries of one head, 64 keys after another
//
// - Numbers: products and sums in f32, in an order that the sizes alone decide.
// - Keys that no query of the block sees are not read. Those beyond the last that is seen are zeros in shared memory.
//   Tiles of late queries, which see most, come first.
// - Takes, of NVRTC 13.4 for sm_90a, causal heads of 64 in bf16: 128 registers, 35,840 bytes of shared memory, 16 of 64 warps. No spills.

// Two blocks of a multiprocessor where their registers are enough: one loads while the other computes.
constexpr int BLOCKS = WIDTH <= 64 && !DROPOUT && MASK <= CAUSAL ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_plain(const __grid_constant__ Parameter p) {
    __shared__ __align__(16) Memory s;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const u64 all_heads = p.batch * p.heads, of_all = blockIdx.x % all_heads;
    const u64 sequence = of_all / p.heads, head = of_all % p.heads;
    const int first = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads) * TILE;
    const int end = min(first + TILE, (int)p.queries);
    const Tile<STORAGE> queries = {p.g_q + start(p.q, sequence, head), p.q.position, first, end};
    const KeyElement* g_k = p.g_k + start(p.k, sequence, head / p.group);
    const KeyElement* g_v = p.g_v + start(p.v, sequence, head / p.group);
    const long long last = last_key(p, sequence);
    const int keys = seen(p, last, end - 1);
    const u32 seed = DROPOUT ? (u32)*p.g_seed : 0;

    float r_o[4][COLUMNS] = {}, r_sum[4] = {}, r_maximum[4] = {never(), never(), never(), never()};
    for (int key = 0; key < keys; key += TILE) {
        float r_s[4][4] = {};
        multiply_tiles(r_s, s, queries, Tile<KV_STORAGE>{g_k, p.k.position, key, keys});
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
                float score = r_s[i][j] * SCALE;
                if constexpr (MASK == ADDITIVE) {
                    if (at < (int)p.keys) score += widen<MASK_STORAGE>(g_mask[at]);
                }
                r_s[i][j] = at < row_end ? score : never();
                most = fmaxf(most, r_s[i][j]);
            }
#pragma unroll
            for (int mask = 1; mask < 16; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
            most = fmaxf(power_of(most, LOG2E), r_maximum[i]);
            if (is_deep(most)) {
#pragma unroll
                for (int j = 0; j < 4; ++j) r_s[i][j] = levelled(r_s[i][j], most);
            }
            const float shift = level_of(most), factor = fading(r_maximum[i], most);
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
                s.weights[4 * y + i][x + 16 * j] = probability;
            }
        }
        add_weighted(r_o, s, Tile<KV_STORAGE>{g_v, p.v.position, key, keys});
    }
    Element* g_o = p.g_o + start(p.o, sequence, head);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int query = first + 4 * y + i;
        float sum = r_sum[i];
#pragma unroll
        for (int mask = 1; mask < 16; mask *= 2) sum += shuffle_xor(sum, mask);
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
    follow(p, sequence, head, first, end, &s);
}
