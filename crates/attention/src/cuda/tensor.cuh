// What the kernels on the matrix units share: tiles of rows in shared memory, products of them, hidden scores, rows stored.
//
// A row takes an odd number of 16-byte pieces of shared memory, so that the eight rows of a small matrix lie in different
// banks. WIDTH is a multiple of 16, and rows start at multiples of 16 bytes.

constexpr int PIECES = WIDTH / 8;
constexpr int ROW = WIDTH + 8;
constexpr int STEPS = WIDTH / 16;
// The scale can wait for the exponential, if it leaves the order of scores as it is.
constexpr bool SCALED = MASK == ADDITIVE || SCALE < 1e-30f;
constexpr float FACTOR = SCALED ? LOG2E : SCALE * LOG2E;

// What is the same for all tiles.
struct Place {
    u64 sequence, head;
    int query;  // first row of this thread; the others follow in eights
    int lane;
    long long last;
    u32 seed;
};

// Rows of a tile on their way to shared memory; zeros from `end` on, where nothing is read.
template <int ROWS, int THREADS>
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
            copy_async<16>(shared_address(s_to + row * ROW + column), g_row, first + row < end);
        }
        g_even += APART * stride;
    }
}

// The left operand of a product, for one step along the width.
template <int ATOMS>
static __device__ __forceinline__ void load_left(u32 (&r)[ATOMS][4], const Element* s_rows, int step, int lane) {
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
        ldmatrix(r[atom], s_rows + (atom * 16 + (lane & 15)) * ROW + step * 16 + (lane >> 4) * 8);
    }
}

// The whole left operand.
template <int ATOMS>
static __device__ __forceinline__ void hold_left(u32 (&r)[STEPS][ATOMS][4], const Element* s_rows, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) load_left(r[step], s_rows, step, lane);
}

// c += left right^T, both rows along the width; the left is held, or comes from shared memory step by step.
template <bool HELD, int ATOMS, int EIGHTS>
static __device__ __forceinline__ void multiply_rows(float (&r_c)[ATOMS][EIGHTS][4], const u32 (&r_held)[STEPS][ATOMS][4],
                                                     const Element* s_left, const Element* s_right, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 r_left[ATOMS][4];
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 4 * ATOMS; ++i) r_left[i / 4][i % 4] = r_held[step][i / 4][i % 4];
        } else {
            load_left(r_left, s_left, step, lane);
        }
#pragma unroll
        for (int pair = 0; pair < EIGHTS / 2; ++pair) {
            // Rows 0 to 7 and 8 to 15, each for the lower and the upper half of the step.
            u32 r_right[4];
            const int row = pair * 16 + (lane & 7) + (lane >> 4) * 8;
            ldmatrix(r_right, s_right + row * ROW + step * 16 + (lane >> 3 & 1) * 8);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                mma<STORAGE>(r_c[atom][2 * pair], r_left[atom], r_right[0], r_right[1]);
                mma<STORAGE>(r_c[atom][2 * pair + 1], r_left[atom], r_right[2], r_right[3]);
            }
        }
    }
}

// c += w right, w rounded to storage: what a product left in registers is the left operand of the next as it lies.
template <int ATOMS, int INNER, int EIGHTS>
static __device__ __forceinline__ void add_weighted(float (&r_c)[ATOMS][EIGHTS][4], const float (&r_w)[ATOMS][INNER][4],
                                                    const Element* s_right, int lane) {
#pragma unroll
    for (int step = 0; step < INNER / 2; ++step) {
        u32 r_left[ATOMS][4];
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
            const float(&left)[4] = r_w[atom][2 * step], (&right)[4] = r_w[atom][2 * step + 1];
            r_left[atom][0] = narrow2<STORAGE>(left[0], left[1]);
            r_left[atom][1] = narrow2<STORAGE>(left[2], left[3]);
            r_left[atom][2] = narrow2<STORAGE>(right[0], right[1]);
            r_left[atom][3] = narrow2<STORAGE>(right[2], right[3]);
        }
#pragma unroll
        for (int pair = 0; pair < EIGHTS / 2; ++pair) {
            u32 r_right[4];
            ldmatrix_transposed(r_right, s_right + (step * 16 + (lane & 15)) * ROW + pair * 16 + (lane >> 4) * 8);
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                mma<STORAGE>(r_c[atom][2 * pair], r_left[atom], r_right[0], r_right[1]);
                mma<STORAGE>(r_c[atom][2 * pair + 1], r_left[atom], r_right[2], r_right[3]);
            }
        }
    }
}

// Scores, queries in rows: scaled, masked, hidden.
template <bool HIDES, int ATOMS, int EIGHTS>
static __device__ __forceinline__ void mask_scores(const Attention& p, const Place& at, float (&r_s)[ATOMS][EIGHTS][4], int key) {
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = at.query + atom * 16 + half * 8, first = key + (at.lane & 3) * 2;
            const int end = HIDES ? seen(p, at.last, query) : 0;
            const bool exists = query < (int)p.queries;
            const MaskElement* g_mask = mask_row(p, at.sequence, at.head, exists ? query : 0);
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
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

// Levels the scores of one of two rows, which is deep.
template <int EIGHTS> static __device__ __forceinline__ void level_row(float (&r_s)[EIGHTS][4], int half, float maximum) {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) r_s[i][e] = levelled(r_s[i][e], maximum);
    }
}

// A warp's rows of a result, through its own part of shared memory, in whole pieces.
template <int ATOMS, int EIGHTS>
static __device__ __forceinline__ void store_rows(Element* s_own, Element* g_to, u64 stride, int first, int end,
                                                  const float (&r)[ATOMS][EIGHTS][4], int lane) {
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Element* s_row = s_own + (atom * 16 + half * 8 + (lane >> 2)) * ROW + (lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < EIGHTS; ++i) {
                *(u32*)(s_row + 8 * i) = narrow2<STORAGE>(r[atom][i][2 * half], r[atom][i][2 * half + 1]);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * ATOMS * EIGHTS / 32; ++i) {
        const int piece = lane + 32 * i, row = piece / EIGHTS, column = piece % EIGHTS * 8;
        if (first + row < end) {
            *(uint4*)(g_to + (u64)(first + row) * stride + column) = *(const uint4*)(s_own + row * ROW + column);
        }
    }
}
