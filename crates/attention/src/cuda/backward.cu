// The gradient of attention on the matrix units, for 16-bit storage, by computing scores again.
//
// - Numbers: products and sums in f32. Probabilities and slopes of scores are rounded to the storage type for the products
//   that they are the left operand of; nothing else is rounded before the result.
// - `backward_queries`: a block a tile of queries, all keys twice: statistics of its rows, which it leaves for the other
//   kernel, then dq. `backward_keys`: a block a tile of keys, all queries that see it: dk and dv. There keys are the rows of
//   scores, so that in both kernels what is weighted with is the left operand of the next product as it lies.
// - What a block does not own comes by asynchronous copies, the next tile while this one is worked on. Tiles that are not
//   seen are not read, and only those that are not seen whole are masked. Blocks with most to do come first.
// - Wide heads: a block makes a part of the columns of dk and dv, and makes the scores again for each.
// - Needs sm_80, WIDTH a multiple of 16, rows that start at multiples of 16 bytes.
// - Takes, of NVRTC 13.4 for sm_90a, causal: heads of 64 with two sixteens of rows a warp 255 and 229 registers, 73,728 and 74,752 bytes of shared
//   memory, 8 of 64 warps; with one 200 and 166, 55,296 and 56,320, 8 and 12 warps; heads of 128 241 and 239, 69,632 and 70,144, 8. No spills.
//
// Constants that stand before this file: of `backward_queries` Q_WARPS, Q_ATOMS (sixteens of queries of a warp), Q_KEYS (of a
// tile), Q_INNER (of them at a time), Q_BLOCKS (of a multiprocessor, at least), Q_HELD (whether queries stay in registers); of
// `backward_keys` K_WARPS, K_ATOMS (sixteens of keys of a warp), K_QUERIES (of a tile), K_INNER, K_BLOCKS, K_HELD, PARTS.

constexpr int Q_THREADS = 32 * Q_WARPS;
constexpr int Q_ROWS = 16 * Q_ATOMS * Q_WARPS;
constexpr int Q_STAGE = 2 * Q_KEYS * ROW;
constexpr int K_THREADS = 32 * K_WARPS;
constexpr int K_ROWS = 16 * K_ATOMS * K_WARPS;
constexpr int K_STAGE = 2 * K_QUERIES * ROW;
constexpr int COLUMNS = WIDTH / PARTS;

static_assert(K_INNER <= 64, "a bit each of four words");
static_assert(Q_KEYS % Q_INNER == 0 && K_QUERIES % K_INNER == 0 && COLUMNS % 16 == 0 && WIDTH % PARTS == 0, "whole tiles and parts");

// What a warp has of a tile: scores, and slopes of probabilities where those are kept.
typedef float QueryTile[Q_ATOMS][Q_INNER / 8][4];
typedef float KeyTile[K_ATOMS][K_INNER / 8][4];

struct Queries {
    u32 q[STEPS][Q_ATOMS][4], slope[STEPS][Q_ATOMS][4];
    const Element *s_q, *s_slope;
};

template <bool HIDES>
static __device__ __forceinline__ void scores_of_queries(const Attention& p, const Place& at, const Queries& own, QueryTile& r_s,
                                                         QueryTile& r_slope, const Element* s_k, const Element* s_v, int key) {
    multiply_rows<Q_HELD>(r_s, own.q, own.s_q, s_k, at.lane);
    multiply_rows<Q_HELD>(r_slope, own.slope, own.s_slope, s_v, at.lane);
    if constexpr (HIDES || SCALED) mask_scores<HIDES>(p, at, r_s, key);
    if constexpr (DROPOUT) {
#pragma unroll
        for (int row = 0; row < 2 * Q_ATOMS; ++row) {
            const u64 elements = row_elements(p, at.sequence, at.head, at.query + row * 8) + key + (at.lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < Q_INNER / 8; ++i) {
                float(&tile)[4] = r_slope[row / 2][i];
                drop2(tile[row % 2 * 2], tile[row % 2 * 2 + 1], elements + 8 * i, at.seed);
            }
        }
    }
}

