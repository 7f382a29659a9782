// ---- the warpgroups that multiply

// Sums of bytes are exact.
template <int> struct SumOf { typedef float Type; };
template <> struct SumOf<3> { typedef int Type; };
typedef SumOf<KIND>::Type Accumulator;

// A warp is done with a stage: all that fetch for this block hear it.
static __device__ __forceinline__ void release(u32 barrier) {
    const u32 lane = threadIdx.x & 31;
    if constexpr (SHARERS == 1) {
        if (lane == 0) mbarrier_arrive(barrier);
    } else {
        if (lane < SHARERS) mbarrier_arrive_at(barrier, lane);
    }
}

// Before the first stage every block of a cluster must run, and at the end none may exit while others still arrive at its barriers.
static __device__ __forceinline__ void meet_neighbours() {
    if constexpr (SHARERS > 1 || (TURNS && CLUSTER > 1)) {
        cluster_arrive();
        cluster_wait();
    }
}

// Not by the first multiplication: sums that it reads without using them would hold their registers since the tile before.
static __device__ __forceinline__ void clear(Accumulator (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[half][i] = 0;
        pin(sums[half]);
    }
}

// A stage is there. COPIED: threads wrote A, not the copy engine.
template <bool COPIED> static __device__ __forceinline__ void await_stage(Ring ring, u32 at) {
    mbarrier_wait(ring.full(at), Ring::parity(at));
    if constexpr (COPIED) fence_proxy_async_shared();
}

// Begins to add the product of one stage's A and another's B to sums, or to set them to it. Of A, the halves from `first` on; of B, this side's columns.
static __device__ __forceinline__ void add_product(Accumulator (&sums)[HALVES][COLUMNS / 2], Ring ring, int first, int side, u32 of_a, u32 of_b, bool set) {
    // From one 16 of K to the next, in units of 16 bytes.
    constexpr int A_STEP = A_COLUMNS ? 128 : 2, B_STEP = B_ROWS ? 128 : 2;
    constexpr int SIDE_BYTES = B_ROWS ? COLUMNS / 64 * HALF_BYTES : COLUMNS * DEPTH * 2;
    const u64 a = matrix_descriptor<HALF_BYTES>(ring.a(of_a) + first * HALF_BYTES), b = matrix_descriptor<HALF_BYTES>(ring.b(of_b) + side * SIDE_BYTES);
#pragma unroll
    for (int j = 0; j < DEPTH / 16; ++j) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            Wgmma<COLUMNS, KIND>::template from_shared<B_ROWS, A_COLUMNS>(sums[half], a + half * (HALF_BYTES / 16) + j * A_STEP, b + j * B_STEP, !set || j > 0);
        }
    }
}

// Begins to add the stages of a K to sums, or to set them to it.
template <bool COPIED>
static __device__ __forceinline__ void add_stages(Accumulator (&sums)[HALVES][COLUMNS / 2], Ring ring, int first, int side, u32 at, bool set) {
    await_stage<COPIED>(ring, at);
    wgmma_fence();
    add_product(sums, ring, first, side, at, at, set);
    if constexpr (PASSES == 2) {
        // Of f32 the small products come first. What both operands leave makes a third one, which is below the last bit.
        await_stage<COPIED>(ring, at + 1);
        add_product(sums, ring, first, side, at + 1, at + 1, false);
        add_product(sums, ring, first, side, at, at + 1, false);
    }
    wgmma_commit();
}

// Adds `steps` stages to sums; all but the last one's place are free then.
template <bool COPIED = false>
static __device__ __forceinline__ void multiply(Accumulator (&sums)[HALVES][COLUMNS / 2], Ring ring, int first, int side, int steps, u32 at) {
    if constexpr (ADDS_STAGES) {
        // The matrix units round towards zero, which over all of K would be an error of its own.
        Accumulator stage[HALVES][COLUMNS / 2];
        clear(stage);
        for (int i = 0; i < steps; i += PASSES, at += PASSES) {
            if (ALTERNATES) named_barrier_sync(TURN_BARRIER + first, MULTIPLIERS);
            add_stages<COPIED>(stage, ring, first, side, at, true);
            if (ALTERNATES) named_barrier_arrive(TURN_BARRIER + (first ^ 1), MULTIPLIERS);
            wgmma_wait<0>();
            if constexpr (PASSES == 2) release(ring.empty(at));
            if (i + PASSES < steps) release(ring.empty(at + PASSES - 1));
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                pin(stage[half]);
#pragma unroll
                for (int j = 0; j < COLUMNS / 2; ++j) sums[half][j] += stage[half][j];
            }
        }
    } else {
        for (int i = 0; i < steps; ++i, ++at) {
            add_stages<COPIED>(sums, ring, first, side, at, false);
            wgmma_wait<1>();
            if (i > 0) release(ring.empty(at - 1));
        }
    }
}

// Where 16 bytes of a row of staged sums lie: pieces of 64 columns, rows of 128 bytes in the swizzle of the tensor maps.
static __device__ __forceinline__ int staged_at(int row, int sixteen) {
    return sixteen / 8 * 8192 + row * 128 + ((sixteen % 8 ^ row & 7) << 4);
}

// Sums of 64 rows, rounded: four pairs for each 16 columns, as `stmatrix` takes them.
typedef u32 Rounded[COLUMNS / 16][4];

static __device__ __forceinline__ void round(Rounded& pairs, const float (&sums)[COLUMNS / 2]) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) pairs[i / 4][i % 4] = narrow2<KIND>(sums[2 * i], sums[2 * i + 1]);
}

// All of a tile at once, so that registers are free for what follows.
static __device__ __forceinline__ void round_tile(Rounded (&pairs)[HALVES], const float (&sums)[HALVES][COLUMNS / 2]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        round(pairs[half], sums[half]);
        pin(pairs[half]);
    }
}

// Rounded sums of 64 rows go to shared memory.
static __device__ __forceinline__ void stage(char* s_staged, const Rounded& pairs) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, row = 16 * warp + lane % 16;
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) stmatrix(s_staged + staged_at(row, 2 * j + lane / 16), pairs[j]);
}
