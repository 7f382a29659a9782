// ---- what follows sums of bytes, sums that stay f32, and those of rows that are routed
//
// Sums of bytes are exact, of 32 bits, and go to `tail` as f32, rounded once; others are rounded to the storage type or are f32 already. A warp has 16 rows of
// them, which it passes through shared memory of its own, PIECE columns at a time: so no other warp is waited for, and `tail` gets V
// neighbouring columns of a row.

constexpr int PIECE = V == 1 ? 32 : 64;
// Sums of 16 rows, and a number for each row of both halves.
constexpr int SUMS_BYTES = 16 * 64 * 4, WARP_BYTES = SUMS_BYTES + 128;
static_assert(4 * WARP_BYTES == STAGED_BYTES, "room for all warps of a warpgroup");

// Where 16 bytes of a row of sums lie. Neither a warp's stores, of eight rows by 32 bytes, nor its loads, of 32 bytes a thread along a row,
// meet in a bank.
static __device__ __forceinline__ int sums_at(int row, int sixteen) {
    return row * 256 + ((sixteen ^ (row & 3) << 1 ^ sixteen >> 3) << 4);
}

// Sum i of a thread.
static __device__ __forceinline__ float sum_at(const int (&sums)[COLUMNS / 2], int i) { return (float)sums[i]; }
static __device__ __forceinline__ float sum_at(const float (&sums)[COLUMNS / 2], int i) { return sums[i]; }
static __device__ __forceinline__ float sum_at(const Rounded& pairs, int i) {
    return widen<KIND>((u16)(pairs[i / 8][i / 2 % 4] >> 16 * (i & 1)));
}

// PIECE columns of a warp's sums, or those that are left, from column FIRST of the tile on.
template <int FIRST, class Sums> static __device__ __forceinline__ void keep_sums(char* s_sums, const Sums& sums) {
    const int lane = threadIdx.x & 31, row = lane / 4;
#pragma unroll
    for (int j = FIRST / 8; j < (FIRST + PIECE) / 8 && j < COLUMNS / 8; ++j) {
        const int sixteen = (8 * j - FIRST) / 4 + lane % 4 / 2, half = lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            *(float2*)(s_sums + sums_at(row + 8 * i, sixteen) + half) = {sum_at(sums, 4 * j + 2 * i), sum_at(sums, 4 * j + 2 * i + 1)};
        }
    }
}

// V of them.
static __device__ __forceinline__ F kept_sums(const char* s_sums, int row, int column) {
    F sums;
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            const float4 four = *(const float4*)(s_sums + sums_at(row, (column + i) / 4));
            sums.v[i] = four.x, sums.v[i + 1] = four.y, sums.v[i + 2] = four.z, sums.v[i + 3] = four.w;
        }
    } else {
        const float* const s_own = (const float*)(s_sums + sums_at(row, column / 4)) + column % 4;
#pragma unroll
        for (int i = 0; i < V; ++i) sums.v[i] = s_own[i];
    }
    return sums;
}

#ifdef TF32
// Sums of products of TF32 that are infinite or no number are done again from the operands as they are. WIDE columns from `column` on were kept.
template <int FIRST, int WIDE, class Sums, class RowOf>
static __device__ __forceinline__ void mend_sums(const Parameters& p, int column, int rows, char* s_sums, const Sums& sums, RowOf row_of) {
    bool wrong = false;
#pragma unroll
    for (int i = FIRST / 2; i < (FIRST + WIDE) / 2; ++i) wrong = wrong || !is_finite(sum_at(sums, i));
    if (__ballot_sync(0xffffffffu, wrong) == 0) return;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < 16 * WIDE; i += 32) {
        const int row = i / WIDE, own = i % WIDE;
        float* const s_sum = (float*)(s_sums + sums_at(row, own / 4)) + own % 4;
        if (row < rows && column + own < N && !is_finite(*s_sum)) *s_sum = sum_again(p, row_of(row), column + own);
    }
    __syncwarp();
}
#endif

// Does with a warp's sums of 16 rows, the first `rows` of which there are, what follows. The tile's first column is `column`; `row_of(r)` is
// the row of the result that row r is of. Where an index picks what follows, it is the same for all rows of a tile.
template <int FIRST = 0, class Sums, class RowOf>
static __device__ __forceinline__ void finish_rows(const Parameters& p, int column, int rows, char* s_sums, const Sums& sums, RowOf row_of) {
    constexpr int WIDE = COLUMNS - FIRST < PIECE ? COLUMNS - FIRST : PIECE, ACROSS = WIDE / V, DOWN = 32 / ACROSS;
    constexpr int TOGETHER = DOWN >= 16 ? 1 : 16 / DOWN < 4 ? 16 / DOWN : 4;
    const int lane = threadIdx.x & 31, own = lane % ACROSS * V, down = lane / ACROSS, c = column + FIRST + own;
    keep_sums<FIRST>(s_sums, sums);
    __syncwarp();
#ifdef TF32
    mend_sums<FIRST, WIDE>(p, column + FIRST, rows, s_sums, sums, row_of);
#endif
    if (down < DOWN && c < N && rows > 0) {
        const tail::Shared shared = tail::read_shared(p.tail, c, row_of(0));
        // Where all rows are there, no branch keeps the compiler from working on several vectors at once.
        if (rows >= 16 && 16 % (DOWN * TOGETHER) == 0) {
#pragma unroll 1
            for (int start = down; start < 16; start += DOWN * TOGETHER) {
                tail::Operands operands[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) operands[i] = tail::read(p.tail, row_of(start + i * DOWN), c);
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const F values = kept_sums(s_sums, start + i * DOWN, own);
                    tail::run(p.tail, row_of(start + i * DOWN), c, &values, shared, operands[i]);
                }
            }
        } else {
#pragma unroll 1
            for (int r = down; r < 16 && r < rows; r += DOWN) {
                const F values = kept_sums(s_sums, r, own);
                tail::run(p.tail, row_of(r), c, &values, shared, tail::read(p.tail, row_of(r), c));
            }
        }
    }
    __syncwarp();
    if constexpr (FIRST + PIECE < COLUMNS) finish_rows<FIRST + PIECE>(p, column, rows, s_sums, sums, row_of);
}
