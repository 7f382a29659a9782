// Attention on the matrix units, for 16-bit storage.
//
//   o = dropout(softmax(scale q k^T + mask)) v, a block a tile of queries of one head, tile after tile of keys
//
// - Numbers: products and sums in f32. The probabilities, before the division by their sum, are rounded to the storage type
//   for their product with v; nothing else is rounded before the result.
// - A warp owns 16 ATOMS rows of queries: its scores, its probabilities and its part of the result never leave registers.
//   Probabilities are the left operand of the second product as they lie.
// - Keys and values come by asynchronous copies, the next tile while this one is worked on. A row takes an odd number of
//   16-byte pieces of shared memory, so that the eight rows of a small matrix lie in different banks.
// - Tiles that no query of the block sees are not read, those that no query of a warp sees are not worked on by it, and only
//   those that some query of the warp does not see whole are masked. Rows of keys and values beyond the last that is seen
//   are zeros in shared memory. Tiles of late queries, which see most, come first.
// - The largest score stays behind by up to 2^SLACK before sums are scaled anew.
// - Needs sm_80, WIDTH a multiple of 16, rows that start at multiples of 16 bytes.
//
// WARPS, ATOMS, KEYS (of a tile) and BLOCKS (of a multiprocessor, at least) are constants that stand before this file.

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * ATOMS * WARPS;
constexpr int PIECES = WIDTH / 8;
constexpr int ROW = WIDTH + 8;
constexpr int STEPS = WIDTH / 16;
constexpr int STAGE = 2 * KEYS * ROW;
constexpr bool HELD = WIDTH <= 128;  // queries stay in registers
constexpr float SLACK = 8.0f;
// The scale can wait for the exponential, if it leaves the order of scores as it is.
constexpr bool SCALED = MASK == ADDITIVE || SCALE < 1e-30f;
constexpr float FACTOR = SCALED ? LOG2E : SCALE * LOG2E;

static_assert(2 * KEYS >= QUERIES, "queries pass through the second stage");

struct State {
    float o[ATOMS][WIDTH / 8][4];
    float maximum[ATOMS][2];
    float sum[ATOMS][2];
};

// What is the same for all tiles of keys.
struct Place {
    u64 sequence, head;
    int query;  // first row of this thread; the others follow in eights
    int lane;
    long long last;
    u32 seed;
};

// Rows of a tile on their way to shared memory; zeros from `end` on, where nothing is read.
template <int ROWS>
static __device__ __forceinline__ void load_rows(Element* s_to, const Element* g_from, u64 stride, int first, int end) {
    // Where rows divide the threads, a thread keeps its column, and its rows are equally far apart.
    constexpr bool EVEN = THREADS % PIECES == 0;
    constexpr int APART = THREADS / PIECES;
    const Element* g_even = g_from + (u64)(first + (int)threadIdx.x / PIECES) * stride + threadIdx.x % PIECES * 8;
#pragma unroll
    for (int i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; ++i) {
        const int piece = threadIdx.x + i * THREADS;
        if (ROWS * PIECES % THREADS == 0 || piece < ROWS * PIECES) {
            const int row = EVEN ? (int)threadIdx.x / PIECES + i * APART : piece / PIECES;
            const int column = (EVEN ? (int)threadIdx.x % PIECES : piece % PIECES) * 8;
            const Element* g_row = EVEN ? g_even : g_from + (u64)(first + row) * stride + column;
            copy_async(s_to + row * ROW + column, g_row, first + row < end);
        }
        g_even += APART * stride;
    }
}

// The part of the queries for one step along the width.
static __device__ __forceinline__ void load_queries(u32 (&r_q)[4], const Element* s_q, int atom, int step, int lane) {
    const int row = (threadIdx.x / 32 * ATOMS + atom) * 16 + (lane & 15);
    load_matrices(r_q, s_q + row * ROW + step * 16 + (lane >> 4) * 8);
}

// Scores: scaled, masked, hidden.
template <bool HIDES>
static __device__ __forceinline__ void mask_scores(const Attention& p, const Place& at, float (&r_s)[ATOMS][KEYS / 8][4], int key) {
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = at.query + atom * 16 + half * 8, first = key + (at.lane & 3) * 2;
            const int end = HIDES ? seen(p, at.last, query) : 0;
            const bool exists = query < (int)p.queries;
            const MaskElement* g_mask = mask_row(p, at.sequence, at.head, exists ? query : 0);
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = r_s[atom][i][2 * half + e];
                    const int j = first + 8 * i + e;
                    if constexpr (SCALED) s *= SCALE;
                    if constexpr (MASK == ADDITIVE) {
                        if (j < (int)p.keys) s += widen<MASK_STORAGE>(g_mask[j]);
                    }
                    if (HIDES && j >= end) s = never();
                }
            }
        }
    }
}

