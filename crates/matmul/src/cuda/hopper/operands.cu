// Matrix products of 16-bit operands, of bytes and of f32 on Hopper: C[m, n] = tail(A[m, k] B[k, n]), batched, any of the four transpositions.
//
// - A block makes tiles of ROWS x COLUMNS. One thread fetches: ROWS x DEPTH of A and DEPTH x COLUMNS of B at a time go by tensor maps into
//   a ring of STAGES in shared memory. Two warpgroups multiply (wgmma).
// - TURNS: a warpgroup has whole tiles, every second one of the block. While one multiplies, the other does what follows its tile.
//   Blocks are persistent: there are as many as run at once, and each walks over tiles.
// - Otherwise a block has one tile, and each warpgroup half of its rows, or where SIDES is 2 half of its columns. SPLIT blocks of a cluster
//   share K: each sends its sums to the blocks that own their columns, and these add them in the order of the blocks.
// - A may be multiplied by RIGHTS matrices B at once: the same columns of each stand side by side in a tile, and `tail` gets a sum of each.
// - Sums are f32, in an order that the constants alone decide, and are rounded to the storage type of the matmul, unless it is f32 itself
//   (ADDS_STAGES). They pass through
//   shared memory, so that `tail` gets V neighbouring columns of a row at a time, and reads and writes whole vectors.
// - Beyond m, n and k the tensor maps give zeros, which are summed and not stored.
// - Bytes come as pairs, so that DEPTH is of pairs; what follows their sums is in `warps.cu`.
// - f32 comes as two numbers of TF32, split by a grid before (`split.cu`): two steps have the same K, and three products are summed of them.
//
// - SHARERS neighbours along the rows, a cluster, have the same columns of B: each fetches its share of them for all (multicast), once all are
//   done with the place. So fewer lines come from the L2, which is what limits matmuls whose rows start between its lines.
//
// KIND (0 f32, 1 f16, 2 bf16, 3 bytes), A_COLUMNS (columns of A are contiguous, not rows), B_ROWS (rows of B are), ROWS (of a tile), COLUMNS (of a
// warpgroup's part of a tile), RIGHTS, STAGES, TURNS, SIDES, SPLIT, CLUSTER (blocks that have rows of C together), MAPS and CARRIED (tensor maps of
// what follows, and how many of them are operands), SHARERS, V and N are constants that stand before this file.

constexpr int DEPTH = 64;
constexpr int PASSES = KIND == 0 ? 2 : 1;  // steps that have the same K
constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
constexpr int HALF_BYTES = 64 * DEPTH * 2;  // 64 rows of A, or 64 columns of B
constexpr int WIDTH = SIDES * COLUMNS, PIECES = (WIDTH + 63) / 64;  // of a tile, columns and 64 of them
constexpr int RESULT_WIDTH = WIDTH / RIGHTS;                         // columns of each B, and of the result
constexpr int A_BYTES = ROWS / 64 * HALF_BYTES, B_BYTES = B_ROWS ? PIECES * HALF_BYTES : WIDTH * DEPTH * 2;
constexpr int STAGE_BYTES = (A_BYTES + B_BYTES + 1023) / 1024 * 1024;
constexpr int HALVES = TURNS ? 2 : ROWS * SIDES / 128;  // 64 rows each, of a warpgroup
constexpr int TURN_BARRIER = 1, STAGED_BARRIER = 3;
// Whether warpgroups that share a tile start their multiplications in turn: while one adds a stage, those of the other are carried out.
constexpr bool ALTERNATES = PASSES == 2 && !TURNS;
static_assert(SHARERS == 1 || (SPLIT == 1 && CLUSTER == 1 && SIDES == 1), "only neighbours along the rows share B");
constexpr int B_SHARE = B_ROWS ? DEPTH / SHARERS : RESULT_WIDTH / SHARERS;  // lines of a box of B
constexpr u16 ALL_SHARERS = (1 << SHARERS) - 1;

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int AT_STAGED = STAGES * STAGE_BYTES;
constexpr int AT_BARRIERS = AT_STAGED + 2 * STAGED_BYTES;

