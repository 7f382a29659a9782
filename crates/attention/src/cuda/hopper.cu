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
//   blocks than there are tiles goes over them forth and back, so that long and short tiles add up alike; DRAWS: its blocks take the next tile
//   from a counter, as soon as they have room for its queries.
// - The largest score stays behind by up to 2^SLACK before sums are scaled anew.
// - Needs sm_90a, a full or causal mask, no dropout, WIDTH a multiple of 16 up to 128, 192 or 256, rows that start at
//   multiples of 16 bytes, SCALE >= 1e-30.
//   If causal, keys less queries are a multiple of KEYS: then no block has a tile of keys whose last ones none of its queries
//   sees, and no NaN there is multiplied by 0.
//
// What hides the time of the softmax, where the matrix units would wait, differs:
// - BLOCKS 2: the products of the other block on the multiprocessor. It leaves few registers, so all is done in order.
// - BLOCKS 1: the product of the next keys and that of the last values go on behind the softmax. The warps that fetch give their
//   registers to those that multiply. TURNS: besides, one warpgroup's softmax is beside the other's products, as they take turns
//   at issuing them. SPLIT: both warpgroups have the same 64 queries and every second tile of keys each, so that few queries
//   fill more multiprocessors; their sums are joined at the end.
// SLOTS 0: results go out through the place of the queries, for which wide heads leave no room beside them.
//
// Takes, of NVRTC 13.4: heads of 64 with two blocks 90 registers, 99,472 bytes of shared memory a block, 18 of 64 warps; with one,
// SPLIT, 168 (240 for those who multiply, 24 for the others), 134,352, 12 warps; heads of 128 168, 197,728, 12; heads
// of 192 and 256 168, 197,760 and 197,728, 12. No spills.

// The parameter.
struct Mapped {
    Maps maps;
    Attention attention;
    u64 section;   // heads whose tiles are worked on together
    u32* g_drawn;  // tiles that were drawn, u32 and 4 bytes of filler; 0 between launches
};
constexpr int AT_NUMBER = AT_MORE;
static_assert(AT_NUMBER + (DRAWS ? 16 : 0) + 1024 == SHARED, "the host asks for as much");

static __device__ __forceinline__ int tiles_of_head(const Attention& p) { return ((int)p.queries + QUERIES - 1) / QUERIES; }

// The tile of a number. False where there are not so many.
static __device__ __forceinline__ bool find_tile(const Mapped& mapped, int number, Tile& tile) {
    const Attention& p = mapped.attention;
    const int heads = (int)p.batch * (int)p.heads, tiles = tiles_of_head(p);
    if (number >= heads * tiles) return false;
    const int section = (int)mapped.section, first_head = number / (section * tiles) * section, rest = number - first_head * tiles;
    const int together = min(section, heads - first_head), head = first_head + rest % together;
    tile = tile_of(p, head / (int)p.heads, head % (int)p.heads, (tiles - 1 - rest / together) * QUERIES);
    return true;
}

// The number of a block's tile in a round, forth and back.
static __device__ __forceinline__ int number_in_turn(int round) {
    const int grid = (int)gridDim.x, block = (int)blockIdx.x;
    return round * grid + ((round & 1) ? grid - 1 - block : block);
}

// DRAWS: a block begins with the tile of its own number. Behind the tiles that blocks begin with it draws: a number that no other block gets. Each
// block draws until there is no tile of its number, so there are as many draws as tiles, and the last one resets the count.
static __device__ __forceinline__ int draw(const Mapped& p) {
    const u32 tiles = (u32)(p.attention.batch * p.attention.heads) * (u32)tiles_of_head(p.attention);
    return (int)(gridDim.x + atomicInc(p.g_drawn, tiles - 1));
}

