// ---- the kernel for bytes: blocks walk over tiles, and what is fetched runs ahead into the next one
//
// TURNS: a warpgroup has whole tiles, every second one of the block; while one multiplies, the other finishes its tile. Otherwise each
// has 64 rows of every tile.

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + 1023) & ~1023u;
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1, steps = (int)p.steps;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.a);
        prefetch_tensor_map(&p.b[0]);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1);
            mbarrier_init(ring.empty(stage), TURNS ? 4 : 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous();
    if (warpgroup < 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) {
            u32 at = 0;
            for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, at);
        }
    } else {
        setmaxnreg_inc<240>();
        // Tiles of the block from one of this warpgroup's to the next, and the first of its rows.
        constexpr u32 APART = TURNS ? 2 : 1;
        const int warp = (int)(threadIdx.x / 32 % 4), first = (TURNS ? 0 : 64 * warpgroup) + 16 * warp;
        char* const s_sums = s_dynamic + (base - unaligned) + AT_STAGED + (4 * warpgroup + warp) * WARP_BYTES;
        // The first one begins.
        if (TURNS && warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
        u32 turn = TURNS ? warpgroup : 0;
        for (u32 index = blockIdx.x + turn * gridDim.x; index < (u32)p.tiles; index += APART * gridDim.x, turn += APART) {
            Accumulator sums[HALVES][COLUMNS / 2];
            clear(sums);
            if (TURNS) named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
            multiply(sums, ring, TURNS ? 0 : warpgroup, 0, steps, turn * steps);
            if (TURNS) named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
            wgmma_wait<0>();
#pragma unroll
            for (int half = 0; half < HALVES; ++half) pin(sums[half]);
            release(ring.empty(turn * steps + steps - 1));
            const Tile tile = tile_at(p, index);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int own = tile.row + first + 64 * half;
                const i64 row = (i64)tile.batch * (i64)p.m + own;
                finish_rows(p, tile.column, (int)p.m - own, s_sums, sums[half], [&](int r) { return row + r; });
            }
        }
    }
}
