// Rows of which each block makes a part: what is added to them, their statistics, their norm.
//
//   s = residual + x;  y = norm(s)
//
// - A unit is 64 columns of a row. Whoever has made x for a unit adds the residual, stores s and says the unit's mean and the sum of
//   squares about it in a word of global memory (`begin_eight`). Once the words of all units of a row are there, each block
//   normalises its own columns (`finish_eight`); it waits for that only after it has given its own.
// - A word's last bit says in which launch it was written: odd and even ones differ, and every launch writes all words. So
//   nothing has to be cleared, and a word that is there is whole.
// - Numbers: x is rounded to the storage type and so is s, as they would be between kernels. Squares are about the unit's first
//   element, then about the first unit's mean: as these are among the numbers, no more cancels than a factor of one more than there are. All blocks
//   compute a row's statistics from the same words in the same order.
// - Work is drawn: a block takes the next number when it has room for it. The last draw of all resets the count and counts launches.
//   Numbers of a block stand on a board in its shared memory until its helpers are done with them. No block draws while its board
//   is full, and a board has more places than there are numbers that wait for each other: so the first numbers that are waited
//   for always go on, however few blocks run at once.
//
// RMS (whether the norm is of the root mean square, and else a layer's), EPSILON, WEIGHT_STORAGE and HANDOFFS (in how many parts x of
// a number comes) stand before this file.

constexpr int UNIT = 64;
constexpr int TOGETHER = WIDTH / UNIT;         // units that come at once
constexpr int UNITS = HANDOFFS * TOGETHER;     // units of a number
constexpr int HELPERS = 3;                     // warps that normalise
constexpr int PLACES = 64;                     // numbers on a board

typedef Stored<WEIGHT_STORAGE>::Element WeightElement;

