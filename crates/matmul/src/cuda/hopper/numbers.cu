// ---- numbers that rows are reduced to, where several have parts of a row
//
// PARTS, how many parts of COLUMNS columns a row has, is a constant that stands before this file.

constexpr int OWN = 2 * HALVES;  // rows of a thread

// Columns of a part of a row.
static __device__ __forceinline__ float part_columns(int part) { return (float)max(0, min(COLUMNS, tail::COLS - part * COLUMNS)); }

// What the four threads that have a part of a row reduce it to.
template <int LEVEL> static __device__ __forceinline__ void own_numbers(const tail::Row& row, int part, float* numbers) {
    constexpr tail::Level<LEVEL> level;
    tail::gather(level, row, numbers);
    if constexpr (tail::Facts<LEVEL>::MOMENTS) {
        numbers[1] = tail::squares(level, row, part * COLUMNS + 2 * (threadIdx.x % 4), numbers[0] / part_columns(part));
    }
}
