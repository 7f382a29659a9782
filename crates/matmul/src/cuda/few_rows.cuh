
// What kernels of few rows share: biases and scales ahead of their use, sums of pieces in order, and sums over the blocks of a cluster.

// What all rows share beside the weights: the whole of it, or what belongs to a strip of columns.
template <class Parameters> static __device__ __forceinline__ void prefetch_shared(const Parameters& p, int strip) {
#pragma unroll
    for (int i = 0; i < SHARED; ++i) {
        const u64 bytes = p.shared[i].bytes, own = p.shared[i].strip, first = strip * own;
        if (p.shared[i].address != 0 && first < bytes) prefetch_range(p.shared[i].address + first, own == 0 ? bytes : min(own, bytes - first));
    }
}

// V sums of `count` pieces that lie `apart` sums from each other, first to last.
template <class Total> static __device__ __forceinline__ F add_pieces(const Total* s, int count, int apart) {
    Total total[V];
#pragma unroll
    for (int i = 0; i < V; ++i) total[i] = s[i];
#pragma unroll
    for (int piece = 1; piece < count; ++piece) {
#pragma unroll
        for (int i = 0; i < V; ++i) total[i] += s[piece * apart + i];
    }
    return lanes<F>([&](int i) { return (float)total[i]; });
}

template <class Parameters> static __device__ __forceinline__ void finish(const Parameters& p, int row, int column, const F& sum) {
    if (row < (int)p.rows && column < N) tail::run(p.tail, row, column, &sum, tail::read_shared(p.tail, column), tail::read(p.tail, row, column));
}

#if __CUDA_ARCH__ >= 900
// Makes the barrier ready that counts the stores of other blocks; `exchange` waits until all are.
static __device__ __forceinline__ void prepare_exchange(u64* s_sent) {
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(s_sent), 1);
        fence_mbarrier_init();
    }
    cluster_arrive();
}

// Adds up what the SPLIT blocks of a cluster have, each a part of K: vector e of VECTORS goes to block e % SPLIT, which adds the parts in order.
// `sum_of` gives a vector of this part, `finish_sum` takes one of all parts. Nothing but what the blocks store lies at `s_parts`.
template <int SPLIT, int VECTORS, class SumOf, class FinishSum>
static __device__ __forceinline__ void exchange(int part, float* s_parts, u64* s_sent, const SumOf& sum_of, const FinishSum& finish_sum) {
    constexpr int SHARE = (VECTORS + SPLIT - 1) / SPLIT * V;
    cluster_wait();
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(s_sent), (VECTORS + SPLIT - 1 - part) / SPLIT * V * SPLIT * (int)sizeof(float));
    for (int e = threadIdx.x; e < VECTORS; e += THREADS) {
        const F sum = sum_of(e);
#pragma unroll
        for (int i = 0; i < V; ++i) store_remote_async(s_parts + part * SHARE + e / SPLIT * V + i, sum.v[i], e % SPLIT, s_sent);
    }
    await_remote_stores(s_sent);
    for (int e = threadIdx.x * SPLIT + part; e < VECTORS; e += THREADS * SPLIT) finish_sum(e, add_pieces(s_parts + e / SPLIT * V, SPLIT, SHARE));
}
#endif
