// ---- what sums begin with: the shares before, if there are any. They are read before this warpgroup's turn, so that nothing waits for them

static __device__ __forceinline__ void begin(const Parameters& p, const Tile& tile, float (&sums)[HALVES][COLUMNS / 2]) {
    clear(sums);
    if (p.tail.first != 0) {
        each_pair(p, tile, sums, [](const char* g_pair, float& first, float& second) {
            u32 words[2];
            Access<8>::load(words, g_pair);
            first = __uint_as_float(words[0]);
            second = __uint_as_float(words[1]);
        });
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) pin(sums[half]);
}