// Scores become probabilities, but for their sum; sums follow the largest score.
static __device__ __forceinline__ void soften(const Attention& p, const Place& at, State& r, float (&r_s)[ATOMS][KEYS / 8][4], int key) {
    float before[ATOMS][2];
    bool grows = false;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = fmaxf(r_s[atom][0][2 * half], r_s[atom][0][2 * half + 1]);
#pragma unroll
            for (int i = 1; i < KEYS / 8; ++i) {
                most = fmaxf(most, fmaxf(r_s[atom][i][2 * half], r_s[atom][i][2 * half + 1]));
            }
            most = fmaxf(most, neighbour(most, 1));
            most = fmaxf(most, neighbour(most, 2)) * FACTOR;
            float& maximum = r.maximum[atom][half];
            before[atom][half] = maximum;
            if (most > maximum + SLACK) {
                maximum = most;
                grows = true;
            }
        }
    }
    if (any_of_warp(grows)) {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Exactly 1 where the largest score stays.
                const float factor = ex2(before[atom][half] - shift_of(r.maximum[atom][half]));
                r.sum[atom][half] *= factor;
#pragma unroll
                for (int i = 0; i < WIDTH / 8; ++i) {
                    r.o[atom][i][2 * half] *= factor;
                    r.o[atom][i][2 * half + 1] *= factor;
                }
            }
        }
    }
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = shift_of(r.maximum[atom][half]);
            const u64 elements = row_elements(p, at.sequence, at.head, at.query + atom * 16 + half * 8) + key + (at.lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                float &a = r_s[atom][i][2 * half], &b = r_s[atom][i][2 * half + 1];
                a = ex2(fmaf(a, FACTOR, -shift));
                b = ex2(fmaf(b, FACTOR, -shift));
                r.sum[atom][half] += a + b;
                if constexpr (DROPOUT) drop2(a, b, elements + 8 * i, at.seed);
            }
        }
    }
}

template <bool HIDES>
static __device__ __forceinline__ void attend(const Attention& p, const Place& at, State& r, const u32 (&r_held)[ATOMS][STEPS][4],
                                              const Element* s_q, const Element* s_k, const Element* s_v, int key) {
    const int lane = at.lane;
    float r_s[ATOMS][KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 r_q[ATOMS][4];
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
            if constexpr (HELD) {
#pragma unroll
                for (int i = 0; i < 4; ++i) r_q[atom][i] = r_held[atom][step][i];
            } else {
                load_queries(r_q[atom], s_q, atom, step, lane);
            }
        }
#pragma unroll
        for (int pair = 0; pair < KEYS / 16; ++pair) {
            // Keys 0 to 7 and 8 to 15, each for the lower and the upper half of the step.
            u32 r_k[4];
            const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8;
            load_matrices(r_k, s_k + row * ROW + step * 16 + (lane >> 3 & 1) * 8);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                multiply_add<STORAGE>(r_s[atom][2 * pair], r_q[atom], r_k[0], r_k[1]);
                multiply_add<STORAGE>(r_s[atom][2 * pair + 1], r_q[atom], r_k[2], r_k[3]);
            }
        }
    }
    if constexpr (HIDES || SCALED) mask_scores<HIDES>(p, at, r_s, key);
    soften(p, at, r, r_s, key);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        u32 r_p[ATOMS][4];
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
            const float(&left)[4] = r_s[atom][2 * step], (&right)[4] = r_s[atom][2 * step + 1];
            r_p[atom][0] = narrow2<STORAGE>(left[0], left[1]);
            r_p[atom][1] = narrow2<STORAGE>(left[2], left[3]);
            r_p[atom][2] = narrow2<STORAGE>(right[0], right[1]);
            r_p[atom][3] = narrow2<STORAGE>(right[2], right[3]);
        }
#pragma unroll
        for (int pair = 0; pair < WIDTH / 16; ++pair) {
            u32 r_v[4];
            load_turned_matrices(r_v, s_v + (step * 16 + (lane & 15)) * ROW + pair * 16 + (lane >> 4) * 8);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                multiply_add<STORAGE>(r.o[atom][2 * pair], r_p[atom], r_v[0], r_v[1]);
                multiply_add<STORAGE>(r.o[atom][2 * pair + 1], r_p[atom], r_v[2], r_v[3]);
            }
        }
    }
}

