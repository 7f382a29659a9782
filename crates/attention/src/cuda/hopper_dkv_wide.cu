// The gradients of keys and values of heads of more than 128, from the statistics that `hopper_dq.cu` leaves. A head of keys has the sums over the
// heads of queries that read it.
//
// dk and dv of 64 keys and 256 columns take half of a multiprocessor's registers, so a block owns 64 keys, and each of its warpgroups makes one
// of the two, with half of the products:
//
//   first:  scores = k q^T, probabilities p, dv += p do
//   second: slopes of probabilities = v do^T, slopes of scores ds = p (slopes - delta), dk += ds q
//
// All that one needs of the other is p, which the first sends through shared memory in f32, so that nothing is rounded that is not rounded
// for narrow heads. Two tiles have room there: the first may be ahead of the second. It is sent as it lies in registers, from thread to thread.

// Steps of the keys, or values, that stay in registers, as far as there are any left.
constexpr int PART_HELD = WIDTH <= 192 ? STEPS : 6;

// Probabilities on their way from the first warpgroup to the second. Tile `at` has place at % 2.
struct Exchange {
    KeyRing ring;
    __device__ __forceinline__ u32 barrier(int index) const { return ring.base + KeyRing::AT_MORE + 2 * SENT_BYTES + index * 8; }
    __device__ __forceinline__ u32 full(u32 at) const { return barrier(at % 2); }
    __device__ __forceinline__ u32 empty(u32 at) const { return barrier(2 + at % 2); }
    static __device__ __forceinline__ u32 parity(u32 at) { return at / 2 & 1; }

    // Before the ring's: those are followed by a fence.
    __device__ __forceinline__ void init() const {
        for (int index = 0; index < 4; ++index) mbarrier_init(barrier(index), 4);
    }
    // A thread's place: a float4 of every 128.
    static __device__ __forceinline__ float4* of_thread(char* s_base, const Thread& thread, u32 at) {
        return (float4*)(s_base + KeyRing::AT_MORE + at % 2 * SENT_BYTES) + thread.warp * 32 + thread.lane;
    }
    // What this warp wrote, or read, is there, or is needed no more.
    static __device__ __forceinline__ void signal(u32 barrier, const Thread& thread) {
        __syncwarp();
        if (thread.lane == 0) mbarrier_arrive(barrier);
    }
};

// The queries of a head: tiles from `begin` to `end`, of which those before `whole` do not see all keys of the block. `hidden` is how many queries
// of tile 0, counted from this thread's first column, do not see its first row.
struct Facing {
    u32 begin, end, whole;
    int hidden;
};

// `at` is the head's first tile.
static __device__ __forceinline__ Facing face(const Attention& of, const Work& work, const Thread& thread, u32 at) {
    const int last = (int)last_key(of, 0), whole = first_query(of, last, work.first + OWN_KEYS - 1);
    const int hidden = MASK == CAUSAL ? work.first + thread.row - last - work.begin - thread.column + (int)at * TILE : 0;
    return {at, at + work.count, at + (whole - work.begin + TILE - 1) / TILE, hidden};
}

// The scores of a tile, of the first warpgroup, become probabilities, which the second gets.
static __device__ __forceinline__ void send(Scores& r_s, KeyRing ring, char* s_base, const Thread& thread, const Facing& facing, u32 at) {
    const Exchange exchange = {ring};
    const float4* s_rows = (const float4*)(s_base + KeyRing::at_rows(at)) + thread.column / 2;
    if ((int)(facing.whole - at) > 0) {
        make_probabilities<true>(r_s, s_rows, facing.hidden - (int)at * TILE);
    } else {
        make_probabilities<false>(r_s, s_rows, 0);
    }
    mbarrier_wait(exchange.empty(at), Exchange::parity(at) ^ 1);
    float4* s_to = Exchange::of_thread(s_base, thread, at);
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) s_to[128 * j] = make_float4(r_s[4 * j], r_s[4 * j + 1], r_s[4 * j + 2], r_s[4 * j + 3]);
    Exchange::signal(exchange.full(at), thread);
    // The queries themselves stay for the second warpgroup.
    ring.release(at, 0);
    ring.wait_full(at, 1);
}

// Slopes of probabilities, of the second warpgroup, become those of scores.
static __device__ __forceinline__ void receive(Scores& r_slope, KeyRing ring, char* s_base, const Thread& thread, u32 at) {
    const Exchange exchange = {ring};
    ring.release(at, 1);
    ring.wait_full(at, 0);
    const float4* s_rows = (const float4*)(s_base + KeyRing::at_rows(at)) + thread.column / 2;
    const float4* s_from = Exchange::of_thread(s_base, thread, at);
    mbarrier_wait(exchange.full(at), Exchange::parity(at));
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
        const float4 rows = s_rows[4 * j], p = s_from[128 * j];  // statistics of two queries, probabilities of two keys each
        float* slope = r_slope + 4 * j;
        slope[0] = slope_of(p.x, slope[0], rows.y);
        slope[1] = slope_of(p.y, slope[1], rows.w);
        slope[2] = slope_of(p.z, slope[2], rows.y);
        slope[3] = slope_of(p.w, slope[3], rows.w);
    }
    Exchange::signal(exchange.empty(at), thread);
}

