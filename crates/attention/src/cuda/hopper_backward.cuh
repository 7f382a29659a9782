// What the two kernels of attention's gradient on Hopper's matrix units share: two warpgroups multiply, a warp beside them fetches tiles
// ahead of them.
//
// - Numbers: products and sums in f32. Probabilities and slopes of scores are rounded to the storage type for the products
//   that they are the left operand of; nothing else is rounded before the result.
// - `hopper_dq.cu`: a block owns 128 queries and goes over the keys: statistics of its rows, which it leaves for the other kernel, and
//   dq. `hopper_dkv.cu`: a block owns 128 keys and goes over the queries that see them: dk and dv. There keys are the rows of
//   scores, so that in both kernels what is weighted with is the left operand of the next product as it lies.
// - Heads that share keys: those 128 keys meet the queries of all heads of their group, one head after the other, and dk and dv are
//   the sums over the group. So they never leave registers before they are whole, and the order of every sum is fixed.
// - What a block owns lies in shared memory, 64 rows for each warpgroup; tiles of 64 rows of the other side come through a ring.
//   Every place of it has a barrier that says full, which the copy's last byte ends, and one that says empty.
// - Products of the next tile are issued behind those of this one, and run while slopes are computed; besides, one warpgroup's
//   arithmetic is beside the other's products.
// - A grid of as many blocks as run at once goes over all tiles forth and back, those with most to do first.
// - Needs sm_90a, a full or causal mask, no dropout, WIDTH a multiple of 16 up to 128, rows that start at multiples of 16 bytes, SCALE >= 1e-30.
//   If causal, keys less queries are a multiple of 64.
// - Takes, of NVRTC 13.4, in both kernels: 168 registers (240 for those who multiply, 24 for the others), 12 of 64 warps; 134,224 bytes of
//   shared memory for heads of up to 64, 199,760 for wider ones. No spills.
//
// STAGES (of the ring) and SHARED (bytes) are constants that stand before this file.

constexpr float FACTOR = SCALE * LOG2E;
constexpr int OWN = 128;   // rows of a block
constexpr int TILE = 64;   // rows of the other side at a time
constexpr int MULTIPLIERS = 256;
constexpr int THREADS = MULTIPLIERS + 128;  // only whole warpgroups give registers away
constexpr int OWN_BYTES = OWN * PADDED * 2, TILE_BYTES = TILE * PADDED * 2, ROWS_BYTES = TILE * 8;
// How many of the two tensors that a block owns stay in registers, as far as there are any left. Where both do, their place in shared memory is
// free for the next ones at once, and results go out through a place of their own; else through that of what was owned.
constexpr int QUERIES_HELD = WIDTH <= 64 ? 2 : WIDTH <= 80 ? 0 : 1, KEYS_HELD = WIDTH <= 64 ? 2 : WIDTH <= 80 ? 1 : 0;
constexpr bool FREED = KEYS_HELD == 2;
constexpr int GROUP_BARRIER = 1;  // of a warpgroup, and the next number of the other

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int AT_RING = 2 * OWN_BYTES;
constexpr int AT_RESULTS = FREED ? AT_RING + STAGES * 2 * TILE_BYTES : 0;
constexpr int AT_ROWS = AT_RING + STAGES * 2 * TILE_BYTES + (FREED ? 2 * OWN_BYTES : 0);
constexpr int AT_BARRIERS = AT_ROWS + STAGES * ROWS_BYTES;
static_assert(AT_BARRIERS + (2 * STAGES + 2) * 8 + 1024 == SHARED, "the host asks for as much");
static_assert(MASK == FULL || MASK == CAUSAL, "how many keys a query sees depends on sizes alone");

// The parameter. Maps of queries and of the gradient that comes in, of keys and of values, have tiles of 128 rows where a block
// owns them and of 64 where it does not. Statistics of a head start at multiples of 128 rows.
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
            mbarrier_init(full(stage), 1);
            mbarrier_init(empty(stage), MULTIPLIERS / 32);
        }
        mbarrier_init(own_full(), 1);
        mbarrier_init(own_empty(), MULTIPLIERS / 32);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ void wait_full(u32 at) const { mbarrier_wait(full(at), parity(at)); }
    // A warp is done with a tile, which has come.
    __device__ __forceinline__ void release(u32 at) const {
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty(at));
    }
};

// ---- the thread that fetches

