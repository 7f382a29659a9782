// Exchange between the lanes of a warp. All 32 lanes execute each of these together.

// The value of the lane whose number differs in the bits of `mask`.
static __device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
static __device__ __forceinline__ int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// The value of lane `lane`.
static __device__ __forceinline__ u32 shuffle(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Whether `x` is true in some lane.
static __device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }
