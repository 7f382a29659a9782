// ---- what follows all sums that a warpgroup has of a tile, from its first row on, where they are handed over as f32

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char* s_staged, int, Accumulator (&sums)[HALVES][COLUMNS / 2]) {
    const int warp = (int)(threadIdx.x / 32 % 4);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) pin(sums[half]);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int own = tile.row + 16 * warp + 64 * half;
        const i64 row = (i64)tile.batch * (i64)p.m + own;
        finish_rows(p, tile.column, (int)p.m - own, s_staged + warp * WARP_BYTES, sums[half], [&](int r) { return row + r; });
    }
}
