// ---- what follows the sums, by rows
//
// - `tail` works on sums where they are: in the registers of the threads that multiplied, pairs of columns of rows, four neighbouring
//   threads per row of a warpgroup's part. So whole rows can be reduced: threads by shuffles, then the warpgroups and the blocks of a
//   cluster that have a row together, by floats that every one sends to all, added in one order.
// - 16-bit operands that lie in rows come as the operands of the matmul do: after the last stage of K, pieces of 64 columns take places of
//   the ring, several of them in one, in the same swizzle. A 16-bit result of a sweep takes the place of the first operand and leaves
//   from there by a tensor map. What else is read or written passes between registers and memory directly.

constexpr int OWN = 2 * HALVES;                         // rows of a thread
constexpr int HELD = CARRIED > 0 ? CARRIED : 1;         // operands of a piece, or room for its result
constexpr int PIECE_BYTES = ROWS * 128, TOGETHER = STAGE_BYTES / PIECE_BYTES;  // pieces in a place of the ring
constexpr int ALL = PIECES * HELD, MORE = (ALL + TOGETHER - 1) / TOGETHER;     // places
constexpr int PARTS = CLUSTER * SIDES, ROWS_BARRIER = 5;
constexpr int AHEAD = 8;  // chunks of what rows share that are loaded together
static_assert(!TURNS && SPLIT == 1 && COLUMNS % 64 == 0 && MORE <= STAGES, "every piece has its place");

// A number of a row, as one of those that have a part of it sent it; and the barrier that counts what a block receives in one exchange.
static __device__ __forceinline__ float* meeting(int slot, int part, int row) {
    extern __shared__ char s_dynamic[];
    return (float*)s_dynamic + (slot * PARTS + part) * ROWS + row;
}
static __device__ __forceinline__ u64* received(int exchange) { return (u64*)meeting(tail::SLOTS, 0, 0) + exchange; }

// How many exchanges there are before a sweep.
template <int LEVEL> static __device__ __forceinline__ constexpr int exchanges() {
    if constexpr (LEVEL == 0) return 0;
    else return exchanges<LEVEL - 1>() + (tail::Facts<LEVEL - 1>::SLOTS > 0 ? 1 : 0);
}
template <int LEVEL> static __device__ __forceinline__ void expect_numbers() {
    constexpr int SLOTS = tail::Facts<LEVEL>::SLOTS;
    if constexpr (SLOTS > 0) {
        const u32 barrier = shared_address(received(exchanges<LEVEL>()));
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_tx(barrier, SLOTS * PARTS * ROWS * 4);
    }
    if constexpr (LEVEL + 1 < tail::LEVELS) expect_numbers<LEVEL + 1>();
}
// One thread does this before the block arrives at the cluster.
static __device__ __forceinline__ void prepare() {
    if constexpr (CLUSTER > 1) expect_numbers<0>();
}

// Where operand `i` of a piece is, in the ring and in shared memory; `at` is the number of the first place in the ring.
static __device__ __forceinline__ u32 place_of(u32 at, int piece, int i) { return at + (piece * HELD + i) / TOGETHER; }
static __device__ __forceinline__ u32 piece_at(Ring ring, u32 at, int piece, int i) {
    return ring.a(place_of(at, piece, i)) + (piece * HELD + i) % TOGETHER * PIECE_BYTES;
}

static __device__ __forceinline__ void fetch_more(const Parameters& p, Ring ring, const Tile& tile, u32 at) {
#pragma unroll 1
    for (int place = 0; place < MORE; ++place) {
        mbarrier_wait(ring.empty(at + place), Ring::parity(at + place) ^ 1);
#if CARRIED > 0
        const int first = place * TOGETHER, end = min(first + TOGETHER, ALL);
        mbarrier_arrive_expect_tx(ring.full(at + place), (end - first) * PIECE_BYTES);
        for (int i = first; i < end; ++i) {
            tma_load_3d(piece_at(ring, at, i / HELD, i % HELD), &p.maps[i % HELD], ring.full(at + place), tile.column + i / HELD * 64, tile.row, tile.batch);
        }
#else
        mbarrier_arrive(ring.full(at + place));
#endif
    }
}

