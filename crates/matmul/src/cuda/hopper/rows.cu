// ---- what follows the sums, by rows
//
// - `tail` works on sums where they are: in the registers of the threads that multiplied, pairs of columns of rows, four neighbouring
//   threads per row of a warpgroup's part. So whole rows can be reduced: threads by shuffles, then the warpgroups and the blocks of a
//   cluster that have a row together, by floats that every one sends to all, added in one order.
// - 16-bit operands that lie in rows come as the operands of the matmul do: after the last stage of K, pieces of 64 columns take places of
//   the ring, several of them in one, in the same swizzle. A 16-bit result of a sweep takes the place of the first operand and leaves
//   from there by a tensor map. What else is read or written passes between registers and memory directly.
// - Where warpgroups take turns (TURNS), each has a place of its own behind the ring for its pieces, so that the other has the whole ring
//   meanwhile. A second thread fetches them.

constexpr int HELD = CARRIED > 0 ? CARRIED : 1;         // operands of a piece, or room for its result
constexpr int PIECE_BYTES = ROWS * 128, TOGETHER = STAGE_BYTES / PIECE_BYTES;  // pieces in a place of the ring
constexpr int ALL = PIECES * HELD, MORE = (ALL + TOGETHER - 1) / TOGETHER;     // places
constexpr int ROWS_BARRIER = 5;
// Places for the numbers of rows: one of each warpgroup that has tiles of its own.
constexpr int SETS = TURNS ? 2 : 1;
constexpr int AHEAD = TURNS ? 4 : 8;  // chunks of what rows share that are loaded together, as far as there are registers
static_assert(SPLIT == 1 && COLUMNS % 64 == 0 && (TURNS ? ALL * PIECE_BYTES <= STAGED_BYTES : MORE <= STAGES), "every piece has its place");

// A number of a row, as one of those that have a part of it sent it; and the barrier that counts what a block receives in one exchange.
static __device__ __forceinline__ float* meeting(int set, int slot, int part, int row) {
    extern __shared__ char s_dynamic[];
    return (float*)(s_dynamic + set * (MEETING_BYTES / SETS)) + (slot * PARTS + part) * ROWS + row;
}
static __device__ __forceinline__ u64* received(int set, int exchange) { return (u64*)meeting(set, tail::SLOTS, 0, 0) + exchange; }
// Where warps of all blocks tell that they have read what their block received: only then the numbers of the next tile may come.
static __device__ __forceinline__ u32 all_read(int set, int exchange) { return shared_address(received(set, tail::SLOTS + exchange)); }

// Barriers of the place behind the ring that the block's tile `turn` has: empty, and full with operands.
static __device__ __forceinline__ u32 held_empty(Ring ring, u32 turn) { return ring.base + AT_BARRIERS + STAGES * 16 + turn % 2 * 16; }
static __device__ __forceinline__ u32 held_full(Ring ring, u32 turn) { return held_empty(ring, turn) + 8; }

// How many exchanges of numbers there are before a sweep.
template <int LEVEL> static __device__ __forceinline__ constexpr int exchanges() {
    if constexpr (LEVEL == 0) return 0;
    else return exchanges<LEVEL - 1>() + (tail::Facts<LEVEL - 1>::SLOTS > 0 ? 1 : 0);
}
template <int LEVEL> static __device__ __forceinline__ void expect_numbers(int set) {
    mbarrier_arrive_expect_tx(shared_address(received(set, exchanges<LEVEL>())), tail::Facts<LEVEL>::SLOTS * PARTS * ROWS * 4);
}
template <int LEVEL> static __device__ __forceinline__ void prepare_numbers(int set) {
    if constexpr (tail::Facts<LEVEL>::SLOTS > 0) {
        mbarrier_init(shared_address(received(set, exchanges<LEVEL>())), 1);
        if constexpr (TURNS) mbarrier_init(all_read(set, exchanges<LEVEL>()), 4 * CLUSTER);
        expect_numbers<LEVEL>(set);
    }
    if constexpr (LEVEL + 1 < tail::LEVELS) prepare_numbers<LEVEL + 1>(set);
}
// One thread does this before the block arrives at the cluster. The block has so many tiles.
static __device__ __forceinline__ void prepare(Ring ring, u32 tiles) {
    if constexpr (CLUSTER > 1) {
        for (int set = 0; set < min(SETS, (int)tiles); ++set) prepare_numbers<0>(set);
    }
    if constexpr (TURNS) {
        for (int turn = 0; turn < 2; ++turn) {
            mbarrier_init(held_empty(ring, turn), 1);
            mbarrier_init(held_full(ring, turn), 1);
        }
    }
}

