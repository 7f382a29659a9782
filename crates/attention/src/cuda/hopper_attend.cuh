// Attention of a tile of queries by warpgroups: what the kernels on Hopper's matrix units share. `hopper.cu` says how it works.
//
// KEYS (of a tile), STAGES, SLOTS (tiles of results; none where they go out through the place of the queries), BLOCKS (of a multiprocessor),
// SPLIT, TURNS and SHARED are constants that stand before this file.

constexpr float SLACK = 8.0f;
constexpr float FACTOR = SCALE * LOG2E;
constexpr int QUERIES = SPLIT ? 64 : 128;
constexpr int STEP = SPLIT ? 2 : 1;  // tiles of keys from one of a warpgroup to its next
constexpr bool AHEAD = BLOCKS == 1;
constexpr bool HELD = TURNS && WIDTH <= 128;  // queries stay in registers
constexpr int MULTIPLIERS = 256;
// Only whole warpgroups give registers away.
constexpr int THREADS = MULTIPLIERS + (AHEAD ? 128 : 32);
constexpr int Q_BYTES = QUERIES * PADDED * 2, KV_BYTES = KEYS * PADDED * 2;
constexpr int MERGE_BYTES = SPLIT ? (WIDTH / 2 + 4) * 128 * 4 : 0;
constexpr int TURN_BARRIER = 1, MERGE_BARRIER = 3, LENT_BARRIER = 4;

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int AT_K = Q_BYTES;
constexpr int AT_V = AT_K + STAGES * KV_BYTES;
constexpr int AT_O = AT_V + STAGES * KV_BYTES;
constexpr int AT_MERGE = AT_O + SLOTS * Q_BYTES;
constexpr int AT_BARRIERS = AT_MERGE + MERGE_BYTES;
constexpr int BARRIERS = 4 * STAGES + 2;
constexpr int AT_MORE = AT_BARRIERS + BARRIERS * 8;  // what else a kernel has
static_assert(MASK == FULL || MASK == CAUSAL, "how many keys a query sees depends on sizes alone");

// How queries, keys and values are found.
struct Maps {
    TensorMap q, k, v;
};

// They are on their way to where the unit that copies has them.
static __device__ __forceinline__ void prefetch_maps(const Maps& maps) {
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
}

// A tile of queries of one head.
struct Tile {
    int sequence, head, key_head, first, end;
    int count;  // tiles of keys that some query of it sees
};

static __device__ __forceinline__ int keys_seen(const Attention& p, int query) { return seen(p, last_key(p, 0), query); }

// The tile of a head from a query on.
static __device__ __forceinline__ Tile tile_of(const Attention& p, int sequence, int head, int first) {
    const int end = min(first + QUERIES, (int)p.queries);
    return {sequence, head, head / (int)p.group, first, end, (keys_seen(p, end - 1) + KEYS - 1) / KEYS};
}

// Shared memory, and the barriers of its rings. Tiles of keys are counted over all rounds: tile `at` has place at % STAGES.
struct Rings {
    u32 base;
    __device__ __forceinline__ u32 k(u32 at) const { return base + AT_K + at % STAGES * KV_BYTES; }
    __device__ __forceinline__ u32 v(u32 at) const { return base + AT_V + at % STAGES * KV_BYTES; }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + AT_BARRIERS + index * 8; }
    __device__ __forceinline__ u32 k_full(u32 at) const { return barrier(at % STAGES); }
    __device__ __forceinline__ u32 v_full(u32 at) const { return barrier(STAGES + at % STAGES); }
    __device__ __forceinline__ u32 k_empty(u32 at) const { return barrier(2 * STAGES + at % STAGES); }
    __device__ __forceinline__ u32 v_empty(u32 at) const { return barrier(3 * STAGES + at % STAGES); }
    __device__ __forceinline__ u32 q_full() const { return barrier(4 * STAGES); }
    __device__ __forceinline__ u32 q_empty() const { return barrier(4 * STAGES + 1); }
    static __device__ __forceinline__ u32 parity(u32 at) { return at / STAGES & 1; }

    __device__ __forceinline__ void init() const {
        // A warpgroup that splits keys uses every second tile, and else both use all; each of its warps says when it is done.
        const u32 users = SPLIT ? 4 : 8;
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(k_full(stage), 1);
            mbarrier_init(v_full(stage), 1);
            mbarrier_init(k_empty(stage), users);
            mbarrier_init(v_empty(stage), users);
        }
        mbarrier_init(q_full(), 1);
        mbarrier_init(q_empty(), 8);
        fence_mbarrier_init();
    }
};

// ---- the thread that fetches