#ifdef TF32
// An operand of f32 as it lies: its first number, and bytes from one of its rows (of A) or columns (of B) to the next, along K, from matrix to matrix.
struct Given {
    const char* g_first;
    u64 line, along, matrix;
};
#endif

struct Parameters {
    TensorMap a, b[RIGHTS];
#if MAPS > 0
    TensorMap maps[MAPS];
#endif
#ifdef TF32
    Given given[2];
    u64 inner;  // K
#endif
    tail::Parameters tail;
    u64 m, steps, row_tiles, column_tiles, tiles;
    u64 a_batch, b_batch;  // whether the operand has a matrix for each of the batch
    u64 b_given;           // not 0 if no kernel of the job makes B
#ifdef MEETS_IN_MEMORY
    u64 *g_launches, *g_words;  // as in `meeting.cu`
#endif
#ifdef MAKES
    head::Parameters head;
    u32* g_made;      // as in `made.cu`
    u64 first_rows;   // that are made before anything is multiplied
#endif
};

struct Tile {
    int batch, row, column;
};

// Tiles of BAND rows of tiles are neighbours: they share columns of B while these are in the L2.
static __device__ __forceinline__ Tile tile_of(u32 row_tiles, u32 column_tiles, u32 index) {
    const u32 all = row_tiles * column_tiles;
    const u32 batch = index / all, own = index % all;
    if constexpr (CLUSTER > 1) return {(int)batch, (int)(own / CLUSTER) * ROWS, (int)(own % CLUSTER) * RESULT_WIDTH};
    const u32 band = own / (BAND * column_tiles), inside = own % (BAND * column_tiles);
    const u32 high = min((u32)BAND, row_tiles - band * BAND);
    return {(int)batch, (int)(band * BAND + inside % high) * ROWS, (int)(inside / high) * RESULT_WIDTH};
}
static __device__ __forceinline__ Tile tile_at(const Parameters& p, u32 index) { return tile_of((u32)p.row_tiles, (u32)p.column_tiles, index); }

// The stages, counted over all tiles: number `at` has place at % STAGES.
struct Ring {
    u32 base;
    __device__ __forceinline__ u32 a(u32 at) const { return base + at % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 b(u32 at) const { return a(at) + A_BYTES; }
    __device__ __forceinline__ u32 full(u32 at) const { return base + AT_BARRIERS + at % STAGES * 8; }
    __device__ __forceinline__ u32 empty(u32 at) const { return full(at) + STAGES * 8; }
    static __device__ __forceinline__ u32 parity(u32 at) { return at / STAGES & 1; }
};

// ---- the thread that fetches

// Operands of what follows a tile are brought into the L2: a piece at a time, so that they do not stand in the way of operands of the matmul.
static __device__ __forceinline__ void prefetch_operands(const Parameters& p, const Tile& tile, int piece) {
#if CARRIED > 0
#pragma unroll
    for (int i = 0; i < CARRIED; ++i) tma_prefetch_3d(&p.maps[i], tile.column + piece * 64, tile.row, tile.batch);
#endif
}

// The first line of this block's share of a box of B.
static __device__ __forceinline__ int own_share() { return SHARERS == 1 ? 0 : (int)(blockIdx.x % SHARERS) * B_SHARE; }

// A box of B, or the shares of all.
static __device__ __forceinline__ void fetch_b(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int batch) {
    const int share = own_share();
    if constexpr (SHARERS == 1) tma_load_3d(to, map, barrier, c0, c1, batch);
    else tma_load_3d_to_ranks(to + share * 128, map, barrier, c0, c1 + share, batch, ALL_SHARERS);
}

// The inner place that a step begins at. Of a matrix of f32 the map has two: the numbers of TF32, and what these leave. The first step of a K
// takes the former of A and the latter of B, the second one the others.
static __device__ __forceinline__ int inner_of(int step) { return step / PASSES * DEPTH; }
static __device__ __forceinline__ int matrix_of_a(int batch, int step) { return batch * PASSES + step % PASSES; }
static __device__ __forceinline__ int matrix_of_b(int batch, int step) { return batch * PASSES + (PASSES - 1 - step % PASSES); }

// B of a stage, which is that of a step.
static __device__ __forceinline__ void fetch_columns(const Parameters& p, Ring ring, const Tile& tile, int step, u32 at) {
    const int k = inner_of(step), batch = matrix_of_b(p.b_batch ? tile.batch : 0, step);
    if constexpr (B_ROWS) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            constexpr int OF_EACH = PIECES / RIGHTS;
            fetch_b(ring.b(at) + piece * HALF_BYTES, &p.b[piece / OF_EACH], ring.full(at), tile.column + piece % OF_EACH * 64, k, batch);
        }
    } else {
#pragma unroll
        for (int right = 0; right < RIGHTS; ++right) {
#pragma unroll
            for (int side = 0; side < SIDES; ++side) {
                const int before = right * RESULT_WIDTH + side * COLUMNS;
                fetch_b(ring.b(at) + before * DEPTH * 2, &p.b[right], ring.full(at), k, tile.column + side * COLUMNS, batch);
            }
        }
    }
}

