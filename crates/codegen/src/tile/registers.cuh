// Registers: reallocation between warpgroups (sm_90a), and hints that shorten live ranges.

// Sets the registers of each thread of this warpgroup to COUNT, a multiple of 8 from 24 to 256: `dec` releases, `inc` waits until there are
// enough. All warps of the warpgroup execute it, and the kernel's total must fit what the launch allocated.
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// threadIdx.x, read from the special register again: values derived from it need not stay in registers until here.
static __device__ __forceinline__ int reread_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
// The same value, opaque to the compiler: what follows from it is computed again instead of kept in registers.
static __device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
