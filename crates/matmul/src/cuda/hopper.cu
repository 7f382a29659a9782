// Matrix products of 16-bit operands on Hopper: C[m, n] = tail(A[m, k] B[k, n]), batched, any of the four transpositions.
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
//
// KIND (1 f16, 2 bf16), A_COLUMNS (columns of A are contiguous, not rows), B_ROWS (rows of B are), COLUMNS, STAGES, TURNS, SPLIT, V
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
constexpr int STAGED_BYTES = SPLIT == 1 ? PIECES * 8192 : 0;
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
static __device__ __forceinline__ Tile tile_at(const Parameters& p, u32 index) {
    const u32 row_tiles = (u32)p.row_tiles, column_tiles = (u32)p.column_tiles, all = row_tiles * column_tiles;
    const u32 batch = index / all, own = index % all, band = own / (8 * column_tiles), inside = own % (8 * column_tiles);
    const u32 high = min(8u, row_tiles - band * 8);
    return {(int)batch, (int)(band * 8 + inside % high) * ROWS, (int)(inside / high) * COLUMNS};
}

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

// ---- the warpgroups that multiply

// A warp is done with a stage.
static __device__ __forceinline__ void release(u32 barrier) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

// Not by the first multiplication: sums that it reads without using them would hold their registers since the tile before.
static __device__ __forceinline__ void clear(float (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[half][i] = 0.0f;
    }
}

// Adds `steps` stages to sums. Of A, the halves from `first` on.
static __device__ __forceinline__ void multiply(float (&sums)[HALVES][COLUMNS / 2], Ring ring, int first, int steps, u32 at) {
    // From one 16 of K to the next, in units of 16 bytes.
    constexpr int A_STEP = A_COLUMNS ? 128 : 2, B_STEP = B_ROWS ? 128 : 2;
    for (int i = 0; i < steps; ++i, ++at) {
        mbarrier_wait(ring.full(at), Ring::parity(at));
        const u64 a = matrix_descriptor<HALF_BYTES>(ring.a(at) + first * HALF_BYTES), b = matrix_descriptor<HALF_BYTES>(ring.b(at));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < DEPTH / 16; ++j) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                Wgmma<COLUMNS, KIND>::template from_shared<B_ROWS, A_COLUMNS>(sums[half], a + half * (HALF_BYTES / 16) + j * A_STEP, b + j * B_STEP, 1);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) release(ring.empty(at - 1));
    }
}

// Where 16 bytes of a row of staged sums lie: pieces of 64 columns, rows of 128 bytes in the swizzle of the tensor maps.
static __device__ __forceinline__ int staged_at(int row, int sixteen) {
    return sixteen / 8 * 8192 + row * 128 + ((sixteen % 8 ^ row & 7) << 4);
}

// Sums of 64 rows, rounded: four pairs for each 16 columns, as `stmatrix` takes them.
typedef u32 Rounded[COLUMNS / 16][4];

static __device__ __forceinline__ void round(Rounded& pairs, const float (&sums)[COLUMNS / 2]) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) pairs[i / 4][i % 4] = narrow2<KIND>(sums[2 * i], sums[2 * i + 1]);
}

// They go to shared memory.
static __device__ __forceinline__ void stage(char* s_staged, const Rounded& pairs) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, row = 16 * warp + lane % 16;
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) stmatrix(s_staged + staged_at(row, 2 * j + lane / 16), pairs[j]);
}

// V sums from shared memory.
static __device__ __forceinline__ F staged(const char* s_staged, int row, int column) {
    F sums;
    if constexpr (V == 8) {
        const uint4 words = *(const uint4*)(s_staged + staged_at(row, column / 8));
        const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < V; ++i) sums.v[i] = widen<KIND>((u16)(w[i / 2] >> 16 * (i & 1)));
    } else {
        const u16* s_own = (const u16*)(s_staged + staged_at(row, column / 8)) + column % 8;
#pragma unroll
        for (int i = 0; i < V; ++i) sums.v[i] = widen<KIND>(s_own[i]);
    }
    return sums;
}

// What follows HIGH x WIDE sums of a tile whose first one is at (row, column) of the batch's matrix. COUNT threads share them, this one is
// number `thread`: it has V columns of each piece of 64, in every DOWN-th row. `sums(row, column)` gives V of them.
template <int HIGH, int WIDE, int COUNT, class Sums>
static __device__ __forceinline__ void finish(const Parameters& p, int batch, int row, int column, int thread, Sums sums) {
    constexpr int PIECE = WIDE < 64 ? WIDE : 64, ACROSS = PIECE / V, DOWN = COUNT / ACROSS, TOGETHER = 4;
    const i64 first = (i64)batch * (i64)p.m + row;
    const int rows = (int)p.m - row, across = thread % ACROSS * V, down = thread / ACROSS;
#pragma unroll 1
    for (int piece = 0; piece < WIDE; piece += PIECE) {
        const int own = piece + across, c = column + own;
        if (down >= DOWN || own >= WIDE || c >= N) continue;
        const tail::Shared shared = tail::read_shared(p.tail, c);
        // Where all rows are there, no branch keeps the compiler from working on several vectors at once.
        if (HIGH % (DOWN * TOGETHER) == 0 && HIGH <= rows) {
#pragma unroll 1
            for (int start = down; start < HIGH; start += DOWN * TOGETHER) {
                tail::Operands operands[TOGETHER];
                F values[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) operands[i] = tail::read(p.tail, first + start + i * DOWN, c);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) values[i] = sums(start + i * DOWN, own);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) tail::run(p.tail, first + start + i * DOWN, c, &values[i], shared, operands[i]);
            }
        } else {
#pragma unroll 1
            for (int r = down; r < HIGH && r < rows; r += DOWN) {
                const F values = sums(r, own);
                tail::run(p.tail, first + r, c, &values, shared, tail::read(p.tail, first + r, c));
            }
        }
    }
}