// While earlier grids still run: B of the first stages, unless one of these grids may make it. Returns of how many stages it is on its way.
static __device__ __forceinline__ u32 fetch_early(const Parameters& p, Ring ring) {
    const int part = (int)(blockIdx.x % SPLIT), steps = (int)p.steps, first = steps * part / SPLIT, end = steps * (part + 1) / SPLIT;
    const u32 early = p.b_given ? (u32)min(STAGES, end - first) : 0;
    const Tile tile = tile_at(p, blockIdx.x / SPLIT);
    for (u32 at = 0; at < early; ++at) {
        mbarrier_arrive_expect_tx(ring.full(at), A_BYTES + B_BYTES);
        fetch_columns(p, ring, tile, first + (int)at, at);
    }
    return early;
}

// And what all rows of the epilogue read is brought into the L2.
static __device__ __forceinline__ void prefetch_shared(const Parameters& p) {
#if SHARED_ROWS > 0
    tail::prefetch_shared(p.tail, tile_at(p, blockIdx.x / SPLIT).column, RESULT_WIDTH);
#endif
}

#ifdef MAKES
static __device__ __forceinline__ void await_rows(const Parameters& p, int row);
#endif

// B of the first `early` stages is on its way.
static __device__ __forceinline__ void fetch(const Parameters& p, Ring ring, const Tile& tile, int first, int steps, u32 early, u32& at) {
    // Pieces that were prefetched, and the step of the next.
    constexpr int ALL = (RESULT_WIDTH + 63) / 64;
    const int between = max(1, steps / ALL);
    int pieces = 0, next = first + between / 2;
#ifdef MAKES
    await_rows(p, tile.row);
#endif
    for (int i = first; i < first + steps; ++i, ++at) {
        const int k = inner_of(i), a_batch = matrix_of_a(p.a_batch ? tile.batch : 0, i);
        if (at >= early) {
            mbarrier_wait(ring.empty(at), Ring::parity(at) ^ 1);
            mbarrier_arrive_expect_tx(ring.full(at), A_BYTES + B_BYTES);
        }
        if constexpr (A_COLUMNS) {
#pragma unroll
            for (int half = 0; half < ROWS / 64; ++half) tma_load_3d(ring.a(at) + half * HALF_BYTES, &p.a, ring.full(at), tile.row + half * 64, k, a_batch);
        } else {
            tma_load_3d(ring.a(at), &p.a, ring.full(at), k, tile.row, a_batch);
        }
        if (at >= early) fetch_columns(p, ring, tile, i, at);
        if (CARRIED > 0 && i == next && pieces < ALL) {
            prefetch_operands(p, tile, pieces++);
            next += between;
        }
    }
}
