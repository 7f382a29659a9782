// ---- what follows sums that are complete: they are stored

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char* s_staged, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2]) {
    Rounded pairs[HALVES];
    round_tile(pairs, sums);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        store_half(p, tile.row + 64 * half, tile.column, (int)p.tail.pitch, s_staged, warpgroup, pairs[half]);
    }
}
