// What the two kernels of attention's gradient on Hopper's matrix units share: two warpgroups multiply, a warp beside them fetches tiles
// ahead of them.
//
// - Numbers: products and sums in f32. Probabilities and slopes of scores are rounded to the storage type for the products
//   that they are the left operand of; nothing else is rounded before the result.
// - `hopper_dq.cu`: a block owns 128 queries and goes over the keys: statistics of its rows, which it leaves for the other kernel, and
//   dq. `hopper_dkv.cu`: a block owns 128 keys (64 of wide heads) and goes over the queries that see them: dk and dv. There keys are the rows of
//   scores, so that in both kernels what is weighted with is the left operand of the next product as it lies.
// - Heads that share keys: the keys of a block meet the queries of all heads of their group, one head after the other, and dk and dv are
//   the sums over the group. So they never leave registers before they are whole, and the order of every sum is fixed.
// - What a block owns lies in shared memory; tiles of 64 rows of the other side come through a ring.
//   Every place of it has a barrier that says full, which the copy's last byte ends, and one that says empty.
// - Products of the next tile are issued behind those of this one, and run while slopes are computed; besides, one warpgroup's
//   arithmetic is beside the other's products.
// - Heads of up to 128: a warpgroup has 64 of the rows that its block owns.
// - Wider heads: a ring has room for one to three tiles of each tensor, so the two tensors have places and barriers of their own, and one is
//   free for the next as soon as its product is over. `hopper_dkv_wide.cu` says how dk and dv of 64 keys fit in registers.
// - A grid of as many blocks as run at once goes over all tiles forth and back, those with most to do first.
// - Needs sm_90a, a full or causal mask, no dropout, WIDTH a multiple of 16 up to 256, rows that start at multiples of 16 bytes, SCALE >= 1e-30.
//   If causal, keys less queries are a multiple of 64.
// - Takes, of NVRTC 13.4, in both kernels: 168 registers (240 for those who multiply, 24 for the others; for dk and dv of wide heads 232 and
//   40), 12 of 64 warps; 134,224 bytes of shared memory for heads of up to 64, 199,760 for those of up to 128, at most 232,080 for wider ones. No spills.
//
// Of the ring of `backward_queries` KEY_STAGES and VALUE_STAGES, of that of `backward_keys` QUERY_STAGES and SLOPE_STAGES (tiles of each tensor),
// QUERIES_SHARED and KEYS_SHARED (bytes) are constants that stand before this file.

constexpr float FACTOR = SCALE * LOG2E;
constexpr bool WIDE = WIDTH > 128;
constexpr int OWN_QUERIES = 128, OWN_KEYS = WIDE ? 64 : 128;  // rows of a block
constexpr int TILE = 64;   // rows of the other side at a time
constexpr int MULTIPLIERS = 256;
constexpr int THREADS = MULTIPLIERS + 128;  // only whole warpgroups give registers away
constexpr int TILE_BYTES = TILE * PADDED * 2, ROWS_BYTES = TILE * 8;
constexpr int STEPS = WIDTH / 16;  // of a product along a row
// Columns of a result: there are instructions for wide ones of 192 and 256, and zeros beyond the width.
constexpr int COLUMNS = WIDE ? PADDED : WIDTH;
// How many steps of the two tensors that a warpgroup owns stay in registers, as far as there are any left. Where all do, their place in shared memory is
// free for the next ones at once, and results go out through a place of their own; else through that of what was owned.
constexpr int QUERIES_HELD = STEPS * (WIDTH <= 64 ? 2 : WIDTH <= 80 ? 0 : WIDTH <= 128 ? 2 : WIDTH <= 192 ? 1 : 0), KEYS_HELD = STEPS * (WIDTH <= 64 ? 2 : WIDTH <= 80 ? 1 : 0);
// The pass for statistics alone has no result in registers.
constexpr int COUNTED_HELD = WIDE ? 2 * STEPS : QUERIES_HELD;
constexpr bool FREED = KEYS_HELD == 2 * STEPS;
constexpr int GROUP_BARRIER = 1;  // of a warpgroup, and the next number of the other

static_assert(MASK == FULL || MASK == CAUSAL, "how many keys a query sees depends on sizes alone");