// Where operand `i` of a piece is, in the ring and in shared memory; `at` is the number of the first place in the ring.
static __device__ __forceinline__ u32 place_of(u32 at, int piece, int i) { return at + (piece * HELD + i) / TOGETHER; }
static __device__ __forceinline__ u32 piece_at(Ring ring, u32 at, int piece, int i) {
    if constexpr (TURNS) return ring.base + AT_STAGED + at % 2 * STAGED_BYTES + (piece * HELD + i) * PIECE_BYTES;
    else return ring.a(place_of(at, piece, i)) + (piece * HELD + i) % TOGETHER * PIECE_BYTES;
}
// Waits until it is there; where warpgroups take turns, `at` is the number of the block's tile.
static __device__ __forceinline__ void await_piece(Ring ring, u32 at, int piece, int i) {
    if constexpr (TURNS) mbarrier_wait(held_full(ring, at), at / 2 & 1);
    else mbarrier_wait(ring.full(place_of(at, piece, i)), Ring::parity(place_of(at, piece, i)));
}

// Pieces from `first` to `end` come to where they belong, and are counted by a barrier.
static __device__ __forceinline__ void fetch_pieces(const Parameters& p, Ring ring, const Tile& tile, u32 at, u32 barrier, int first, int end) {
#if CARRIED > 0
    mbarrier_arrive_expect_tx(barrier, (end - first) * PIECE_BYTES);
    for (int i = first; i < end; ++i) {
        tma_load_3d(piece_at(ring, at, i / HELD, i % HELD), &p.maps[i % HELD], barrier, tile.column + i / HELD * 64, tile.row, tile.batch);
    }
#else
    mbarrier_arrive(barrier);
#endif
}

// By the second thread, where warpgroups take turns.
static __device__ __forceinline__ void fetch_held(const Parameters& p, Ring ring) {
    u32 turn = 0;
    for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x, ++turn) {
        mbarrier_wait(held_empty(ring, turn), turn / 2 & 1 ^ 1);
        fetch_pieces(p, ring, tile_at(p, index), turn, held_full(ring, turn), 0, ALL);
    }
}

static __device__ __forceinline__ void fetch_more(const Parameters& p, Ring ring, const Tile& tile, u32 at) {
#pragma unroll 1
    for (int place = 0; place < MORE; ++place) {
        mbarrier_wait(ring.empty(at + place), Ring::parity(at + place) ^ 1);
        fetch_pieces(p, ring, tile, at, ring.full(at + place), place * TOGETHER, min((place + 1) * TOGETHER, ALL));
    }
}

static __device__ __forceinline__ void stand_by() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_wait();
        for (int i = 0; i < tail::MEETINGS; ++i) await_remote_stores(received(0, i));
    }
}

// What a warpgroup has of a tile: rows from `top` on, this side's columns.
struct Part {
    int top, side, warpgroup;
    u32 at;    // number in the ring of the first place of what comes besides, or of the block's tile
    u32 left;  // tiles that the block has behind this one
    u32 thread = threadIdx.x;
    __device__ __forceinline__ int set() const { return at % SETS; }
    __device__ __forceinline__ u32 parity() const { return TURNS ? at / SETS & 1 : 0; }
    __device__ __forceinline__ int piece(int i) const { return side * (COLUMNS / 64) + i; }
};

// What a whole row is reduced to, its parts taken in their order. `number_of(slot, part)` gives a part's.
template <int LEVEL, class NumberOf> static __device__ __forceinline__ void all_numbers(float* numbers, NumberOf number_of) {
    constexpr tail::Level<LEVEL> level;
#pragma unroll
    for (int slot = 0; slot < tail::Facts<LEVEL>::SLOTS; ++slot) {
        float total = number_of(slot, 0);
#pragma unroll
        for (int other = 1; other < PARTS; ++other) total = tail::both(level, slot, total, number_of(slot, other));
        numbers[slot] = total;
    }
    if constexpr (tail::Facts<LEVEL>::MOMENTS) {
        const float mean = numbers[0] * (1.0f / tail::COLS);
#pragma unroll
        for (int other = 0; other < PARTS; ++other) {
            const float count = part_columns(other), off = count > 0.0f ? number_of(0, other) / count - mean : 0.0f;
            numbers[1] = fmaf(count * off, off, numbers[1]);
        }
    }
}

