// ---- warpgroups that share the tile of their block, of which a cluster may share K

static __device__ __forceinline__ void walk(const Parameters& p, Ring ring, char* s_dynamic, char* s_base, int warpgroup) {
    const int steps = (int)p.steps;
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
