// Signals between blocks in global memory, and between warps in shared memory: ordered loads, stores and atomics (Hopper and later as
// written here).

// A word on which only its own value matters: relaxed, for all of the GPU.
static __device__ __forceinline__ u64 load_relaxed(const u64* g_word) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(g_word) : "memory");
    return word;
}
static __device__ __forceinline__ void store_relaxed(u64* g_word, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(g_word), "l"(word) : "memory");
}
// Adds, and returns the sum before. Releases what this thread wrote or observed, and acquires what earlier additions released.
static __device__ __forceinline__ u32 add_acq_rel(u32* g_sum, u32 more) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(g_sum), "r"(more) : "memory");
    return before;
}
// Loads, and acquires what was released before the value that it returns.
static __device__ __forceinline__ u32 load_acquire(const u32* g_sum) {
    u32 sum;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(sum) : "l"(g_sum) : "memory");
    return sum;
}
// Release and acquire within a block, at a shared address.
static __device__ __forceinline__ void store_release_shared(u32 s_at, u32 value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(s_at), "r"(value) : "memory");
}
static __device__ __forceinline__ u32 load_acquire_shared(u32 s_at) {
    u32 value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(s_at) : "memory");
    return value;
}
// Suspends the thread for about 40 ns, between two polls.
static __device__ __forceinline__ void back_off() { asm volatile("nanosleep.u32 %0;" ::"n"(40) : "memory"); }