// From the parts of threads, warpgroups and blocks to the numbers of rows. This thread's first row is row `first` of the tile.
template <int LEVEL> static __device__ __forceinline__ void meet(const Tile& tile, const Part& part, tail::Row (&rows)[OWN], int first) {
    constexpr tail::Level<LEVEL> level;
    constexpr int SLOTS = tail::Facts<LEVEL>::SLOTS, BEFORE = tail::Facts<LEVEL>::FIRST;
    const int own_part = tile.column / COLUMNS + part.side;
    float parts[OWN][SLOTS];
#pragma unroll
    for (int own = 0; own < OWN; ++own) own_numbers<LEVEL>(rows[own], own_part, parts[own]);
    if constexpr (PARTS > 1) {
        // Of a new barrier the phase before the first counts as completed.
        if constexpr (TURNS && CLUSTER > 1) mbarrier_wait(all_read(part.set(), exchanges<LEVEL>()), part.parity() ^ 1);
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int row = first + 64 * (own / 2) + 8 * (own % 2);
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                float* const s_part = meeting(part.set(), BEFORE + slot, own_part, row);
                if constexpr (CLUSTER > 1) {
                    for (int rank = threadIdx.x % 4; rank < CLUSTER; rank += 4) store_remote_async(s_part, parts[own][slot], rank, received(part.set(), exchanges<LEVEL>()));
                } else if (threadIdx.x % 4 == 0) {
                    *s_part = parts[own][slot];
                }
            }
        }
        if constexpr (CLUSTER > 1) {
            await_remote_stores(received(part.set(), exchanges<LEVEL>()), part.parity());
            if (TURNS && part.left >= SETS && threadIdx.x % 128 == 0) expect_numbers<LEVEL>(part.set());
        } else {
            named_barrier_sync(ROWS_BARRIER, MULTIPLIERS);
        }
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const int row = first + 64 * (own / 2) + 8 * (own % 2);
            all_numbers<LEVEL>(parts[own], [&](int slot, int other) { return *meeting(part.set(), BEFORE + slot, other, row); });
        }
        if constexpr (TURNS && CLUSTER > 1) {
            __syncwarp();
            if (threadIdx.x % 32 < CLUSTER) mbarrier_arrive_at(all_read(part.set(), exchanges<LEVEL>()), threadIdx.x % 32);
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
    const int lane = part.thread & 31, quad = lane % 4, warp_top = part.top + 16 * (part.thread / 32 % 4);
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
            for (int i = 0; i < HELD; ++i) await_piece(ring, part.at, piece, i);
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

static __device__ __forceinline__ void finish_rows(const Parameters& p, Ring ring, char* s_base, const Tile& tile, const Part& part, const float (&sums)[HALVES][COLUMNS / 2]) {
    tail::Row rows[OWN];
    const int first = tile.row + part.top + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        const int row = first + 64 * (own / 2) + 8 * (own % 2);
        rows[own].live = row < (int)p.m;
        rows[own].row = (i64)tile.batch * (i64)p.m + (rows[own].live ? row : 0);
        tail::begin(p.tail, rows[own]);
    }
    sweep<0>(p, ring, tile, part, s_base, rows, sums);
}

// All of a warpgroup's sums of the block's only tile.
static __device__ __forceinline__ void finish_part(const Parameters& p, Ring ring, char* s_base, const Tile& tile, int top, int side, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2], u32 at) {
    // Every block of the cluster runs: others may write into its shared memory.
    if constexpr (CLUSTER > 1) cluster_wait();
    finish_rows(p, ring, s_base, tile, {top, side, warpgroup, at, 0}, sums);
    if (threadIdx.x % 128 == 0) await_stores();
}

// Of one of the block's tiles.
static __device__ __forceinline__ void finish_turn(const Parameters& p, Ring ring, char* s_base, u32 index, u32 turn, int warpgroup, float (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) pin(sums[half]);
    const u32 left = ((u32)p.tiles - 1 - index) / gridDim.x;
    // Addresses are the same for all tiles: computed before the first one, they would take registers that sums need.
    const u32 zero = opaque(0);
    finish_rows(p, {ring.base + zero}, s_base + zero, tile_at(p, index), {0, 0, warpgroup, turn, left, threadIdx.x + zero}, sums);
    if (threadIdx.x % 128 == 0) {
        await_stores_read();
        mbarrier_arrive(held_empty(ring, turn));
        if (left < 2) await_stores();
    }
}
