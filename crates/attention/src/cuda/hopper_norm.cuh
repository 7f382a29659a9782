// Rows of which each block makes a part: what is added to them, their statistics, their norm.
//
//   s = residual + x;  y = norm(s)
//
// - A unit is 64 columns of a row. Those who multiply hand over x in a slot, which is as many rows of shared memory as a tile has
//   queries, WIDTH columns of them. The residual is copied there while they multiply; they add x to it in place and say each unit's
//   mean and its squares about that in a word of global memory (`add_rows`).
// - Three warps beside them (helpers) have slots next. Once the words of all units of a row are there, they know its statistics and
//   normalise their block's columns of it in the slot; s and y leave by the unit that copies. So no helper loads or stores rows
//   itself, and a slot is free again once the other blocks of the same rows are as far.
// - Blocks may start late, and one block may have several parts of a row. So helpers wait for words with patience, and then let the
//   slot go: s is in global memory, and y is made of that as soon as the words are there (`finish_late`).
// - A word's last bit says in which launch it was written: odd and even ones differ, and every launch writes all words. So
//   nothing has to be cleared, and a word that is there is whole.
// - Numbers: x is rounded to the storage type and so is s, as they would be between kernels. Squares are about the unit's first
//   element, then about the first unit's mean: as these are among the numbers, no more cancels than a factor of one more than there
//   are. All blocks compute a row's statistics from the same words in the same order.
// - Work is drawn: a block takes the next number when it has room for it. The last draw of all resets the count and counts launches.
//   Numbers of a block stand on a board in its shared memory until its helpers are done with them. No block draws while its board
//   is full, and a board has more places than there are numbers that wait for each other: so the first numbers that are waited
//   for always go on, however few blocks run at once.
//
// RMS (whether the norm is of the root mean square, and else a layer's), EPSILON, WEIGHT_STORAGE, STORED (whether s is a result, and
// else memory for those who let their slots go), COLS (of a row) and HANDOFFS (slots that x of a number takes) stand before this file.

constexpr int UNIT = 64;
constexpr int TOGETHER = WIDTH / UNIT;      // units of a slot
constexpr int UNITS = HANDOFFS * TOGETHER;  // units of a number
constexpr int ROW_UNITS = COLS / UNIT;      // units of a row
constexpr int UNIT_BYTES = QUERIES * 128;   // of a slot: a unit of all its rows
constexpr int HELPERS = 3;                  // warps that normalise
constexpr int BATCH = 32;                   // rows that a warp normalises together, a lane each
constexpr int PATIENCE = 100;               // looks
// Words that a lane has on their way: of more than these, as many as go into them.
constexpr int AT_ONCE = ROW_UNITS <= 12      ? ROW_UNITS
                        : ROW_UNITS % 5 == 0 ? 5
                        : ROW_UNITS % 4 == 0 ? 4
                        : ROW_UNITS % 3 == 0 ? 3
                        : ROW_UNITS % 2 == 0 ? 2
                                             : 1;
constexpr int PLACES = 64;                  // numbers on a board
static_assert(HANDOFFS <= SLOTS && QUERIES % BATCH == 0, "a number has its slots at once");

typedef Stored<WEIGHT_STORAGE>::Element WeightElement;

// How rows are found: all at once for the residual, BATCH of them for the others.
struct NormMaps {
    TensorMap residual, sum, y;
};

struct Norm {
    Element* g_sum;
    Element* g_y;
    const WeightElement* g_weight;
    const WeightElement* g_bias;
    u64* g_moments;  // tiles of queries by units by QUERIES
    u64* g_state;    // how many numbers were drawn, and in the upper half launches before this one
    u64 numbers;     // of a launch
    u64 by_tiles;    // 2^32 over how many tiles of queries a sequence has, and a bit more
};

// ---- numbers