// Queries, keys and values of a tile. `at` counts tiles of keys so far, `queries` those of queries.
static __device__ __forceinline__ void fetch_tile(const Maps& maps, Rings rings, const Tile& tile, u32& at, u32& queries) {
    if (tile.count <= 0) return;
    mbarrier_wait(rings.q_empty(), (queries & 1) ^ 1);
    ++queries;
    mbarrier_arrive_expect_tx(rings.q_full(), Q_BYTES);
    load_rows<QUERIES>(rings.base, &maps.q, rings.q_full(), tile.first, tile.head, tile.sequence);
    // Keys one tile ahead of values, as they are used.
    for (int i = 0; i <= tile.count; ++i) {
        if (i < tile.count) {
            const u32 now = at + i;
            mbarrier_wait(rings.k_empty(now), Rings::parity(now) ^ 1);
            mbarrier_arrive_expect_tx(rings.k_full(now), KV_BYTES);
            load_rows<KEYS>(rings.k(now), &maps.k, rings.k_full(now), (tile.count - 1 - i) * KEYS, tile.key_head, tile.sequence);
        }
        if (i > 0) {
            const u32 now = at + i - 1;
            mbarrier_wait(rings.v_empty(now), Rings::parity(now) ^ 1);
            mbarrier_arrive_expect_tx(rings.v_full(now), KV_BYTES);
            load_rows<KEYS>(rings.v(now), &maps.v, rings.v_full(now), (tile.count - i) * KEYS, tile.key_head, tile.sequence);
        }
    }
    at += tile.count;
}

// ---- the warpgroups that multiply

// Of a thread: two rows eight apart, as a product leaves them.
struct State {
    float o[WIDTH / 2];
    float maximum[2];
    float sum[2];
};

// What is the same for all tiles of keys of a tile of queries.
struct Place {
    Rings rings;
    u32 at;  // number of its first tile of keys
    int count, warpgroup;
    u32 s_q;
    // Keys that all queries of the warpgroup see, and that this thread's rows see, these counted from its first column.
    int whole, end0, end1;

    __device__ __forceinline__ int key(int i) const { return (count - 1 - i) * KEYS; }
};

static __device__ __forceinline__ void release(u32 barrier) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

// Warpgroups take turns at issuing products.
static __device__ __forceinline__ void begin_turn(int warpgroup) {
    if constexpr (TURNS) named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
}
static __device__ __forceinline__ void end_turn(int warpgroup) {
    if constexpr (TURNS) named_barrier_arrive(TURN_BARRIER + 1 - warpgroup, MULTIPLIERS);
}

// The scores of a tile of keys, on their way.
static __device__ __forceinline__ void issue_scores(float (&r_s)[KEYS / 2], const u32 (&r_q)[WIDTH / 16][4], const Place& in,
                                                    int i) {
    const u32 now = in.at + i;
    mbarrier_wait(in.rings.k_full(now), Rings::parity(now));
    const u64 q = matrix_descriptor<16>(in.s_q), k = matrix_descriptor<16>(in.rings.k(now));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const u64 right = k + (step / 4 * KEYS * 128 + step % 4 * 32) / 16;
        if constexpr (HELD) {
            Wgmma<KEYS, STORAGE>::template from_registers<0>(r_s, r_q[step], right, step > 0);
        } else {
            Wgmma<KEYS, STORAGE>::template from_shared<0>(r_s, q + (step / 4 * QUERIES * 128 + step % 4 * 32) / 16, right, step > 0);
        }
    }
    wgmma_commit();
}

// The result's share of a tile of values, on its way.
static __device__ __forceinline__ void issue_values(float (&r_o)[WIDTH / 2], const u32 (&r_p)[KEYS / 16][4], const Place& in,
                                                    int i) {
    const u32 now = in.at + i;
    mbarrier_wait(in.rings.v_full(now), Rings::parity(now));
    const u64 v = matrix_descriptor<KEYS * 128>(in.rings.v(now));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        Wgmma<WIDTH, STORAGE>::template from_registers<1>(r_o, r_p[step], v + step * 16 * 128 / 16, 1);
    }
    wgmma_commit();
}

// Scores become probabilities, but for their sum. True where the result has to be multiplied by the factors.
static __device__ __forceinline__ bool soften(State& r, float (&r_s)[KEYS / 2], float (&factor)[2], const Place& in, int i) {
    const int key = in.key(i);
    if (key + KEYS > in.whole) hide(r_s, in.end0 - key, in.end1 - key);
    const bool grows = raise_maxima(r.maximum, factor, r_s, FACTOR, SLACK);
    // Before the first score a factor is 2^-inf, also where nothing grows.
    if (grows) {
        r.sum[0] *= factor[0];
        r.sum[1] *= factor[1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float shift = shift_of(r.maximum[half]);
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) {
            float &a = r_s[4 * j + 2 * half], &b = r_s[4 * j + 2 * half + 1];
            a = ex2(fmaf(a, FACTOR, -shift));
            b = ex2(fmaf(b, FACTOR, -shift));
            even += a;
            odd += b;
        }
        r.sum[half] += even + odd;
    }
    return grows;
}

