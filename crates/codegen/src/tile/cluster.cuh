// Clusters and distributed shared memory (Hopper and later). Functions are declared for those GPUs alone.
//
// How blocks send floats to each other, counted at the receiver: each initialises an mbarrier for one arrival, fences it and arrives at the
// cluster (`cluster_arrive`); after `cluster_wait` one of its threads expects the bytes it will receive, and all blocks store to each
// other, in any order (`store_remote_async`); a block that has waited for its bytes (`await_remote_stores`) reads them. Nothing more
// arrives, so it may exit. A cluster barrier at the end would first wait for everything its threads have in flight.

#if __CUDA_ARCH__ >= 900
// The block's rank in its cluster.
static __device__ __forceinline__ u32 cluster_rank() { u32 x; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
// The address (`shared::cluster`) of what is `s` in this block, in the block of some rank.
static __device__ __forceinline__ u32 remote(const void* s, u32 rank) {
    u32 own = (u32)__cvta_generic_to_shared(s), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    return there;
}
// Waits for all threads of the cluster, and makes their writes visible to each other.
static __device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the cluster barrier without ordering writes. All threads of a warp do it together.
static __device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Waits for all threads of the cluster to have arrived.
static __device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Arrives once at the mbarrier that is at `barrier` in the block of some rank. It orders no writes for that block: a release at the scope of the
// cluster would wait for everything that the thread has in flight.
static __device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 ::"r"(barrier), "r"(rank) : "memory");
}
// Stores to an address of a block of the cluster. A cluster barrier comes before it is read.
static __device__ __forceinline__ void store_remote(u32 there, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
static __device__ __forceinline__ void store_remote2(u32 there, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(x), "f"(y) : "memory");
}
static __device__ __forceinline__ void store_remote(u32 there, int x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
}
#if __CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ > 0
// Stores to where `s` is in the block of some rank; the mbarrier at `s_sent` there gets the bytes.
static __device__ __forceinline__ void store_remote_async(float* s, float x, u32 rank, u64* s_sent) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote(s, rank)), "f"(x), "r"(remote(s_sent, rank)) : "memory");
}
#else
// CUDA 12.0 has no stores that an mbarrier counts: they are counted behind a fence.
static __device__ __forceinline__ void store_remote_async(float* s, float x, u32 rank, u64* s_sent) {
    store_remote(remote(s, rank), x);
    asm volatile("fence.acq_rel.cluster;\nmbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 4;" ::"r"(remote(s_sent, rank)) : "memory");
}
#endif
// Waits for a phase of the mbarrier that counts what this block receives, the first one or one of that parity. All threads that read it do so.
static __device__ __forceinline__ void await_remote_stores(const u64* s_sent, u32 parity = 0) {
    const u32 sent = (u32)__cvta_generic_to_shared(s_sent);
    u32 all = 0;
    while (all == 0) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(all) : "r"(sent), "r"(parity) : "memory");
    }
}
#endif
