// ---- blocks that walk over tiles; what is fetched runs ahead into the next one
//
// TURNS: a warpgroup has whole tiles, every second one of the block; while one multiplies, the other finishes its tile. Otherwise each
// has 64 rows of every tile.

static __device__ __forceinline__ void walk(const Parameters& p, Ring ring, char* s_base, int warpgroup, u32 early) {
    const int steps = (int)p.steps;
    if (warpgroup < 0) {
        setmaxnreg_dec<FETCHING_REGISTERS>();
        if (threadIdx.x == 0) {
            u32 at = 0;
            for (u32 index = blockIdx.x; index < (u32)p.tiles; index += gridDim.x) fetch(p, ring, tile_at(p, index), 0, steps, early, at);
#ifdef MAKES
            forget_rows(p);
#endif
        }
#ifdef MAKES
        if (threadIdx.x >= 32) make_other_rows(p);
#endif
#ifdef BY_ROWS
        if (threadIdx.x == 32) fetch_held(p, ring);
#endif
    } else {
        setmaxnreg_inc<MULTIPLYING_REGISTERS>();
        // Tiles of the block from one of this warpgroup's to the next, and the first 64 rows of a tile that it has.
        constexpr u32 APART = TURNS ? 2 : 1;
        const int first = TURNS ? 0 : warpgroup;
        // The first one begins.
        if ((TURNS || ALTERNATES) && warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
        u32 turn = TURNS ? warpgroup : 0;
        for (u32 index = blockIdx.x + turn * gridDim.x; index < (u32)p.tiles; index += APART * gridDim.x, turn += APART) {
            Accumulator sums[HALVES][COLUMNS / 2];
            begin(p, tile_at(p, index), sums);
            if (TURNS) named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
            multiply(sums, ring, first, 0, steps, turn * steps);
            if (TURNS) named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
            wgmma_wait<0>();
            release(ring.empty(turn * steps + steps - 1));
#ifdef BY_ROWS
            finish_turn(p, ring, s_base, index, turn, warpgroup, sums);
#else
            const Tile tile = tile_at(p, index);
            finish_tile(p, {tile.batch, tile.row + 64 * first, tile.column}, s_base + AT_STAGED + warpgroup * STAGED_BYTES, warpgroup, sums);
#endif
        }
#ifdef MEETS_IN_MEMORY
        end_meetings(p);
#endif
    }
}
