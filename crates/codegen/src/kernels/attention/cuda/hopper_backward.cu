// The gradient of attention on Hopper's matrix units: two warpgroups multiply, a warp beside them fetches tiles ahead of them.
//
// - Numbers: products and sums in f32. Probabilities and slopes of scores are rounded to the storage type for the products
//   that they are the left operand of; nothing else is rounded before the result.
// - `backward_queries`: a block owns 128 queries and goes over the keys twice: statistics of its rows, which it leaves for the other
//   kernel, then dq. `backward_keys`: a block owns 128 keys and goes over the queries that see them once: dk and dv. There
//   keys are the rows of scores, so that in both kernels what is weighted with is the left operand of the next product as it lies.
// - What a block owns lies in shared memory, 64 rows for each warpgroup; tiles of 64 rows of the other side come through a ring.
//   Every place of it has a barrier that says full, which the copy's last byte ends, and one that says empty.
// - Products of the next tile are issued behind those of this one, and run while slopes are computed; besides, one warpgroup's
//   arithmetic is beside the other's products.
// - A grid of as many blocks as run at once goes over all tiles forth and back, those with most to do first.
// - Needs sm_90a, a full or causal mask, no dropout, WIDTH 64 or 128, rows that start at multiples of 16 bytes, SCALE >= 1e-30.
//   If causal, keys less queries are a multiple of 64.
//
// STAGES (of the ring) and SHARED (bytes) are constants that stand before this file.

constexpr float FACTOR = SCALE * LOG2E;
constexpr int OWN = 128;   // rows of a block
constexpr int TILE = 64;   // rows of the other side at a time
constexpr int PIECES = WIDTH / 64;
constexpr int MULTIPLIERS = 256;
constexpr int THREADS = MULTIPLIERS + 128;  // only whole warpgroups give registers away
constexpr int OWN_BYTES = OWN * WIDTH * 2, TILE_BYTES = TILE * WIDTH * 2, ROWS_BYTES = TILE * 8;
// Two wide results leave no registers for the weights of products that are still on their way.
constexpr bool TIGHT = WIDTH > 64;
constexpr int GROUP_BARRIER = 1;  // of a warpgroup, and the next number of the other

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int AT_RING = 2 * OWN_BYTES;
constexpr int AT_ROWS = AT_RING + STAGES * 2 * TILE_BYTES;
constexpr int AT_BARRIERS = AT_ROWS + STAGES * ROWS_BYTES;
static_assert(AT_BARRIERS + (2 * STAGES + 2) * 8 + 1024 == SHARED, "the host asks for as much");
static_assert(MASK == FULL || MASK == CAUSAL, "how many keys a query sees depends on sizes alone");

// The parameter. Maps of queries and of the gradient that comes in, of keys and of values, have tiles of 128 rows where a block
// owns them and of 64 where it does not. Statistics of a head start at multiples of 128 rows.
struct Mapped {
    TensorMap q, slope, k, v;
    Backward backward;
    u64 section;  // heads whose tiles are worked on together
    u64 filler[13];
};

// What a block owns, and which tiles of the other side it needs.
struct Work {
    int sequence, head, first;
    int begin, count;  // first row of the other side, and tiles from there on
};

// The rows of a block in a round, the `rank`-th of their head by how much there is to do; none where `head` is negative. False after
// the last round.
static __device__ __forceinline__ bool find_work(const Mapped& p, int positions, int round, Work& work, int& rank) {
    const int heads = (int)p.backward.of.batch * (int)p.backward.of.heads, tiles = (positions + OWN - 1) / OWN, grid = gridDim.x;
    if (round * grid >= heads * tiles) return false;
    const int index = round * grid + ((round & 1) ? grid - 1 - (int)blockIdx.x : (int)blockIdx.x);
    work.head = -1;
    if (index >= heads * tiles) return true;
    const int section = (int)p.section, first_head = index / (section * tiles) * section, rest = index - first_head * tiles;
    const int together = min(section, heads - first_head), head = first_head + rest % together;
    work.sequence = head / (int)p.backward.of.heads;
    work.head = head % (int)p.backward.of.heads;
    rank = rest / together;
    return true;
}

