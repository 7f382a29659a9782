// ---- what follows the sums of a warp's rows by rows, wherever each belongs. Lane 16 * half + r has the number of row r of a half.

struct RoutedRows {
    Ready ready;
    __device__ __forceinline__ void finish(const Accumulator (&sums)[HALVES][COLUMNS / 2]) { finish_warp(ready, sums); }
};

static __device__ __forceinline__ RoutedRows routed_rows(const Parameters& p, int column, int place, int left, int number, char*) {
    return {get_ready(p, column, place, left, [=](int down) { return (i64)shuffle((u32)number, down / 64 * 16 + down % 64); })};
}