// The last bit of the words of a launch: memory begins as zeros.
static __device__ __forceinline__ u32 mark_of(u32 launches) { return (launches & 1) ^ 1; }

// What a draw gives: a number, and in the upper half how many launches there were before.
static __device__ __forceinline__ u64 draw(const Norm& p) {
    const u64 drawn = atomicAdd(p.g_state, 1ull);
    // Every block draws one too many; then all have drawn.
    if ((u32)drawn == (u32)p.numbers + gridDim.x - 1) *p.g_state = ((drawn >> 32) + 1) << 32;
    return drawn;
}
static __device__ __forceinline__ int number_of(const Norm& p, u64 drawn) {
    return (u32)drawn < (u32)p.numbers ? (int)(u32)drawn : -1;
}

// What a number stands for: a tile of queries, counted over all sequences, and which columns of their rows; what is below zero has none.
struct alignas(8) Number {
    int tile;  // -1 after the last number
    int which;
};

static __device__ __forceinline__ int tiles_of(const Attention& p) { return ((int)p.queries + QUERIES - 1) / QUERIES; }

// The tile of a group of numbers: tiles that see most come first, in sections of sequences whose keys and values stay in the L2 cache.
static __device__ __forceinline__ int tile_of_group(const Attention& p, int section, int group) {
    const int tiles = tiles_of(p), from = group / (section * tiles) * section;
    const int rest = group - from * tiles, together = min(section, (int)p.batch - from);
    return (from + rest % together) * tiles + tiles - 1 - rest / together;
}

// The rows of a tile.
struct TileRows {
    int sequence, first, count;
};
static __device__ __forceinline__ TileRows rows_of(const Norm& p, const Attention& q, int tile) {
    const int sequence = (int)((u64)tile * p.by_tiles >> 32), first = (tile - sequence * tiles_of(q)) * QUERIES;
    return {sequence, first, min(QUERIES, (int)q.queries - first)};
}

struct Board {
    Number item;             // what those who multiply do next
    Number numbers[PLACES];  // numbers with columns, which helpers have next
    u32 done[HELPERS];       // of these, how many a helper is done with
    u32 mark;                // of this launch, known with the first number
};

static __device__ __forceinline__ u32 look_at(const u32* s_at) { return *(const volatile u32*)s_at; }
static __device__ __forceinline__ Number look_at(const Number* s_at) {
    const volatile Number* s_same = s_at;
    return {s_same->tile, s_same->which};
}
// Warps after those who multiply: the first fetches.
static __device__ __forceinline__ int helper_anew() { return reread_thread() / 32 - MULTIPLIERS / 32 - 1; }

// Waits until one more number with columns, after so many of them, has a place.
static __device__ __forceinline__ void wait_for_place(const Board* s_board, u32 round) {
    for (int helper = 0; helper < HELPERS; ++helper) {
        while (round - load_acquire_shared(shared_address(&s_board->done[helper])) >= PLACES) back_off();
    }
}

// ---- barriers of a block

// Slots are used in turn, and uses of all slots counted. One is ready when the residual is there, filled when x is, and empty when helpers
// are done.
constexpr int READY = BARRIERS, FILLED = READY + SLOTS, EMPTY = FILLED + SLOTS;
constexpr int ITEM_FULL = EMPTY + SLOTS, ITEM_EMPTY = ITEM_FULL + 1;
constexpr int AT_BOARD = AT_MORE + (3 * SLOTS + 2) * 8;
constexpr int AT_REST = AT_BOARD + sizeof(Board);
static_assert(AT_BOARD % 8 == 0, "a board is aligned");

static __device__ __forceinline__ Board* board_of(char* s_base) { return (Board*)(s_base + AT_BOARD); }
static __device__ __forceinline__ u32 slot_of(u32 use) { return AT_O + use % SLOTS * Q_BYTES; }
static __device__ __forceinline__ u32 turn_of(u32 use) { return use / SLOTS & 1; }