static __device__ __forceinline__ int keys_seen(const Attention& p, int query) { return seen(p, last_key(p, 0), query); }

// Later queries see more.
static __device__ __forceinline__ bool find_queries(const Mapped& p, int round, Work& work) {
    const Attention& of = p.backward.of;
    int rank;
    if (!find_work(p, (int)of.queries, round, work, rank)) return false;
    work.first = (((int)of.queries + OWN - 1) / OWN - 1 - rank) * OWN;
    work.begin = 0;
    work.count = (keys_seen(of, min(work.first + OWN, (int)of.queries) - 1) + TILE - 1) / TILE;
    return true;
}

// Earlier keys are seen by more.
static __device__ __forceinline__ bool find_keys(const Mapped& p, int round, Work& work) {
    const Attention& of = p.backward.of;
    int rank;
    if (!find_work(p, (int)of.keys, round, work, rank)) return false;
    work.first = rank * OWN;
    work.begin = first_query(of, last_key(of, 0), work.first);
    work.count = ((int)of.queries - work.begin + TILE - 1) / TILE;
    return true;
}

// Shared memory and its barriers. Tiles are counted over all rounds: tile `at` has place at % STAGES.
struct Ring {
    u32 base;
    __device__ __forceinline__ u32 own(int which) const { return base + which * OWN_BYTES; }
    __device__ __forceinline__ u32 tile(u32 at, int which) const { return base + AT_RING + (at % STAGES * 2 + which) * TILE_BYTES; }
    __device__ __forceinline__ u32 rows(u32 at) const { return base + AT_ROWS + at % STAGES * ROWS_BYTES; }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + AT_BARRIERS + index * 8; }
    __device__ __forceinline__ u32 full(u32 at) const { return barrier(at % STAGES); }
    __device__ __forceinline__ u32 empty(u32 at) const { return barrier(STAGES + at % STAGES); }
    __device__ __forceinline__ u32 own_full() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 own_empty() const { return barrier(2 * STAGES + 1); }
    static __device__ __forceinline__ u32 parity(u32 at) { return at / STAGES & 1; }

    __device__ __forceinline__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), MULTIPLIERS / 32);
        }
        init_barrier(own_full(), 1);
        init_barrier(own_empty(), MULTIPLIERS / 32);
        fence_barriers();
    }
    __device__ __forceinline__ void wait_full(u32 at) const { wait(full(at), parity(at)); }
    // A warp is done with a tile, which has come.
    __device__ __forceinline__ void release(u32 at) const {
        if ((threadIdx.x & 31) == 0) arrive(empty(at));
    }
};

// ---- the thread that fetches

static __device__ __forceinline__ void fetch_own(Ring ring, const TensorMap* one, const TensorMap* other, const Work& work, u32 turn) {
    wait(ring.own_empty(), (turn & 1) ^ 1);
    expect(ring.own_full(), 2 * OWN_BYTES);
    fetch<PIECES>(ring.own(0), one, ring.own_full(), work.first, work.head, work.sequence);
    fetch<PIECES>(ring.own(1), other, ring.own_full(), work.first, work.head, work.sequence);
}

static __device__ __forceinline__ void fetch_for_queries(const Mapped& p, Ring ring) {
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_queries(p, round, work); ++round) {
        if (work.head < 0) continue;
        fetch_own(ring, &p.q, &p.slope, work, turn++);
        // Twice over the keys.
        for (int i = 0; i < 2 * work.count; ++i, ++at) {
            const int row = (i < work.count ? i : i - work.count) * TILE;
            wait(ring.empty(at), Ring::parity(at) ^ 1);
            expect(ring.full(at), 2 * TILE_BYTES);
            fetch<PIECES>(ring.tile(at, 0), &p.k, ring.full(at), row, work.head, work.sequence);
            fetch<PIECES>(ring.tile(at, 1), &p.v, ring.full(at), row, work.head, work.sequence);
        }
    }
}