template <bool HIDES>
static __device__ __forceinline__ void count(const Attention& p, const Place& at, const Queries& own, Statistics (&r)[2 * Q_ATOMS],
                                             const Element* s_k, const Element* s_v, int key) {
    QueryTile r_s = {}, r_slope = {};
    scores_of_queries<HIDES>(p, at, own, r_s, r_slope, s_k, s_v, key);
#pragma unroll
    for (int row = 0; row < 2 * Q_ATOMS; ++row) {
        const int first = row % 2 * 2;
        float most = never();
#pragma unroll
        for (int i = 0; i < Q_INNER / 8; ++i) {
            most = fmaxf(most, fmaxf(r_s[row / 2][i][first], r_s[row / 2][i][first + 1]));
        }
        raise(r[row], power_of(most, FACTOR));
        const float shift = level_of(r[row].maximum);
        if (is_deep(r[row].maximum)) level_row(r_s[row / 2], row % 2, r[row].maximum);
#pragma unroll
        for (int i = 0; i < Q_INNER / 8; ++i) {
#pragma unroll
            for (int e = first; e < first + 2; ++e) {
                const float power = ex2(fmaf(r_s[row / 2][i][e], FACTOR, -shift));
                r[row].sum += power;
                r[row].slope = fmaf(power, r_slope[row / 2][i][e], r[row].slope);
            }
        }
    }
}

// Where 1 over the sum of each row of a head stands.
static __device__ __forceinline__ float* factors_of(const Backward& p, const Place& at) {
    const u64 heads = p.of.heads, queries = p.of.queries;
    return (float*)(p.g_rows + p.of.batch * heads * queries) + (at.sequence * heads + at.head) * queries;
}

// The probability of a score in a row whose maximum stands in the place of its logsumexp.
static __device__ __forceinline__ float far_probability(float score, float maximum, float factor) {
    return ex2(fmaf(is_deep(maximum) ? levelled(score, maximum) : score, FACTOR, -level_of(maximum))) * factor;
}

template <bool HIDES>
static __device__ __forceinline__ void add_dq(const Backward& p, const Place& at, const Queries& own, float (&r_dq)[Q_ATOMS][WIDTH / 8][4],
                                              const float2 (&r_rows)[2 * Q_ATOMS], const Element* s_k, const Element* s_v,
                                              int key) {
    QueryTile r_s = {}, r_slope = {};
    scores_of_queries<HIDES>(p.of, at, own, r_s, r_slope, s_k, s_v, key);
    if constexpr (MASK == ADDITIVE) {
#pragma unroll
        for (int row = 0; row < 2 * Q_ATOMS; ++row) {
            const int query = at.query + row * 8;
            if (!is_far(r_rows[row].x) || query >= (int)p.of.queries) continue;
            const float factor = factors_of(p, at)[query];
#pragma unroll
            for (int i = 0; i < Q_INNER / 8; ++i) {
#pragma unroll
                for (int e = row % 2 * 2; e < row % 2 * 2 + 2; ++e) {
                    r_s[row / 2][i][e] = far_probability(r_s[row / 2][i][e], r_rows[row].x, factor);
                }
            }
        }
    }
#pragma unroll
    for (int atom = 0; atom < Q_ATOMS; ++atom) {
#pragma unroll
        for (int i = 0; i < Q_INNER / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = 2 * atom + e / 2;
                const float s = r_s[atom][i][e], probability = is_far(r_rows[row].x) ? s : ex2(fmaf(s, FACTOR, -r_rows[row].x));
                r_s[atom][i][e] = slope_of(probability, r_slope[atom][i][e], r_rows[row].y);
            }
        }
    }
    add_weighted(r_dq, r_s, s_k, at.lane);
}

// Keys and values that a block goes over: `end` of them, `own` of which its warp works on, in two stages of shared memory.
struct Walk {
    Element* s_stages;
    const Element *g_k, *g_v;
    u64 k_stride, v_stride;
    int end, own, stage;
};