static __device__ __forceinline__ void stand_by() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_wait();
        for (int i = 0; i < tail::MEETINGS; ++i) await_remote_stores(received(i));
    }
}

// What a warpgroup has of a tile: rows from `top` on, this side's columns.
struct Part {
    int top, side, warpgroup;
    u32 at;  // number in the ring of the first place of what comes besides
    __device__ __forceinline__ int piece(int i) const { return side * (COLUMNS / 64) + i; }
};

// From the parts of threads, warpgroups and blocks to the numbers of rows. This thread's first row is row `first` of the tile.
template <int LEVEL> static __device__ __forceinline__ void meet(const Tile& tile, const Part& part, tail::Row (&rows)[OWN], int first) {
    constexpr tail::Level<LEVEL> level;
    constexpr int SLOTS = tail::Facts<LEVEL>::SLOTS, BEFORE = tail::Facts<LEVEL>::FIRST;
    constexpr bool MOMENTS = tail::Facts<LEVEL>::MOMENTS;
    const int column = tile.column + part.side * COLUMNS, own_part = tile.column / COLUMNS + part.side;
    // Columns of a part of the row.
    const auto columns = [](int part) { return (float)max(0, min(COLUMNS, tail::COLS - part * COLUMNS)); };
    float parts[OWN][SLOTS];
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        tail::gather(level, rows[own], parts[own]);
        if constexpr (MOMENTS) parts[own][1] = tail::squares(level, rows[own], column + 2 * (threadIdx.x % 4), parts[own][0] / columns(own_part));
    }
    if constexpr (PARTS > 1) {
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int row = first + 64 * (own / 2) + 8 * (own % 2);
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                float* const s_part = meeting(BEFORE + slot, own_part, row);
                if constexpr (CLUSTER > 1) {
                    for (int rank = threadIdx.x % 4; rank < CLUSTER; rank += 4) store_remote_async(s_part, parts[own][slot], rank, received(exchanges<LEVEL>()));
                } else if (threadIdx.x % 4 == 0) {
                    *s_part = parts[own][slot];
                }
            }
        }
        if constexpr (CLUSTER > 1) {
            await_remote_stores(received(exchanges<LEVEL>()));
        } else {
            named_barrier_sync(ROWS_BARRIER, MULTIPLIERS);
        }
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int row = first + 64 * (own / 2) + 8 * (own % 2);
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                float total = *meeting(BEFORE + slot, 0, row);
#pragma unroll
                for (int other = 1; other < PARTS; ++other) total = tail::both(level, slot, total, *meeting(BEFORE + slot, other, row));
                parts[own][slot] = total;
            }
            if constexpr (MOMENTS) {
                const float mean = parts[own][0] * (1.0f / tail::COLS);
#pragma unroll
                for (int other = 0; other < PARTS; ++other) {
                    const float count = columns(other), off = count > 0.0f ? *meeting(BEFORE, other, row) / count - mean : 0.0f;
                    parts[own][1] = fmaf(count * off, off, parts[own][1]);
                }
            }
        }
    }
#pragma unroll
    for (int own = 0; own < OWN; ++own) tail::meet(level, rows[own], parts[own]);
}

// The result of a sweep leaves.
static __device__ __forceinline__ void put(const TensorMap* map, Ring ring, const Tile& tile, const Part& part) {
    fence_proxy_async_shared();
    named_barrier_sync(STAGED_BARRIER + part.warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll 1
        for (int i = 0; i < COLUMNS / 64; ++i) {
            const int piece = part.piece(i);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int down = part.top + 64 * half;
                tma_store_3d(map, piece_at(ring, part.at, piece, 0) + down * 128, tile.column + 64 * piece, tile.row + down, tile.batch);
            }
        }
        commit_stores();
    }
}

