// ---- the kernel for rows that are routed to experts, as `route` has sorted them: each tile has rows of one expert
//
// A warpgroup gathers rows of A by number into the swizzled stages, 16 bytes a thread at a time; its first thread fetches the expert's columns
// by a tensor map of all matrices. No row and no matrix is copied in global memory. Two warpgroups multiply and finish, in turn or together as
// in `walk.cu`, and put each row to its own place. Rows of the result that follow each other may be choices of one row of A.

struct RoutedParameters {
    Parameters own;                // `b` is the table of matrices; `a`, `row_tiles` and `tiles` are not used
    u64 left, left_row, left_own;  // address of A, bytes from one row's choices to those of the next, from choice to choice
    u64 choices, inner;            // of a row, and its bytes
    u64 order, list;               // as `route` writes them
};

// A tile's rows: an expert, its first place, and the one behind the last place of the expert.
struct Routed {
    int expert, first, end;
};

static __device__ __forceinline__ Routed routed_at(const RoutedParameters& p, const Tile& tile) {
    u32 words[4];
    Access<16>::load_again(words, (const char*)p.list + 16ll * (tile.row / ROWS + 1));
    return {(int)words[0], (int)words[1], (int)words[2]};
}

static __device__ __forceinline__ int row_at(const RoutedParameters& p, int place) { return load_one(I32{}, (const char*)p.order + 4ll * place); }

// A tile's stages. Thread t has the same 16 bytes of rows t / 8, t / 8 + 16, ... Rows behind the expert's last are left as they are: what
// they hold reaches no row that is stored. Behind the end of a row are zeros, as there are in B.
static __device__ __forceinline__ void gather(const RoutedParameters& p, Ring ring, const Tile& tile, const Routed& rows, u32& at) {
    constexpr int EACH = ROWS / 16;
    const int sixteen = threadIdx.x % 8, down = threadIdx.x / 8, steps = (int)p.own.steps;
    const char* g_rows[EACH];
    u32 there = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int place = rows.first + down + 16 * i;
        const bool in = place < rows.end;
        const u32 row = in ? row_at(p, place) : 0, choices = (u32)p.choices;
        g_rows[i] = (const char*)p.left + (row / choices) * p.left_row + (row % choices) * p.left_own + sixteen * 16;
        there |= (u32)in << i;
    }
    const int s_place = down * 128 + ((sixteen ^ down & 7) << 4);
    for (int i = 0; i < steps; ++i, ++at) {
        mbarrier_wait(ring.empty(at), Ring::parity(at) ^ 1);
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(ring.full(at), B_BYTES);
            tma_load_3d(ring.b(at), &p.own.b[0], ring.full(at), i * DEPTH, tile.column, rows.expert);
        }
        const int k = i * DEPTH * 2;
        const bool in = k + sixteen * 16 < (int)p.inner;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (there >> j & 1) copy_async<16>(ring.a(at) + s_place + j * 2048, g_rows[j] + k, in);
        }
        arrive_after_copies(ring.full(at));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_routed(const __grid_constant__ RoutedParameters p) {
    extern __shared__ char s_dynamic[];
    const u32 unaligned = shared_address(s_dynamic), base = (unaligned + 1023) & ~1023u;
    const Ring ring = {base};
    // By a shuffle, so that the compiler knows that all lanes have the same, and keeps what follows from it in uniform registers.
    const int warpgroup = (int)shuffle(threadIdx.x / 128, 0) - 1, steps = (int)p.own.steps;
    start_next();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.own.b[0]);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring.full(stage), 1 + 128);
            mbarrier_init(ring.empty(stage), TURNS ? 4 : 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_previous();
    u32 words[4];
    Access<16>::load_again(words, (const char*)p.list);
    const u32 row_tiles = words[0], column_tiles = (u32)p.own.column_tiles, tiles = row_tiles * column_tiles;
    if (warpgroup < 0) {
        setmaxnreg_dec<56>();
        u32 at = 0;
        for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
            const Tile tile = tile_of(row_tiles, column_tiles, index);
            gather(p, ring, tile, routed_at(p, tile), at);
        }
    } else {
        setmaxnreg_inc<224>();
        // Tiles of the block from one of this warpgroup's to the next, and the first of its rows.
        constexpr u32 APART = TURNS ? 2 : 1;
        const int lane = threadIdx.x % 32, warp = (int)(threadIdx.x / 32 % 4), first = (TURNS ? 0 : 64 * warpgroup) + 16 * warp;
        char* const s_staged = s_dynamic + (base - unaligned) + AT_STAGED + warpgroup * STAGED_BYTES;
        // The first one begins.
        if (TURNS && warpgroup == 1) named_barrier_arrive(TURN_BARRIER, MULTIPLIERS);
        u32 turn = TURNS ? warpgroup : 0;
        for (u32 index = blockIdx.x + turn * gridDim.x; index < tiles; index += APART * gridDim.x, turn += APART) {
            const Tile tile = tile_of(row_tiles, column_tiles, index);
            const Routed rows = routed_at(p, tile);
            // Numbers of 16 rows, and of the 16 that are 64 further on; where there are not so many, of another.
            const int place = rows.first + first;
            const int number = row_at(p, min(place + (HALVES == 2 ? lane / 16 * 64 : 0) + lane % 16, rows.end - 1));
            RoutedRows own = routed_rows(p.own, tile.column, place, rows.end - place, number, s_staged);
            Accumulator sums[HALVES][COLUMNS / 2];
            clear(sums);
            if (TURNS) named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);
            multiply<true>(sums, ring, TURNS ? 0 : warpgroup, 0, steps, turn * steps);
            if (TURNS) named_barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), MULTIPLIERS);
            wgmma_wait<0>();
#pragma unroll
            for (int half = 0; half < HALVES; ++half) pin(sums[half]);
            release(ring.empty(turn * steps + steps - 1));
            own.finish(sums);
        }
#ifdef MEETS_IN_MEMORY
        end_meetings(p.own);
#endif
    }
}