static __device__ __forceinline__ void init_norm(Rings rings, char* s_base) {
    for (int slot = 0; slot < SLOTS; ++slot) {
        mbarrier_init(rings.barrier(READY + slot), 1);
        mbarrier_init(rings.barrier(FILLED + slot), SPLIT ? 4 : 8);
        mbarrier_init(rings.barrier(EMPTY + slot), HELPERS);
    }
    mbarrier_init(rings.barrier(ITEM_FULL), 1);
    mbarrier_init(rings.barrier(ITEM_EMPTY), MULTIPLIERS);
    for (int helper = 0; helper < HELPERS; ++helper) board_of(s_base)->done[helper] = 0;
}

// ---- the thread that fetches

// Tells those who multiply of the number of a round; they have read what came before.
static __device__ __forceinline__ void put_item(Rings rings, char* s_base, u32 round, Number number) {
    mbarrier_wait(rings.barrier(ITEM_EMPTY), (round & 1) ^ 1);
    board_of(s_base)->item = number;
    mbarrier_arrive(rings.barrier(ITEM_FULL));
}

// Makes the slots of a number ready.
static __device__ __forceinline__ void fetch_residual(const TensorMap* map, Rings rings, const TileRows& rows, int which, u32& uses) {
    for (int i = 0; i < HANDOFFS; ++i, ++uses) {
        const u32 ready = rings.barrier(READY + uses % SLOTS), to = rings.base + slot_of(uses);
        mbarrier_wait(rings.barrier(EMPTY + uses % SLOTS), turn_of(uses) ^ 1);
        mbarrier_arrive_expect_tx(ready, Q_BYTES);
        for (int unit = 0; unit < TOGETHER; ++unit) {
            tma_load_3d(to + unit * UNIT_BYTES, map, ready, (which * UNITS + i * TOGETHER + unit) * UNIT, rows.first, rows.sequence);
        }
    }
}

// ---- the warpgroups that multiply

// All lanes read it, so that the compiler knows it to be the same for all, and each says that it has: checkers of races follow no lane that
// speaks for its warp here.
static __device__ __forceinline__ Number take_item(Rings rings, char* s_base, u32 round) {
    mbarrier_wait(rings.barrier(ITEM_FULL), round & 1);
    const Number number = look_at(&board_of(s_base)->item);
    mbarrier_arrive(rings.barrier(ITEM_EMPTY));
    return number;
}

// Of a slot that is ready: this warp's rows.
static __device__ __forceinline__ char* take_slot(Rings rings, char* s_base, const Rank& rank, u32 use) {
    mbarrier_wait(rings.barrier(READY + use % SLOTS), turn_of(use));
    return s_base + slot_of(use) + (rank.part * 64 + rank.warp * 16) * 128;
}
static __device__ __forceinline__ void give_slot(Rings rings, u32 use) {
    fence_proxy_async_shared();
    __syncwarp();
    release(rings.barrier(FILLED + use % SLOTS));
}
// After the last number: helpers are told of it.
static __device__ __forceinline__ void give_end(Rings rings, u32 use) {
    mbarrier_wait(rings.barrier(EMPTY + use % SLOTS), turn_of(use) ^ 1);
    release(rings.barrier(FILLED + use % SLOTS));
}

static __device__ __forceinline__ float low_half(u32 pair) { return widen<STORAGE>((u16)pair); }
static __device__ __forceinline__ float high_half(u32 pair) { return widen<STORAGE>((u16)(pair >> 16)); }

// Where the words of a tile's unit are.
static __device__ __forceinline__ u64* words_of(const Norm& p, int tile, int unit) {
    return p.g_moments + ((u32)tile * ROW_UNITS + unit) * QUERIES;
}

