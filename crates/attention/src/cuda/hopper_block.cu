// Attention, its projection, a residual and a norm in one launch, on Hopper's matrix units.
//
//   o = attention(q, k, v), heads side by side;  s = residual + (o weight + bias);  y = norm(s)
//
// `hopper.cu` says how a tile of a head is computed, `hopper_norm.cuh` how rows meet and how work is drawn. Here:
// - A number is a tile of queries of one head, or a part: as many columns of the product of these queries. Parts of some queries come `lag`
//   groups of queries after their heads, so that o is there by then and hardly anyone waits; meanwhile blocks do one beside the
//   other, and products, which want the L2 cache, share a multiprocessor with softmax, which does not.
// - o goes to the workspace, by way of the memory of its queries, and from there by a tensor map to the products: it stays in the L2
//   cache. A count for each tile of queries says how many warps have stored theirs; it only grows, and a launch knows by how much.
// - A part has its operands in the rings of keys and values, 64 of the inner size at a time, and its sums in registers, bias first.
//   They are handed to the helpers 64 or 128 columns at a time.
// - Needs what `hopper.cu` does, a key for every query, columns that are a multiple of PART, an inner size that is one of 64, fewer parts than a board has places.
// - A part waits for heads that have smaller numbers, which others have drawn before it: so there is always a number that goes on.
//
// Takes, of NVRTC 13.4: with two blocks 80 registers (96 for those who multiply, 48 for the others), 115,464 bytes of shared memory a block,
// 24 of 64 warps; with one 168 (224 and 56), 142,216 of heads of 64 and 197,328 of heads of 128, 12 warps. No spills.
//
// Times are in `bench/results/h200-launches-peers.csv`. At 8 x 12 x 1024 x 64, by texts with one
// thing left out, which were not kept: attention 42 us, products 16,
// norms 6, counts that others wait for 3, and 5 for o on its way and for the end, where the last parts wait for the last heads and leave
// blocks without work. Tried: parts after all heads (1 us slower), a shorter lag, o by way of slots (with norms left
// out no better, and with them parts keep both), helpers that load rows themselves (102 us in all).
//
// TRANSPOSED (whether columns of the weight lie together, and else what is summed) and BIASED stand before this file.

constexpr int PART = QUERIES;
constexpr int CHUNK_BYTES = QUERIES * 128;  // of either operand
constexpr int CHUNKS = STAGES * KV_BYTES / CHUNK_BYTES;
constexpr int AT_CHUNKS = AT_REST;  // barriers: full, then empty
constexpr u32 STORING = SPLIT ? 4 : 8;  // warps that store a tile of o
static_assert(AT_CHUNKS + 2 * CHUNKS * 8 == SHARED, "the host asks for as much");
static_assert(UNITS * UNIT == PART && HANDOFFS * WIDTH == PART && CHUNKS * CHUNK_BYTES == STAGES * KV_BYTES, "a part is handed over whole");

// The parameter.
struct Projected {
    Maps maps;
    NormMaps norm_maps;
    TensorMap o, weight;
    Attention attention;
    Norm norm;
    const Element* g_bias;
    u32* g_ready;  // of each tile of queries: warps that have stored o, over all launches
    u64 section, inner, lag;
    u64 filler[5];
};
static_assert(sizeof(Projected) % 128 == 0, "as maps are aligned");

// What a number stands for. Heads are counted down from -1.
static __device__ __forceinline__ Number find_number(const Projected& p, int number) {
    if (number < 0) return {-1, 0};
    const int heads = (int)p.attention.heads, parts = COLS / PART, lag = (int)p.lag;
    const int groups = (int)p.attention.batch * tiles_of(p.attention), both = heads + parts;
    const auto tile = [&](int group) { return tile_of_group(p.attention, (int)p.section, group); };
    // First heads alone, then heads of a group and parts of an earlier one, then parts alone.
    if (number < lag * heads) return {tile(number / heads), -1 - number % heads};
    number -= lag * heads;
    if (number < (groups - lag) * both) {
        const int step = number / both, at = number - step * both;
        return at < heads ? Number{tile(lag + step), -1 - at} : Number{tile(step), at - heads};
    }
    number -= (groups - lag) * both;
    return {tile(groups - lag + number / parts), number % parts};
}

