// Attention on Hopper's matrix units: two warpgroups multiply, a warp beside them fetches tiles ahead of them.
//
//   o = softmax(scale q k^T, hidden keys left out) v, a tile of queries of one head at a time, tile after tile of keys
//
// - Numbers: products and sums in f32. The probabilities, before the division by their sum, are rounded to the storage type
//   for their product with v; nothing else is rounded before the result.
// - Tiles come by tensor maps into shared memory. Keys and values have a ring of STAGES tiles each; every place of a ring has a
//   barrier that says full, which the copy's last byte ends, and one that says empty, which those who multiply end.
// - A warpgroup has 64 queries. Its scores, probabilities and part of the result never leave registers; probabilities are the
//   left operand of the second product as they lie.
// - Tiles of keys go from the last to the first. Only those that some query of the warpgroup does not see whole are masked.
// - Tiles of queries that see most come first, in sections of heads whose keys and values stay in the L2 cache. A grid with fewer
//   blocks than there are tiles goes over them forth and back, so that long and short tiles add up alike.
// - The largest score stays behind by up to 2^SLACK before sums are scaled anew.
// - Needs sm_90a, a full or causal mask, no dropout, WIDTH 64 or 128, rows that start at multiples of 16 bytes, SCALE >= 1e-30.
//   If causal, keys less queries are a multiple of KEYS: then no block has a tile of keys whose last ones none of its queries
//   sees, and no NaN there is multiplied by 0.
//
// What hides the time of the softmax, where the matrix units would wait, differs:
// - BLOCKS 2: the products of the other block on the multiprocessor. It leaves few registers, so all is done in order.
// - BLOCKS 1: the product of the next keys and that of the last values go on behind the softmax. The warps that fetch give their
//   registers to those that multiply. TURNS: besides, one warpgroup's softmax is beside the other's products, as they take turns
//   at issuing them. SPLIT: both warpgroups have the same 64 queries and every second tile of keys each, so that few queries
//   fill more multiprocessors; their sums are joined at the end.
//
// Takes, of NVRTC 13.4: heads of 64 with two blocks 90 registers, 99,472 bytes of shared memory a block, 18 of 64 warps; with one,
// SPLIT, 168 (240 for those who multiply, 24 for the others), 134,352, 12 warps; heads of 128 168, 197,712, 12. No spills.
//
// KEYS (of a tile), STAGES, BLOCKS (of a multiprocessor), SPLIT and TURNS are constants that stand before this file.

constexpr float SLACK = 8.0f;
constexpr float FACTOR = SCALE * LOG2E;
constexpr int QUERIES = SPLIT ? 64 : 128;
constexpr int STEP = SPLIT ? 2 : 1;  // tiles of keys from one of a warpgroup to its next
constexpr int PIECES = WIDTH / 64;
constexpr bool AHEAD = BLOCKS == 1;
constexpr bool HELD = TURNS;  // queries stay in registers
constexpr int MULTIPLIERS = 256;
// Only whole warpgroups give registers away.
constexpr int THREADS = MULTIPLIERS + (AHEAD ? 128 : 32);
constexpr int Q_BYTES = QUERIES * WIDTH * 2, KV_BYTES = KEYS * WIDTH * 2;
constexpr int MERGE_BYTES = SPLIT ? (WIDTH / 2 + 4) * 128 * 4 : 0;
constexpr int TURN_BARRIER = 1, MERGE_BARRIER = 3;

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int AT_K = Q_BYTES;
constexpr int AT_V = AT_K + STAGES * KV_BYTES;
constexpr int AT_O = AT_V + STAGES * KV_BYTES;
constexpr int AT_MERGE = AT_O + Q_BYTES;
constexpr int AT_BARRIERS = AT_MERGE + MERGE_BYTES;
static_assert(AT_BARRIERS + (4 * STAGES + 2) * 8 + 1024 == SHARED, "the host asks for as much");
static_assert(MASK == FULL || MASK == CAUSAL, "how many keys a query sees depends on sizes alone");

// The parameter.
struct Mapped {
    TensorMap q, k, v;
    Attention attention;
    u64 section;  // heads whose tiles are worked on together
    u64 filler;
};

// A tile of queries of one head.
struct Tile {
    int sequence, head, key_head, first, end;
    int count;  // tiles of keys that some query of it sees
};

static __device__ __forceinline__ int keys_seen(const Attention& p, int query) { return seen(p, last_key(p, 0), query); }

