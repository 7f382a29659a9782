// Addresses of shared memory as PTX takes them: 32-bit numbers in the window of the block (`shared::cta`).

// `s_at` points into the block's shared memory.
static __device__ __forceinline__ u32 shared_address(const void* s_at) { return (u32)__cvta_generic_to_shared(s_at); }
