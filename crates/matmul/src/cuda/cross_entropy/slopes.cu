// ---- what follows the logits of a tile: their slopes

// Slopes of one row of this thread's two in place of its logits. HITS: whether the warp has a target among them.
template <bool HITS> static __device__ __forceinline__ void replace(Rounded& pairs, int r, float scale, float shift, float spread, int hit, float kept) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        u32& both = pair(pairs, r, j);
        float slopes[2] = {low(both), high(both)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            slopes[i] = scale * ex2(slopes[i] * LOG2_E - shift) - spread;
            if (HITS && hit == 8 * j + i) slopes[i] -= kept;
        }
        both = narrow2<KIND>(slopes[0], slopes[1]);
    }
}

static __device__ __forceinline__ void make_slopes(const Parameters& p, int row, int first, Rounded& pairs, int r) {
    const bool there = row < (int)p.m;
    const float scale = there ? p.tail.d_logsumexp[row * p.tail.d_logsumexp_stride] : 0.0f;
    const float d_loss = there ? p.tail.d_loss[row * p.tail.d_loss_stride] : 0.0f;
    const float shift = there ? p.tail.logsumexp[row * p.tail.logsumexp_stride] * LOG2_E : 0.0f, spread = SPREAD * d_loss;
    // Columns count from this thread's first one on.
    const i64 target = there ? (i64)p.tail.targets[row] - (i64)p.tail.first - first : -1;
    const int hit = target >= 0 && target < COLUMNS ? (int)target : -COLUMNS;
    const float kept = KEPT * d_loss;
    if (any_of_warp(hit >= 0)) {
        replace<true>(pairs, r, scale, shift, spread, hit, kept);
    } else {
        replace<false>(pairs, r, scale, shift, spread, hit, kept);
    }
}

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char* s_staged, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2]) {
    Rounded pairs[HALVES];
    round_tile(pairs, sums);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int row = tile.row + 64 * half;
#pragma unroll
        for (int r = 0; r < 2; ++r) make_slopes(p, row + own_row() + 8 * r, tile.column + own_column(), pairs[half], r);
        store_half(p, row, tile.column, (int)p.tail.width, s_staged, warpgroup, pairs[half]);
    }
}
