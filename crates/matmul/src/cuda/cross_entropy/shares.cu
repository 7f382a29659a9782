// ---- what follows sums that are a share: they are stored, or rounded with the last share

// Visits each pair of sums of this thread: its place in memory, where tiles are whole, and its two numbers.
template <class Visit> static __device__ __forceinline__ void each_pair(const Parameters& p, const Tile& tile, float (&sums)[HALVES][COLUMNS / 2], Visit visit) {
    const int thread = reread_thread(), row = tile.row + 16 * (thread / 32 % 4) + thread % 32 / 4, column = tile.column + thread % 4 * 2;
    char* const g_first = (char*)(p.tail.sums + (i64)row * (i64)p.tail.sums_pitch + column);
#pragma unroll
    for (int i = 0; i < 2 * HALVES; ++i) {
        char* const g_sums = g_first + (i / 2 * 64 + i % 2 * 8) * 4 * p.tail.sums_pitch;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) visit(g_sums + 32 * j, sums[i / 2][4 * j + 2 * (i % 2)], sums[i / 2][4 * j + 2 * (i % 2) + 1]);
    }
}

static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char* s_staged, int warpgroup, float (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) pin(sums[half]);
    if (!p.tail.is_last) {
        each_pair(p, tile, sums, [](char* g_pair, float first, float second) {
            const u32 words[2] = {__float_as_uint(first), __float_as_uint(second)};
            Access<8>::store(g_pair, words);
        });
        return;
    }
    Rounded pairs[HALVES];
    round_tile(pairs, sums);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        store_half(p, tile.row + 64 * half, tile.column, (int)p.tail.pitch, s_staged, warpgroup, pairs[half]);
    }
}
