// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + 1023) & ~1023u;
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
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous();
    if constexpr (TURNS) {
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 0) {
                u32 at = 0;
                for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, at);
            }
        } else {
            setmaxnreg_inc<240>();
            char* const s_staged = s_base + AT_STAGED + warpgroup * STAGED_BYTES;
            // The first one begins.
            if (warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
            u32 turn = warpgroup;
            for (u32 index = blockIdx.x + warpgroup * gridDim.x; index < (u32)p.tiles; index += 2 * gridDim.x, turn += 2) {
                float sums[HALVES][COLUMNS / 2];
                clear(sums);
                named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
                multiply(sums, ring, 0, steps, turn * steps);
                named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
                wgmma_wait<0>();
                release(ring.empty(turn * steps + steps - 1));
                const Tile tile = tile_at(p, index);
                // At once, so that registers are free for what follows the first half.
                Rounded pairs[HALVES];
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    round(pairs[half], sums[half]);
                    pin(pairs[half]);
                }
#pragma unroll
                for (int half = 0; half < HALVES; ++half) finish_half(p, tile, tile.row + 64 * half, s_staged, warpgroup, pairs[half]);
            }
        }
    } else {
        const int part = (int)(blockIdx.x % SPLIT), first = steps * part / SPLIT, own = steps * (part + 1) / SPLIT - first;
        const Tile tile = tile_at(p, blockIdx.x / SPLIT);
        if (warpgroup < 0) {
            setmaxnreg_dec<24>();
            u32 at = 0;
            if (threadIdx.x == 0) fetch(p, ring, tile, first, own, at);
            if constexpr (SPLIT > 1) {
                __syncwarp();
                cluster_barrier();
                cluster_barrier();
            }
        } else {
            setmaxnreg_inc<240>();
            float sums[HALVES][COLUMNS / 2];
            clear(sums);
            multiply(sums, ring, warpgroup, own, 0);
            wgmma_wait<0>();
            if constexpr (SPLIT == 1) {
                Rounded pairs;
                round(pairs, sums[0]);
                finish_half(p, tile, tile.row + 64 * warpgroup, s_base + AT_STAGED + warpgroup * STAGED_BYTES, warpgroup, pairs);
            } else {
                // At the same place in every block, whatever the others moved their stages by.
                const float* const s_parts = (const float*)s_dynamic;
                cluster_barrier();
                send(s_parts, warpgroup, sums[0]);
                cluster_barrier();
                finish<ROWS, SHARE, MULTIPLIERS>(p, tile.batch, tile.row, tile.column + part * SHARE, threadIdx.x - 128, [&](int r, int c) { return added(s_parts, r, c); });
            }
        }
    }
}
