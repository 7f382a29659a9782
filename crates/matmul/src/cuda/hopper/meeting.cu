// ---- what follows sums of bytes by rows, where blocks meet in memory
//
// - `tail` works on sums where they are, as in `rows.cu`: in the registers of the threads that multiplied, pairs of columns of rows, four
//   neighbouring threads per row of a tile. What it reads or writes passes between registers and memory.
// - Each number of each part of a row has a word of its own, half of which is the number and half a mark of this launch. A warp stores those of its
//   tile, and waits until the words of all parts have the mark: nothing else orders them. So a row may have any number of tiles, on any
//   multiprocessors. Four threads share the parts of their row, each adds up its own in order, and all add up those of the four.
// - All blocks must run at once: there are at most as many as multiprocessors, and each takes one of them. Then tiles of the same rows follow each
//   other, and a block has at most one of them: the tiles of the first rows that are not done wait for nothing but their own
//   multiplications. A kernel on another stream may delay some blocks, but must not wait for this one to end.
//
// g_launches: how many launches have ended, then how many warps of this one have. g_words: zeros before the first launch.

constexpr int EACH = (PARTS + 3) / 4;  // parts of a row that a thread reads
// Chunks of what rows share that are loaded together, and rows whose numbers are, as far as there are registers.
constexpr int LOADED = 8, TOGETHER = EACH <= 4 ? OWN : EACH <= 8 ? 2 : 1;
constexpr int WARPS = 8;               // that multiply
static_assert(SPLIT == 1 && SIDES == 1 && RIGHTS == 1 && COLUMNS % 64 == 0, "a part of a row is a tile's");

// A warp's rows in a tile.
struct WarpRows {
    const Parameters& p;
    int column;  // the tile's first
    i64 place;   // the first among all rows, in the order of tiles
    int left;    // rows from the first one on, of which there are 16, and 16 more that are 64 further on where HALVES is 2
    u32 mark, thread;
    tail::Picked picked;

    __device__ __forceinline__ int part() const { return column / COLUMNS; }
    // Which of the warp's rows is row `own` of this thread.
    __device__ __forceinline__ int down(int own) const { return 64 * (own / 2) + 8 * (own % 2) + (int)(thread % 32 / 4); }
    // A word of a row, or if it is not there of the warp's first.
    __device__ __forceinline__ u64* word(int slot, int part, int own) const {
        return p.g_words + (slot * PARTS + part) * (i64)p.m + place + (down(own) < left ? down(own) : 0);
    }
};

// What a row is reduced to, from the words of this thread's parts.
template <int LEVEL> static __device__ __forceinline__ void all_numbers(const WarpRows& at, const u64 (&words)[tail::Facts<LEVEL>::SLOTS][EACH], float* numbers) {
    constexpr tail::Level<LEVEL> level;
    const int quad = (int)(at.thread % 4);
    const auto number = [&](int slot, int i) { return __uint_as_float((u32)words[slot][i]); };
    const auto of_four = [&](int slot, float own) {
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) own = tail::both(level, slot, own, shuffle_xor(own, apart));
        return own;
    };
#pragma unroll
    for (int slot = 0; slot < tail::Facts<LEVEL>::SLOTS; ++slot) {
        float total = quad < PARTS ? number(slot, 0) : tail::nothing(level, slot);
#pragma unroll
        for (int i = 1; i < EACH; ++i) total = quad + 4 * i < PARTS ? tail::both(level, slot, total, number(slot, i)) : total;
        if (tail::Facts<LEVEL>::MOMENTS && slot == 1) {
            const float mean = numbers[0] * (1.0f / tail::COLS);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float count = quad + 4 * i < PARTS ? part_columns(quad + 4 * i) : 0.0f, off = count > 0.0f ? number(0, i) / count - mean : 0.0f;
                total = fmaf(count * off, off, total);
            }
        }
        numbers[slot] = of_four(slot, total);
    }
}

// From the numbers of parts to those of rows.
template <int LEVEL> static __device__ __forceinline__ void meet(const WarpRows& at, tail::Row (&rows)[OWN]) {
    constexpr tail::Level<LEVEL> level;
    constexpr int SLOTS = tail::Facts<LEVEL>::SLOTS, BEFORE = tail::Facts<LEVEL>::FIRST;
    float numbers[OWN][SLOTS];
#pragma unroll
    for (int own = 0; own < OWN; ++own) own_numbers<LEVEL>(rows[own], at.part(), numbers[own]);
    if constexpr (PARTS > 1) {
        const int quad = (int)(at.thread % 4);
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                const u64 word = (u64)at.mark << 32 | __float_as_uint(numbers[own][slot]);
                if (rows[own].live && quad == 0) store_relaxed(at.word(BEFORE + slot, at.part(), own), word);
            }
        }
