// ---- what follows all sums of bytes that a warpgroup has of a tile, from its first row on, by rows

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char*, int, Accumulator (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) pin(sums[half]);
    const int top = tile.row + 16 * (int)(threadIdx.x / 32 % 4), left = (int)p.m - top;
    // Where there is no row, the warp does nothing.
    Ready ready = get_ready(p, tile.column, top, left, [=](int down) { return left > 0 ? (i64)top + (down < left ? down : 0) : 0; });
    finish_warp(ready, sums);
}