// All tiles, the first of which is there; the last brings the first again if another pass follows.
template <bool LAST, typename Work> static __device__ __forceinline__ void each_tile(Walk& walk, const Work& work) {
#pragma unroll 1
    for (int tile = 0; tile < walk.end; tile += Q_KEYS) {
        const int next = tile + Q_KEYS < walk.end ? tile + Q_KEYS : 0;
        if (next > 0 || !LAST) {
            Element* s_next = walk.s_stages + (walk.stage ^ 1) * Q_STAGE;
            load_rows<Q_KEYS, Q_THREADS>(s_next, walk.g_k, walk.k_stride, next, walk.end);
            load_rows<Q_KEYS, Q_THREADS>(s_next + Q_KEYS * ROW, walk.g_v, walk.v_stride, next, walk.end);
        }
#pragma unroll 1
        for (int part = 0; part < Q_KEYS && tile + part < walk.own; part += Q_INNER) {
            const Element* s_k = walk.s_stages + walk.stage * Q_STAGE + part * ROW;
            work(s_k, s_k + Q_KEYS * ROW, tile + part);
        }
        await_all_copies();
        __syncthreads();
        walk.stage ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(Q_THREADS, Q_BLOCKS) backward_queries(const __grid_constant__ Backward p) {
    extern __shared__ uint4 s_memory[];
    const Attention& of = p.of;
    Element *s_stages = (Element*)s_memory, *s_q = s_stages + 2 * Q_STAGE, *s_slope = s_q + Q_ROWS * ROW;
    const u64 all_heads = of.batch * of.heads, of_all = blockIdx.x % all_heads;
    const int tile = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads);
    const int lane = threadIdx.x & 31, first = tile * Q_ROWS, end = min(first + Q_ROWS, (int)of.queries);
    const int warp_row = (int)threadIdx.x / 32 * 16 * Q_ATOMS, warp_first = first + warp_row;
    Place at;
    at.sequence = of_all / of.heads;
    at.head = of_all % of.heads;
    at.query = warp_first + (lane >> 2);
    at.lane = lane;
    at.last = last_key(of, at.sequence);
    at.seed = DROPOUT ? (u32)*of.g_seed : 0;
    const Element* g_k = of.g_k + start(of.k, at.sequence, at.head);
    const Element* g_v = of.g_v + start(of.v, at.sequence, at.head);
    // Keys that the block works on, that the warp works on, and that all queries of the warp see.
    const int block_end = seen(of, at.last, end - 1), warp_whole = seen(of, at.last, warp_first);
    const int warp_end = warp_first < end ? seen(of, at.last, min(warp_first + 16 * Q_ATOMS, end) - 1) : 0;

    load_rows<Q_ROWS, Q_THREADS>(s_q, of.g_q + start(of.q, at.sequence, at.head), of.q.position, first, end);
    load_rows<Q_ROWS, Q_THREADS>(s_slope, of.g_o + start(of.o, at.sequence, at.head), of.o.position, first, end);
    if (block_end > 0) {
        load_rows<Q_KEYS, Q_THREADS>(s_stages, g_k, of.k.position, 0, block_end);
        load_rows<Q_KEYS, Q_THREADS>(s_stages + Q_KEYS * ROW, g_v, of.v.position, 0, block_end);
    }
    await_all_copies();
    __syncthreads();
    Queries own;
    own.s_q = s_q + warp_row * ROW;
    own.s_slope = s_slope + warp_row * ROW;
    if constexpr (Q_HELD) {
        hold_left(own.q, own.s_q, lane);
        hold_left(own.slope, own.s_slope, lane);
    }
    Walk walk = {s_stages, g_k, g_v, of.k.position, of.v.position, block_end, warp_end, 0};

    Statistics r[2 * Q_ATOMS];
#pragma unroll
    for (int row = 0; row < 2 * Q_ATOMS; ++row) clear(r[row]);
    each_tile<false>(walk, [&](const Element* s_k, const Element* s_v, int key) {
        if (key + Q_INNER <= warp_whole) {
            count<false>(of, at, own, r, s_k, s_v, key);
        } else {
            count<true>(of, at, own, r, s_k, s_v, key);
        }
    });
    float2 r_rows[2 * Q_ATOMS];
#pragma unroll
    for (int row = 0; row < 2 * Q_ATOMS; ++row) {
        const Statistics joined = join<4>(r[row]);
        r_rows[row] = ended(joined);
        const int query = at.query + row * 8;
        if ((lane & 3) == 0 && query < end) p.g_rows[of_all * of.queries + query] = r_rows[row];
        // By all four lanes, which read it again.
        if (MASK == ADDITIVE && query < end) factors_of(p, at)[query] = joined.sum == 0.0f ? 0.0f : 1.0f / joined.sum;
    }

    float r_dq[Q_ATOMS][WIDTH / 8][4] = {};
    each_tile<true>(walk, [&](const Element* s_k, const Element* s_v, int key) {
        if (key + Q_INNER <= warp_whole) {
            add_dq<false>(p, at, own, r_dq, r_rows, s_k, s_v, key);
        } else {
            add_dq<true>(p, at, own, r_dq, r_rows, s_k, s_v, key);
        }
    });
#pragma unroll
    for (int i = 0; i < Q_ATOMS * WIDTH / 2; ++i) r_dq[i / 4 / (WIDTH / 8)][i / 4 % (WIDTH / 8)][i % 4] *= SCALE;
    Element* g_dq = p.g_dq + start(p.dq, (u32)of_all / (u32)of.heads, (u32)of_all % (u32)of.heads);
    store_rows(s_q + warp_row * ROW, g_dq, p.dq.position, warp_first, end, r_dq, lane);
}

struct Keys {
    u32 k[STEPS][K_ATOMS][4], v[STEPS][K_ATOMS][4];
    const Element *s_k, *s_v;
    int first;  // of the warp
};

// The queries of a tile that are worked on at a time.
struct Facing {
    const Element *s_q, *s_slope;
    const float2* s_rows;
    int query;  // the first
};

// Which probabilities of sixteen keys are kept: bit 4 i of word e is for element e of the i-th eight of queries. Four lanes
// have four keys in a row; where those share their random words, each lane makes them for one element e of all four.
static __device__ __forceinline__ void find_kept(u32 (&r_kept)[4], const Attention& p, const Place& at, int first_query, int first_key) {
    const int pair = (at.lane & 3) * 2, group = at.lane >> 2, of_four = group & 3;
    if (p.keys % 4 == 0) {
        u32 kept = 0;
        const int key = first_key + of_four / 2 * 8 + (group & 4);
#pragma unroll
        for (int i = 0; i < K_INNER / 8; ++i) {
            const u64 elements = row_elements(p, at.sequence, at.head, first_query + 8 * i + pair + of_four % 2) + key;
            const Words4 words = philox(elements >> 2, at.seed, OFFSET);
#pragma unroll
            for (int w = 0; w < 4; ++w) kept |= (words.w[w] >= THRESHOLD ? 1u : 0u) << (4 * i + w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) r_kept[e] = shuffle(kept, (at.lane & ~12) + 4 * e) >> of_four;
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            r_kept[e] = 0;
#pragma unroll 1
            for (int i = 0; i < K_INNER / 8; ++i) {
                const u64 row = row_elements(p, at.sequence, at.head, first_query + 8 * i + pair + e % 2);
                r_kept[e] |= (keeps(row + first_key + e / 2 * 8 + group, at.seed) ? 1u : 0u) << 4 * i;
            }
        }
    }
}

// Whether a maximum stands in the place of some logsumexp of the tile.
static __device__ __forceinline__ bool any_far(const Facing& facing, int lane) {
    bool any = false;
    for (int query = lane; query < K_INNER; query += 32) any |= is_far(facing.s_rows[query].x);
    return any_of_warp(any);
}

// Scores of a tile become probabilities, where they are kept, and their slopes those of scores.
template <bool HIDES, bool ANY_FAR>
static __device__ __forceinline__ void weigh_keys(const Backward& p, const Place& at, const Keys& own, const Facing& facing, KeyTile& r_s,
                                                  KeyTile& r_slope, const u32 (&r_kept)[K_ATOMS][4]) {
#pragma unroll
    for (int i = 0; i < K_INNER / 8; ++i) {
        const int of_two = 8 * i + (at.lane & 3) * 2;
        const float4 rows = *(const float4*)(facing.s_rows + of_two);  // of two queries
        float factors[2] = {};
        if constexpr (ANY_FAR) {
            const float* g_factors = factors_of(p, at) + facing.query;
            if (is_far(rows.x)) factors[0] = g_factors[of_two];
            if (is_far(rows.z)) factors[1] = g_factors[of_two + 1];
        }
#pragma unroll
        for (int atom = 0; atom < K_ATOMS; ++atom) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int query = facing.query + of_two + e % 2, key = own.first + atom * 16 + e / 2 * 8 + (at.lane >> 2);
                float &s = r_s[atom][i][e], &slope = r_slope[atom][i][e];
                s = masked_score<SCALED, HIDES>(p.of, at.sequence, at.head, at.last, s, query, key);
                const float logsumexp = e % 2 ? rows.z : rows.x;
                float probability = ex2(fmaf(s, FACTOR, -logsumexp));
                if (ANY_FAR && is_far(logsumexp)) probability = far_probability(s, logsumexp, factors[e % 2]);
                const bool kept = !DROPOUT || (r_kept[atom][e] >> 4 * i & 1);
                slope = slope_of(probability, kept ? slope : 0.0f, e % 2 ? rows.w : rows.y);
                s = kept ? probability : 0.0f;
            }
        }
    }
}