struct Norm {
    const Element* g_residual;
    Element* g_sum;
    Element* g_y;
    const WeightElement* g_weight;
    const WeightElement* g_bias;
    u64* g_moments;  // rows by units
    u64* g_state;    // how many numbers were drawn, and in the upper half launches before this one
    u64 cols, residual_row, numbers;  // all elements have 32-bit numbers
    float by_units, by_cols;  // one over how many there are
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

// What a number stands for: some queries of a sequence, and which head or columns of them. Only who draws has to take numbers apart.
struct alignas(16) Drawn {
    int sequence;  // -1 after the last number
    int first, end;
    int which;
};

// Queries of a group: groups that see most come first, in sections of sequences whose keys and values stay in the L2 cache.
static __device__ __forceinline__ Drawn queries_of(const Attention& p, int section, int group, int which) {
    const int tiles = ((int)p.queries + QUERIES - 1) / QUERIES, from = group / (section * tiles) * section;
    const int rest = group - from * tiles, together = min(section, (int)p.batch - from);
    const int first = (tiles - 1 - rest / together) * QUERIES;
    return {from + rest % together, first, min(first + QUERIES, (int)p.queries), which};
}

struct Board {
    Drawn item;           // what those who multiply do next
    Drawn drawn[PLACES];  // numbers whose rows helpers have
    u32 done[HELPERS];   // numbers that a helper is done with
    u32 begun[HELPERS];  // parts of numbers whose rows it has begun
    u32 eight[HELPERS];  // of the oldest one that it is not done with, the next rows
    u32 mark;            // of this launch, known with the first number
    u32 filler[2];
};

static __device__ __forceinline__ void clear(Board* s_board) {
    for (int helper = 0; helper < HELPERS; ++helper) {
        s_board->done[helper] = s_board->begun[helper] = 0;
        s_board->eight[helper] = helper;
    }
}

static __device__ __forceinline__ u32 look_at(const u32* s_at) { return *(const volatile u32*)s_at; }
static __device__ __forceinline__ void put_down(u32* s_at, u32 value) {
    __syncwarp();
    if ((thread_anew() & 31) == 0) store_released_shared(shared_address(s_at), value);
    __syncwarp();
}
// Warps after those who multiply: the first fetches.
static __device__ __forceinline__ int helper_anew() { return thread_anew() / 32 - MULTIPLIERS / 32 - 1; }

static __device__ __forceinline__ Drawn look_at(const Drawn* s_at) {
    const int4 all = *(const int4*)s_at;
    return {all.x, all.y, all.z, all.w};
}

// Waits until a number of this round has a place.
static __device__ __forceinline__ void wait_for_place(const Board* s_board, u32 round) {
    for (int helper = 0; helper < HELPERS; ++helper) {
        while (round - load_acquired_shared(shared_address(&s_board->done[helper])) >= PLACES) pause();
    }
}

// ---- rows

static __device__ __forceinline__ float low_half(u32 pair) { return widen<STORAGE>((u16)pair); }
static __device__ __forceinline__ float high_half(u32 pair) { return widen<STORAGE>((u16)(pair >> 16)); }

// Eight weights as they lie, which become numbers where they are used: so few registers hold them.
struct Weights {
    uint4 raw[WEIGHT_STORAGE == 0 ? 2 : 1];
    __device__ __forceinline__ void load(const WeightElement* g_from) {
#pragma unroll
        for (int i = 0; i < (WEIGHT_STORAGE == 0 ? 2 : 1); ++i) raw[i] = ((const uint4*)g_from)[i];
    }
    // Number `at`, which the compiler knows.
    __device__ __forceinline__ float operator[](int at) const {
        const int word = WEIGHT_STORAGE == 0 ? at : at / 2;
        const uint4& four = raw[word / 4];
        const u32 bits = word % 4 == 0 ? four.x : word % 4 == 1 ? four.y : word % 4 == 2 ? four.z : four.w;
        if constexpr (WEIGHT_STORAGE == 0) {
            return __uint_as_float(bits);
        } else {
            return widen<WEIGHT_STORAGE>((u16)(at % 2 ? bits >> 16 : bits));
        }
    }
};

// x of eight rows and a unit, of which `rows` there are, from shared memory: a row is 128 bytes, its pieces of 16 swizzled. A warp
// does it: half the rows at a time, eight lanes a row.
static __device__ __forceinline__ void begin_eight(const Norm& p, const char* s_eight, u32 row, int rows, int unit, u32 mark) {
    const int lane = thread_anew() & 31, piece = lane % 8;
    const int column = unit * UNIT + piece * 8;
    const u32 cols = (u32)p.cols, stride = (u32)p.residual_row;
    uint4 r_residual[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = half * 4 + lane / 8;
        if (at < rows) r_residual[half] = *(const uint4*)(p.g_residual + (row + at) * stride + column);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = half * 4 + lane / 8;
        const uint4 x = *(const uint4*)(s_eight + at * 128 + ((piece ^ at) << 4));
        const u32 left[4] = {r_residual[half].x, r_residual[half].y, r_residual[half].z, r_residual[half].w};
        const u32 right[4] = {x.x, x.y, x.z, x.w};
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = narrow2<STORAGE>(low_half(left[i]) + low_half(right[i]), high_half(left[i]) + high_half(right[i]));
        }
        const float pivot = RMS ? 0.0f : __shfl_sync(0xffffffffu, low_half(pairs[0]), lane & 24);
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float a = low_half(pairs[i]) - pivot, b = high_half(pairs[i]) - pivot;
            if constexpr (!RMS) sum += a + b;
            squares = fmaf(a, a, fmaf(b, b, squares));
        }
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) {
            if constexpr (!RMS) sum += neighbour(sum, mask);
            squares += neighbour(squares, mask);
        }
        if (at < rows) {
            *(uint4*)(p.g_sum + (row + at) * cols + column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
            if (piece == 0) {
                const float mean = sum * (1.0f / UNIT), about = squares - sum * mean;
                // Not a number stays so.
                const u32 bits = (__float_as_uint(about < 0.0f ? 0.0f : about) & ~1u) | mark;
                write_word(p.g_moments + (row + at) * (cols / UNIT) + unit, (u64)bits << 32 | __float_as_uint(pivot + mean));
            }
        }
    }
}

static __device__ __forceinline__ float mean_of(u64 word) { return __uint_as_float((u32)word); }
static __device__ __forceinline__ float squares_of(u64 word) { return __uint_as_float((u32)(word >> 32) & ~1u); }
static __device__ __forceinline__ bool is_marked(u64 word, u32 mark) { return ((u32)(word >> 32) & 1) == mark; }