// Statistics of a head have room for whole blocks of queries.
static __device__ __forceinline__ float2* rows_of(const Mapped& p, const Work& work) {
    const Attention& of = p.backward.of;
    return p.backward.g_rows + (work.sequence * of.heads + work.head) * ((of.queries + OWN - 1) / OWN * OWN);
}

static __device__ __forceinline__ void fetch_for_keys(const Mapped& p, Ring ring) {
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_keys(p, round, work); ++round) {
        if (work.head < 0) continue;
        fetch_own(ring, &p.k, &p.v, work, turn++);
        for (int i = 0; i < work.count; ++i, ++at) {
            const int row = work.begin + i * TILE;
            wait(ring.empty(at), Ring::parity(at) ^ 1);
            expect(ring.full(at), 2 * TILE_BYTES + ROWS_BYTES);
            fetch<PIECES>(ring.tile(at, 0), &p.q, ring.full(at), row, work.head, work.sequence);
            fetch<PIECES>(ring.tile(at, 1), &p.slope, ring.full(at), row, work.head, work.sequence);
            fetch_bytes(ring.rows(at), rows_of(p, work) + row, ROWS_BYTES, ring.full(at));
        }
    }
}

// ---- the warpgroups that multiply

// Of a thread: two rows eight apart, as a product leaves them.
typedef float Scores[TILE / 2];
typedef float Result[WIDTH / 2];
typedef u32 Weights[TILE / 16][4];

// Where a thread is.
struct Thread {
    int group, warp, lane;
    u32 own[2];     // what its warpgroup owns
    int row, column;  // of what a product leaves: the first
};

static __device__ __forceinline__ Thread find_thread(Ring ring) {
    // The same for all lanes, and known to be.
    const int warps = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rows = warps / 4 * 64 * 128;
    return {warps / 4, warps % 4, lane, {ring.own(0) + rows, ring.own(1) + rows}, warps * 16 + lane / 4, lane % 4 * 2};
}

// Scores, and slopes of probabilities, of a tile, on their way: two groups of products.
static __device__ __forceinline__ void issue(Scores& r_s, Scores& r_slope, Ring ring, const Thread& thread, u32 at) {
    ring.wait_full(at);
    fence_products();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const u64 left = descriptor<16>(thread.own[which]), right = descriptor<16>(ring.tile(at, which));
#pragma unroll
        for (int step = 0; step < WIDTH / 16; ++step) {
            const int inside = step % 4 * 32;
            Product<TILE>::of_shared(which ? r_slope : r_s, left + (step / 4 * OWN * 128 + inside) / 16,
                                     right + (step / 4 * TILE * 128 + inside) / 16, step > 0);
        }
        commit_products();
    }
}

// All but the slopes issued last is there. The compiler sees that it is only where this stands in the same turn of a loop as what is
// waited for; else products wait for each other.
static __device__ __forceinline__ void wait_scores(Scores& r_s) {
    wait_products<1>();
    pin(r_s);
}

// sum += weights tile, on its way.
static __device__ __forceinline__ void issue_weighted(Result& r_sum, const Weights& r_weights, u32 s_tile) {
    const u64 right = descriptor<TILE * 128>(s_tile);
    fence_products();
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
        Product<WIDTH>::template of_registers<1>(r_sum, r_weights[step], right + step * 16 * 128 / 16, 1);
    }
    commit_products();
}

static __device__ __forceinline__ void narrow_weights(Weights& r_weights, const Scores& r) {
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r_weights[step][i] = narrow2<STORAGE>(r[8 * step + 2 * i], r[8 * step + 2 * i + 1]);
    }
    pin(r_weights);
}

static __device__ __forceinline__ void clear(Result& r) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) r[i] = 0.0f;
}

// A warp's rows of a gradient, through the rows of shared memory that it owned.
static __device__ __forceinline__ void store_gradient(Ring ring, char* s_base, const Thread& thread, int which, Element* g_to, int first,
                                                      int positions, const Result& r, float factor) {
    char* s_rows = s_base + which * OWN_BYTES + (thread.group * 64 + thread.warp * 16) * 128;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const float* of = r + 8 * step;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = narrow2<STORAGE>(of[2 * i] * factor, of[2 * i + 1] * factor);
        stage_pairs<OWN * 128>(s_rows, step, pairs);
    }
    __syncwarp();
    const int row = first + thread.group * 64 + thread.warp * 16;
    store_staged<OWN * 128>(s_rows, g_to + (u64)row * WIDTH, WIDTH, positions - row);
}