// A warp's rows of the result, through its own part of shared memory, in whole pieces.
static __device__ __forceinline__ void store_rows(const Attention& p, const Place& at, State& r, Element* s_all, int first) {
    const int lane = at.lane;
    Element* s_o = s_all + threadIdx.x / 32 * 16 * ATOMS * ROW;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = r.sum[atom][half];
            sum += neighbour(sum, 1);
            sum += neighbour(sum, 2);
            const float end = ending(sum);
            Element* s_row = s_o + (atom * 16 + half * 8 + (lane >> 2)) * ROW + (lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) {
                // A row without a key is zeros whatever was multiplied by 0.
                const float a = r.o[atom][i][2 * half] * end, b = r.o[atom][i][2 * half + 1] * end;
                *(u32*)(s_row + 8 * i) = sum == 0.0f ? 0 : narrow2<STORAGE>(a, b);
            }
        }
    }
    __syncwarp();
    Element* g_o = p.g_o + start(p.o, at.sequence, at.head);
#pragma unroll
    for (int i = 0; i < 16 * ATOMS * PIECES / 32; ++i) {
        const int piece = lane + 32 * i, row = piece / PIECES, column = piece % PIECES * 8;
        if (first + row < (int)p.queries) {
            *(uint4*)(g_o + (u64)(first + row) * p.o.position + column) = *(const uint4*)(s_o + row * ROW + column);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_tensor(const __grid_constant__ Attention p) {
    extern __shared__ uint4 s_memory[];
    Element* s_stages = (Element*)s_memory;
    Element* s_q = s_stages + (HELD ? STAGE : 2 * STAGE);
    const u64 all_heads = p.batch * p.heads, head = blockIdx.x % all_heads;
    const int tile = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads);
    const int lane = threadIdx.x & 31, first = tile * QUERIES, end = min(first + QUERIES, (int)p.queries);
    const int warp_first = first + (int)threadIdx.x / 32 * 16 * ATOMS;
    Place at;
    at.sequence = head / p.heads;
    at.head = head % p.heads;
    at.query = warp_first + (lane >> 2);
    at.lane = lane;
    at.last = last_key(p, at.sequence);
    at.seed = DROPOUT ? (u32)*p.g_seed : 0;
    const Element* g_k = p.g_k + start(p.k, at.sequence, at.head / p.group);
    const Element* g_v = p.g_v + start(p.v, at.sequence, at.head / p.group);
    // Keys that the block works on, that the warp works on, and that all queries of the warp see.
    const int block_end = seen(p, at.last, end - 1), warp_whole = seen(p, at.last, warp_first);
    const int warp_end = warp_first < end ? seen(p, at.last, min(warp_first + 16 * ATOMS, end) - 1) : 0;

    State r;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            r.maximum[atom][half] = never();
            r.sum[atom][half] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) r.o[atom][i][e] = 0.0f;
        }
    }

    load_rows<QUERIES>(s_q, p.g_q + start(p.q, at.sequence, at.head), p.q.position, first, end);
    if (block_end > 0) {
        load_rows<KEYS>(s_stages, g_k, p.k.position, 0, block_end);
        load_rows<KEYS>(s_stages + KEYS * ROW, g_v, p.v.position, 0, block_end);
    }
    wait_copies();
    __syncthreads();
    u32 r_q[ATOMS][STEPS][4];
    if constexpr (HELD) {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) load_queries(r_q[atom][step], s_q, atom, step, lane);
        }
        // The second stage is free once all warps have their queries.
        __syncthreads();
    }
    int stage = 0;
    for (int key = 0; key < block_end; key += KEYS) {
        if (key + KEYS < block_end) {
            Element* s_next = s_stages + (stage ^ 1) * STAGE;
            load_rows<KEYS>(s_next, g_k, p.k.position, key + KEYS, block_end);
            load_rows<KEYS>(s_next + KEYS * ROW, g_v, p.v.position, key + KEYS, block_end);
        }
        const Element *s_k = s_stages + stage * STAGE, *s_v = s_k + KEYS * ROW;
        if (key + KEYS <= warp_whole && warp_end > 0) {
            attend<false>(p, at, r, r_q, s_q, s_k, s_v, key);
        } else if (key < warp_end) {
            attend<true>(p, at, r, r_q, s_q, s_k, s_v, key);
        }
        wait_copies();
        __syncthreads();
        stage ^= 1;
    }
    store_rows(p, at, r, s_stages, warp_first);
}
