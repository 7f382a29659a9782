// ---- rows by expert: one block sorts rows by the expert that an index picks for each, stably, and cuts each expert's rows into tiles
//
// A warp has as many rows as any other, in a row. Warps count their rows of each expert; sums of the counts over experts, and within an
// expert over warps, are where each warp puts its rows. An index that picks no expert is a fault, and its row is left out.
//
// `order` has the row of each place. `list` has the number of tiles, then for each its expert, its first place and the place behind
// the expert's last one, as four words.
//
// ROWS (of a tile), EXPERTS and BITS, those of an expert's number, are constants that stand before this file.

constexpr int ROUTE_THREADS = 1024, ROUTE_WARPS = ROUTE_THREADS / 32;
// Counts that a thread adds up, and indices that it loads at once.
constexpr int COUNTS = EXPERTS * ROUTE_WARPS / ROUTE_THREADS + (EXPERTS % 32 != 0), AHEAD = 8;

struct RouteParameters {
    u64 indices, order, list, fault;
    u64 rows, argument;  // how many, and the table's number in a fault
};

// The sum of `x` over all threads before this one, and in `total` over all.
static __device__ __forceinline__ int sum_before(int x, int* s_sums, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = (int)shuffle((u32)sum, lane - apart & 31);
        if (lane >= apart) sum += other;
    }
    if (lane == 31) s_sums[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < ROUTE_WARPS; ++i) {
        if (i == warp) before = total;
        total += s_sums[i];
    }
    __syncthreads();
    return before + sum - x;
}

// Calls `visit(row, expert, lanes)` for each row of this warp that has an expert, with the lanes whose rows have the same. `count(expert,
// lanes)` follows, in one of them, when all are through.
template <class Visit, class Count>
static __device__ __forceinline__ void each_row(const RouteParameters& p, bool checks, Visit visit, Count count) {
    const int lane = threadIdx.x % 32, rows = (int)p.rows, share = (rows + ROUTE_THREADS - 1) / ROUTE_THREADS * 32;
    const int start = threadIdx.x / 32 * share, end = min(start + share, rows);
    for (int first = start; first < end; first += 32 * AHEAD) {
        int experts[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int row = first + 32 * i + lane;
            experts[i] = row < end ? load_one(I32{}, (const char*)p.indices + 4ll * row) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int row = first + 32 * i + lane, expert = experts[i];
            const bool known = expert >= 0 && expert < EXPERTS;
            if (checks && row < end && !known) atomicMin((u64*)p.fault, (u64)row * 256 + p.argument);
            u32 lanes = __ballot_sync(0xffffffffu, row < end && known);
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit) {
                const u32 set = __ballot_sync(0xffffffffu, expert >> bit & 1);
                lanes &= expert >> bit & 1 ? set : ~set;
            }
            const bool own = row < end && known;
            if (own) visit(row, expert, lanes);
            __syncwarp();
            if (own && (lanes & (1u << lane) - 1) == 0) count(expert, lanes);
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, 1) route(const __grid_constant__ RouteParameters p) {
    extern __shared__ int s_counts[];
    __shared__ int s_sums[ROUTE_WARPS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    start_next();
    for (int i = thread; i < EXPERTS * ROUTE_WARPS; i += ROUTE_THREADS) s_counts[i] = 0;
    __syncthreads();
    wait_for_previous();
    each_row(p, true, [](int, int, u32) {}, [&](int expert, u32 lanes) { s_counts[expert * ROUTE_WARPS + warp] += __popc(lanes); });
    __syncthreads();
    // Counts become places.
    int own = 0, all;
#pragma unroll
    for (int i = 0; i < COUNTS; ++i) own += thread * COUNTS + i < EXPERTS * ROUTE_WARPS ? s_counts[thread * COUNTS + i] : 0;
    int place = sum_before(own, s_sums, all);
#pragma unroll
    for (int i = 0; i < COUNTS; ++i) {
        const int at = thread * COUNTS + i;
        if (at < EXPERTS * ROUTE_WARPS) {
            const int count = s_counts[at];
            s_counts[at] = place;
            place += count;
        }
    }
    __syncthreads();
    const int first = thread < EXPERTS ? s_counts[thread * ROUTE_WARPS] : 0;
    const int end = thread >= EXPERTS ? 0 : thread == EXPERTS - 1 ? all : s_counts[(thread + 1) * ROUTE_WARPS];
    int tiles;
    int tile = sum_before((end - first + ROWS - 1) / ROWS, s_sums, tiles);
    int4* const g_list = (int4*)p.list;
    if (thread == 0) g_list[0] = {tiles, 0, 0, 0};
    for (int at = first; at < end; at += ROWS) g_list[++tile] = {thread, at, end, 0};
    each_row(
        p, false,
        [&](int row, int expert, u32 lanes) {
            ((int*)p.order)[s_counts[expert * ROUTE_WARPS + warp] + __popc(lanes & (1u << lane) - 1)] = row;
        },
        [&](int expert, u32 lanes) { s_counts[expert * ROUTE_WARPS + warp] += __popc(lanes); });
}
