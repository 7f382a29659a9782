// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + MEETING_BYTES + 1023) & ~1023u;
    char* const s_base = s_dynamic + (base - unaligned);
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1, steps = (int)p.steps;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.a);
        prefetch_tensor_map(&p.b);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1);
            mbarrier_init(ring.empty(stage), TURNS ? 4 : 8);
        }
        prepare();
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive();
    wait_for_previous();
    if constexpr (TURNS) {
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 0) {
                u32 at = 0;
                for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) {
                    const Tile tile = tile_at(p, index);
                    fetch(p, ring, tile, 0, steps, at);
                }
            }
        } else {
            setmaxnreg_inc<240>();
            // The first one begins.
            if (warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
            u32 turn = warpgroup;
            for (u32 index = blockIdx.x + warpgroup * gridDim.x; index < (u32)p.tiles; index += 2 * gridDim.x, turn += 2) {
                float sums[HALVES][COLUMNS / 2];
                clear(sums);
                named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
                multiply(sums, ring, 0, 0, steps, turn * steps);
                named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
                wgmma_wait<0>();
                release(ring.empty(turn * steps + steps - 1));
                finish_tile(p, ring, s_base, tile_at(p, index), 0, 0, warpgroup, sums, 0);
            }
        }
    } else {
        const int part = (int)(blockIdx.x % SPLIT), first = steps * part / SPLIT, own = steps * (part + 1) / SPLIT - first;
        const Tile tile = tile_at(p, blockIdx.x / SPLIT);
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 0) {
                u32 at = 0;
                fetch(p, ring, tile, first, own, at);
                fetch_more(p, ring, tile, at);
            }
            stand_by();
        } else {
            setmaxnreg_inc<240>();
            const int side = SIDES == 2 ? warpgroup : 0, half = SIDES == 2 ? 0 : warpgroup * HALVES;
            float sums[HALVES][COLUMNS / 2];
            clear(sums);
            multiply(sums, ring, half, side, own, 0);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < HALVES; ++i) pin(sums[i]);
            release(ring.empty(own - 1));
            finish_tile(p, ring, s_base, tile, 64 * half, side, warpgroup, sums, own);
        }
    }
}
