// mbarrier: barriers in shared memory that count arrivals and bytes (Hopper and later).
//
// A phase completes once `count` arrivals and all expected bytes have come. Phases have parities 0, 1, 0, ... in turn. `barrier` is the
// shared address of 8 bytes, a multiple of 8.

// Initialises a barrier for `count` arrivals per phase. One thread does it, before a barrier of the block.
static __device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes this thread's initialised barriers visible to the async proxy and to the cluster.
static __device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives once; releases what this thread wrote before.
static __device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once, and adds `bytes` to those that the current phase expects.
static __device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity has completed. The hardware may suspend the thread for a while before it answers no.
static __device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}
// The same without suspending.
static __device__ __forceinline__ bool mbarrier_test_wait(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}
// Waits for the phase of this parity to complete. Of a new barrier the phase of parity 1 counts as completed.
static __device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}