// ---- operands of parts, in the memory of the rings. Chunks are counted over all parts.

static __device__ __forceinline__ u32 left_of(Rings rings, u32 chunk) { return rings.base + AT_K + chunk % CHUNKS * CHUNK_BYTES; }
static __device__ __forceinline__ u32 right_of(Rings rings, u32 chunk) { return rings.base + AT_V + chunk % CHUNKS * CHUNK_BYTES; }
static __device__ __forceinline__ u32 chunk_full(Rings rings, u32 chunk) { return rings.base + AT_CHUNKS + chunk % CHUNKS * 8; }
static __device__ __forceinline__ u32 chunk_empty(Rings rings, u32 chunk) { return rings.base + AT_CHUNKS + (CHUNKS + chunk % CHUNKS) * 8; }
static __device__ __forceinline__ u32 chunk_parity(u32 chunk) { return chunk / CHUNKS & 1; }

// Waits until no tile of keys or values, of `at` so far, is where a chunk will be.
static __device__ __forceinline__ void wait_for_tiles(Rings rings, u32 at, u32 place) {
    const u32 first = place * CHUNK_BYTES / KV_BYTES, last = ((place + 1) * CHUNK_BYTES - 1) / KV_BYTES;
    for (u32 stage = first; stage <= last; ++stage) {
        if (at <= stage) continue;
        const u32 user = stage + (at - 1 - stage) / STAGES * STAGES;
        mbarrier_wait(rings.k_empty(user), Rings::parity(user));
        mbarrier_wait(rings.v_empty(user), Rings::parity(user));
    }
}
// Waits until no chunk, of so many so far, is used.
static __device__ __forceinline__ void wait_for_chunks(Rings rings, u32 chunks) {
    for (u32 place = 0; place < CHUNKS; ++place) {
        if (chunks <= place) continue;
        const u32 user = place + (chunks - 1 - place) / CHUNKS * CHUNKS;
        mbarrier_wait(chunk_empty(rings, user), chunk_parity(user));
    }
}

static __device__ __forceinline__ void fetch_part(const Projected& p, Rings rings, const TileRows& rows, int part, u32 at, u32& chunks) {
    const int count = (int)p.inner / 64;
    for (int i = 0; i < count; ++i) {
        const u32 now = chunks + i, full = chunk_full(rings, now);
        if (i < CHUNKS) wait_for_tiles(rings, at, now % CHUNKS);
        mbarrier_wait(chunk_empty(rings, now), chunk_parity(now) ^ 1);
        mbarrier_arrive_expect_tx(full, 2 * CHUNK_BYTES);
        tma_load_3d(left_of(rings, now), &p.o, full, i * 64, rows.first, rows.sequence);
        if constexpr (TRANSPOSED) {
            for (int piece = 0; piece < PART / 64; ++piece) {
                tma_load_3d(right_of(rings, now) + piece * 8192, &p.weight, full, part * PART + piece * 64, i * 64, 0);
            }
        } else {
            tma_load_3d(right_of(rings, now), &p.weight, full, i * 64, part * PART, 0);
        }
    }
    chunks += count;
}