template <bool HIDES>
static __device__ __forceinline__ void add_dk_dv(const Backward& p, const Place& at, const Keys& own, const Facing& facing,
                                                 float (&r_dk)[K_ATOMS][COLUMNS / 8][4], float (&r_dv)[K_ATOMS][COLUMNS / 8][4],
                                                 int column) {
    KeyTile r_s = {}, r_slope = {};
    multiply_rows<K_HELD>(r_s, own.k, own.s_k, facing.s_q, at.lane);
    multiply_rows<K_HELD>(r_slope, own.v, own.s_v, facing.s_slope, at.lane);
    u32 r_kept[K_ATOMS][4];
    if constexpr (DROPOUT) {
#pragma unroll
        for (int atom = 0; atom < K_ATOMS; ++atom) find_kept(r_kept[atom], p.of, at, facing.query, own.first + atom * 16);
    }
    if (MASK == ADDITIVE && any_far(facing, at.lane)) {
        weigh_keys<HIDES, true>(p, at, own, facing, r_s, r_slope, r_kept);
    } else {
        weigh_keys<HIDES, false>(p, at, own, facing, r_s, r_slope, r_kept);
    }
    add_weighted(r_dv, r_s, facing.s_slope + column, at.lane);
    add_weighted(r_dk, r_slope, facing.s_q + column, at.lane);
}

