// ---- statistics of tiles

extern "C" __global__ void __launch_bounds__(logits::THREADS, 1) cross_entropy_statistics(const __grid_constant__ logits::Parameters p) { logits::run(p); }

// ---- rows of tiles: a warp has a row

constexpr int COMBINE_THREADS = 256;

struct RowParameters {
    tail::Parameters tail;
    u64 m, column_tiles;
    float *loss, *logsumexp;  // [m]
    i64 ignored;              // a target whose row has no loss; no i32 where there is none
    u64 position;             // of the targets among the arguments of the launch
    u64* fault;
};

static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) cross_entropy_rows(const __grid_constant__ RowParameters p) {
    start_next();
    wait_for_previous();
    const int lane = threadIdx.x & 31, tiles = (int)p.column_tiles;
    const u64 row = (u64)blockIdx.x * (COMBINE_THREADS / 32) + threadIdx.x / 32;
    if (row >= p.m) return;
    const tail::Partial* const g_partials = p.tail.partials + row * tiles;
    float most = minus_infinity(), sum = 0.0f, total = 0.0f;
    for (int i = lane; i < tiles; i += 32) most = fmaxf(most, g_partials[i].most);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, shuffle_xor(most, mask));
    const float shift = shift_of(most);
    for (int i = lane; i < tiles; i += 32) {
        const tail::Partial partial = g_partials[i];
        // A tile of -inf adds nothing; relative to the others its exponential may be no number.
        sum += partial.sum == 0.0f ? 0.0f : partial.sum * ex2((partial.most - shift) * LOG2_E);
        if constexpr (SPREAD != 0.0f) total += p.tail.totals[row * tiles + i];
    }
    sum = warp_sum(sum);
    if constexpr (SPREAD != 0.0f) total = warp_sum(total);
    if (lane != 0) return;
    const float logsumexp = logf(sum) + shift;
    const i64 target = p.tail.targets[row];
    p.logsumexp[row] = logsumexp;
    if (target == p.ignored) {
        p.loss[row] = 0.0f;
    } else if (target < 0 || target >= (i64)p.tail.classes) {
        p.loss[row] = __uint_as_float(0x7fffffffu);
        atomicMin(p.fault, row * 256 + p.position);
    } else {
        p.loss[row] = logsumexp - KEPT * p.tail.picked[row] - (SPREAD != 0.0f ? SPREAD * total : 0.0f);
    }
}
