// The gradients of keys and values by warpgroups, from the statistics that `hopper_dq.cu` leaves. A head of keys has the sums over the heads
// of queries that read it.

// Two wide results leave no registers for the weights of products that are still on their way.
constexpr bool TIGHT = WIDTH > 96;

static __device__ __forceinline__ void make_slopes(Scores& r_slope, const Scores& r_s, const float4* s_rows) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
        const float4 rows = s_rows[4 * j];
#pragma unroll
        for (int e = 0; e < 4; ++e) r_slope[4 * j + e] = slope_of(r_s[4 * j + e], r_slope[4 * j + e], e % 2 ? rows.w : rows.y);
    }
}

// The queries of a head that a warpgroup goes over: tiles from `begin` to `end`, of which those before `whole` do not see all its keys; the
// head's tiles end at `next`. `hidden` is how many queries of tile 0, counted from this thread's first column, do not see its first row.
struct Facing {
    u32 begin, end, whole, next;
    int hidden;
};

// `at` is the head's first tile.
static __device__ __forceinline__ Facing face(const Attention& of, const Work& work, const Thread& thread, u32 at) {
    const int last = (int)last_key(of, 0), first = work.first + thread.part * 64;
    // Queries that see the first and the last key of the warpgroup.
    const int begin = min(first_query(of, last, first), (int)of.queries), whole = first_query(of, last, first + 63);
    const int skipped = min((begin - work.begin + TILE - 1) / TILE, work.count), tiles = first < (int)of.keys ? work.count : skipped;
    const int hidden = MASK == CAUSAL ? work.first + thread.row - last - work.begin - thread.column + (int)at * TILE : 0;
    return {at + skipped, at + tiles, at + (whole - work.begin + TILE - 1) / TILE, at + work.count, hidden};
}

// What the scores of a tile weight joins dk and dv, on its way; the scores are there.
static __device__ __forceinline__ void weight_tile(Result& r_dk, Result& r_dv, Scores& r_s, Scores& r_slope, Weights& r_p, Weights& r_ds, KeyRing ring,
                                                   const float4* s_all_rows, const Facing& facing, u32 at) {
    const float4* s_rows = s_all_rows + at % QUERY_STAGES * (ROWS_BYTES / 16);
    if ((int)(facing.whole - at) > 0) {
        make_probabilities<true>(r_s, s_rows, facing.hidden - (int)at * TILE);
    } else {
        make_probabilities<false>(r_s, s_rows, 0);
    }
    narrow_weights(r_p, r_s);
    wgmma_wait<0>();
    pin(r_slope);
    issue_weighted(r_dv, r_p, ring.tile(at, 1));
    if constexpr (TIGHT) {
        wgmma_wait<0>();
        pin(r_dv);
    }
    make_slopes(r_slope, r_s, s_rows);
    narrow_weights(r_ds, r_slope);
    issue_weighted(r_dk, r_ds, ring.tile(at, 0));
}

// A head's share of dk, but for the scale, and of dv.
template <int COUNT>
static __device__ __forceinline__ void add_dk_dv(Result& r_dk, Result& r_dv, KeyRing ring, const float4* s_all_rows, const Thread& thread,
                                                 const Held<OWN_KEYS, COUNT>& held, const Facing& facing) {
    Scores r_s, r_slope;
    Weights r_p, r_ds;
    if (facing.begin == facing.end) return;
    issue(r_s, r_slope, ring, thread, held, facing.begin);
    wait_scores(r_s);
    const u32 last = facing.end - 1;
#pragma unroll 1
    for (u32 at = facing.begin; at != last; ++at) {
        weight_tile(r_dk, r_dv, r_s, r_slope, r_p, r_ds, ring, s_all_rows, facing, at);
        issue(r_s, r_slope, ring, thread, held, at + 1);
        wait_scores(r_s);
        pin(r_dk);
        pin(r_dv);
        ring.release(at, 0);
    }
    weight_tile(r_dk, r_dv, r_s, r_slope, r_p, r_ds, ring, s_all_rows, facing, last);
    wgmma_wait<0>();
    pin(r_dk);
    pin(r_dv);
    ring.release(last, 0);
}

static __device__ __forceinline__ void work_on_keys(const Mapped& p, KeyRing ring, char* s_base) {
    const Attention& of = p.backward.of;
    const Thread thread = find_thread(ring);
    const int keys = (int)of.keys;
    u32 at = 0;
    Work work;
    for (int round = 0; find_keys(p, round, work) && work.head >= 0; ++round) {
        mbarrier_wait(ring.own_full(), round & 1);
        Held<OWN_KEYS, KEYS_HELD> held;
        held.load(s_base, thread);
        if constexpr (FREED) release_own(ring, thread);
        Result r_dk, r_dv;
        clear(r_dk);
        clear(r_dv);
#pragma unroll 1
        for (int left = (int)of.group; left > 0; --left) {
            // Found anew for every head: over the tiles of one nothing else of it has to be in registers.
            find_keys(p, opaque(round), work);
            const Facing facing = face(of, work, thread, at);
            skip_tiles(ring, at, facing.begin);
            add_dk_dv(r_dk, r_dv, ring, (const float4*)(s_base + KeyRing::AT_ROWS) + thread.column / 2, thread, held, facing);
            skip_tiles(ring, facing.end, facing.next);
            at = facing.next;
        }
        find_keys(p, opaque(round), work);
        if constexpr (!FREED) named_barrier_sync(GROUP_BARRIER + thread.group, 128);
        const Backward& to = p.backward;
        store_gradient(ring, s_base, thread, 0, to.g_dk + start(to.dk, work.sequence, work.head), to.dk.position, work.first, keys, r_dk, SCALE);
        store_gradient(ring, s_base, thread, 1, to.g_dv + start(to.dv, work.sequence, work.head), to.dv.position, work.first, keys, r_dv, 1.0f);
        if constexpr (!FREED) release_own(ring, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const KeyRing ring = make_ring<KeyRing>(s_base);
    if (threadIdx.x >= MULTIPLIERS) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_for_keys(p, ring);
    } else {
        setmaxnreg_inc<240>();
        work_on_keys(p, ring, s_base);
    }
}
