// ---- what follows the sums, and all of K

// Floats from one row of a warp's staged sums to the next: what is stored together is in different banks.
constexpr int PITCH = WARP_COLUMNS + 8;
static_assert(STAGES > 2, "what is stored is read a stage later");
static_assert(WARPS * 16 * PITCH * 4 <= STAGES * STAGE_BYTES, "sums take the place of operands");

// Totals of 16 rows go to shared memory.
static __device__ __forceinline__ void stage(float* s_own, const Total (&sums)[EIGHTS][4], int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* s_row = s_own + (KIND == 3 && A_COLUMNS ? 2 * g + half : g + 8 * half) * PITCH;
#pragma unroll
        for (int i = 0; i < EIGHTS; i += 2) {
            const Total(&x)[4] = sums[i], (&y)[4] = sums[i + 1];
            if constexpr (KIND == 3 && B_ROWS) {
                *(float4*)(s_row + 8 * i + 4 * t) = make_float4((float)x[2 * half], (float)y[2 * half], (float)x[2 * half + 1], (float)y[2 * half + 1]);
            } else {
                *(float2*)(s_row + 8 * i + 2 * t) = make_float2((float)x[2 * half], (float)x[2 * half + 1]);
                *(float2*)(s_row + 8 * i + 8 + 2 * t) = make_float2((float)y[2 * half], (float)y[2 * half + 1]);
            }
        }
    }
}

// A sum by fused multiply-adds, where that of three passes is infinite or no number: infinity times a rest of zero is none.
static __device__ __noinline__ float sum_again(const char* g_a, u64 a_step, const char* g_b, u64 b_step, int k) {
    float sum = 0.0f;
    for (int i = 0; i < k; ++i) sum = fmaf(__uint_as_float(load_element<SIZE>(g_a + i * a_step)), __uint_as_float(load_element<SIZE>(g_b + i * b_step)), sum);
    return sum;
}
template <bool ACROSS, bool LISTED = false> static __device__ __forceinline__ const char* line_of(const Source& from, int at) {
    if constexpr (LISTED) return from.g_first + from.s_lines[at];
    return from.g_first + (u64)at * (ACROSS ? from.element : from.line);
}
static __device__ __forceinline__ float sum_again(const Source& a, const Source& b, int row, int column) {
    return sum_again(line_of<A_COLUMNS, ROUTED>(a, row), A_COLUMNS ? a.line : a.element, line_of<B_ROWS>(b, column), B_ROWS ? b.line : b.element, a.k);
}

// A quarter of a tile: which of it a warp has, and what it is made of.
struct Quarter {
    int row, column;     // in the tile
    int rows, columns;   // from there to the end of the matrix
    Source a, b;
};

// V sums of a row, rounded to the storage type of the matmul.
static __device__ __forceinline__ F staged(const float* s_own, const Quarter& at, int row, int own, int column) {
    return lanes<F>([&](int i) {
        float sum = s_own[own * PITCH + column + i];
        if constexpr ((KIND == 1 || KIND == 2) && !ADDS_STAGES) sum = widen<KIND>(narrow<KIND>(sum));
        if constexpr (KIND == 0 && !FMA) {
            if (!(fabsf(sum) < __uint_as_float(0x7f800000u))) sum = sum_again(at.a, at.b, at.row + row, at.column + column + i);
        }
        return sum;
    });
}