extern "C" __global__ void __launch_bounds__(K_THREADS, K_BLOCKS) backward_keys(const __grid_constant__ Backward p) {
    extern __shared__ uint4 s_memory[];
    const Attention& of = p.of;
    Element *s_stages = (Element*)s_memory, *s_k = s_stages + 2 * K_STAGE, *s_v = s_k + K_ROWS * ROW;
    float2* s_rows = (float2*)(s_v + K_ROWS * ROW);
    const u64 all_heads = of.batch * of.heads, of_all = blockIdx.x / PARTS % all_heads;
    const int column = (int)(blockIdx.x % PARTS) * COLUMNS;
    const int lane = threadIdx.x & 31, first = (int)(blockIdx.x / PARTS / all_heads) * K_ROWS, keys = (int)of.keys;
    const int warp_row = (int)threadIdx.x / 32 * 16 * K_ATOMS, queries = (int)of.queries;
    Place at;
    at.sequence = of_all / of.heads;
    at.head = of_all % of.heads;
    at.lane = lane;
    at.last = last_key(of, at.sequence);
    at.seed = DROPOUT ? (u32)*of.g_seed : 0;
    const int begin = first_query(of, at.last, first);
    const Element* g_q = of.g_q + start(of.q, at.sequence, at.head);
    const Element* g_slope = of.g_o + start(of.o, at.sequence, at.head);
    const float2* g_rows = p.g_rows + of_all * of.queries;
    const auto load = [&](int stage, int query) {
        Element* s_to = s_stages + stage * K_STAGE;
        load_rows<K_QUERIES, K_THREADS>(s_to, g_q, of.q.position, query, queries);
        load_rows<K_QUERIES, K_THREADS>(s_to + K_QUERIES * ROW, g_slope, of.o.position, query, queries);
        // Zeros beyond the last query: its slopes are zeros too, so nothing is added.
        for (int i = threadIdx.x; i < K_QUERIES; i += K_THREADS) {
            copy_async<8>(shared_address(s_rows + stage * K_QUERIES + i), g_rows + query + i, query + i < queries);
        }
    };
    load_rows<K_ROWS, K_THREADS>(s_k, of.g_k + start(of.k, at.sequence, at.head), of.k.position, first, keys);
    load_rows<K_ROWS, K_THREADS>(s_v, of.g_v + start(of.v, at.sequence, at.head), of.v.position, first, keys);
    if (begin < queries) load(0, begin);
    await_all_copies();
    __syncthreads();
    Keys own;
    own.s_k = s_k + warp_row * ROW;
    own.s_v = s_v + warp_row * ROW;
    own.first = first + warp_row;
    if constexpr (K_HELD) {
        hold_left(own.k, own.s_k, lane);
        hold_left(own.v, own.s_v, lane);
    }
    float r_dk[K_ATOMS][COLUMNS / 8][4] = {}, r_dv[K_ATOMS][COLUMNS / 8][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int query = begin; query < queries; query += K_QUERIES) {
        if (query + K_QUERIES < queries) load(stage ^ 1, query + K_QUERIES);
        const Element* s_tile = s_stages + stage * K_STAGE;
#pragma unroll 1
        for (int part = 0; part < K_QUERIES; part += K_INNER) {
            Facing facing;
            facing.s_q = s_tile + part * ROW;
            facing.s_slope = facing.s_q + K_QUERIES * ROW;
            facing.s_rows = s_rows + stage * K_QUERIES + part;
            facing.query = query + part;
            if (facing.query >= queries) break;
            if (seen(of, at.last, facing.query) >= own.first + 16 * K_ATOMS) {
                add_dk_dv<false>(p, at, own, facing, r_dk, r_dv, column);
            } else if (seen(of, at.last, min(facing.query + K_INNER, queries) - 1) > own.first) {
                add_dk_dv<true>(p, at, own, facing, r_dk, r_dv, column);
            }
        }
        await_all_copies();
        __syncthreads();
        stage ^= 1;
    }
#pragma unroll
    for (int i = 0; i < K_ATOMS * COLUMNS / 2; ++i) {
        r_dk[i / 4 / (COLUMNS / 8)][i / 4 % (COLUMNS / 8)][i % 4] *= SCALE;
        if constexpr (DROPOUT) r_dv[i / 4 / (COLUMNS / 8)][i / 4 % (COLUMNS / 8)][i % 4] *= KEPT;
    }
    // Found anew: over the loop there are no registers to hold them.
    const u32 own_head = blockIdx.x / PARTS % (u32)all_heads, sequence = own_head / (u32)of.heads, head = own_head % (u32)of.heads;
    store_rows(s_k + warp_row * ROW, p.g_dk + start(p.dk, sequence, head) + column, p.dk.position, own.first, keys, r_dk, lane);
    store_rows(s_v + warp_row * ROW, p.g_dv + start(p.dv, sequence, head) + column, p.dv.position, own.first, keys, r_dv, lane);
}