// The parameter. Maps of queries and of the gradient that comes in, of keys and of values, have tiles of as many rows as a block
// owns where it does, and of 64 where it does not. Statistics of a head start at multiples of 128 rows.
struct Mapped {
    TensorMap q, slope, k, v;
    Backward backward;
    u64 section;  // heads whose tiles are worked on together: of queries or of keys, as the kernel's blocks own them
    u64 filler[4];
};

// What a block owns, and which tiles of the other side it needs: of keys those of one head, of queries those of each head of the group.
struct Work {
    int sequence, head, first;  // the head of what it owns
    int begin, count;  // first row of the other side, and tiles from there on
};

// The rows of a block in a round, of one of `each` heads of a sequence, the `rank`-th of their head by how much there is to do; none where
// `head` is negative, which only the last round has. False after it.
template <int OWN>
static __device__ __forceinline__ bool find_work(const Mapped& p, int each, int positions, int round, Work& work, int& rank) {
    const int heads = (int)p.backward.of.batch * each, tiles = (positions + OWN - 1) / OWN, grid = gridDim.x;
    if (round * grid >= heads * tiles) return false;
    const int index = round * grid + ((round & 1) ? grid - 1 - (int)blockIdx.x : (int)blockIdx.x);
    work.head = -1;
    if (index >= heads * tiles) return true;
    const int section = (int)p.section, first_head = index / (section * tiles) * section, rest = index - first_head * tiles;
    const int together = min(section, heads - first_head), head = first_head + rest % together;
    work.sequence = head / each;
    work.head = head % each;
    rank = rest / together;
    return true;
}

static __device__ __forceinline__ int keys_seen(const Attention& p, int query) { return seen(p, last_key(p, 0), query); }

// Shared memory of a block and its barriers, from a multiple of 1024 bytes on, as the swizzle wants it: ROWS rows of the two tensors that it owns, FIRST and
// SECOND tiles of the other side's, results, statistics that come with tiles, MORE bytes of the kernel's own. Tiles are counted over all
// rounds: the first tensor of tile `at` has place at % FIRST. Both of a tile have one barrier unless heads are wide: that of the first, which
// is let go last.
template <int ROWS, int FIRST, int SECOND, int MORE> struct Ring {
    static constexpr int OWN = ROWS, OWN_BYTES = ROWS * PADDED * 2;
    static constexpr int AT_RING = 2 * OWN_BYTES, AT_RING_END = AT_RING + (FIRST + SECOND) * TILE_BYTES;
    static constexpr int AT_RESULTS = FREED ? AT_RING_END : 0;
    static constexpr int AT_ROWS = AT_RING_END + (FREED ? 2 * OWN_BYTES : 0);
    static constexpr int AT_MORE = AT_ROWS + FIRST * ROWS_BYTES;
    static constexpr int AT_BARRIERS = AT_MORE + MORE;
    static constexpr int STAGES = WIDE ? FIRST + SECOND : FIRST;
    static constexpr int BYTES = AT_BARRIERS + (2 * STAGES + 2) * 8 + 1024;
    static_assert(WIDE || FIRST == SECOND, "one barrier is for both");

    u32 base;
    __device__ __forceinline__ u32 own(int which) const { return base + which * OWN_BYTES; }
    static __device__ __forceinline__ u32 place(u32 at, int which) { return which ? FIRST + at % SECOND : at % FIRST; }
    __device__ __forceinline__ u32 tile(u32 at, int which) const { return base + AT_RING + place(at, which) * TILE_BYTES; }
    static __device__ __forceinline__ u32 at_rows(u32 at) { return AT_ROWS + at % FIRST * ROWS_BYTES; }
    __device__ __forceinline__ u32 rows(u32 at) const { return base + at_rows(at); }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + AT_BARRIERS + index * 8; }
    __device__ __forceinline__ u32 full(u32 at, int which) const { return barrier(place(at, WIDE ? which : 0)); }
    __device__ __forceinline__ u32 empty(u32 at, int which) const { return barrier(STAGES + place(at, WIDE ? which : 0)); }
    __device__ __forceinline__ u32 own_full() const { return barrier(2 * STAGES); }
    __device__ __forceinline__ u32 own_empty() const { return barrier(2 * STAGES + 1); }
    static __device__ __forceinline__ u32 parity(u32 at, int which) { return at / (which ? SECOND : FIRST) & 1; }

    __device__ __forceinline__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(barrier(stage), 1);
            mbarrier_init(barrier(STAGES + stage), MULTIPLIERS / 32);
        }
        mbarrier_init(own_full(), 1);
        mbarrier_init(own_empty(), MULTIPLIERS / 32);
        fence_mbarrier_init();
    }
    // The place of a tile is free, and its barrier expects the tile and `more` bytes.
    __device__ __forceinline__ void open(u32 at, int which, int more = 0) const {
        if (!WIDE && which == 1) return;
        mbarrier_wait(empty(at, which), parity(at, which) ^ 1);
        mbarrier_arrive_expect_tx(full(at, which), (WIDE ? 1 : 2) * TILE_BYTES + more);
    }
    __device__ __forceinline__ void wait_full(u32 at, int which) const {
        if (WIDE || which == 0) mbarrier_wait(full(at, which), parity(at, which));
    }
    // A warp is done with a tile, which has come.
    __device__ __forceinline__ void release(u32 at, int which) const {
        if ((WIDE || which == 0) && (threadIdx.x & 31) == 0) mbarrier_arrive(empty(at, which));
    }
};