static __device__ __forceinline__ void narrow_scores(u32 (&r_p)[KEYS / 16][4], const float (&r_s)[KEYS / 2]) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r_p[step][i] = narrow2<STORAGE>(r_s[8 * step + 2 * i], r_s[8 * step + 2 * i + 1]);
    }
    pin(r_p);
}

static __device__ __forceinline__ void scale_result(State& r, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) r.o[i] *= factor[i / 2 & 1];
}

// Tiles of keys from `i` on, one thing after the other.
static __device__ __forceinline__ void attend_in_order(State& r, const u32 (&r_q)[WIDTH / 16][4], const Place& in, int i) {
    float r_s[KEYS / 2], factor[2];
    u32 r_p[KEYS / 16][4];
    for (; i < in.count; i += STEP) {
        issue_scores(r_s, r_q, in, i);
        wgmma_wait<0>();
        pin(r_s);
        release(in.rings.k_empty(in.at + i));
        if (soften(r, r_s, factor, in, i)) scale_result(r, factor);
        narrow_scores(r_p, r_s);
        issue_values(r.o, r_p, in, i);
        wgmma_wait<0>();
        pin(r.o);
        release(in.rings.v_empty(in.at + i));
    }
}

// Tiles of keys from `i` on: while scores are softened, the product of the values before them goes on.
static __device__ __forceinline__ void attend_ahead(State& r, const u32 (&r_q)[WIDTH / 16][4], const Place& in, int i) {
    float r_s[KEYS / 2], factor[2];
    u32 r_p[KEYS / 16][4];
    if (i >= in.count) return;
    begin_turn(in.warpgroup);
    issue_scores(r_s, r_q, in, i);
    end_turn(in.warpgroup);
    wgmma_wait<0>();
    pin(r_s);
    release(in.rings.k_empty(in.at + i));
    soften(r, r_s, factor, in, i);
    narrow_scores(r_p, r_s);
    for (i += STEP; i < in.count; i += STEP) {
        begin_turn(in.warpgroup);
        issue_scores(r_s, r_q, in, i);
        issue_values(r.o, r_p, in, i - STEP);
        end_turn(in.warpgroup);
        wgmma_wait<1>();
        pin(r_s);
        release(in.rings.k_empty(in.at + i));
        const bool grows = soften(r, r_s, factor, in, i);
        wgmma_wait<0>();
        pin(r.o);
        pin(r_s);
        release(in.rings.v_empty(in.at + i - STEP));
        if (grows) scale_result(r, factor);
        narrow_scores(r_p, r_s);
    }
    issue_values(r.o, r_p, in, i - STEP);
    wgmma_wait<0>();
    pin(r.o);
    release(in.rings.v_empty(in.at + i - STEP));
}

// Lets go of the first tiles, which later queries of the block see and no query of this warpgroup does, and says how many. Their turns pass.
static __device__ __forceinline__ int skip_tiles(const Attention& p, const Place& in, int group_first, int end) {
    const int own = (keys_seen(p, min(group_first + 64, end) - 1) + KEYS - 1) / KEYS, skipped = min(in.count - own, STAGES - 1);
    // Only a tile that has come is let go: so no warp says twice that a place is free before the others have said it once.
    for (u32 at = in.at; at < in.at + skipped; ++at) {
        begin_turn(in.warpgroup);
        end_turn(in.warpgroup);
        // Nothing else holds a warp together here: a lane that comes late would miss the phase.
        mbarrier_wait(in.rings.k_full(at), Rings::parity(at));
        __syncwarp();
        release(in.rings.k_empty(at));
        mbarrier_wait(in.rings.v_full(at), Rings::parity(at));
        __syncwarp();
        release(in.rings.v_empty(at));
    }
    return skipped;
}

// The queries of a warp as left operands: in a swizzled tile, lane l reads 16 bytes of row l % 16.
static __device__ __forceinline__ void load_queries(u32 (&r_q)[WIDTH / 16][4], const char* s_q, int warp, int lane) {
    const int row = warp * 16 + (lane & 15);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const int piece = step % 4 * 2 + (lane >> 4);
        ldmatrix(r_q[step], s_q + step / 4 * QUERIES * 128 + row * 128 + ((piece ^ (row & 7)) << 4));
    }
}

