// ---- the kernel for bytes: blocks walk over tiles, of which each warpgroup has 64 rows. What is fetched runs ahead into the next tile while
// the warpgroups finish one.

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + 1023) & ~1023u;
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1, steps = (int)p.steps;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.a);
        prefetch_tensor_map(&p.b);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1);
            mbarrier_init(ring.empty(stage), 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous();
    u32 at = 0;
    if (warpgroup < 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) {
            for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, at);
        }
    } else {
        setmaxnreg_inc<240>();
        const int first = 64 * warpgroup + (int)(threadIdx.x / 32 % 4) * 16;
        char* const s_sums = s_dynamic + (base - unaligned) + AT_STAGED + first / 16 * WARP_BYTES;
        for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x, at += steps) {
            Accumulator sums[HALVES][COLUMNS / 2];
            clear(sums);
            multiply(sums, ring, warpgroup, steps, at);
            wgmma_wait<0>();
            pin(sums[0]);
            release(ring.empty(at + steps - 1));
            const Tile tile = tile_at(p, index);
            const i64 row = (i64)tile.batch * (i64)p.m + tile.row + first;
            finish_rows(p, tile.column, (int)p.m - tile.row - first, s_sums, sums[0], [&](int r) { return row + r; });
        }
    }
}
