// Attention that row work follows: the block that stores the last head of some rows goes on with them.
//
// - JOINED heads lie side by side in a row. Their blocks follow each other, so that block b counts in counter
//   b / JOINED, which goes from 0 to JOINED - 1 and back to 0: it is 0 whenever a launch begins.
// - What a block stored can be seen by all before it counts, and whoever counts last reads only afterwards. Nobody waits.
//
// JOINED is a constant that stands before this file, and so does the row work, in the namespace `rows`.

struct Parameter : Attention {
    // One for the tile of queries of every group of heads that make a row.
    u32* g_done;
    rows::Parameters after;
};

// Of the queries from `first` to before `end` of a head: its rows are stored. `s_memory` is shared memory that is not needed any more.
static __device__ __forceinline__ void follow(const Parameter& p, u64 sequence, u64 head, int first, int end, void* s_memory) {
    __syncthreads();
    if constexpr (JOINED > 1) {
        bool last = false;
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicInc(p.g_done + blockIdx.x / JOINED, JOINED - 1) == JOINED - 1;
            __threadfence();
        }
        if (!__syncthreads_or(last)) return;
    }
    const u64 element = start(p.o, sequence, head / JOINED * JOINED) + (u64)first * p.o.position;
    const long long row = (long long)(element / rows::COLS);
    rows::run(p.after, row, row + (end - first), (char*)s_memory);
}
