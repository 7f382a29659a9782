// Probabilities of attention, stored, on the matrix units, for 16-bit storage.
//
//   o = softmax(scale q k^T + mask), a block a tile of queries of one head, all keys twice
//
// - The first time for the sum of each row, the second time for its probabilities: scores are computed again, and never stored. At
//   bf16, 8 x 12 heads of 64, 1024 queries and keys, 201 MB are written, 48 us at 4.2 TB/s, and the products are 26 GFLOP, 33 us at
//   780 TFLOP/s, half of that if causal. Exponentials are 201 million, 54 us at 16 a clock of each of 132 multiprocessors; causal
//   27 us.
// - Numbers: products and sums in f32, in an order that the sizes alone decide; only the result is rounded.
// - A warp owns 16 ATOMS rows of queries. Keys come by asynchronous copies, the next tile while this one is worked on.
// - Keys lie in shared memory in the order in which a product hands a thread eight that follow each other: 16 bytes of a row of the
//   result go from registers to memory at once, four threads side by side.
// - Keys beyond those that some query of the warp sees are zeros, which are written first: they drain while products run. Tiles of
//   late queries, which compute most, and of early ones, which mostly write zeros, take turns.
// - Needs sm_80, WIDTH a multiple of 16, rows of queries and keys that start at multiples of 16 bytes.
// - Takes, of NVRTC 13.4 for sm_90a, causal, heads of 64: with one sixteen of queries a warp 94 registers and 27,648 bytes of shared memory, 20 of
//   64 warps; with two 128 and 36,864, 16 warps. No spills.
//
// WARPS, ATOMS, KEYS (of a tile), BLOCKS (of a multiprocessor, at least) and TOGETHER (8, 4, 2 or 1: elements of a row of the result
// and of the mask that lie at a multiple of their size, or of 16 bytes) are constants that stand before this file.

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * ATOMS * WARPS;
constexpr int STAGE = KEYS * ROW;
constexpr int GROUP = 32;  // keys that are worked on at a time: eight for each of four threads
constexpr bool HIDDEN = MASK == CAUSAL || MASK == CACHED;

static_assert(KEYS % GROUP == 0, "whole groups");

typedef float Scores[ATOMS][GROUP / 8][4];

// Neighbours in memory.
template <class T> struct __align__(TOGETHER * sizeof(T) < 16 ? TOGETHER * sizeof(T) : 16) Neighbours {
    T x[TOGETHER];
};

// The key in row `row` of shared memory. Columns 2 t and 2 t + 1 of the products of rows 0, 8, 16 and 24 on are keys 8 t to 8 t + 7.
static __device__ __forceinline__ int key_of(int row) {
    return row / GROUP * GROUP + row % 8 / 2 * 8 + row % GROUP / 8 * 2 + row % 2;
}

// Keys of a tile on their way to shared memory; zeros from `end` on, where nothing is read.
static __device__ __forceinline__ void load_keys(Element* s_to, const Element* g_from, u64 stride, int first, int end) {
    constexpr int APART = THREADS / PIECES;
    // A key is its row with bits exchanged: where a thread's rows are a power of two apart, its keys are known distances apart.
    constexpr bool EVEN = THREADS % PIECES == 0 && (APART & (APART - 1)) == 0 && KEYS % APART == 0;
    if constexpr (EVEN) {
        const int row = (int)threadIdx.x / PIECES, column = (int)threadIdx.x % PIECES * 8, key = first + key_of(row);
        const Element* g_own = g_from + (u64)key * stride + column;
        Element* s_own = s_to + row * ROW + column;
#pragma unroll
        for (int i = 0; i < KEYS / APART; ++i) {
            const int apart = key_of(i * APART);
            copy_async<16>(shared_address(s_own + i * APART * ROW), g_own + apart * stride, key + apart < end);
        }
    } else {
#pragma unroll 1
        for (int piece = threadIdx.x; piece < KEYS * PIECES; piece += THREADS) {
            const int row = piece / PIECES, column = piece % PIECES * 8, key = first + key_of(row);
            copy_async<16>(shared_address(s_to + row * ROW + column), g_from + (u64)key * stride + column, key < end);
        }
    }
}

// Eight neighbours of a row of the result, as far as `left` elements are left of it.
static __device__ __forceinline__ void store_eight(Element* g_to, const u32 (&r)[4], int left) {
    if constexpr (TOGETHER == 8) {
        if (left > 0) __stcs((uint4*)g_to, make_uint4(r[0], r[1], r[2], r[3]));
    } else if constexpr (TOGETHER == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (left > 4 * i) __stcs((uint2*)g_to + i, make_uint2(r[2 * i], r[2 * i + 1]));
        }
    } else if constexpr (TOGETHER == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (left > 2 * i) __stcs((u32*)g_to + i, r[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (left > i) __stcs(g_to + i, (u16)(r[i / 2] >> 16 * (i % 2)));
        }
    }
}