#pragma unroll
        for (int first = 0; first < OWN; first += TOGETHER) {
            u64 words[TOGETHER][SLOTS][EACH];
            while (true) {
                bool there = true;
#pragma unroll
                for (int own = 0; own < TOGETHER; ++own) {
#pragma unroll
                    for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
                        for (int i = 0; i < EACH; ++i) words[own][slot][i] = load_relaxed(at.word(BEFORE + slot, min(quad + 4 * i, PARTS - 1), first + own));
                    }
                }
#pragma unroll
                for (int own = 0; own < TOGETHER; ++own) {
#pragma unroll
                    for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
                        for (int i = 0; i < EACH; ++i) there = there && (u32)(words[own][slot][i] >> 32) == at.mark;
                    }
                }
                if (__ballot_sync(0xffffffffu, there) == 0xffffffffu) break;
                back_off();
            }
#pragma unroll
            for (int own = 0; own < TOGETHER; ++own) all_numbers<LEVEL>(at, words[own], numbers[first + own]);
        }
    }
#pragma unroll
    for (int own = 0; own < OWN; ++own) tail::meet(level, rows[own], numbers[own]);
}

// One sweep over the rows of a thread, and all that follow.
template <int LEVEL>
static __device__ __forceinline__ void sweep(const WarpRows& at, tail::Row (&rows)[OWN], const Accumulator (&sums)[HALVES][COLUMNS / 2]) {
    if constexpr (tail::Facts<LEVEL>::EMPTY) {
        sweep<LEVEL + 1>(at, rows, sums);
        return;
    }
    constexpr tail::Level<LEVEL> level;
    const int quad = (int)(at.thread % 4), column = at.column + 2 * quad;
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        tail::numbers(level, at.p.tail, rows[own], quad, at.part());
        tail::start(level, rows[own]);
    }
    decltype(tail::shared(level, at.p.tail, 0)) shared[LOADED];
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; ++c) {
        if (c % LOADED == 0) {
#pragma unroll
            for (int i = 0; i < LOADED; ++i) shared[i] = tail::shared(level, at.p.tail, column + 8 * (c + i), at.picked);
        }
#pragma unroll
        for (int own = 0; own < OWN; ++own) {
            const F sum = lanes<F>([&](int i) { return (float)sums[own / 2][4 * c + own % 2 * 2 + i]; });
            tail::take(level, at.p.tail, rows[own], c, column + 8 * c, &sum, nullptr, shared[c % LOADED]);
        }
    }
    if constexpr (tail::Facts<LEVEL>::SLOTS > 0) meet<LEVEL>(at, rows);
    if constexpr (LEVEL + 1 < tail::LEVELS) sweep<LEVEL + 1>(at, rows, sums);
}

// What is known of a warp's rows in a tile before their sums are.
struct Ready {
    WarpRows at;
    tail::Row rows[OWN];
};

// Of a warp whose first row in the order of tiles is number `place`, of which `left` are there. `row_of(down)` is the row of the result that is so
// far down from the first, or any if there is none.
template <class RowOf>
static __device__ __forceinline__ Ready get_ready(const Parameters& p, int column, i64 place, int left, RowOf row_of) {
    // Addresses are much the same for all tiles: computed before the first one, they would take registers that sums need.
    const u32 zero = opaque(0), mark = (u32)load_relaxed(p.g_launches) + 1;
    Ready ready = {{p, column + (int)zero, place, left, mark, threadIdx.x + zero, {}}, {}};
#pragma unroll
    for (int own = 0; own < OWN; ++own) {
        ready.rows[own].live = ready.at.down(own) < left;
        ready.rows[own].row = row_of(ready.at.down(own));
        tail::begin(p.tail, ready.rows[own]);
    }
    ready.at.picked = tail::pick(p.tail, ready.rows[0].row);
    return ready;
}

static __device__ __forceinline__ void finish_warp(Ready& ready, const Accumulator (&sums)[HALVES][COLUMNS / 2]) {
    if (ready.at.left > 0) sweep<0>(ready.at, ready.rows, sums);
}

// A warp has met the others of all its rows. The last one of all makes another mark for the next launch.
static __device__ __forceinline__ void end_meetings(const Parameters& p) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    u32* const g_ended = (u32*)(p.g_launches + 1);
    if (add_acq_rel(g_ended, 1) + 1 < WARPS * gridDim.x) return;
    *g_ended = 0;
    store_relaxed(p.g_launches, load_relaxed(p.g_launches) + 1);
}