// Adds a warp's 16 rows of x to the residual, which is in its part of a slot, and says their moments. `pairs` gives what a product leaves
// of 16 columns, narrowed; `row` is the first of the rows in their tile, of which `count` there are.
template <class Pairs>
static __device__ __forceinline__ void add_rows(const Norm& p, char* s_rows, int tile, int first_unit, int row, int count, u32 mark,
                                                Pairs pairs_of) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int unit = 0; unit < TOGETHER; ++unit) {
        float pivot[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            char* s_at = s_rows + unit * UNIT_BYTES + (lane & 15) * 128 + ((step * 2 + (lane >> 4) ^ (lane & 7)) << 4);
            u32 left[4], pairs[4];
            pairs_of(unit * 4 + step, pairs);
            ldmatrix(left, s_at);
#pragma unroll
            for (int i = 0; i < 4; ++i) pairs[i] = add_packed<STORAGE>(left[i], pairs[i]);
            stmatrix(s_at, pairs);
            if (!RMS && step == 0) {
                pivot[0] = __shfl_sync(0xffffffffu, low_half(pairs[0]), lane & 28);
                pivot[1] = __shfl_sync(0xffffffffu, low_half(pairs[1]), lane & 28);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float a = low_half(pairs[i]) - pivot[i & 1], b = high_half(pairs[i]) - pivot[i & 1];
                if constexpr (!RMS) sum[i & 1] += a + b;
                squares[i & 1] = fmaf(a, a, fmaf(b, b, squares[i & 1]));
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {
                if constexpr (!RMS) sum[half] += shuffle_xor(sum[half], mask);
                squares[half] += shuffle_xor(squares[half], mask);
            }
        }
        // Two lanes of four say a row's.
        const int half = lane & 3, at = row + lane / 4 + half * 8;
        if (half < 2 && at < count) {
            const float of_row = half ? sum[1] : sum[0], mean = of_row * (1.0f / UNIT);
            const float about = (half ? squares[1] : squares[0]) - of_row * mean;
            // Not a number stays so.
            const u32 bits = (__float_as_uint(about < 0.0f ? 0.0f : about) & ~1u) | mark;
            store_relaxed(words_of(p, tile, first_unit + unit) + at, (u64)bits << 32 | __float_as_uint((half ? pivot[1] : pivot[0]) + mean));
        }
    }
}

// ---- helpers

static __device__ __forceinline__ float mean_of(u64 word) { return __uint_as_float((u32)word); }
static __device__ __forceinline__ float squares_of(u64 word) { return __uint_as_float((u32)(word >> 32) & ~1u); }
static __device__ __forceinline__ bool is_marked(u64 word, u32 mark) { return ((u32)(word >> 32) & 1) == mark; }

// Weights of eight columns.
struct Weights {
    float w[8], b[8];
    __device__ __forceinline__ Weights(const Norm& p, int column) {
        load(w, p.g_weight + column);
        if constexpr (!RMS) load(b, p.g_bias + column);
    }
    static __device__ __forceinline__ void load(float (&to)[8], const WeightElement* g_from) {
        constexpr int EACH = 16 / sizeof(WeightElement);
#pragma unroll
        for (int i = 0; i < 8 / EACH; ++i) {
            const uint4 raw = ((const uint4*)g_from)[i];
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (WEIGHT_STORAGE == 0) {
                    to[i * 4 + j] = __uint_as_float(words[j]);
                } else {
                    to[2 * j] = widen<WEIGHT_STORAGE>((u16)words[j]);
                    to[2 * j + 1] = widen<WEIGHT_STORAGE>((u16)(words[j] >> 16));
                }
            }
        }
    }
};

