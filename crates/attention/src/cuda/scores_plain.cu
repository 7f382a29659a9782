// Probabilities of attention, stored, for any storage, any width, any strides, in f32 arithmetic.
//
//   o = softmax(scale q k^T + mask), a block 64 queries of one head, 64 keys after another, twice
//
// - Numbers: products and sums in f32, in an order that the sizes alone decide.
// - The first time for the sum of each row. Where the result is f32 it holds the scores meanwhile, and every thread makes
//   probabilities of what it stored itself: two more trips to memory cost less than a second product without matrix units. Scores
//   are computed again for narrower storage, where they would be rounded.
// - Keys that no query of the block sees are not read, and their probabilities are zeros. Tiles of late queries, which see most,
//   come first.

constexpr bool HOLDS_SCORES = STORAGE == 0;
// Two blocks of a multiprocessor, but where a product is so short that it is unrolled whole beside a mask, which takes registers.
constexpr int BLOCKS = MASK <= CAUSAL || WIDTH > DEPTH ? 2 : 1;

// What a thread makes, and where it goes.
struct Place {
    u64 sequence, head;
    long long last;
    int row, end;   // rows of this thread from `row` on, four at most; none from `end` on
    Element* g_row;  // the first of them
};

// What is stored for good goes past what else the cache holds; scores are read again.
template <bool LAST>
static __device__ __forceinline__ void store(const Attention& p, const Place& at, int i, int key, float value) {
    if (at.row + i < at.end && key < (int)p.keys) {
        Element* g_to = at.g_row + i * p.o.position + key;
        if constexpr (LAST) {
            __stcs(g_to, narrow<STORAGE>(value));
        } else {
            *g_to = narrow<STORAGE>(value);
        }
    }
}

// Scores of 4 x 4 pairs: columns from `key` on, sixteen apart.
static __device__ __forceinline__ void score(float (&r_s)[4][4], Memory& s, const Attention& p, const Place& at,
                                             const Tile<STORAGE>& queries, const Tile<KV_STORAGE>& keys, int key) {
#pragma unroll
    for (int i = 0; i < 16; ++i) r_s[i / 4][i % 4] = 0.0f;
    multiply_tiles(r_s, s, queries, keys);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float& score = r_s[i][j];
            score = masked_score<true, true>(p, at.sequence, at.head, at.last, score, at.row + i, key + 16 * j);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_scores_plain(const __grid_constant__ Attention p) {
    __shared__ __align__(16) Memory s;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const u64 all_heads = p.batch * p.heads, of_all = blockIdx.x % all_heads;
    const int first = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads) * TILE;
    Place at;
    at.sequence = of_all / p.heads;
    at.head = of_all % p.heads;
    at.last = last_key(p, at.sequence);
    at.row = first + 4 * y;
    at.end = min(first + TILE, (int)p.queries);
    at.g_row = p.g_o + start(p.o, at.sequence, at.head) + (u64)at.row * p.o.position;
    const int keys = seen(p, at.last, at.end - 1);
    const Tile<STORAGE> queries = {p.g_q + start(p.q, at.sequence, at.head), p.q.position, first, at.end};
    Tile<KV_STORAGE> facing = {p.g_k + start(p.k, at.sequence, at.head / p.group), p.k.position, 0, keys};

    float r_s[4][4];
    RowSum r_sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) clear(r_sums[i]);
    for (int key = 0; key < keys; key += TILE) {
        facing.first = key;
        score(r_s, s, p, at, queries, facing, key + x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            raise(r_sums[i], power_of(fmaxf(fmaxf(r_s[i][0], r_s[i][1]), fmaxf(r_s[i][2], r_s[i][3])), LOG2E));
            const float shift = level_of(r_sums[i].largest);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float score = is_deep(r_sums[i].largest) ? levelled(r_s[i][j], r_sums[i].largest) : r_s[i][j];
                r_sums[i].sum += ex2(fmaf(score, LOG2E, -shift));
                if constexpr (HOLDS_SCORES) store<false>(p, at, i, key + x + 16 * j, r_s[i][j]);
            }
        }
    }
    Ending r_ends[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r_ends[i] = finish<16>(r_sums[i]);

    for (int key = 0; key < (int)p.keys; key += TILE) {
        if (key >= keys) {
#pragma unroll
            for (int i = 0; i < 16; ++i) r_s[i / 4][i % 4] = never();
        } else if constexpr (HOLDS_SCORES) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int column = key + x + 16 * (i % 4);
                const bool exists = at.row + i / 4 < at.end && column < (int)p.keys;
                r_s[i / 4][i % 4] = exists ? at.g_row[i / 4 * p.o.position + column] : never();
            }
        } else {
            facing.first = key;
            score(r_s, s, p, at, queries, facing, key + x);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const Ending& row = r_ends[i / 4];
            const float score = is_deep(row.shift) ? levelled(r_s[i / 4][i % 4], row.shift) : r_s[i / 4][i % 4];
            store<true>(p, at, i / 4, key + x + 16 * (i % 4), probability(score, LOG2E, row));
        }
    }
}