// What was owned is not needed any more, and neither are the rows stored through it.
static __device__ __forceinline__ void release_own(Ring ring, const Thread& thread) {
    fence_copies();
    __syncwarp();
    if (thread.lane == 0) arrive(ring.own_empty());
}

// Hides keys from `end` on, of each of the two rows. `end` counts from this thread's first key.
static __device__ __forceinline__ void hide_keys(Scores& r_s, int end0, int end1) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * j + e >= end0) r_s[4 * j + e] = never();
            if (8 * j + e >= end1) r_s[4 * j + 2 + e] = never();
        }
    }
}

// Scores and slopes of a tile join the statistics.
static __device__ __forceinline__ void count(Statistics (&r)[2], const Scores& r_s, const Scores& r_slope) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = never();
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) most = fmaxf(most, fmaxf(r_s[4 * j + 2 * half], r_s[4 * j + 2 * half + 1]));
        raise(r[half], most * FACTOR);
        const float shift = shift_of(r[half].maximum);
        float sums[2] = {}, slopes[2] = {};
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int i = 4 * j + 2 * half + e;
                const float power = ex2(fmaf(r_s[i], FACTOR, -shift));
                sums[e] += power;
                slopes[e] = fmaf(power, r_slope[i], slopes[e]);
            }
        }
        r[half].sum += sums[0] + sums[1];
        r[half].slope += slopes[0] + slopes[1];
    }
}

// Keys of the tiles of a pass that a thread's queries see.
struct Seen {
    int tiles;             // that some query of the warpgroup sees
    int whole, end0, end1;  // keys that all of them see; that this thread's rows see, counted from its first column

    __device__ __forceinline__ void hide(Scores& r_s, int i) const {
        const int key = i * TILE;
        if (key + TILE > whole) hide_keys(r_s, end0 - key, end1 - key);
    }
};

// The first pass: statistics of the rows.
static __device__ __forceinline__ void count_tiles(Statistics (&r)[2], Ring ring, const Thread& thread, const Seen& sight, u32 at) {
    Scores r_s, r_slope;
#pragma unroll 1
    for (int i = 0; i < sight.tiles; ++i) {
        issue(r_s, r_slope, ring, thread, at + i);
        wait_products<0>();
        pin(r_s);
        pin(r_slope);
        ring.release(at + i);
        sight.hide(r_s, i);
        count(r, r_s, r_slope);
    }
}

// Slopes of the scores of a tile as weights; the scores are there.
static __device__ __forceinline__ void make_weights(Weights& r_weights, Scores& r_s, Scores& r_slope, const float2 (&rows)[2], const Seen& sight, int i) {
    sight.hide(r_s, i);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) r_s[j] = ex2(fmaf(r_s[j], FACTOR, -rows[j / 2 & 1].x));
    wait_products<0>();
    pin(r_slope);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) r_s[j] = slope_of(r_s[j], r_slope[j], rows[j / 2 & 1].y);
    narrow_weights(r_weights, r_s);
}

// The second pass: dq, but for the scale.
static __device__ __forceinline__ void add_dq(Result& r_dq, const float2 (&rows)[2], Ring ring, const Thread& thread, const Seen& sight, u32 at) {
    Scores r_s, r_slope;
    Weights r_weights;
    if (sight.tiles == 0) return;
    issue(r_s, r_slope, ring, thread, at);
    wait_scores(r_s);
    const int last = sight.tiles - 1;
#pragma unroll 1
    for (int i = 0; i < last; ++i) {
        make_weights(r_weights, r_s, r_slope, rows, sight, i);
        issue_weighted(r_dq, r_weights, ring.tile(at + i, 0));
        issue(r_s, r_slope, ring, thread, at + i + 1);
        wait_scores(r_s);
        pin(r_dq);
        ring.release(at + i);
    }
    make_weights(r_weights, r_s, r_slope, rows, sight, last);
    issue_weighted(r_dq, r_weights, ring.tile(at + last, 0));
    wait_products<0>();
    pin(r_dq);
    ring.release(at + last);
}