// Of the rows from one on, a lane each: how they are normalised.
struct Moments {
    float mean, rstd;
};
static __device__ __forceinline__ Moments moments_of(const Norm& p, int tile, int row, int count, u32 mark) {
    const int at = min(row + (reread_thread() & 31), count - 1);
    while (true) {
        const u64* g_words = words_of(p, tile, 0) + at;
        bool here = true;
        float pivot = 0.0f, means = 0.0f, squared = 0.0f, squares = 0.0f;
#pragma unroll 1
        for (int unit = 0; unit < ROW_UNITS; unit += AT_ONCE) {
            u64 words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) words[i] = load_relaxed(g_words + (unit + i) * QUERIES);
            if (!RMS && unit == 0) pivot = mean_of(words[0]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                here = here && is_marked(words[i], mark);
                const float mean = mean_of(words[i]) - pivot;
                means += mean;
                squared = fmaf(mean, mean, squared);
                squares += squares_of(words[i]);
            }
        }
        if (any_of_warp(!here)) continue;
        float mean = 0.0f;
        if constexpr (!RMS) {
            const float of_means = means * (1.0f / ROW_UNITS), between = squared - means * of_means;
            squares += UNIT * (between < 0.0f ? 0.0f : between);
            mean = pivot + of_means;
        }
        return {mean, rsqrtf(fmaf(squares, 1.0f / COLS, EPSILON))};
    }
}

