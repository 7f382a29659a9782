// ---- warpgroups that have whole tiles in turn, of blocks that walk over tiles

static __device__ __forceinline__ void walk(const Parameters& p, Ring ring, char* s_base, int warpgroup) {
    const int steps = (int)p.steps;
    if (warpgroup < 0) {
        setmaxnreg_dec<FETCHING_REGISTERS>();
        if (threadIdx.x == 0) {
            u32 at = 0;
            for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, at);
#ifdef MAKES
            forget_rows(p);
#endif
        }
#ifdef MAKES
        if (threadIdx.x >= 32) make_other_rows(p);
#endif
    } else {
        setmaxnreg_inc<MULTIPLYING_REGISTERS>();
        char* const s_staged = s_base + AT_STAGED + warpgroup * STAGED_BYTES;
        // The first one begins.
        if (warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
        u32 turn = warpgroup;
        for (u32 index = blockIdx.x + warpgroup * gridDim.x; index < (u32)p.tiles; index += 2 * gridDim.x, turn += 2) {
            float sums[HALVES][COLUMNS / 2];
            begin(p, tile_at(p, index), sums);
            named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
            multiply(sums, ring, 0, 0, steps, turn * steps);
            named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
            wgmma_wait<0>();
            release(ring.empty(turn * steps + steps - 1));
            const Tile tile = tile_at(p, index);
            finish_tile(p, tile, s_staged, warpgroup, sums);
        }
    }
}