// The product that gives a warpgroup's weights, and the one that they are weights in, on their way.
template <int GROUP>
static __device__ __forceinline__ void issue_own(Scores& r, KeyRing ring, const Thread& thread, const Held<OWN_KEYS, PART_HELD>& held, u32 at) {
    ring.wait_full(at, GROUP);
    wgmma_fence();
    issue_scores<0>(r, thread.own[GROUP], ring.tile(at, GROUP), held);
}
template <int GROUP>
static __device__ __forceinline__ void weight_tile(Result& r_sum, Scores& r, Weights& r_weights, KeyRing ring, char* s_base, const Thread& thread,
                                                   const Facing& facing, u32 at) {
    if constexpr (GROUP == 0) {
        send(r, ring, s_base, thread, facing, at);
    } else {
        receive(r, ring, s_base, thread, at);
    }
    narrow_weights(r_weights, r);
    issue_weighted(r_sum, r_weights, ring.tile(at, 1 - GROUP));
}

// A head's share of dv, or of dk but for the scale.
template <int GROUP>
static __device__ __forceinline__ void add_share(Result& r_sum, KeyRing ring, char* s_base, const Thread& thread, const Held<OWN_KEYS, PART_HELD>& held,
                                                 const Facing& facing) {
    Scores r;
    Weights r_weights;
    if (facing.begin == facing.end) return;
    issue_own<GROUP>(r, ring, thread, held, facing.begin);
    wgmma_wait<0>();
    pin(r);
    const u32 last = facing.end - 1;
#pragma unroll 1
    for (u32 at = facing.begin; at != last; ++at) {
        weight_tile<GROUP>(r_sum, r, r_weights, ring, s_base, thread, facing, at);
        issue_own<GROUP>(r, ring, thread, held, at + 1);
        wgmma_wait<1>();
        pin(r_sum);
        ring.release(at, 1 - GROUP);
        wgmma_wait<0>();
        pin(r);
    }
    weight_tile<GROUP>(r_sum, r, r_weights, ring, s_base, thread, facing, last);
    wgmma_wait<0>();
    pin(r_sum);
    ring.release(last, 1 - GROUP);
}

template <int GROUP> static __device__ __forceinline__ void work_on_keys(const Mapped& p, KeyRing ring, char* s_base, const Thread& thread) {
    const Attention& of = p.backward.of;
    u32 at = 0;
    Work work;
    for (int round = 0; find_keys(p, round, work) && work.head >= 0; ++round) {
        mbarrier_wait(ring.own_full(), round & 1);
        Held<OWN_KEYS, PART_HELD> held;
        held.load(s_base + GROUP * KeyRing::OWN_BYTES, find_thread(ring));
        Result r_sum;
        clear(r_sum);
#pragma unroll 1
        for (int left = (int)of.group; left > 0; --left) {
            // Found anew for every head: over the tiles of one nothing else of it has to be in registers.
            find_keys(p, opaque(round), work);
            const Facing facing = face(of, work, thread, at);
            add_share<GROUP>(r_sum, ring, s_base, thread, held, facing);
            at = facing.end;
        }
        find_keys(p, opaque(round), work);
        // It goes out through the place of what its warpgroup owns.
        named_barrier_sync(GROUP_BARRIER + GROUP, 128);
        const Strides strides = GROUP == 0 ? p.backward.dv : p.backward.dk;
        Element* g_to = (GROUP == 0 ? p.backward.g_dv : p.backward.g_dk) + start(strides, work.sequence, work.head);
        store_gradient(ring, s_base, find_thread(ring), GROUP, g_to, strides.position, work.first, (int)of.keys, r_sum, GROUP == 0 ? 1.0f : SCALE);
        release_own(ring, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    if (threadIdx.x == 0) Exchange{{shared_address(s_base)}}.init();
    const KeyRing ring = make_ring<KeyRing>(s_base);
    if (threadIdx.x >= MULTIPLIERS) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == MULTIPLIERS) fetch_for_keys(p, ring);
    } else {
        setmaxnreg_inc<232>();
        const Thread thread = find_thread(ring);
        if (thread.group == 0) {
            work_on_keys<0>(p, ring, s_base, thread);
        } else {
            work_on_keys<1>(p, ring, s_base, thread);
        }
    }
}