// ---- the thread that fetches

template <class R>
static __device__ __forceinline__ void fetch_own(R ring, const TensorMap* one, const TensorMap* other, const Work& work, u32 turn) {
    mbarrier_wait(ring.own_empty(), (turn & 1) ^ 1);
    mbarrier_arrive_expect_tx(ring.own_full(), 2 * R::OWN_BYTES);
    load_rows<R::OWN>(ring.own(0), one, ring.own_full(), work.first, work.head, work.sequence);
    load_rows<R::OWN>(ring.own(1), other, ring.own_full(), work.first, work.head, work.sequence);
}

// Statistics of a head of queries have room for whole blocks of them.
static __device__ __forceinline__ float2* rows_of(const Mapped& p, int sequence, int head) {
    const Attention& of = p.backward.of;
    return p.backward.g_rows + (sequence * of.heads + head) * ((of.queries + OWN_QUERIES - 1) / OWN_QUERIES * OWN_QUERIES);
}

// ---- the warpgroups that multiply

// Of a thread: two rows eight apart, as a product leaves them.
typedef float Scores[TILE / 2];
typedef float Result[COLUMNS / 2];
typedef u32 Weights[TILE / 16][4];

// Where a thread is.
struct Thread {
    int group, warp, lane;
    int part;       // of the block's rows, that its warpgroup has
    u32 own[2];     // what its warpgroup owns
    int row, column;  // of what a product leaves: the first
};

// The first COUNT steps of the tensors that a warpgroup owns, as left operands in registers. From shared memory both operands of a
// product of 64 x 64 take all its bandwidth.
template <int OWN, int COUNT> struct Held {
    u32 r[COUNT > 0 ? COUNT : 1][4];

    __device__ __forceinline__ void load(const char* s_own, const Thread& thread) {
        const int row = thread.part * 64 + thread.warp * 16 + (thread.lane & 15);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int which = i / STEPS, step = i % STEPS, piece = step % 4 * 2 + (thread.lane >> 4);
            const char* s_row = s_own + which * OWN * PADDED * 2 + step / 4 * OWN * 128 + row * 128;
            ldmatrix(r[i], s_row + ((piece ^ (row & 7)) << 4));
        }
    }
};

// Where rows are loaded and stored it is found anew, so that nothing that follows from it is in registers beside the products.
template <class R> static __device__ __forceinline__ Thread find_thread(R ring) {
    // The same for all lanes, and known to be.
    const int number = reread_thread(), warps = __shfl_sync(0xffffffffu, number / 32, 0), lane = number & 31;
    const int group = warps / 4, warp = warps % 4, part = R::OWN > 64 ? group : 0;
    const u32 rows = part * 64 * 128;
    return {group, warp, lane, part, {ring.own(0) + rows, ring.own(1) + rows}, (part * 4 + warp) * 16 + lane / 4, lane % 4 * 2};
}