// The tile of a block in a round; one with a negative count where there is none for it. False after the last round.
static __device__ __forceinline__ bool find_tile(const Mapped& mapped, int round, Tile& tile) {
    const Attention& p = mapped.attention;
    const int heads = (int)p.batch * (int)p.heads, tiles = ((int)p.queries + QUERIES - 1) / QUERIES, grid = gridDim.x;
    if (round * grid >= heads * tiles) return false;
    const int index = round * grid + ((round & 1) ? grid - 1 - (int)blockIdx.x : (int)blockIdx.x);
    if (index >= heads * tiles) {
        tile.count = -1;
        return true;
    }
    const int section = (int)mapped.section, first_head = index / (section * tiles) * section, rest = index - first_head * tiles;
    const int together = min(section, heads - first_head), head = first_head + rest % together;
    tile.sequence = head / (int)p.heads;
    tile.head = head % (int)p.heads;
    tile.key_head = tile.head / (int)p.group;
    tile.first = (tiles - 1 - rest / together) * QUERIES;
    tile.end = min(tile.first + QUERIES, (int)p.queries);
    tile.count = (keys_seen(p, tile.end - 1) + KEYS - 1) / KEYS;
    return true;
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
            init_barrier(k_full(stage), 1);
            init_barrier(v_full(stage), 1);
            init_barrier(k_empty(stage), users);
            init_barrier(v_empty(stage), users);
        }
        init_barrier(q_full(), 1);
        init_barrier(q_empty(), 8);
        fence_barriers();
    }
};

// ---- the thread that fetches

static __device__ __forceinline__ void fetch_tiles(const Mapped& p, Rings rings) {
    u32 at = 0;  // tiles of keys so far
    u32 queries = 0;
    Tile tile;
    for (int round = 0; find_tile(p, round, tile); ++round) {
        if (tile.count <= 0) continue;
        wait(rings.q_empty(), (queries & 1) ^ 1);
        ++queries;
        expect(rings.q_full(), Q_BYTES);
        fetch<PIECES>(rings.base, &p.q, rings.q_full(), tile.first, tile.head, tile.sequence);
        // Keys one tile ahead of values, as they are used.
        for (int i = 0; i <= tile.count; ++i) {
            if (i < tile.count) {
                const u32 now = at + i;
                wait(rings.k_empty(now), Rings::parity(now) ^ 1);
                expect(rings.k_full(now), KV_BYTES);
                fetch<PIECES>(rings.k(now), &p.k, rings.k_full(now), (tile.count - 1 - i) * KEYS, tile.key_head, tile.sequence);
            }
            if (i > 0) {
                const u32 now = at + i - 1;
                wait(rings.v_empty(now), Rings::parity(now) ^ 1);
                expect(rings.v_full(now), KV_BYTES);
                fetch<PIECES>(rings.v(now), &p.v, rings.v_full(now), (tile.count - i) * KEYS, tile.key_head, tile.sequence);
            }
        }
        at += tile.count;
    }
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
    if ((threadIdx.x & 31) == 0) arrive(barrier);
}

// Warpgroups take turns at issuing products.
static __device__ __forceinline__ void begin_turn(int warpgroup) {
    if constexpr (TURNS) named_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
}
static __device__ __forceinline__ void end_turn(int warpgroup) {
    if constexpr (TURNS) named_arrive(TURN_BARRIER + 1 - warpgroup, MULTIPLIERS);
}

// The scores of a tile of keys, on their way.
static __device__ __forceinline__ void issue_scores(float (&r_s)[KEYS / 2], const u32 (&r_q)[WIDTH / 16][4], const Place& in,
                                                    int i) {
    const u32 now = in.at + i;
    wait(in.rings.k_full(now), Rings::parity(now));
    const u64 q = descriptor<16>(in.s_q), k = descriptor<16>(in.rings.k(now));
    fence_products();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const u64 right = k + (step / 4 * KEYS * 128 + step % 4 * 32) / 16;
        if constexpr (HELD) {
            Product<KEYS>::template of_registers<0>(r_s, r_q[step], right, step > 0);
        } else {
            Product<KEYS>::of_shared(r_s, q + (step / 4 * QUERIES * 128 + step % 4 * 32) / 16, right, step > 0);
        }
    }
    commit_products();
}

// The result's share of a tile of values, on its way.
static __device__ __forceinline__ void issue_values(float (&r_o)[WIDTH / 2], const u32 (&r_p)[KEYS / 16][4], const Place& in,
                                                    int i) {
    const u32 now = in.at + i;
    wait(in.rings.v_full(now), Rings::parity(now));
    const u64 v = descriptor<KEYS * 128>(in.rings.v(now));
    fence_products();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        Product<WIDTH>::template of_registers<1>(r_o, r_p[step], v + step * 16 * 128 / 16, 1);
    }
    commit_products();
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
        wait_products<0>();
        pin(r_s);
        release(in.rings.k_empty(in.at + i));
        if (soften(r, r_s, factor, in, i)) scale_result(r, factor);
        narrow_scores(r_p, r_s);
        issue_values(r.o, r_p, in, i);
        wait_products<0>();
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
    wait_products<0>();
    pin(r_s);
    release(in.rings.k_empty(in.at + i));
    soften(r, r_s, factor, in, i);
    narrow_scores(r_p, r_s);
    for (i += STEP; i < in.count; i += STEP) {
        begin_turn(in.warpgroup);
        issue_scores(r_s, r_q, in, i);
        issue_values(r.o, r_p, in, i - STEP);
        end_turn(in.warpgroup);
        wait_products<1>();
        pin(r_s);
        release(in.rings.k_empty(in.at + i));
        const bool grows = soften(r, r_s, factor, in, i);
        wait_products<0>();
        pin(r.o);
        pin(r_s);
        release(in.rings.v_empty(in.at + i - STEP));
        if (grows) scale_result(r, factor);
        narrow_scores(r_p, r_s);
    }
    issue_values(r.o, r_p, in, i - STEP);
    wait_products<0>();
    pin(r.o);
    release(in.rings.v_empty(in.at + i - STEP));
}

