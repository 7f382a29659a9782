// Programmatic dependent launch: a grid starts before the grid ahead of it in the stream has ended. Prefetches into the L2 belong here:
// they are what a grid can do before its wait.
//
// The launch decides whether a grid is started early. Otherwise, and on GPUs before Hopper, both functions do nothing.

// Allows the next grid to start once every block of this one has executed this or has exited.
static __device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until all earlier grids have completed and their writes are visible. Before it no thread may write global memory, or read memory
// that an earlier grid writes.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches one line of 128 bytes into the L2. It reads nothing, and the L2 is coherent, so it may come before the wait.
static __device__ __forceinline__ void prefetch_line(unsigned long long address) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Prefetches all lines of a range of bytes. All threads of a block call it together.
static __device__ __forceinline__ void prefetch_range(unsigned long long address, unsigned long long bytes) {
    const unsigned long long end = address + bytes;
    for (unsigned long long at = (address & ~127ull) + threadIdx.x * 128ull; at < end; at += blockDim.x * 128ull) prefetch_line(at);
}