// y of eight rows and `COUNT` units, of which this warp, or another of the block, has begun all; false where another unit is missing.
template <int COUNT>
static __device__ __forceinline__ bool finish_eight(const Norm& p, u32 row, int rows, int first_unit, u32 mark) {
    const int lane = thread_anew() & 31, units = (int)p.cols / UNIT;
    bool here = true;
    float pivot = 0.0f, means = 0.0f, squared = 0.0f, squares = 0.0f;
    if (lane / 4 < rows) {
        const u64* g_row = p.g_moments + (row + lane / 4) * units;
        if constexpr (!RMS) {
            const u64 first = read_word(g_row);
            here = is_marked(first, mark);
            pivot = mean_of(first);
        }
#pragma unroll 2
        for (int unit = lane % 4; unit < units; unit += 4) {
            const u64 word = read_word(g_row + unit);
            here = here && is_marked(word, mark);
            const float mean = mean_of(word) - pivot;
            means += mean;
            squared = fmaf(mean, mean, squared);
            squares += squares_of(word);
        }
    }
    if (any_of_warp(!here)) return false;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        means += neighbour(means, mask);
        squared += neighbour(squared, mask);
        squares += neighbour(squares, mask);
    }
    float mean = 0.0f;
    if constexpr (!RMS) {
        const float of_means = means * p.by_units, between = squared - means * of_means;
        squares += UNIT * (between < 0.0f ? 0.0f : between);
        mean = pivot + of_means;
    }
    const float rstd = rsqrtf(fmaf(squares, p.by_cols, EPSILON));
#pragma unroll 1
    for (int i = 0; i < COUNT; ++i) {
        const int same = thread_anew() & 31, column = (first_unit + i) * UNIT + same % 8 * 8;
        const u32 cols = (u32)p.cols, offset = (row + same / 8) * cols + column;
        uint4 s[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = half * 4 + same / 8;
            if (at < rows) s[half] = *(const uint4*)(p.g_sum + offset + half * 4 * cols);
        }
        Weights w, b;
        w.load(p.g_weight + column);
        if constexpr (!RMS) b.load(p.g_bias + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = half * 4 + same / 8;
            const float of_row = __shfl_sync(0xffffffffu, mean, at * 4), by = __shfl_sync(0xffffffffu, rstd, at * 4);
            const u32 from[4] = {s[half].x, s[half].y, s[half].z, s[half].w};
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float low = low_half(from[j]), high = high_half(from[j]);
                if constexpr (RMS) {
                    low = low * by * w[2 * j];
                    high = high * by * w[2 * j + 1];
                } else {
                    low = fmaf((low - of_row) * by, w[2 * j], b[2 * j]);
                    high = fmaf((high - of_row) * by, w[2 * j + 1], b[2 * j + 1]);
                }
                pairs[j] = narrow2<STORAGE>(low, high);
            }
            if (at < rows) *(uint4*)(p.g_y + offset + half * 4 * cols) = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
    return true;
}

// ---- barriers of a block, and helpers

constexpr int O_FULL = BARRIERS, O_EMPTY = BARRIERS + 1, ITEM_FULL = BARRIERS + 2, ITEM_EMPTY = BARRIERS + 3;
constexpr int AT_BOARD = AT_MORE + 4 * 8;
constexpr int AT_REST = AT_BOARD + sizeof(Board);
static_assert(AT_BOARD % 16 == 0, "a board is aligned");

static __device__ __forceinline__ Board* board_of(char* s_base) { return (Board*)(s_base + AT_BOARD); }

static __device__ __forceinline__ void init_norm(Rings rings, char* s_base) {
    init_barrier(rings.barrier(O_FULL), SPLIT ? 4 : 8);
    init_barrier(rings.barrier(O_EMPTY), HELPERS);
    init_barrier(rings.barrier(ITEM_FULL), 1);
    init_barrier(rings.barrier(ITEM_EMPTY), 8);
    clear(board_of(s_base));
}

// Tells those who multiply what comes next; they have read what came before.
static __device__ __forceinline__ void put_item(Rings rings, char* s_base, u32 round, const Drawn& drawn) {
    wait(rings.barrier(ITEM_EMPTY), (round & 1) ^ 1);
    board_of(s_base)->item = drawn;
    arrive(rings.barrier(ITEM_FULL));
}
static __device__ __forceinline__ Drawn take_item(Rings rings, char* s_base, u32 round) {
    wait(rings.barrier(ITEM_FULL), round & 1);
    const Drawn drawn = look_at(&board_of(s_base)->item);
    __syncwarp();
    release(rings.barrier(ITEM_EMPTY));
    return drawn;
}