// Joins the sums of two warpgroups in the first.
static __device__ __forceinline__ void merge(State& r, float* s_merge, int warpgroup) {
    float* s_mine = s_merge + threadIdx.x % 128;
    if (warpgroup == 1) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) s_mine[i * 128] = r.o[i];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            s_mine[(WIDTH / 2 + half) * 128] = r.maximum[half];
            s_mine[(WIDTH / 2 + 2 + half) * 128] = r.sum[half];
        }
    }
    named_barrier_sync(MERGE_BARRIER, MULTIPLIERS);
    if (warpgroup == 0) {
        float mine[2], other[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float theirs = s_mine[(WIDTH / 2 + half) * 128], most = fmaxf(r.maximum[half], theirs);
            mine[half] = ex2(r.maximum[half] - shift_of(most));
            other[half] = ex2(theirs - shift_of(most));
            r.sum[half] = r.sum[half] * mine[half] + s_mine[(WIDTH / 2 + 2 + half) * 128] * other[half];
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) r.o[i] = r.o[i] * mine[i / 2 & 1] + s_mine[i * 128] * other[i / 2 & 1];
    }
    named_barrier_sync(MERGE_BARRIER, MULTIPLIERS);
}

// The part of a tile's queries that a warpgroup has, and this thread's warp in it.
struct Rank {
    int warpgroup, warp, part;
};
static __device__ __forceinline__ Rank rank_of_warp() {
    // The same for all lanes, and known to be.
    const int all_warps = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = all_warps / 4;
    return {warpgroup, all_warps % 4, SPLIT ? 0 : warpgroup};
}

// Attention of a tile, but for the division by the sum. LENDS: the memory of its queries is let go of by whoever calls.
template <bool LENDS = false>
static __device__ __forceinline__ void attend(State& r, const Attention& p, Rings rings, char* s_base, const Rank& rank,
                                              const Tile& tile, u32& at, u32& queries) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) r.o[i] = 0.0f;
    r.maximum[0] = r.maximum[1] = never();
    r.sum[0] = r.sum[1] = 0.0f;
    if (tile.count > 0) {
        const int first = tile.first + rank.part * 64, row = first + rank.warp * 16 + lane / 4, column = lane % 4 * 2;
        const Place in = {rings, at, tile.count, rank.warpgroup, rings.base + rank.part * 64 * 128,
                          keys_seen(p, first), keys_seen(p, row) - column, keys_seen(p, row + 8) - column};
        int i = SPLIT ? rank.warpgroup : 0;
        // Else both have the same queries, or a tile has as many keys as there are queries: none to skip.
        if constexpr (MASK == CAUSAL && !SPLIT && KEYS < QUERIES) {
            if (first < tile.end) i = skip_tiles(p, in, first, tile.end);
        }
        mbarrier_wait(rings.q_full(), queries & 1);
        ++queries;
        u32 r_q[WIDTH / 16][4];
        if constexpr (HELD) load_queries(r_q, s_base + rank.part * 64 * 128, rank.warp, lane);
        if constexpr (AHEAD) {
            attend_ahead(r, r_q, in, i);
        } else {
            attend_in_order(r, r_q, in, i);
        }
        if constexpr (!LENDS) release(rings.q_empty());
        at += tile.count;
    }
    if constexpr (SPLIT) merge(r, (float*)(s_base + AT_MERGE), rank.warpgroup);
}

// A warp's part of shared memory for rows on their way out.
static __device__ __forceinline__ char* staging(char* s_base, const Rank& rank) {
    return s_base + AT_O + (rank.part * 4 + rank.warp) * 16 * PADDED * 2;
}

// How a thread's two rows are divided by their sums.
struct Divided {
    float end[2];
    __device__ __forceinline__ explicit Divided(const State& r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = r.sum[half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            end[half] = ending(sum);
        }
    }
    // Of 16 columns. A row without a key is zeros whatever was multiplied by 0.
    __device__ __forceinline__ void pairs(const State& r, int step, u32 (&pairs)[4]) const {
        const float* o = r.o + 8 * step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = end[i & 1] == 0.0f ? 0 : narrow2<STORAGE>(o[2 * i] * end[i & 1], o[2 * i + 1] * end[i & 1]);
        }
    }
};

// A warp's rows of the result, divided by their sums, to its part of shared memory.
template <int BEYOND> static __device__ __forceinline__ void stage_rows(const State& r, char* s_o) {
    const Divided divided(r);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        u32 pairs[4];
        divided.pairs(r, step, pairs);
        stage_pairs<BEYOND>(s_o, threadIdx.x & 31, step, pairs);
    }
    __syncwarp();
}

// The same, and from there in whole pieces of 16 bytes to where the result lies.
template <int BEYOND>
static __device__ __forceinline__ void store_rows(const Attention& p, const Tile& tile, const State& r, char* s_o, int first) {
    stage_rows<BEYOND>(r, s_o);
    Element* g_o = p.g_o + start(p.o, tile.sequence, tile.head) + (u64)first * p.o.position;
    store_staged<BEYOND>(s_o, threadIdx.x & 31, g_o, p.o.position, tile.end - first);
    __syncwarp();
}
