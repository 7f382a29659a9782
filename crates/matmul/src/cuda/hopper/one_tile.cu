// ---- warpgroups that share the tile of their block, of which a cluster may share K

static __device__ __forceinline__ void walk(const Parameters& p, Ring ring, char* s_base, int warpgroup, u32 early) {
    const int steps = (int)p.steps;
    const int part = (int)(blockIdx.x % SPLIT), first = steps * part / SPLIT, own = steps * (part + 1) / SPLIT - first;
    const Tile tile = tile_at(p, blockIdx.x / SPLIT);
    if (warpgroup < 0) {
        setmaxnreg_dec<FETCHING_REGISTERS>();
        if (threadIdx.x == 0) {
            u32 at = 0;
            fetch(p, ring, tile, first, own, early, at);
            fetch_more(p, ring, tile, at);
#ifdef MAKES
            forget_rows(p);
#endif
        }
#ifdef MAKES
        if (threadIdx.x >= 32) make_other_rows(p);
#endif
        stand_by();
    } else {
        setmaxnreg_inc<MULTIPLYING_REGISTERS>();
        const int side = SIDES == 2 ? warpgroup : 0, half = SIDES == 2 ? 0 : warpgroup * HALVES;
        float sums[HALVES][COLUMNS / 2];
        begin(p, tile, sums);
        multiply(sums, ring, half, side, own, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < HALVES; ++i) pin(sums[i]);
        release(ring.empty(own - 1));
        finish_part(p, ring, s_base, tile, 64 * half, side, warpgroup, sums, own);
    }
}
