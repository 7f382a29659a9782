// Attention, a residual and a norm in one launch, on Hopper's matrix units.
//
//   s = residual + attention(q, k, v), heads side by side;  y = norm(s)
//
// A norm needs a whole row, and a row spans all heads, which several blocks compute. `hopper.cu` says how a tile of a head is computed,
// `hopper_norm.cuh` how rows meet. Here:
// - A number is a tile of queries of one head. Heads of the same queries follow each other, so they are computed at about the same time;
//   queries that see most come first, in sections of sequences whose keys and values stay in the L2 cache.
// - Beside the warpgroups that multiply, three warps (helpers) have the rows: they take a tile from shared memory, where it is left as
//   x, and those who multiply go on with the next tile. What a helper finds ready it does first: a new tile, so that its units are
//   there for others, then eight rows of the oldest tile all of whose units are there.
// - The residual is on its way to the L2 cache while the tile is computed.
// - Needs what `hopper.cu` does, rows of 64 columns times some, fewer heads than a board has places.
//
// Takes, of NVRTC 13.4: with two blocks 80 registers (96 for those who multiply, 48 for the others), 100,592 bytes of shared memory a block,
// 24 of 64 warps; with one 168 (224 and 56), 135,472 of heads of 64 and 198,832 of heads of 128, 12 warps. No spills. What is given and
// taken evens out, so the compiler has to begin with just as many.
//
// Two other designs were measured with this op at 8 x 12 x 1024 x 64 (attention alone takes 42.5 us; a program outside of the repository):
// a cluster of 6 blocks of 2 heads with statistics exchanged through distributed shared memory took 69 us, as the blocks of a cluster
// start and end together; rows normalised by the warp that ends last took 82 us, as its warpgroup waits for it.

static_assert(AT_REST + 1024 == SHARED, "the host asks for as much");

// The parameter.
struct Followed {
    Maps maps;
    TensorMap residual;
    Attention attention;
    Norm norm;
    u64 section;  // sequences whose tiles are worked on together
    u64 filler[6];
};
static_assert(sizeof(Followed) % 128 == 0, "as maps are aligned");

static __device__ __forceinline__ Drawn find_item(const Followed& p, int number) {
    if (number < 0) return {-1, 0, 0, 0};
    const int heads = (int)p.attention.heads, group = number / heads;
    return queries_of(p.attention, (int)p.section, group, number - group * heads);
}

static __device__ __forceinline__ void fetch_drawn(const Followed& p, Rings rings, char* s_base, u64 drawn_first) {
    board_of(s_base)->mark = mark_of((u32)(drawn_first >> 32));
    u32 at = 0, queries = 0;
    for (u32 round = 0;; ++round) {
        wait_for_place(board_of(s_base), round);
        const Drawn drawn = find_item(p, number_of(p.norm, round == 0 ? drawn_first : draw(p.norm)));
        board_of(s_base)->drawn[round % PLACES] = drawn;
        put_item(rings, s_base, round, drawn);
        if (drawn.sequence < 0) return;
        const Tile tile = tile_of(p.attention, drawn.sequence, drawn.which, drawn.first);
        for (int piece = 0; piece < PIECES; ++piece) {
            prefetch_piece(&p.residual, tile.head * WIDTH + piece * UNIT, tile.first, tile.sequence);
        }
        fetch_tile(p.maps, rings, tile, at, queries);
    }
}

static __device__ __forceinline__ void attend_drawn(const Followed& p, Rings rings, char* s_base) {
    const Rank rank = rank_of_warp();
    // The first warpgroup has the first turn.
    if (rank.warpgroup == 1) end_turn(rank.warpgroup);
    u32 at = 0, queries = 0;
    for (u32 round = 0;; ++round) {
        const Drawn drawn = take_item(rings, s_base, round);
        State r;
        if (drawn.sequence >= 0) {
            const Tile tile = tile_of(p.attention, drawn.sequence, drawn.which, drawn.first);
            attend(r, p.attention, rings, s_base, rank, tile, at, queries);
        }
        // Helpers are told of the end too.
        if (!SPLIT || rank.warpgroup == 0) {
            wait_for_helpers(rings, round);
            if (drawn.sequence >= 0) stage_rows(r, staging(s_base, rank));
            release(rings.barrier(O_FULL));
        }
        if (drawn.sequence < 0) return;
    }
}

extern "C" __global__ void __launch_bounds__(384, BLOCKS) attention_rows_hopper(const __grid_constant__ Followed p) {
    extern __shared__ char s_memory[];
    run_block(
        p.norm, p.attention.queries, s_memory, [](Rings) {},
        [&](Rings rings, char* s_base, u64 drawn_first) { fetch_drawn(p, rings, s_base, drawn_first); },
        [&](Rings rings, char* s_base) { attend_drawn(p, rings, s_base); });
}
