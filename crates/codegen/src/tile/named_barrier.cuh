// Named barriers: barriers 0 to 15 of a block, each for a multiple of 32 threads. Barrier 0 is that of __syncthreads.

// Arrives and waits until `threads` threads have arrived. Whole warps execute it.
static __device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting. Whole warps execute it.
static __device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