// Sums of all 64 rows of a half, and what follows them. The warpgroup does it together.
static __device__ __forceinline__ void finish_half(const Parameters& p, const Tile& tile, int row, char* s_staged, int warpgroup, const Rounded& pairs) {
    stage(s_staged, pairs);
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
    finish<64, COLUMNS, 128>(p, tile.batch, row, tile.column, threadIdx.x % 128, [&](int r, int c) { return staged(s_staged, r, c); });
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
}

// Sends this thread's sums to the blocks of the cluster that own their columns, behind those of lower blocks.
static __device__ __forceinline__ void send(const float* s_parts, int warpgroup, const float (&sums)[COLUMNS / 2]) {
    const int lane = threadIdx.x & 31, row = 64 * warpgroup + 16 * (threadIdx.x / 32 % 4) + lane / 4, part = (int)cluster_rank();
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        const int owner = 8 * j / SHARE, column = 8 * j % SHARE + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 there = remote(s_parts + (part * ROWS + row + 8 * i) * PITCH + column, owner);
            store_remote2(there, sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
        }
    }
}

// V sums of all parts, first to last, rounded.
static __device__ __forceinline__ F added(const float* s_parts, int row, int column) {
    F total = lanes<F>([&](int i) { return s_parts[row * PITCH + column + i]; });
#pragma unroll
    for (int part = 1; part < SPLIT; ++part) {
        total = lanes<F>([&](int i) { return total.v[i] + s_parts[(part * ROWS + row) * PITCH + column + i]; });
    }
    return lanes<F>([&](int i) { return widen<KIND>(narrow<KIND>(total.v[i])); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + 1023) & ~1023u;
    char* const s_base = s_dynamic + (base - unaligned);
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1, steps = (int)p.steps;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.a);
        prefetch_tensor_map(&p.b);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1);
            mbarrier_init(ring.empty(stage), TURNS ? 4 : 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous();
    if constexpr (TURNS) {
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 0) {
                u32 at = 0;
                for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, at);
            }
        } else {
            setmaxnreg_inc<240>();
            char* const s_staged = s_base + AT_STAGED + warpgroup * STAGED_BYTES;
            // The first one begins.
            if (warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
            u32 turn = warpgroup;
            for (u32 index = blockIdx.x + warpgroup * gridDim.x; index < (u32)p.tiles; index += 2 * gridDim.x, turn += 2) {
                float sums[HALVES][COLUMNS / 2];
                clear(sums);
                named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
                multiply(sums, ring, 0, steps, turn * steps);
                named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
                wgmma_wait<0>();
                release(ring.empty(turn * steps + steps - 1));
                const Tile tile = tile_at(p, index);
                // At once, so that registers are free for what follows the first half.
                Rounded pairs[HALVES];
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    round(pairs[half], sums[half]);
                    pin(pairs[half]);
                }
#pragma unroll
                for (int half = 0; half < HALVES; ++half) finish_half(p, tile, tile.row + 64 * half, s_staged, warpgroup, pairs[half]);
            }
        }
    } else {
        const int part = (int)(blockIdx.x % SPLIT), first = steps * part / SPLIT, own = steps * (part + 1) / SPLIT - first;
        const Tile tile = tile_at(p, blockIdx.x / SPLIT);
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            u32 at = 0;
            if (threadIdx.x == 0) fetch(p, ring, tile, first, own, at);
            if constexpr (SPLIT > 1) {
                __syncwarp();
                cluster_barrier();
                cluster_barrier();
            }
        } else {
            setmaxnreg_inc<240>();
            float sums[HALVES][COLUMNS / 2];
            clear(sums);
            multiply(sums, ring, warpgroup, own, 0);
            wgmma_wait<0>();
            if constexpr (SPLIT == 1) {
                Rounded pairs;
                round(pairs, sums[0]);
                finish_half(p, tile, tile.row + 64 * warpgroup, s_base + AT_STAGED + warpgroup * STAGED_BYTES, warpgroup, pairs);
            } else {
                // At the same place in every block, whatever the others moved their stages by.
                const float* const s_parts = (const float*)s_dynamic;
                cluster_barrier();
                send(s_parts, warpgroup, sums[0]);
                cluster_barrier();
                finish<ROWS, SHARE, MULTIPLIERS>(p, tile.batch, tile.row, tile.column + part * SHARE, threadIdx.x - 128, [&](int r, int c) { return added(s_parts, r, c); });
            }
        }
    }
}
