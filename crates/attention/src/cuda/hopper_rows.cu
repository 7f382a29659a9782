// Attention, a residual and a norm in one launch, on Hopper's matrix units.
//
//   s = residual + attention(q, k, v), heads side by side;  y = norm(s)
//
// A norm needs a whole row, and a row spans all heads, which several blocks compute. `hopper.cu` says how a tile of a head is computed,
// `hopper_norm.cuh` how rows meet. Here:
// - A number is a tile of queries of one head. Heads of the same queries follow each other, so they are computed at about the same time;
//   queries that see most come first, in sections of sequences whose keys and values stay in the L2 cache.
// - Needs what `hopper.cu` does, rows of 64 columns times some, fewer heads than a board has places.
//
// Takes, of NVRTC 13.4: with two blocks 80 registers (96 for those who multiply, 48 for the others), 115,424 bytes of shared memory a block,
// 24 of 64 warps; with one 168 (224 and 56), 142,120 of heads of 64 and 197,264 of heads of 128, 12 warps. No spills. What is given and
// taken evens out, so the compiler has to begin with just as many.
//
// Times are in `bench/results/h200-launches-peers.csv`. At 8 x 12 x 1024 x 64 what goes beyond attention alone is mostly the end: the last rows
// have to be told of, looked for, normalised and stored when all products are done; the rest is instructions of helpers beside those of
// the softmax. Designs that were measured there before it, by programs outside of the repository or by earlier texts of this file, attention
// alone at 42 us:
// - a cluster of 6 blocks of 2 heads, statistics exchanged through distributed shared memory: 69 us, as the blocks of a cluster start and
//   end together;
// - rows normalised by the warp that ends last: 82 us, as its warpgroup waits for it;
// - helpers that load the residual, and s again, themselves: 79 us, as a warp has too few loads on their way;
// - slots, but one of them: 64 us; words looked for by all rows in three rounds of loads: 56 us.

static_assert(AT_REST == SHARED, "the host asks for as much");

// The parameter.
struct Followed {
    Maps maps;
    NormMaps norm_maps;
    Attention attention;
    Norm norm;
    u64 section;  // sequences whose tiles are worked on together
    u64 filler[9];
};
static_assert(sizeof(Followed) % 128 == 0, "as maps are aligned");

static __device__ __forceinline__ Number find_number(const Followed& p, int number) {
    if (number < 0) return {-1, 0};
    const int heads = (int)p.attention.heads, group = number / heads;
    return {tile_of_group(p.attention, (int)p.section, group), number - group * heads};
}

static __device__ __forceinline__ void fetch_drawn(const Followed& p, Rings rings, char* s_base, u64 drawn_first) {
    board_of(s_base)->mark = mark_of((u32)(drawn_first >> 32));
    u32 at = 0, queries = 0, uses = 0;
    for (u32 round = 0;; ++round) {
        wait_for_place(board_of(s_base), round);
        const Number number = find_number(p, number_of(p.norm, round == 0 ? drawn_first : draw(p.norm)));
        board_of(s_base)->numbers[round % PLACES] = number;
        put_item(rings, s_base, round, number);
        if (number.tile < 0) return;
        const TileRows rows = rows_of(p.norm, p.attention, number.tile);
        fetch_tile(p.maps, rings, tile_of(p.attention, rows.sequence, number.which, rows.first), at, queries);
        fetch_residual(&p.norm_maps.residual, rings, rows, number.which, uses);
    }
}

static __device__ __forceinline__ void attend_drawn(const Followed& p, Rings rings, char* s_base) {
    const Rank rank = rank_of_warp();
    // The first warpgroup has the first turn.
    if (rank.warpgroup == 1) end_turn(rank.warpgroup);
    u32 at = 0, queries = 0;
    for (u32 round = 0;; ++round) {
        const Number number = take_item(rings, s_base, round);
        if (number.tile < 0) {
            if (!SPLIT || rank.warpgroup == 0) give_end(rings, round);
            return;
        }
        State r;
        {
            const TileRows rows = rows_of(p.norm, p.attention, number.tile);
            attend(r, p.attention, rings, s_base, rank, tile_of(p.attention, rows.sequence, number.which, rows.first), at, queries);
        }
        if (!SPLIT || rank.warpgroup == 0) {
            // Read anew: until now it has to be in no registers.
            const Number same = look_at(&board_of(s_base)->numbers[round % PLACES]);
            const Divided divided(r);
            add_rows(p.norm, take_slot(rings, s_base, rank, round), same.tile, same.which * UNITS, rank.part * 64 + rank.warp * 16,
                     rows_of(p.norm, p.attention, same.tile).count, look_at(&board_of(s_base)->mark),
                     [&](int step, u32 (&pairs)[4]) { divided.pairs(r, step, pairs); });
            give_slot(rings, round);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, BLOCKS) attention_rows_hopper(const __grid_constant__ Followed p) {
    extern __shared__ __align__(1024) char s_base[];
    run_block(
        p.norm, p.norm_maps, s_base, [&](Rings) { prefetch_maps(p.maps); },
        [&](Rings rings, u64 drawn_first) { fetch_drawn(p, rings, s_base, drawn_first); },
        [&](Rings rings) { follow(p.norm, p.norm_maps, p.attention, rings, s_base); },
        [&](Rings rings) { attend_drawn(p, rings, s_base); });
}
