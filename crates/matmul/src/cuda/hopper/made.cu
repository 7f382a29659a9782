// ---- rows of A that this launch makes
//
// A is row work on what lies in memory. A warp makes a row at a time and stores it in the workspace, from where tiles of A are fetched as if
// another launch had stored them. All warps make the first rows: those of the blocks' first tiles at least, and as many as the warps beside
// the thread that fetches cannot make while tiles are multiplied. These make the others, in the order in which tiles need them. All blocks
// run at once, and no row waits for anything: so every row is made, whatever waits for it.
//
// g_made: how many blocks have fetched all of their tiles, then, every COUNT_STEP words, how many rows of ROWS neighbours are made. The
// last block leaves zeros for the next launch.

constexpr int WARPS = THREADS / 32, MAKERS = 3, COUNT_STEP = 8;
constexpr int BATCH = 4;  // rows that one signal is for

static __device__ __forceinline__ u32* count_of(const Parameters& p, int row) { return p.g_made + (1 + row / ROWS) * COUNT_STEP; }

// BATCH rows of one tile, as far as there are so many.
static __device__ __forceinline__ void make_rows(const Parameters& p, int row) {
    const int count = min(BATCH, (int)p.m - row);
#pragma unroll 1
    for (int i = 0; i < count; ++i) head::make(p.head, row + i);
    // Stored as numbers, and copied as tiles.
    fence_proxy_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) add_acq_rel(count_of(p, row), (u32)count);
}

// None is waited for before all are made: so there is one fence for all rows of a warp.
static __device__ __forceinline__ void make_first_rows(const Parameters& p) {
    const int first = (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x), step = (int)(WARPS * gridDim.x);
    for (int row = first; row < (int)p.first_rows; row += step) head::make(p.head, row);
    fence_proxy_async();
    __syncwarp();
    for (int row = first + (int)(threadIdx.x & 31) * step; row < (int)p.first_rows; row += 32 * step) add_acq_rel(count_of(p, row), 1);
}

// By warps 1 to MAKERS.
static __device__ __forceinline__ void make_other_rows(const Parameters& p) {
    const int maker = (int)(threadIdx.x / 32) - 1, step = (int)(MAKERS * gridDim.x) * BATCH;
    for (int row = (int)p.first_rows + (int)(maker * gridDim.x + blockIdx.x) * BATCH; row < (int)p.m; row += step) {
        for (int ahead = row + step; ahead < min(row + step + BATCH, (int)p.m); ++ahead) head::prefetch(p.head, ahead);
        make_rows(p, row);
    }
}

// Waits until all rows of a tile are made.
static __device__ __forceinline__ void await_rows(const Parameters& p, int row) {
    const u32 all = (u32)min(ROWS, (int)p.m - row);
    while (load_acquire(count_of(p, row)) < all) back_off();
    fence_proxy_async();
}

// The last block that has fetched everything leaves the counts as it found them.
static __device__ __forceinline__ void forget_rows(const Parameters& p) {
    if (add_acq_rel(p.g_made, 1) + 1 < gridDim.x) return;
    for (int row = 0; row < (int)p.m; row += ROWS) *count_of(p, row) = 0;
    *p.g_made = 0;
}
