// ---- rounded sums to memory

// Stores 64 rows of a tile that begins at (row, column) of a matrix of `rows` x `columns`, with 16 bytes at a time. The warpgroup does it
// together; between the columns and the pitch may be written what is no element.
static __device__ __forceinline__ void store_half(const Parameters& p, int row, int column, int columns, char* s_staged, int warpgroup, const Rounded& pairs) {
    stage(s_staged, pairs);
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
    constexpr int ACROSS = COLUMNS / 8;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < 64 * ACROSS; i += 128) {
        const int r = i / ACROSS, c = i % ACROSS;
        if (row + r < (int)p.m && column + 8 * c < columns) {
            uint4* const g_stored = (uint4*)(p.tail.stored + (i64)(row + r) * (i64)p.tail.pitch + column + 8 * c);
            // Not to be kept in the L2, where operands are read again.
            __stcs(g_stored, *(const uint4*)(s_staged + staged_at(r, c)));
        }
    }
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
}