// Scales, adds the mask, hides: query 0 sees `visible` keys, less than none perhaps. `key` is the first of the eight of this thread.
template <bool HIDES>
static __device__ __forceinline__ void mask_eights(const Attention& p, const Place& at, Scores& r_s, int visible, int key) {
#pragma unroll
    for (int row = 0; row < 2 * ATOMS; ++row) {
        const int query = at.query + row * 8, end = HIDDEN ? min(visible + query, (int)p.keys) : (int)p.keys;
        const MaskElement* g_mask = mask_row(p, at.sequence, at.head, query < (int)p.queries ? query : 0);
#pragma unroll
        for (int first = 0; first < 8; first += TOGETHER) {
            Neighbours<MaskElement> added = {};
            if constexpr (MASK == ADDITIVE) {
                if (key + first < (int)p.keys) added = *(const Neighbours<MaskElement>*)(g_mask + key + first);
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int j = first + i;
                float& s = r_s[row / 2][j / 2][row % 2 * 2 + j % 2];
                if constexpr (SCALED) s *= SCALE;
                if constexpr (MASK == ADDITIVE) s += widen<MASK_STORAGE>(added.x[i]);
                if (HIDES && key + j >= end) s = never();
            }
        }
    }
}

// What a warp works with.
struct Rows {
    u32 q[STEPS][ATOMS][4];
    RowSum sums[2 * ATOMS];
    Ending ends[2 * ATOMS];
    Element* g_o;  // the first row of this thread
    int visible;   // keys that query 0 sees; below 0 if only later ones do
};

static __device__ __forceinline__ void add_to_sums(Rows& r, Scores& r_s) {
#pragma unroll
    for (int row = 0; row < 2 * ATOMS; ++row) {
        const float(&s)[GROUP / 8][4] = r_s[row / 2];
        constexpr int EIGHTS = GROUP / 8;
        float most = never();
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) most = fmaxf(most, fmaxf(s[i][row % 2 * 2], s[i][row % 2 * 2 + 1]));
        raise(r.sums[row], power_of(most, FACTOR));
        const float largest = r.sums[row].largest, shift = level_of(largest);
        if (is_deep(largest)) level_row(r_s[row / 2], row % 2, largest);
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            r.sums[row].sum += ex2(fmaf(s[i][row % 2 * 2], FACTOR, -shift)) + ex2(fmaf(s[i][row % 2 * 2 + 1], FACTOR, -shift));
        }
    }
}

static __device__ __forceinline__ void store_probabilities(const Attention& p, const Place& at, const Rows& r, Scores& r_s, int key) {
    Element* g_to = r.g_o + key;
#pragma unroll
    for (int row = 0; row < 2 * ATOMS; ++row) {
        if (is_deep(r.ends[row].shift)) level_row(r_s[row / 2], row % 2, r.ends[row].shift);
        u32 r_words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float(&s)[4] = r_s[row / 2][i];
            const float low = probability(s[row % 2 * 2], FACTOR, r.ends[row]);
            const float high = probability(s[row % 2 * 2 + 1], FACTOR, r.ends[row]);
            r_words[i] = narrow2<STORAGE>(low, high);
        }
        if (at.query + row * 8 < (int)p.queries) store_eight(g_to, r_words, (int)p.keys - key);
        g_to += 8 * p.o.position;
    }
}

template <bool STORES, bool HIDES>
static __device__ __forceinline__ void work_on(const Attention& p, const Place& at, Rows& r, const Element* s_keys, int key) {
    Scores r_s = {};
    multiply_rows<true>(r_s, r.q, s_keys, s_keys, at.lane);
    key += (at.lane & 3) * 8;
    if constexpr (HIDES || SCALED) mask_eights<HIDES>(p, at, r_s, r.visible, key);
    if constexpr (STORES) {
        store_probabilities(p, at, r, r_s, key);
    } else {
        add_to_sums(r, r_s);
    }
}

// How many keys are worked on.
struct Ends {
    int block, warp;  // by the block, by this warp
    int whole;        // that all queries of the warp see
};