// The product of what a warpgroup owns of a tensor, of which steps from WHICH * STEPS on are held, and a tile, on its way.
template <int WHICH, int OWN, int COUNT>
static __device__ __forceinline__ void issue_scores(Scores& r, u32 s_own, u32 s_tile, const Held<OWN, COUNT>& held) {
    const u64 left = matrix_descriptor<16>(s_own), right = matrix_descriptor<16>(s_tile);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int inside = step % 4 * 32, held_step = WHICH * STEPS + step;
        const u64 b = right + (step / 4 * TILE * 128 + inside) / 16;
        if (held_step < COUNT) {
            Wgmma<TILE, STORAGE>::template from_registers<0>(r, held.r[held_step < COUNT ? held_step : 0], b, step > 0);
        } else {
            Wgmma<TILE, STORAGE>::template from_shared<0>(r, left + (step / 4 * OWN * 128 + inside) / 16, b, step > 0);
        }
    }
    wgmma_commit();
}

// Scores, or slopes of probabilities, of a tile, on their way.
template <int WHICH, class R, int COUNT>
static __device__ __forceinline__ void issue_one(Scores& r, R ring, const Thread& thread, const Held<R::OWN, COUNT>& held, u32 at) {
    ring.wait_full(at, WHICH);
    wgmma_fence();
    issue_scores<WHICH>(r, thread.own[WHICH], ring.tile(at, WHICH), held);
}
// Both: two groups of products.
template <class R, int COUNT>
static __device__ __forceinline__ void issue(Scores& r_s, Scores& r_slope, R ring, const Thread& thread, const Held<R::OWN, COUNT>& held, u32 at) {
    issue_one<0>(r_s, ring, thread, held, at);
    issue_one<1>(r_slope, ring, thread, held, at);
}

// All but the slopes issued last is there. The compiler sees that it is only where this stands in the same turn of a loop as what is
// waited for; else products wait for each other.
static __device__ __forceinline__ void wait_scores(Scores& r_s) {
    wgmma_wait<1>();
    pin(r_s);
}

// sum += weights tile, on its way.
static __device__ __forceinline__ void issue_weighted(Result& r_sum, const Weights& r_weights, u32 s_tile) {
    const u64 right = matrix_descriptor<TILE * 128>(s_tile);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
        Wgmma<COLUMNS, STORAGE>::template from_registers<1>(r_sum, r_weights[step], right + step * 16 * 128 / 16, 1);
    }
    wgmma_commit();
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
    for (int i = 0; i < COLUMNS / 2; ++i) r[i] = 0.0f;
}

// A warp's rows of a gradient, through shared memory.
template <class R>
static __device__ __forceinline__ void store_gradient(R, char* s_base, const Thread& thread, int which, Element* g_to,
                                                      u64 stride, int first, int positions, const Result& r, float factor) {
    char* s_rows = s_base + R::AT_RESULTS + which * R::OWN_BYTES + (thread.part * 64 + thread.warp * 16) * 128;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
        const float* of = r + 8 * step;
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = narrow2<STORAGE>(of[2 * i] * factor, of[2 * i + 1] * factor);
        stage_pairs<R::OWN * 128>(s_rows, thread.lane, step, pairs);
    }
    __syncwarp();
    const int row = first + thread.part * 64 + thread.warp * 16;
    store_staged<R::OWN * 128>(s_rows, thread.lane, g_to + row * stride, stride, positions - row);
    __syncwarp();
}

// What was owned is not needed any more.
template <class R> static __device__ __forceinline__ void release_own(R ring, const Thread& thread) {
    fence_proxy_async_shared();
    __syncwarp();
    if (thread.lane == 0) mbarrier_arrive(ring.own_empty());
}

// Tiles that others of the block see.
template <class R> static __device__ __forceinline__ void skip_tiles(R ring, u32 begin, u32 end) {
    for (u32 at = begin; at != end; ++at) {
        // Only a tile that has come is let go: so no warp says twice that a place is free before the others have said it once.
        // Nothing else holds a warp together here: a lane that comes late would miss the phase.
        ring.wait_full(at, 1);
        ring.wait_full(at, 0);
        __syncwarp();
        ring.release(at, 1);
        ring.release(at, 0);
    }
}

// The ring of a block, with its barriers made.
template <class R> static __device__ __forceinline__ R make_ring(char* s_base) {
    const R ring = {shared_address(s_base)};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    return ring;
}
