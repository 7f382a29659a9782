// Grids that start before the one before them has ended.
//
// `start_next` lets the next grid start once all blocks of this one have said so or ended. `wait_for_previous` returns when all
// earlier grids have ended and what they wrote can be seen: a grid that was started so touches nothing of theirs before, and
// writes nothing, in any thread. Whether a grid is started so is the launch's choice; elsewhere, and on GPUs before Hopper, both do nothing.

static __device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for a line of 128 bytes to be brought to the L2. Nothing is read, and the L2 sees every write, so this may come before the wait.
static __device__ __forceinline__ void bring_line(unsigned long long address) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Asks for all lines of some bytes, all threads of a block together.
static __device__ __forceinline__ void bring_near(unsigned long long address, unsigned long long bytes) {
    const unsigned long long end = address + bytes;
    for (unsigned long long at = (address & ~127ull) + threadIdx.x * 128ull; at < end; at += blockDim.x * 128ull) bring_line(at);
}