// Waits until helpers have taken what was left for them before, given how often something was.
static __device__ __forceinline__ void wait_for_helpers(Rings rings, u32 handoffs) {
    wait(rings.barrier(O_EMPTY), (handoffs & 1) ^ 1);
}

// Begins the rows of what those who multiply have left. False where it was the end.
static __device__ __forceinline__ bool begin_rows(const Norm& p, Rings rings, char* s_base, u64 queries, u32 begun) {
    const Drawn drawn = look_at(&board_of(s_base)->drawn[begun / HANDOFFS % PLACES]);
    if (drawn.sequence < 0) return false;
    const u32 first = drawn.sequence * (u32)queries + drawn.first;
    const int rows = drawn.end - drawn.first, unit = drawn.which * UNITS + begun % HANDOFFS * TOGETHER;
#pragma unroll 1
    for (int i = helper_anew(); i * 8 < rows; i += HELPERS) {
#pragma unroll 1
        for (int piece = 0; piece < TOGETHER; ++piece) {
            const char* s_eight = s_base + AT_O + i / 2 * 16 * WIDTH * 2 + piece * 2048 + i % 2 * 1024;
            begin_eight(p, s_eight, first + i * 8, rows - i * 8, unit + piece, look_at(&board_of(s_base)->mark));
        }
    }
    __syncwarp();
    release(rings.barrier(O_EMPTY));
    return true;
}

// What helpers do, until they are told of the end. Eights of rows are taken by them in turn. What one knows from number to number is on
// the board, so that registers are left for rows. What is new comes first, as other blocks wait for its units; then the oldest rows
// all of whose units are there.
static __device__ __forceinline__ void follow(const Norm& p, Rings rings, char* s_base, u64 queries) {
    Board* s_board = board_of(s_base);
    bool ended = false;
    while (true) {
        const u32 begun = look_at(&s_board->begun[helper_anew()]);
        const bool behind = look_at(&s_board->done[helper_anew()]) < begun / HANDOFFS;
        if (ended && !behind) return;
        const u32 full = rings.barrier(O_FULL);
        if (!ended && (!behind || any_of_warp(is_over_now(full, begun & 1)))) {
            wait(full, begun & 1);
            ended = !begin_rows(p, rings, s_base, queries, begun);
            if (!ended) put_down(&s_board->begun[helper_anew()], look_at(&s_board->begun[helper_anew()]) + 1);
            continue;
        }
        const Drawn drawn = look_at(&s_board->drawn[look_at(&s_board->done[helper_anew()]) % PLACES]);
        const int row = drawn.first + look_at(&s_board->eight[helper_anew()]) * 8, rows = drawn.end - row;
        if (rows > 0) {
            const u32 from = drawn.sequence * (u32)queries + row;
            if (!finish_eight<UNITS>(p, from, rows, drawn.which * UNITS, look_at(&s_board->mark))) {
                pause();
                continue;
            }
        }
        // The next rows, or those of the next number.
        const bool last = rows <= HELPERS * 8;
        const u32 next = last ? helper_anew() : look_at(&s_board->eight[helper_anew()]) + HELPERS;
        put_down(&s_board->eight[helper_anew()], next);
        if (last) put_down(&s_board->done[helper_anew()], look_at(&s_board->done[helper_anew()]) + 1);
    }
}

// A block of 384 threads: one fetches what the block draws, warps beside it help, the others compute. `init` makes the barriers that the
// kernel has besides.
template <class Init, class Fetch, class Compute>
static __device__ __forceinline__ void run_block(const Norm& p, u64 queries, char* s_memory, Init init, Fetch fetch, Compute compute) {
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const Rings rings = {shared_address(s_base)};
    // On its way while barriers are made.
    u64 drawn_first = 0;
    if (threadIdx.x == MULTIPLIERS) drawn_first = draw(p);
    if (threadIdx.x == 0) {
        init_norm(rings, s_base);
        init(rings);
        rings.init();
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<AHEAD ? 56 : 48>();
        if (threadIdx.x == MULTIPLIERS) fetch(rings, s_base, drawn_first);
        if (threadIdx.x >= MULTIPLIERS + 32) follow(p, rings, s_base, queries);
    } else {
        take_registers<AHEAD ? 224 : 96>();
        compute(rings, s_base);
    }
}
