
// Floats that the blocks of a cluster send into each other's shared memory.
//
// A block makes the counter of what it gets (`count_sent`, one thread) and starts (`cluster_start`, all); when all have started
// (`cluster_started`, all), it says how many bytes that will be (`expect`, one thread), and they `send`, in any order; a block that has all
// of its bytes (`await_sent`, all) reads them. It gets nothing more, so it may end.
// The bytes are counted where they arrive: a barrier of the cluster would first wait for all that the threads have under way.

#if __CUDA_ARCH__ >= 900
static __device__ __forceinline__ u32 remote(const void* s, u32 rank) {
    u32 own = (u32)__cvta_generic_to_shared(s), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    return there;
}
static __device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ __forceinline__ void count_sent(u64* s_sent) {
    const u32 sent = (u32)__cvta_generic_to_shared(s_sent);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(sent) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void expect(u64* s_sent, u32 bytes) {
    const u32 sent = (u32)__cvta_generic_to_shared(s_sent);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sent), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void cluster_start() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
static __device__ __forceinline__ void cluster_started() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#if __CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ > 0
static __device__ __forceinline__ void send(float* s, float x, u32 rank, u64* s_sent) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote(s, rank)), "f"(x), "r"(remote(s_sent, rank)) : "memory");
}
static __device__ __forceinline__ void await_sent(const u64* s_sent) {
    const u32 sent = (u32)__cvta_generic_to_shared(s_sent);
    u32 all = 0;
    while (all == 0) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(all) : "r"(sent) : "memory");
    }
}
#else
// CUDA 12.0 has no stores that are counted.
static __device__ __forceinline__ void send(float* s, float x, u32 rank, u64*) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote(s, rank)), "f"(x) : "memory");
}
static __device__ __forceinline__ void await_sent(const u64*) {
    __syncwarp();
    cluster_barrier();
}
#endif
#endif