// Once over the keys. Their first tile is in stage `stage`; after a time that stores nothing it comes again.
template <bool STORES>
static __device__ __forceinline__ void sweep(const Attention& p, const Place& at, Rows& r, const Ends& ends, const Element* g_k,
                                             Element* s_stages, int& stage) {
#pragma unroll 1
    for (int key = 0; key < ends.block; key += KEYS) {
        const bool is_last = key + KEYS >= ends.block;
        if (!STORES || !is_last) {
            load_keys(s_stages + (stage ^ 1) * STAGE, g_k, p.k.position, is_last ? 0 : key + KEYS, ends.block);
        }
#pragma unroll 1
        for (int part = 0; part < KEYS && key + part < ends.warp; part += GROUP) {
            const Element* s_keys = s_stages + stage * STAGE + part * ROW;
            if (key + part + GROUP <= ends.whole) {
                work_on<STORES, false>(p, at, r, s_keys, key + part);
            } else {
                work_on<STORES, true>(p, at, r, s_keys, key + part);
            }
        }
        await_all_copies();
        __syncthreads();
        stage ^= 1;
    }
}

// One pair of elements for all keys of a row from `key` on.
static __device__ __forceinline__ void fill_row(const Attention& p, Element* g_row, u32 pair, int key, int lane) {
    const u32 r_words[4] = {pair, pair, pair, pair};
#pragma unroll 1
    for (int at = key + lane * 8; at < (int)p.keys; at += 32 * 8) store_eight(g_row + at, r_words, (int)p.keys - at);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_scores(const __grid_constant__ Attention p) {
    extern __shared__ uint4 s_memory[];
    Element *s_stages = (Element*)s_memory, *s_q = s_stages + 2 * STAGE;
    const u64 all_heads = p.batch * p.heads, head = blockIdx.x % all_heads;
    const int turn = (int)(blockIdx.x / all_heads), tiles = (int)(gridDim.x / all_heads);
    const int tile = turn % 2 ? turn / 2 : tiles - 1 - turn / 2;
    const int lane = threadIdx.x & 31, first = tile * QUERIES, end = min(first + QUERIES, (int)p.queries);
    const int warp_row = (int)threadIdx.x / 32 * 16 * ATOMS, warp_first = first + warp_row;
    const int warp_end = min(warp_first + 16 * ATOMS, end);
    Place at;
    at.sequence = head / p.heads;
    at.head = head % p.heads;
    at.query = warp_first + (lane >> 2);
    at.lane = lane;
    at.last = last_key(p, at.sequence);
    at.seed = 0;
    const Element* g_k = p.g_k + start(p.k, at.sequence, at.head / p.group);
    Ends ends;
    ends.block = seen(p, at.last, end - 1);
    ends.warp = warp_first < end ? seen(p, at.last, warp_end - 1) : 0;
    ends.whole = seen(p, at.last, warp_first);
    const int unseen = (ends.warp + GROUP - 1) / GROUP * GROUP;
    Element* g_o = p.g_o + start(p.o, at.sequence, at.head);
    Rows r;
    r.g_o = g_o + (u64)at.query * p.o.position;
    r.visible = (int)max(-(long long)p.queries, min(at.last + 1, (long long)p.keys));

    load_rows<QUERIES, THREADS>(s_q, p.g_q + start(p.q, at.sequence, at.head), p.q.position, first, end);
    if (ends.block > 0) load_keys(s_stages, g_k, p.k.position, 0, ends.block);
    if constexpr (HIDDEN) {
#pragma unroll 1
        for (int row = warp_first; row < warp_end; ++row) fill_row(p, g_o + (u64)row * p.o.position, 0, unseen, lane);
    }
    await_all_copies();
    __syncthreads();
    hold_left(r.q, s_q + warp_row * ROW, lane);

    int stage = 0;
    bool poisoned = false;
#pragma unroll
    for (int row = 0; row < 2 * ATOMS; ++row) clear(r.sums[row]);
    sweep<false>(p, at, r, ends, g_k, s_stages, stage);
#pragma unroll
    for (int row = 0; row < 2 * ATOMS; ++row) {
        r.ends[row] = finish<4>(r.sums[row]);
        poisoned |= r.ends[row].factor != r.ends[row].factor;
    }
    if (HIDDEN && any_of_warp(poisoned)) {
#pragma unroll 1
        for (int row = 0; row < 8; ++row) {
#pragma unroll
            for (int eight = 0; eight < 2 * ATOMS; ++eight) {
                const float factor = __uint_as_float(shuffle(__float_as_uint(r.ends[eight].factor), 4 * row));
                const int query = warp_first + 8 * eight + row;
                // NaN in both types; each thread writes over its own zeros.
                if (factor != factor && query < warp_end) fill_row(p, g_o + (u64)query * p.o.position, 0x7fff7fffu, unseen, lane);
            }
        }
    }
    sweep<true>(p, at, r, ends, g_k, s_stages, stage);
}