// Tiles that others of the block see.
static __device__ __forceinline__ void skip_tiles(Ring ring, u32 begin, u32 end) {
    for (u32 at = begin; at != end; ++at) {
        // Only a tile that has come is let go: so no warp says twice that a place is free before the others have said it once.
        ring.wait_full(at);
        ring.release(at);
    }
}

static __device__ __forceinline__ void work_on_queries(const Mapped& p, Ring ring, char* s_base) {
    const Attention& of = p.backward.of;
    const Thread thread = find_thread(ring);
    const int queries = (int)of.queries;
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_queries(p, round, work); ++round) {
        if (work.head < 0) continue;
        const int first = work.first + thread.group * 64, row = work.first + thread.row;
        const int last = min(first + 64, queries) - 1;
        const Seen sight = {first < queries ? (keys_seen(of, last) + TILE - 1) / TILE : 0, keys_seen(of, first),
                            keys_seen(of, row) - thread.column, keys_seen(of, row + 8) - thread.column};
        wait(ring.own_full(), turn++ & 1);
        Statistics r[2];
        clear(r[0]);
        clear(r[1]);
        count_tiles(r, ring, thread, sight, at);
        skip_tiles(ring, at + sight.tiles, at + work.count);
        at += work.count;
        float2 rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows[half] = finish<4>(r[half]);
            // Zeros beyond the last query: its slopes are zeros too, so nothing is added.
            const bool exists = row + half * 8 < queries;
            if (thread.column == 0) rows_of(p, work)[row + half * 8] = exists ? rows[half] : make_float2(0.0f, 0.0f);
        }
        Result r_dq;
        clear(r_dq);
        add_dq(r_dq, rows, ring, thread, sight, at);
        skip_tiles(ring, at + sight.tiles, at + work.count);
        at += work.count;
        named_sync(GROUP_BARRIER + thread.group, 128);
        Element* g_dq = p.backward.g_dq + (work.sequence * of.heads + work.head) * of.queries * WIDTH;
        store_gradient(ring, s_base, thread, 0, g_dq, work.first, queries, r_dq, SCALE);
        release_own(ring, thread);
    }
}

// Probabilities of a tile, keys in rows; `hidden` is how many of the tile's queries, counted from this thread's first column, do not
// see its first row.
template <bool HIDES>
static __device__ __forceinline__ void make_probabilities(Scores& r_s, const float4* s_rows, int hidden) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
        const float4 rows = s_rows[4 * j];  // of two queries
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& s = r_s[4 * j + e];
            s = ex2(fmaf(s, FACTOR, e % 2 ? -rows.z : -rows.x));
            if (HIDES && 8 * j + e % 2 < hidden + e / 2 * 8) s = 0.0f;
        }
    }
}

static __device__ __forceinline__ void make_slopes(Scores& r_slope, const Scores& r_s, const float4* s_rows) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
        const float4 rows = s_rows[4 * j];
#pragma unroll
        for (int e = 0; e < 4; ++e) r_slope[4 * j + e] = slope_of(r_s[4 * j + e], r_slope[4 * j + e], e % 2 ? rows.w : rows.y);
    }
}

// The queries that a warpgroup goes over: tiles from `begin` to `end`, of which those before `whole` do not see all its keys.
struct Facing {
    u32 begin, end, whole;
    int hidden;  // for the first of them
};

