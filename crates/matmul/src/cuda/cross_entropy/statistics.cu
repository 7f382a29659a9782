// ---- what follows the logits of a tile: statistics of its rows

// The sum of four lanes that share a row, in each of them.
static __device__ __forceinline__ float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
static __device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

// Columns from `end` on are -inf: they are in no maximum and in no sum.
static __device__ __forceinline__ void hide_from(Rounded& pairs, int end) {
    constexpr u32 LOWEST = KIND == 1 ? 0xfc00 : 0xff80;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        const int column = 8 * j + own_column();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32& both = pair(pairs, r, j);
            if (column >= end) both = both & 0xffff0000u | LOWEST;
            if (column + 1 >= end) both = both & 0xffffu | LOWEST << 16;
        }
    }
}

// Of one row of this thread's two: largest logit and sum of exponentials, of all columns of the tile.
static __device__ __forceinline__ tail::Partial partial_of(const Rounded& pairs, int r) {
    float most = minus_infinity();
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) most = fmaxf(most, fmaxf(low(pair(pairs, r, j)), high(pair(pairs, r, j))));
    most = row_max(most);
    const float shift = shift_of(most) * LOG2_E;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        sums[0] += ex2(low(pair(pairs, r, j)) * LOG2_E - shift);
        sums[1] += ex2(high(pair(pairs, r, j)) * LOG2_E - shift);
    }
    return {most, row_sum(sums[0] + sums[1])};
}

static __device__ __forceinline__ float total_of(const Rounded& pairs, int r) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) total += low(pair(pairs, r, j)) + high(pair(pairs, r, j));
    return row_sum(total);
}

// Stores the logits of two rows' targets, by the threads that have them. `wanted` counts columns from this thread's first one on.
static __device__ __forceinline__ void pick(const Parameters& p, int row, const Rounded& pairs, const int (&wanted)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            if (wanted[r] == 8 * j) p.tail.picked[row + 8 * r] = low(pair(pairs, r, j));
            if (wanted[r] == 8 * j + 1) p.tail.picked[row + 8 * r] = high(pair(pairs, r, j));
        }
    }
}

// Of 64 rows from `row` on.
static __device__ __forceinline__ void finish_half(const Parameters& p, const Tile& tile, int row, Rounded& pairs) {
    const int own = row + own_row(), first = tile.column + own_column(), end = (int)p.tail.classes - tile.column;
    int wanted[2];
    bool hit = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool there = own + 8 * r < (int)p.m;
        // A column that no thread has, where there is no row.
        const i64 target = there ? (i64)p.tail.targets[own + 8 * r] - tile.column : -1;
        const bool inside = target >= 0 && target < min(end, COLUMNS);
        wanted[r] = inside ? (int)target + tile.column - first : -COLUMNS;
        hit = hit || inside;
    }
    if (any_of_warp(hit)) pick(p, own, pairs, wanted);
    float totals[2] = {0.0f, 0.0f};
    if constexpr (SPREAD != 0.0f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) totals[r] = total_of(pairs, r);
    }
    if (end < COLUMNS) hide_from(pairs, end);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const tail::Partial partial = partial_of(pairs, r);
        if (own_column() == 0 && own + 8 * r < (int)p.m) {
            const i64 at = (i64)(own + 8 * r) * (i64)p.column_tiles + tile.column / COLUMNS;
            p.tail.partials[at] = partial;
            if constexpr (SPREAD != 0.0f) p.tail.totals[at] = totals[r];
        }
    }
}

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char*, int, const float (&sums)[HALVES][COLUMNS / 2]) {
    Rounded pairs[HALVES];
    round_tile(pairs, sums);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) finish_half(p, tile, tile.row + 64 * half, pairs[half]);
}