// One sweep over the rows of a thread, and all that follow.
template <int LEVEL>
static __device__ __forceinline__ void sweep(const Parameters& p, Ring ring, const Tile& tile, const Part& part, char* s_base, tail::Row (&rows)[OWN], const float (&sums)[HALVES][COLUMNS / 2]) {
    if constexpr (tail::Facts<LEVEL>::EMPTY) {
        sweep<LEVEL + 1>(p, ring, tile, part, s_base, rows, sums);
        return;
    }
    constexpr tail::Level<LEVEL> level;
    constexpr int PUT = tail::Facts<LEVEL>::PUT;
    const int lane = threadIdx.x & 31, quad = lane % 4, warp_top = part.top + 16 * (threadIdx.x / 32 % 4);
    const bool first_part = tile.column == 0 && part.side == 0;
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        tail::numbers(level, p.tail, rows[own], quad, first_part ? 0 : 1);
        tail::start(level, rows[own]);
    }
    // The result of an earlier sweep must have left.
    if (LEVEL > 0 && PUT >= 0) {
        if (threadIdx.x % 128 == 0) await_stores_read();
        named_barrier_sync(STAGED_BARRIER + part.warpgroup, 128);
    }
    const int columns = tile.column + part.side * COLUMNS + 2 * quad;
    decltype(tail::shared(level, p.tail, 0)) shared[AHEAD];
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
        const int piece = part.piece(j / 4), column = columns + 16 * j;
        if (LEVEL == 0 && j % 4 == 0) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) mbarrier_wait(ring.full(place_of(part.at, piece, i)), Ring::parity(place_of(part.at, piece, i)));
        }
        // Several loads are on their way together.
        if (j % (AHEAD / 2) == 0) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) shared[i] = tail::shared(level, p.tail, column + 8 * i);
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int row = warp_top + 64 * half + lane % 16, offset = row * 128 + ((j % 4 * 2 + lane / 16 ^ row & 7) << 4);
            u32 carried[4][HELD] = {};
            if constexpr (LEVEL == 0 && CARRIED > 0) {
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    u32 words[4];
                    ldmatrix(words, s_base + (piece_at(ring, part.at, piece, i) - ring.base) + offset);
#pragma unroll
                    for (int k = 0; k < 4; ++k) carried[k][i] = words[k];
                }
            }
            u32 pairs[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int c = 2 * j + k / 2, i = 4 * c + k % 2 * 2;
                const u32 rounded = narrow2<KIND>(sums[half][i], sums[half][i + 1]);
                const F sum = lanes<F>([&](int at) { return widen<KIND>((u16)(rounded >> 16 * at)); });
                pairs[k] = tail::take(level, p.tail, rows[2 * half + k % 2], c, column + k / 2 * 8, &sum, carried[k], shared[j % (AHEAD / 2) * 2 + k / 2]);
            }
            if constexpr (PUT >= 0) stmatrix(s_base + (piece_at(ring, part.at, piece, 0) - ring.base) + offset, pairs);
        }
    }
    if constexpr (PUT >= 0) put(&p.maps[PUT], ring, tile, part);
    if constexpr (tail::Facts<LEVEL>::SLOTS > 0) meet<LEVEL>(tile, part, rows, warp_top + lane / 4);
    if constexpr (LEVEL + 1 < tail::LEVELS) sweep<LEVEL + 1>(p, ring, tile, part, s_base, rows, sums);
}

static __device__ __forceinline__ void finish_part(const Parameters& p, Ring ring, char* s_base, const Tile& tile, int top, int side, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2], u32 at) {
    tail::Row rows[OWN];
    const int first = tile.row + top + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        const int row = first + 64 * (own / 2) + 8 * (own % 2);
        rows[own].live = row < (int)p.m;
        rows[own].row = (i64)tile.batch * (i64)p.m + (rows[own].live ? row : 0);
        tail::begin(p.tail, rows[own]);
    }
    // Every block of the cluster runs: others may write into its shared memory.
    if constexpr (CLUSTER > 1) cluster_wait();
    sweep<0>(p, ring, tile, Part{top, side, warpgroup, at}, s_base, rows, sums);
    if (threadIdx.x % 128 == 0) await_stores();
}