static __device__ __forceinline__ void fetch_drawn(const Projected& p, Rings rings, char* s_base, u64 drawn_first) {
    const u32 launches = (u32)(drawn_first >> 32), target = (launches + 1) * (u32)p.attention.heads * STORING;
    board_of(s_base)->mark = mark_of(launches);
    u32 at = 0, queries = 0, chunks = 0, parts = 0;
    for (u32 round = 0;; ++round) {
        wait_for_place(board_of(s_base), parts);
        const Number number = find_number(p, number_of(p.norm, round == 0 ? drawn_first : draw(p.norm)));
        if (number.which >= 0) board_of(s_base)->numbers[parts % PLACES] = number;
        put_item(rings, s_base, round, number);
        if (number.tile < 0) return;
        const TileRows rows = rows_of(p.norm, p.attention, number.tile);
        if (number.which < 0) {
            wait_for_chunks(rings, chunks);
            fetch_tile(p.maps, rings, tile_of(p.attention, rows.sequence, -1 - number.which, rows.first), at, queries);
        } else {
            while ((int)(load_acquire(p.g_ready + number.tile) - target) < 0) back_off();
            // Stored as numbers, and now copied.
            fence_proxy_async();
            fetch_part(p, rings, rows, number.which, at, chunks);
            u32 uses = parts * HANDOFFS;
            fetch_residual(&p.norm_maps.residual, rings, rows, number.which, uses);
            ++parts;
        }
    }
}

// ---- the warpgroups that multiply

// Adds the sums of the second warpgroup to those of the first.
static __device__ __forceinline__ void merge_sums(float (&r_sums)[WIDTH / 2], float* s_merge, int warpgroup) {
    float* s_mine = s_merge + threadIdx.x % 128;
    if (warpgroup == 1) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) s_mine[i * 128] = r_sums[i];
    }
    named_barrier_sync(MERGE_BARRIER, MULTIPLIERS);
    if (warpgroup == 0) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) r_sums[i] += s_mine[i * 128];
    }
    named_barrier_sync(MERGE_BARRIER, MULTIPLIERS);
}

static __device__ __forceinline__ void project(const Projected& p, Rings rings, char* s_base, const Rank& rank, Number number,
                                               u32& chunks, u32& uses) {
    const int part = number.which;
    // As many columns as are handed over at once are one product: more would take more registers than the block begins with.
    float r_sums[HANDOFFS][WIDTH / 2];
    const bool first = !SPLIT || rank.warpgroup == 0;
#pragma unroll
    for (int j = 0; j < PART / 8; ++j) {
        u32 pair = 0;
        if (BIASED && first) pair = *(const u32*)(p.g_bias + part * PART + j * 8 + (threadIdx.x & 3) * 2);
        float* sums = r_sums[j / (WIDTH / 8)] + j % (WIDTH / 8) * 4;
        sums[0] = sums[2] = low_half(pair);
        sums[1] = sums[3] = high_half(pair);
    }
#pragma unroll
    for (int turn = 0; turn < HANDOFFS; ++turn) pin(r_sums[turn]);
    const int count = (int)p.inner / 64;
    int i = SPLIT ? rank.warpgroup : 0, before = -1;
    for (; i < count; i += STEP) {
        const u32 now = chunks + i;
        mbarrier_wait(chunk_full(rings, now), chunk_parity(now));
        const u64 left = matrix_descriptor<16>(left_of(rings, now) + rank.part * 64 * 128);
        const u64 right = matrix_descriptor<TRANSPOSED ? 8192 : 16>(right_of(rings, now));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int turn = 0; turn < HANDOFFS; ++turn) {
                // Columns of a turn are pieces or rows of their own.
                const u64 columns = right + turn * WIDTH * 128 / 16 + step * (TRANSPOSED ? 128 : 2);
                Wgmma<WIDTH, STORAGE>::template from_shared<TRANSPOSED>(r_sums[turn], left + step * 2, columns, 1);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(chunk_empty(rings, chunks + before));
        before = i;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int turn = 0; turn < HANDOFFS; ++turn) pin(r_sums[turn]);
    if (before >= 0) release(chunk_empty(rings, chunks + before));
    chunks += count;
    if constexpr (SPLIT) merge_sums(r_sums[0], (float*)(s_base + AT_MERGE), rank.warpgroup);
    if (!first) return;
    const int count_of_rows = rows_of(p.norm, p.attention, number.tile).count;
#pragma unroll
    for (int turn = 0; turn < HANDOFFS; ++turn, ++uses) {
        add_rows(p.norm, take_slot(rings, s_base, rank, uses), number.tile, part * UNITS + turn * TOGETHER, rank.part * 64 + rank.warp * 16,
                 count_of_rows, look_at(&board_of(s_base)->mark), [&](int step, u32 (&pairs)[4]) {
                     const float* sums = r_sums[turn] + 8 * step;
#pragma unroll
                     for (int i = 0; i < 4; ++i) pairs[i] = narrow2<STORAGE>(sums[2 * i], sums[2 * i + 1]);
                 });
        give_slot(rings, uses);
    }
}

