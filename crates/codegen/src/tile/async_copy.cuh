// cp.async: copies from global to shared memory past the registers (Ampere and later).
//
// Copies of a thread are collected in commit groups, which complete in order. Other threads see the bytes after the copying thread has
// waited for them and a barrier follows.

// Starts a copy of BYTES (4, 8 or 16) to `s_to`; zeros where `in` is false, and nothing is read. Both addresses are multiples of BYTES.
// 16 bytes go past the L1.
template <int BYTES> static __device__ __forceinline__ void copy_async(u32 s_to, const void* g_from, bool in) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_to), "l"(g_from), "r"(in ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(s_to), "l"(g_from), "n"(BYTES), "r"(in ? BYTES : 0) : "memory");
    }
}
// Starts a copy of 16 bytes, of which the first `bytes` (0 to 16) are read, and the others are zeros.
static __device__ __forceinline__ void copy_async_first(u32 s_to, const void* g_from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_to), "l"(g_from), "r"(bytes) : "memory");
}
// Ends a commit group: all copies that this thread started since the last one.
static __device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's latest commit groups are incomplete.
template <int PENDING> static __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#if __CUDA_ARCH__ >= 900
// Arrives at an mbarrier (`mbarrier.cuh`) once all copies that this thread has started are done. Its count includes this arrival.
static __device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif
// Waits for all copies of this thread, committed or not.
static __device__ __forceinline__ void await_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