// Lets go of the first tiles, which later queries of the block see and no query of this warpgroup does, and says how many.
static __device__ __forceinline__ int skip_tiles(const Attention& p, const Place& in, int group_first, int end) {
    const int own = (keys_seen(p, min(group_first + 64, end) - 1) + KEYS - 1) / KEYS, skipped = min(in.count - own, STAGES - 1);
    // Only a tile that has come is let go: so no warp says twice that a place is free before the others have said it once.
    for (u32 at = in.at; at < in.at + skipped; ++at) {
        wait(in.rings.k_full(at), Rings::parity(at));
        release(in.rings.k_empty(at));
        wait(in.rings.v_full(at), Rings::parity(at));
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
        load_matrices(r_q[step], s_q + step / 4 * QUERIES * 128 + row * 128 + ((piece ^ (row & 7)) << 4));
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
    named_sync(MERGE_BARRIER, MULTIPLIERS);
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
    named_sync(MERGE_BARRIER, MULTIPLIERS);
}

// A warp's rows of the result, through its own part of shared memory, in whole pieces of 16 bytes.
static __device__ __forceinline__ void store_rows(const Attention& p, const Tile& tile, const State& r, char* s_o, int first) {
    float end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = r.sum[half];
        sum += neighbour(sum, 1);
        sum += neighbour(sum, 2);
        end[half] = ending(sum);
    }
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const float* o = r.o + 8 * step;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // A row without a key is zeros whatever was multiplied by 0.
            pairs[i] = end[i & 1] == 0.0f ? 0 : narrow2<STORAGE>(o[2 * i] * end[i & 1], o[2 * i + 1] * end[i & 1]);
        }
        stage_pairs<2048>(s_o, step, pairs);
    }
    __syncwarp();
    Element* g_o = p.g_o + start(p.o, tile.sequence, tile.head) + (u64)first * p.o.position;
    store_staged<2048>(s_o, g_o, p.o.position, tile.end - first);
    __syncwarp();
}

static __device__ __forceinline__ void attend_tiles(const Mapped& mapped, Rings rings, char* s_base) {
    const Attention& p = mapped.attention;
    const int lane = threadIdx.x & 31;
    // The same for all lanes, and known to be.
    const int all_warps = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = all_warps / 4, warp = all_warps % 4;
    const int part = SPLIT ? 0 : warpgroup;  // of the queries
    // The first warpgroup has the first turn.
    if (warpgroup == 1) end_turn(warpgroup);
    u32 at = 0, queries = 0;
    Tile tile;
    for (int round = 0; find_tile(mapped, round, tile); ++round) {
        if (tile.count < 0) continue;
        State r;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) r.o[i] = 0.0f;
        r.maximum[0] = r.maximum[1] = never();
        r.sum[0] = r.sum[1] = 0.0f;
        if (tile.count > 0) {
            const int first = tile.first + part * 64, row = first + warp * 16 + lane / 4, column = lane % 4 * 2;
            const Place in = {rings, at, tile.count, warpgroup, rings.base + part * 64 * 128,
                              keys_seen(p, first), keys_seen(p, row) - column, keys_seen(p, row + 8) - column};
            int i = SPLIT ? warpgroup : 0;
            // Else warpgroups have turns or tiles one by one, and a tile has as many keys as there are queries: none to skip.
            if constexpr (MASK == CAUSAL && !AHEAD) {
                if (first < tile.end) i = skip_tiles(p, in, first, tile.end);
            }
            wait(rings.q_full(), queries & 1);
            ++queries;
            u32 r_q[WIDTH / 16][4];
            if constexpr (HELD) load_queries(r_q, s_base + part * 64 * 128, warp, lane);
            if constexpr (AHEAD) {
                attend_ahead(r, r_q, in, i);
            } else {
                attend_in_order(r, r_q, in, i);
            }
            release(rings.q_empty());
            at += tile.count;
        }
        if constexpr (SPLIT) merge(r, (float*)(s_base + AT_MERGE), warpgroup);
        // Found anew: until now nothing of it has to be in registers.
        int same = round;
        asm volatile("" : "+r"(same));
        find_tile(mapped, same, tile);
        char* s_o = s_base + AT_O + (part * 4 + warp) * 16 * WIDTH * 2;
        if (!SPLIT || warpgroup == 0) store_rows(p, tile, r, s_o, tile.first + part * 64 + warp * 16);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_hopper(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const Rings rings = {shared_address(s_base)};
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        if constexpr (AHEAD) give_registers<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_tiles(p, rings);
    } else {
        if constexpr (AHEAD) take_registers<240>();
        attend_tiles(p, rings, s_base);
    }
}