// A warp's rows of o, by way of the memory of their queries, to where parts find them.
static __device__ __forceinline__ void keep_rows(const Projected& p, Rings rings, char* s_base, const Rank& rank, const State& r, Number number,
                                                 const Tile& tile) {
    // Its warpgroup's products have read queries; where two share them, both have been waited for.
    if constexpr (!SPLIT) {
        if (rank.warpgroup == 0) named_barrier_sync(LENT_BARRIER, 128);
        if (rank.warpgroup == 1) named_barrier_sync(LENT_BARRIER + 1, 128);
    }
    const int first = tile.first + rank.part * 64 + rank.warp * 16;
    store_rows<UNIT_BYTES>(p.attention, tile, r, s_base + (rank.part * 64 + rank.warp * 16) * 128, first);
    // Copies of queries come after it. Whoever copies o sees to it that this comes after too.
    fence_proxy_async_shared();
    __syncwarp();
    release(rings.q_empty());
    if ((threadIdx.x & 31) == 0) add_acq_rel(p.g_ready + number.tile, 1);
}

static __device__ __forceinline__ void compute_drawn(const Projected& p, Rings rings, char* s_base) {
    const Rank rank = rank_of_warp();
    const bool gives = !SPLIT || rank.warpgroup == 0;
    // The first warpgroup has the first turn.
    if (rank.warpgroup == 1) end_turn(rank.warpgroup);
    u32 at = 0, queries = 0, chunks = 0, uses = 0;
    for (u32 round = 0;; ++round) {
        const Number number = take_item(rings, s_base, round);
        if (number.tile < 0) {
            if (gives) give_end(rings, uses);
            return;
        }
        if (number.which >= 0) {
            project(p, rings, s_base, rank, number, chunks, uses);
            continue;
        }
        State r;
        const TileRows rows = rows_of(p.norm, p.attention, number.tile);
        const Tile tile = tile_of(p.attention, rows.sequence, -1 - number.which, rows.first);
        attend<true>(r, p.attention, rings, s_base, rank, tile, at, queries);
        if (gives) {
            keep_rows(p, rings, s_base, rank, r, number, tile);
        } else {
            release(rings.q_empty());
        }
    }
}

static __device__ __forceinline__ void init_chunks(Rings rings) {
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        mbarrier_init(chunk_full(rings, chunk), 1);
        mbarrier_init(chunk_empty(rings, chunk), STORING);
    }
}

extern "C" __global__ void __launch_bounds__(384, BLOCKS) attention_block_hopper(const __grid_constant__ Projected p) {
    extern __shared__ __align__(1024) char s_base[];
    run_block(
        p.norm, p.norm_maps, s_base, [&](Rings rings) {
            init_chunks(rings);
            prefetch_maps(p.maps);
            prefetch_tensor_map(&p.o);
            prefetch_tensor_map(&p.weight);
        },
        [&](Rings rings, u64 drawn_first) { fetch_drawn(p, rings, s_base, drawn_first); },
        [&](Rings rings) { follow(p.norm, p.norm_maps, p.attention, rings, s_base); },
        [&](Rings rings) { compute_drawn(p, rings, s_base); });
}