// y of eight elements of a row.
static __device__ __forceinline__ uint4 normalised(uint4 s, float mean, float rstd, const Weights& by) {
    const u32 from[4] = {s.x, s.y, s.z, s.w};
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low = low_half(from[i]), high = high_half(from[i]);
        if constexpr (RMS) {
            low = low * rstd * by.w[2 * i];
            high = high * rstd * by.w[2 * i + 1];
        } else {
            low = fmaf((low - mean) * rstd, by.w[2 * i], by.b[2 * i]);
            high = fmaf((high - mean) * rstd, by.w[2 * i + 1], by.b[2 * i + 1]);
        }
        pairs[i] = narrow2<STORAGE>(low, high);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Rows of a number and a helper: every HELPERS-th batch. Which helper begins differs from number to number, so that all have alike.
static __device__ __forceinline__ int first_batch(u32 round) { return (helper_anew() + round) % HELPERS * BATCH; }
constexpr int NEXT_BATCH = HELPERS * BATCH;

// What helpers know from number to number is on the board and read anew where it is needed, so that registers are left for rows.
static __device__ __forceinline__ Number number_anew(char* s_base, u32 round) { return look_at(&board_of(s_base)->numbers[round % PLACES]); }
static __device__ __forceinline__ u32 mark_anew(char* s_base) { return look_at(&board_of(s_base)->mark); }
static __device__ __forceinline__ int rows_anew(const Norm& p, const Attention& q, char* s_base, u32 round) {
    return rows_of(p, q, number_anew(s_base, round).tile).count;
}

// A batch of rows in `count` units of a slot on its way to where a map says, from a column on.
static __device__ __forceinline__ void store_batch(const TensorMap* map, const Norm& p, const Attention& q, Rings rings, char* s_base,
                                                   u32 round, u32 slot, int column, int batch, int count) {
    if ((reread_thread() & 31) == 0) {
        const TileRows rows = rows_of(p, q, number_anew(s_base, round).tile);
        for (int unit = 0; unit < count; ++unit) {
            const u32 from = rings.base + slot + unit * UNIT_BYTES + batch * 128;
            tma_store_3d(map, from, column + unit * UNIT, rows.first + batch, rows.sequence);
        }
        commit_stores();
    }
}
// A helper's rows of s in a slot of a number, which has several.
static __device__ __forceinline__ void store_sums(const NormMaps& maps, const Norm& p, const Attention& q, Rings rings, char* s_base,
                                                  u32 round, u32 use, int turn) {
    const int column = (number_anew(s_base, round).which * UNITS + turn * TOGETHER) * UNIT;
#pragma unroll 1
    for (int batch = first_batch(round); batch < rows_anew(p, q, s_base, round); batch += NEXT_BATCH) {
        store_batch(&maps.sum, p, q, rings, s_base, round, slot_of(use + turn), column, batch, TOGETHER);
    }
}

// y of a batch of rows in its slots, and from there to where it belongs. `use` is the number's first slot.
static __device__ __forceinline__ void finish_batch(const Norm& p, const NormMaps& maps, const Attention& q, Rings rings, char* s_base,
                                                    u32 round, u32 use, int batch) {
    const Moments of = moments_of(p, number_anew(s_base, round).tile, batch, rows_anew(p, q, s_base, round), mark_anew(s_base));
#pragma unroll 1
    for (int i = 0; i < UNITS; ++i) {
        const int lane = reread_thread() & 31, piece = lane % 8, column = (number_anew(s_base, round).which * UNITS + i) * UNIT;
        const u32 slot = slot_of(use + i / TOGETHER) + i % TOGETHER * UNIT_BYTES;
        const Weights by(p, column + piece * 8);
        char* s_rows = s_base + slot + (batch + lane / 8) * 128;
#pragma unroll 2
        for (int j = 0; j < BATCH / 4; ++j) {
            const int at = j * 4 + lane / 8;
            const float mean = __shfl_sync(0xffffffffu, of.mean, at), rstd = __shfl_sync(0xffffffffu, of.rstd, at);
            uint4* s_at = (uint4*)(s_rows + j * 4 * 128 + ((piece ^ (at & 7)) << 4));
            *s_at = normalised(*s_at, mean, rstd, by);
        }
        fence_proxy_async_shared();
        __syncwarp();
        store_batch(&maps.y, p, q, rings, s_base, round, slot, column, batch, 1);
    }
}

// Whether words of all units are there for a helper's rows of a number, or come while it looks so often. It looks at the first row of a batch:
// words of the others are then on their way at least, as whoever has said the first waits for nobody before it says them.
static __device__ __forceinline__ bool are_here(const Norm& p, const Attention& q, char* s_base, u32 round, int looks) {
    while (true) {
        bool here = true;
#pragma unroll 1
        for (int batch = first_batch(round); batch < rows_anew(p, q, s_base, round); batch += NEXT_BATCH) {
#pragma unroll
            for (int unit = 0; unit < ROW_UNITS; unit += 32) {
                const int mine = min(unit + (reread_thread() & 31), ROW_UNITS - 1);
                here = here && is_marked(load_relaxed(words_of(p, number_anew(s_base, round).tile, mine) + batch), mark_anew(s_base));
            }
        }
        if (!any_of_warp(!here)) return true;
        if (--looks <= 0) return false;
        back_off();
    }
}

// y of a helper's rows of a number that let its slots go.
static __device__ __forceinline__ void finish_late(const Norm& p, const Attention& q, char* s_base, u32 round) {
#pragma unroll 1
    for (int batch = first_batch(round); batch < rows_anew(p, q, s_base, round); batch += NEXT_BATCH) {
        const Moments of = moments_of(p, number_anew(s_base, round).tile, batch, rows_anew(p, q, s_base, round), mark_anew(s_base));
#pragma unroll 1
        for (int i = 0; i < UNITS * BATCH / 4; ++i) {
            const Number number = number_anew(s_base, round);
            const TileRows rows = rows_of(p, q, number.tile);
            const int lane = reread_thread() & 31, at = i % (BATCH / 4) * 4 + lane / 8;
            const int column = (number.which * UNITS + i / (BATCH / 4)) * UNIT + lane % 8 * 8;
            const float mean = __shfl_sync(0xffffffffu, of.mean, at), rstd = __shfl_sync(0xffffffffu, of.rstd, at);
            const u32 offset = ((u32)rows.sequence * (u32)q.queries + rows.first + batch + at) * COLS + column;
            const Weights by(p, column);
            if (batch + at < rows.count) *(uint4*)(p.g_y + offset) = normalised(*(const uint4*)(p.g_sum + offset), mean, rstd, by);
        }
    }
}

static __device__ __forceinline__ u32 done_numbers(char* s_base) { return look_at(&board_of(s_base)->done[helper_anew()]); }
static __device__ __forceinline__ void one_more_done(char* s_base) {
    __syncwarp();
    u32* s_at = &board_of(s_base)->done[helper_anew()];
    if ((reread_thread() & 31) == 0) store_release_shared(shared_address(s_at), look_at(s_at) + 1);
    __syncwarp();
}

// What helpers do, until they are told of the end: numbers as they are handed over, and meanwhile the oldest one that let its slots go.
static __device__ __forceinline__ void follow(const Norm& p, const NormMaps& maps, const Attention& q, Rings rings, char* s_base) {
    u32 round = 0;
    bool ended = false;
    while (true) {
        const bool behind = done_numbers(s_base) < round;
        if (ended && !behind) break;
        const u32 use = round * HANDOFFS, filled = rings.barrier(FILLED + use % SLOTS);
        if (ended || (behind && !any_of_warp(mbarrier_test_wait(filled, turn_of(use))))) {
            if (are_here(p, q, s_base, done_numbers(s_base), 1)) {
                finish_late(p, q, s_base, done_numbers(s_base));
                one_more_done(s_base);
            } else {
                back_off();
            }
            continue;
        }
        mbarrier_wait(filled, turn_of(use));
        if (number_anew(s_base, round).tile < 0) {
            ended = true;
            continue;
        }
#pragma unroll 1
        for (int turn = 0; turn < HANDOFFS; ++turn) {
            mbarrier_wait(rings.barrier(FILLED + (use + turn) % SLOTS), turn_of(use + turn));
            if constexpr (STORED) store_sums(maps, p, q, rings, s_base, round, use, turn);
        }
        if (!behind && are_here(p, q, s_base, round, PATIENCE)) {
            // s has left its place.
            await_stores_read();
            __syncwarp();
#pragma unroll 1
            for (int batch = first_batch(round); batch < rows_anew(p, q, s_base, round); batch += NEXT_BATCH) {
                finish_batch(p, maps, q, rings, s_base, round, use, batch);
            }
            one_more_done(s_base);
            await_stores_read();
        } else {
            if constexpr (!STORED) {
#pragma unroll 1
                for (int turn = 0; turn < HANDOFFS; ++turn) store_sums(maps, p, q, rings, s_base, round, use, turn);
            }
            // Read from there later.
            await_stores();
            fence_proxy_async();
        }
        __syncwarp();
        for (int turn = 0; turn < HANDOFFS; ++turn) release(rings.barrier(EMPTY + (use + turn) % SLOTS));
        ++round;
    }
    await_stores();
}

// A block of 384 threads: one fetches what the block draws, warps beside it help, the others compute. `init` makes the barriers that the
// kernel has besides.
template <class Init, class Fetch, class Help, class Compute>
static __device__ __forceinline__ void run_block(const Norm& p, const NormMaps& maps, char* s_base, Init init, Fetch fetch, Help help, Compute compute) {
    const Rings rings = {shared_address(s_base)};
    // On its way while barriers are made.
    u64 drawn_first = 0;
    if (threadIdx.x == MULTIPLIERS) drawn_first = draw(p);
    if (threadIdx.x == 0) {
        init_norm(rings, s_base);
        init(rings);
        rings.init();
    }
    if (threadIdx.x == MULTIPLIERS + 32) {
        prefetch_tensor_map(&maps.residual);
        prefetch_tensor_map(&maps.sum);
        prefetch_tensor_map(&maps.y);
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        setmaxnreg_dec<AHEAD ? 56 : 48>();
        if (threadIdx.x == MULTIPLIERS) fetch(rings, drawn_first);
        if (threadIdx.x >= MULTIPLIERS + 32) help(rings);
    } else {
        setmaxnreg_inc<AHEAD ? 224 : 96>();
        compute(rings);
    }
}
