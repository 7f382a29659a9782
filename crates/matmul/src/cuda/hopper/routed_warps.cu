// ---- what follows the sums of a warp's rows, wherever each belongs: the first `left` of 16, and of 16 more that are 64 further on where HALVES
// is 2. Lane 16 * half + r has the number of row r of a half.

struct RoutedRows {
    const Parameters& p;
    int column, left;
    char* s_sums;
    const int* s_rows;

    template <class Sums> __device__ __forceinline__ void finish_half(int half, const Sums& sums) const {
        const int* const s_half = s_rows + 16 * half;
        finish_rows(p, column, left - 64 * half, s_sums, sums, [=](int r) { return (i64)s_half[r]; });
    }
    __device__ __forceinline__ void finish(const int (&sums)[HALVES][COLUMNS / 2]) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) finish_half(half, sums[half]);
    }
    // Sums of floats are rounded before, all at once, so that registers are free.
    __device__ __forceinline__ void finish(const float (&sums)[HALVES][COLUMNS / 2]) const {
        Rounded pairs[HALVES];
        round_tile(pairs, sums);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) finish_half(half, pairs[half]);
    }
};

static __device__ __forceinline__ RoutedRows routed_rows(const Parameters& p, int column, int, int left, int number, char* s_staged) {
    char* const s_sums = s_staged + threadIdx.x / 32 % 4 * WARP_BYTES;
    int* const s_rows = (int*)(s_sums + SUMS_BYTES);
    if (threadIdx.x % 32 < 16 * HALVES) s_rows[threadIdx.x % 32] = number;
    return {p, column, left, s_sums, s_rows};
}
