// Matrix products of 16-bit operands and of bytes on Hopper: C[m, n] = tail(A[m, k] B[k, n]), batched, any of the four transpositions.
//
// - A block makes tiles of ROWS x COLUMNS. One thread fetches: ROWS x DEPTH of A and DEPTH x COLUMNS of B at a time go by tensor maps into
//   a ring of STAGES in shared memory. Two warpgroups multiply (wgmma).
// - TURNS: a warpgroup has whole tiles, every second one of the block. While one multiplies, the other does what follows its tile.
//   Blocks are persistent: there are as many as run at once, and each walks over tiles.
// - Otherwise a block has one tile, and each warpgroup 64 rows of it. SPLIT blocks of a cluster share K: each sends its sums to the
//   blocks that own their columns, and these add them in the order of the blocks.
// - Sums are f32, in an order that the constants alone decide, and are rounded to the storage type of the matmul. They pass through
//   shared memory, so that `tail` gets V neighbouring columns of a row at a time, and reads and writes whole vectors.
// - Beyond m, n and k the tensor maps give zeros, which are summed and not stored.
// - Bytes come as pairs, so that DEPTH is of pairs; what follows their sums is in `bytes.cu`.
//
// KIND (1 f16, 2 bf16, 3 bytes), A_COLUMNS (columns of A are contiguous, not rows), B_ROWS (rows of B are), COLUMNS, STAGES, TURNS, SPLIT, V
// and N are constants that stand before this file.

constexpr int ROWS = 128, DEPTH = 64;
constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
constexpr int HALF_BYTES = 64 * DEPTH * 2;  // 64 rows of A, or 64 columns of B
constexpr int PIECES = (COLUMNS + 63) / 64;
constexpr int A_BYTES = 2 * HALF_BYTES, B_BYTES = B_ROWS ? PIECES * HALF_BYTES : COLUMNS * DEPTH * 2;
constexpr int STAGE_BYTES = (A_BYTES + B_BYTES + 1023) / 1024 * 1024;
constexpr int HALVES = TURNS ? 2 : 1;  // 64 rows each, of a warpgroup
constexpr int SHARE = COLUMNS / SPLIT; // columns that a block of a cluster stores
// Floats from one row of sums that wait to be added to the next: eight rows of a warp's store are in different banks.
constexpr int PITCH = SHARE + (SHARE % 32 == 8 || SHARE % 32 == 24 ? 0 : 8);
constexpr int TURN_BARRIER = 1, STAGED_BARRIER = 3;

// Where things lie in shared memory, from a multiple of 1024 bytes on, as the swizzle wants it.
constexpr int STAGED_BYTES = KIND == 3 ? 4 * (16 * 64 * 4 + 128) : SPLIT == 1 ? PIECES * 8192 : 0;
constexpr int AT_STAGED = STAGES * STAGE_BYTES;
constexpr int AT_BARRIERS = AT_STAGED + 2 * STAGED_BYTES;
static_assert(SPLIT == 1 || SPLIT * ROWS * PITCH * 4 <= AT_STAGED, "sums that are exchanged take the place of operands");

struct Parameters {
    TensorMap a, b;
    tail::Parameters tail;
    u64 m, steps, row_tiles, column_tiles, tiles;
    u64 a_batch, b_batch;  // whether the operand has a matrix for each of the batch
};

struct Tile {
    int batch, row, column;
};

// Tiles of eight rows of tiles are neighbours: they share columns of B while these are in the L2.
static __device__ __forceinline__ Tile tile_of(u32 row_tiles, u32 column_tiles, u32 index) {
    const u32 all = row_tiles * column_tiles;
    const u32 batch = index / all, own = index % all, band = own / (8 * column_tiles), inside = own % (8 * column_tiles);
    const u32 high = min(8u, row_tiles - band * 8);
    return {(int)batch, (int)(band * 8 + inside % high) * ROWS, (int)(inside / high) * COLUMNS};
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

static __device__ __forceinline__ void fetch(const Parameters& p, Ring ring, const Tile& tile, int first, int steps, u32& at) {
    const int a_batch = p.a_batch ? tile.batch : 0, b_batch = p.b_batch ? tile.batch : 0;
    for (int i = first; i < first + steps; ++i, ++at) {
        mbarrier_wait(ring.empty(at), Ring::parity(at) ^ 1);
        mbarrier_arrive_expect_tx(ring.full(at), A_BYTES + B_BYTES);
        const int k = i * DEPTH;
        if constexpr (A_COLUMNS) {
#pragma unroll
            for (int half = 0; half < 2; ++half) tma_load_3d(ring.a(at) + half * HALF_BYTES, &p.a, ring.full(at), tile.row + half * 64, k, a_batch);
        } else {
            tma_load_3d(ring.a(at), &p.a, ring.full(at), k, tile.row, a_batch);
        }
        if constexpr (B_ROWS) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                tma_load_3d(ring.b(at) + piece * HALF_BYTES, &p.b, ring.full(at), tile.column + piece * 64, k, b_batch);
            }
        } else {
            tma_load_3d(ring.b(at), &p.b, ring.full(at), k, tile.column, b_batch);
        }
    }
}