static __device__ __forceinline__ void fetch_own(Ring ring, const TensorMap* one, const TensorMap* other, const Work& work, u32 turn) {
    mbarrier_wait(ring.own_empty(), (turn & 1) ^ 1);
    mbarrier_arrive_expect_tx(ring.own_full(), 2 * OWN_BYTES);
    load_rows<OWN>(ring.own(0), one, ring.own_full(), work.first, work.head, work.sequence);
    load_rows<OWN>(ring.own(1), other, ring.own_full(), work.first, work.head, work.sequence);
}

// Statistics of a head of queries have room for whole blocks of them.
static __device__ __forceinline__ float2* rows_of(const Mapped& p, int sequence, int head) {
    const Attention& of = p.backward.of;
    return p.backward.g_rows + (sequence * of.heads + head) * ((of.queries + OWN - 1) / OWN * OWN);
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

// The first COUNT of the two tensors that a warpgroup owns, as left operands in registers. From shared memory both operands of a
// product of 64 x 64 take all its bandwidth.
template <int COUNT> struct Held {
    u32 r[COUNT > 0 ? COUNT : 1][WIDTH / 16][4];

    __device__ __forceinline__ void load(const char* s_base, const Thread& thread) {
        const int row = thread.group * 64 + thread.warp * 16 + (thread.lane & 15);
#pragma unroll
        for (int i = 0; i < COUNT * WIDTH / 16; ++i) {
            const int which = i / (WIDTH / 16), step = i % (WIDTH / 16), piece = step % 4 * 2 + (thread.lane >> 4);
            const char* s_row = s_base + which * OWN_BYTES + step / 4 * OWN * 128 + row * 128;
            ldmatrix(r[which][step], s_row + ((piece ^ (row & 7)) << 4));
        }
    }
};

static __device__ __forceinline__ Thread find_thread(Ring ring) {
    // The same for all lanes, and known to be.
    const int warps = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const u32 rows = warps / 4 * 64 * 128;
    return {warps / 4, warps % 4, lane, {ring.own(0) + rows, ring.own(1) + rows}, warps * 16 + lane / 4, lane % 4 * 2};
}

// Scores, and slopes of probabilities, of a tile, on their way: two groups of products.
template <int COUNT>
static __device__ __forceinline__ void issue(Scores& r_s, Scores& r_slope, Ring ring, const Thread& thread, const Held<COUNT>& held, u32 at) {
    ring.wait_full(at);
    wgmma_fence();
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const u64 left = matrix_descriptor<16>(thread.own[which]), right = matrix_descriptor<16>(ring.tile(at, which));
#pragma unroll
        for (int step = 0; step < WIDTH / 16; ++step) {
            const int inside = step % 4 * 32;
            const u64 b = right + (step / 4 * TILE * 128 + inside) / 16;
            if (which < COUNT) {
                Wgmma<TILE, STORAGE>::template from_registers<0>(which ? r_slope : r_s, held.r[which][step], b, step > 0);
            } else {
                Wgmma<TILE, STORAGE>::template from_shared<0>(which ? r_slope : r_s, left + (step / 4 * OWN * 128 + inside) / 16, b, step > 0);
            }
        }
        wgmma_commit();
    }
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
        Wgmma<WIDTH, STORAGE>::template from_registers<1>(r_sum, r_weights[step], right + step * 16 * 128 / 16, 1);
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
    for (int i = 0; i < WIDTH / 2; ++i) r[i] = 0.0f;
}

// A warp's rows of a gradient, through shared memory.
static __device__ __forceinline__ void store_gradient(char* s_base, const Thread& thread, int which, Element* g_to, u64 stride,
                                                      int first, int positions, const Result& r, float factor) {
    char* s_rows = s_base + AT_RESULTS + which * OWN_BYTES + (thread.group * 64 + thread.warp * 16) * 128;
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
    store_staged<OWN * 128>(s_rows, g_to + row * stride, stride, positions - row);
    __syncwarp();
}

// What was owned is not needed any more.
static __device__ __forceinline__ void release_own(Ring ring, const Thread& thread) {
    fence_proxy_async_shared();
    __syncwarp();
    if (thread.lane == 0) mbarrier_arrive(ring.own_empty());
}

// Tiles that others of the block see.
static __device__ __forceinline__ void skip_tiles(Ring ring, u32 begin, u32 end) {
    for (u32 at = begin; at != end; ++at) {
        // Only a tile that has come is let go: so no warp says twice that a place is free before the others have said it once.
        ring.wait_full(at);
        // Nothing else holds a warp together here: a lane that comes late would miss the phase.
        __syncwarp();
        ring.release(at);
    }
}

// The ring of a block, with its barriers made.
static __device__ __forceinline__ Ring make_ring(char* s_base) {
    const Ring ring = {shared_address(s_base)};
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    return ring;
}