// What the scores of a tile weight joins dk and dv, on its way; the scores are there.
static __device__ __forceinline__ void weight_tile(Result& r_dk, Result& r_dv, Scores& r_s, Scores& r_slope, Weights& r_p, Weights& r_ds, Ring ring,
                                                   const float4* s_all_rows, const Facing& facing, u32 at) {
    const float4* s_rows = s_all_rows + at % STAGES * (ROWS_BYTES / 16);
    if ((int)(facing.whole - at) > 0) {
        make_probabilities<true>(r_s, s_rows, facing.hidden - (int)(at - facing.begin) * TILE);
    } else {
        make_probabilities<false>(r_s, s_rows, 0);
    }
    narrow_weights(r_p, r_s);
    wait_products<0>();
    pin(r_slope);
    issue_weighted(r_dv, r_p, ring.tile(at, 1));
    if constexpr (TIGHT) {
        wait_products<0>();
        pin(r_dv);
    }
    make_slopes(r_slope, r_s, s_rows);
    narrow_weights(r_ds, r_slope);
    issue_weighted(r_dk, r_ds, ring.tile(at, 0));
}

// dk, but for the scale, and dv.
static __device__ __forceinline__ void add_dk_dv(Result& r_dk, Result& r_dv, Ring ring, const float4* s_all_rows, const Thread& thread,
                                                 const Facing& facing) {
    Scores r_s, r_slope;
    Weights r_p, r_ds;
    if (facing.begin == facing.end) return;
    issue(r_s, r_slope, ring, thread, facing.begin);
    wait_scores(r_s);
    const u32 last = facing.end - 1;
#pragma unroll 1
    for (u32 at = facing.begin; at != last; ++at) {
        weight_tile(r_dk, r_dv, r_s, r_slope, r_p, r_ds, ring, s_all_rows, facing, at);
        issue(r_s, r_slope, ring, thread, at + 1);
        wait_scores(r_s);
        pin(r_dk);
        pin(r_dv);
        ring.release(at);
    }
    weight_tile(r_dk, r_dv, r_s, r_slope, r_p, r_ds, ring, s_all_rows, facing, last);
    wait_products<0>();
    pin(r_dk);
    pin(r_dv);
    ring.release(last);
}

static __device__ __forceinline__ void work_on_keys(const Mapped& p, Ring ring, char* s_base) {
    const Attention& of = p.backward.of;
    const Thread thread = find_thread(ring);
    const int keys = (int)of.keys;
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_keys(p, round, work); ++round) {
        if (work.head < 0) continue;
        const int last = (int)last_key(of, 0), first = work.first + thread.group * 64;
        // Queries that see the first and the last key of the warpgroup; the number of those that do not see a thread's first row.
        const int begin = min(first_query(of, last, first), (int)of.queries), whole = first_query(of, last, first + 63);
        const int skipped = min((begin - work.begin + TILE - 1) / TILE, work.count), tiles = first < keys ? work.count : skipped;
        const int hidden = MASK == CAUSAL ? work.first + thread.row - last - (work.begin + skipped * TILE) - thread.column : 0;
        wait(ring.own_full(), turn++ & 1);
        skip_tiles(ring, at, at + skipped);
        Result r_dk, r_dv;
        clear(r_dk);
        clear(r_dv);
        const Facing facing = {at + skipped, at + tiles, at + (whole - work.begin + TILE - 1) / TILE, hidden};
        add_dk_dv(r_dk, r_dv, ring, (const float4*)(s_base + AT_ROWS) + thread.column / 2, thread, facing);
        skip_tiles(ring, at + tiles, at + work.count);
        at += work.count;
        named_sync(GROUP_BARRIER + thread.group, 128);
        const u64 rows = (work.sequence * of.heads + work.head) * of.keys * WIDTH;
        store_gradient(ring, s_base, thread, 0, p.backward.g_dk + rows, work.first, keys, r_dk, SCALE);
        store_gradient(ring, s_base, thread, 1, p.backward.g_dv + rows, work.first, keys, r_dv, 1.0f);
        release_own(ring, thread);
    }
}

// The ring of a block, with its barriers made.
static __device__ __forceinline__ Ring make_ring(char* s_base) {
    const Ring ring = {shared_address(s_base)};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    return ring;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_queries(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const Ring ring = make_ring(s_base);
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_for_queries(p, ring);
    } else {
        take_registers<240>();
        work_on_queries(p, ring, s_base);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const Ring ring = make_ring(s_base);
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_for_keys(p, ring);
    } else {
        take_registers<240>();
        work_on_keys(p, ring, s_base);
    }
}