// What follows 16 rows of a warp's sums from `row` of it on; `row_of(r)` is the row of the result that row r of the warp is of. A lane has
// V columns of each piece, in every DOWN-th row. Where an index picks what follows, it is the same for all rows.
template <class RowOf>
static __device__ __forceinline__ void finish(const Parameters& p, const float* s_own, const Quarter& at, int row, int first_column, int lane, RowOf row_of) {
    if (row >= at.rows) return;
    constexpr int WIDE = WARP_COLUMNS < 32 * V ? WARP_COLUMNS : 32 * V, ACROSS = WIDE / V, DOWN = 32 / ACROSS, TOGETHER = 4;
    const int across = lane % ACROSS * V, down = lane / ACROSS;
#pragma unroll 1
    for (int piece = 0; piece < WARP_COLUMNS; piece += WIDE) {
        const int column = piece + across, c = first_column + column;
        if (down >= DOWN || column >= WARP_COLUMNS || column >= at.columns) continue;
        const tail::Shared shared = tail::read_shared(p.tail, c, row_of(row));
        // Where all rows are there, no branch keeps the compiler from working on several vectors at once.
        if (16 % (DOWN * TOGETHER) == 0 && row + 16 <= at.rows) {
#pragma unroll 1
            for (int start = down; start < 16; start += DOWN * TOGETHER) {
                tail::Operands operands[TOGETHER];
                F values[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) operands[i] = tail::read(p.tail, row_of(row + start + i * DOWN), c);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) values[i] = staged(s_own, at, row + start + i * DOWN, start + i * DOWN, column);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) tail::run(p.tail, row_of(row + start + i * DOWN), c, &values[i], shared, operands[i]);
            }
        } else {
#pragma unroll 1
            for (int own = down; own < 16 && row + own < at.rows; own += DOWN) {
                const F values = staged(s_own, at, row + own, own, column);
                tail::run(p.tail, row_of(row + own), c, &values, shared, tail::read(p.tail, row_of(row + own), c));
            }
        }
    }
}

// Adds all of K to a warp's sums. While a stage is multiplied, copies of the one that follows STAGES - 1 later are started. What passes
// through registers is loaded then, and stored a stage later.
static __device__ __forceinline__ void sum_up(Totals& sums, char* s_ring, const Source& a, const Source& b, int row, int column, int lane) {
    const int steps = (a.k + DEPTH - 1) / DEPTH;
    const auto following = [&](char* s_at) { return s_at == s_ring + (STAGES - 1) * STAGE_BYTES ? s_ring : s_at + STAGE_BYTES; };
    char* s_stage = s_ring + STAGE_BYTES;
    char* s_held = s_ring + (STAGES - 1) * STAGE_BYTES;
    typename Left::Held held_a;
    typename Right::Held held_b;
    for (int i = 1 - STAGES; i < steps; ++i) {
        if (i >= 0) {
            // All see the stage, and are done with the one whose place the next takes.
            if constexpr (!Left::HELD || !Right::HELD) await_copies<STAGES - 2>();
            __syncthreads();
        }
        char* const s_next = following(s_held);
        const int next = (i + STAGES - 1) * DEPTH, held = next - DEPTH;
        if (next < a.k) {
            Left::copy(s_next, a, next);
            Right::copy(s_next + Left::BYTES, b, next);
        }
        if constexpr (!Left::HELD || !Right::HELD) commit_copies();
        if (0 <= held && held < a.k) {
            Left::store(s_held, held_a, a, held);
            Right::store(s_held + Left::BYTES, held_b, b, held);
        }
        if (next < a.k) {
            Left::load(held_a, a, next);
            Right::load(held_b, b, next);
        }
        if (i >= 0) {
            if constexpr (ADDS_STAGES && !FMA) {
                multiply_stage<KIND>(sums, s_stage, row, column, lane);
            } else {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) multiply(sums, s_stage, row, column, step, lane);
            }
        }
        s_stage = following(s_stage);
        s_held = s_next;
    }
}

// A warp's quarter of a tile of A times B, and what follows it.
template <class RowOf>
static __device__ __forceinline__ void make_tile(const Parameters& p, char* s_ring, const Source& a, const Source& b, int first_column, RowOf row_of) {
    const int warp = (int)shuffle(threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const int row = warp % 2 * WARP_ROWS, column = warp / 2 * WARP_COLUMNS;
    Totals sums = {};
    sum_up(sums, s_ring, a, b, row, column, lane);
    // All are done with the stages, whose place the sums take.
    __syncthreads();
    float* const s_own = (float*)s_ring + warp * 16 * PITCH;
    const Quarter at = {row, column, a.high - row, b.high - column, a, b};
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
        stage(s_own, sums[atom], lane);
        __syncwarp();
        finish(p, s_own, at, 16 * atom, first_column + column, lane, [&](int r) { return row_of(row + r); });
        __syncwarp();
    }
}
