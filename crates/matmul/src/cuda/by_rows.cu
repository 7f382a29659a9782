
// B is [K, N]. A block owns STRIP columns; its threads stand ACROSS by DOWN, and a thread takes 16 bytes of DEEP neighbouring rows
// at a time, twice, before it adds the first. K is cut into SPLIT parts of PART rows, one a block of a cluster.

constexpr int DOWN = THREADS / ACROSS;
constexpr int STRIP = ACROSS * WIDE;
constexpr int TRIP = DOWN * DEEP;
constexpr bool SEVERAL = LEFT > TRIP;
constexpr int VECTORS = M * STRIP / V;

struct alignas(4 * DEEP) Run { float v[DEEP]; };

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) skinny(const __grid_constant__ Parameters p) {
    extern __shared__ float4 s_dynamic[];
    float* const s_left = (float*)s_dynamic;
    start_next();
    const int x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    const int strip = blockIdx.x / SPLIT * STRIP, part = blockIdx.x % SPLIT;
#if __CUDA_ARCH__ >= 900
    __shared__ u64 s_sent;
    if (SPLIT > 1) prepare_exchange(&s_sent);
#endif
    const int first = part * PART, last = min(first + PART, K);
    const int width = N - (strip + x * WIDE);
    const char* const g_right = (const char*)p.right + (i64)(strip + x * WIDE) * Right::SIZE;
    auto load = [&](Weights* to, int inner) {
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const int k = first + inner + d;
            to[d] = load_weights(g_right + (i64)k * (i64)p.right_next, k < last ? width : 0);
        }
    };
    Weights now[DEEP], next[DEEP];
    if (p.right_given == 0) wait_for_previous();
    load(now, y * DEEP);
    if (SEVERAL) load(next, y * DEEP + TRIP);
    prefetch_shared(p, blockIdx.x / SPLIT);
    wait_for_previous();
    fill_left(p, s_left, first, last);
    __syncthreads();
    float sums[M * WIDE];
#pragma unroll
    for (int i = 0; i < M * WIDE; ++i) sums[i] = 0.0f;
    auto add = [&](const Weights* weights, int inner) {
        Run left[M];
#pragma unroll
        for (int r = 0; r < M; ++r) left[r] = *(const Run*)(s_left + r * LEFT + inner);
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                const float weight = element(Right{}, weights[d].w, i);
#pragma unroll
                for (int r = 0; r < M; ++r) sums[r * WIDE + i] = fmaf(left[r].v[d], weight, sums[r * WIDE + i]);
            }
        }
    };
    for (int inner = y * DEEP; inner < last - first; inner += 2 * TRIP) {
        add(now, inner);
        if (SEVERAL) load(now, inner + 2 * TRIP);
        if (SEVERAL && inner + TRIP < last - first) add(next, inner + TRIP);
        if (SEVERAL) load(next, inner + 3 * TRIP);
    }
    // Threads below each other in a warp, then warps, then blocks. The sums take the place of A.
    constexpr int BELOW = 32 / ACROSS, HELD = M * WIDE > BELOW ? M * WIDE / BELOW : 1;
    constexpr int ALIKE = BELOW * HELD / (M * WIDE);
    add_lanes<M * WIDE, 16, ACROSS>(sums);
    __syncthreads();
    float* const s_sums = s_left;
    const int below = threadIdx.x % 32 / ACROSS;
    if (below % ALIKE == 0) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int index = below / ALIKE * HELD + i;
            s_sums[(threadIdx.x / 32 * M + index / WIDE) * STRIP + x * WIDE + index % WIDE] = sums[i];
        }
    }
    __syncthreads();
    auto sum_of = [&](int e) { return add_pieces(s_sums + e * V, WARPS, M * STRIP); };
    auto finish_sum = [&](int e, const F& sum) { finish(p, e * V / STRIP, strip + e * V % STRIP, sum); };
#if __CUDA_ARCH__ >= 900
    if (SPLIT > 1) {
        // Behind what the other block may still use as A and sums.
        exchange<SPLIT, VECTORS>(part, s_left + PARTS_AT, &s_sent, sum_of, finish_sum);
        return;
    }
#endif
    for (int e = threadIdx.x; e < VECTORS; e += THREADS) finish_sum(e, sum_of(e));
}