// The number of the block's tile stands beside its queries: written when their place is free, and read when they have come.
static __device__ __forceinline__ void fetch_drawn(const Mapped& p, Rings rings, volatile int* s_number) {
    u32 at = 0, queries = 0;
    Tile tile;
    for (int number = blockIdx.x;; number = draw(p)) {
        const bool exists = find_tile(p, number, tile);
        mbarrier_wait(rings.q_empty(), (queries & 1) ^ 1);
        *s_number = number;
        if (exists && tile.count > 0) {
            fetch_tile(p.maps, rings, tile, at, queries);
            continue;
        }
        // No queries come.
        ++queries;
        mbarrier_arrive(rings.q_full());
        if (!exists) return;
    }
}

static __device__ __forceinline__ void fetch_tiles(const Mapped& p, Rings rings, char* s_base) {
    if constexpr (DRAWS) {
        fetch_drawn(p, rings, (volatile int*)(s_base + AT_NUMBER));
    } else {
        u32 at = 0, queries = 0;
        Tile tile;
        for (int round = 0; find_tile(p, number_in_turn(round), tile); ++round) fetch_tile(p.maps, rings, tile, at, queries);
    }
}

// A warpgroup's rows of the result through the place of its queries, which is free then.
static __device__ __forceinline__ void store_lent(const Attention& p, Rings rings, char* s_base, const Rank& rank, const Tile& tile, const State& r) {
    const int first = tile.first + rank.part * 64 + rank.warp * 16;
    if (tile.count <= 0) {
        // No queries have come, and their place may be that of the next ones by now.
        Element* g_o = p.g_o + start(p.o, tile.sequence, tile.head) + (u64)first * p.o.position;
        store_zeros(g_o, p.o.position, tile.end - first);
        return;
    }
    named_barrier_sync(LENT_BARRIER + rank.warpgroup, 128);
    store_rows<QUERIES * 128>(p, tile, r, s_base + (rank.part * 64 + rank.warp * 16) * 128, first);
    fence_proxy_async_shared();
    __syncwarp();
    release(rings.q_empty());
}

// The number of the block's next tile.
static __device__ __forceinline__ int next_number(Rings rings, const char* s_base, int round, u32 queries) {
    if constexpr (DRAWS) {
        mbarrier_wait(rings.q_full(), queries & 1);
        return *(const volatile int*)(s_base + AT_NUMBER);
    } else {
        return number_in_turn(round);
    }
}

static __device__ __forceinline__ void attend_tiles(const Mapped& mapped, Rings rings, char* s_base) {
    const Attention& p = mapped.attention;
    const Rank rank = rank_of_warp();
    // The first warpgroup has the first turn.
    if (rank.warpgroup == 1) end_turn(rank.warpgroup);
    u32 at = 0, queries = 0;
    Tile tile;
    for (int round = 0;; ++round) {
        const int number = next_number(rings, s_base, round, queries);
        if (!find_tile(mapped, number, tile)) break;
        if (DRAWS && tile.count <= 0) {
            // The number was read, and no queries have come.
            __syncwarp();
            release(rings.q_empty());
            ++queries;
        }
        State r;
        attend<SLOTS == 0>(r, p, rings, s_base, rank, tile, at, queries);
        // Found anew: until now nothing of it has to be in registers.
        find_tile(mapped, opaque(number), tile);
        if constexpr (SLOTS == 0) {
            store_lent(p, rings, s_base, rank, tile, r);
        } else if (!SPLIT || rank.warpgroup == 0) {
            store_rows<2048>(p, tile, r, staging(s_base, rank), tile.first + rank.part * 64 + rank.warp * 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_hopper(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const Rings rings = {shared_address(s_base)};
    if (threadIdx.x == 0) rings.init();
    if (threadIdx.x == MULTIPLIERS) prefetch_maps(p.maps);
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        if constexpr (AHEAD) setmaxnreg_dec<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_tiles(p, rings, s_base);
    } else {
        if constexpr (AHEAD) setmaxnreg_inc<240>();
        attend_tiles(p, rings, s_base);
    }
}
