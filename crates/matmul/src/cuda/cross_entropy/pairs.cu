// ---- rounded sums in the registers of a thread

// Of 64 rows a thread has two, 8 apart: two neighbouring columns of each 8. With lane = 4 g + t these are rows g and g + 8 of its warp's
// 16, and columns 2 t and 2 t + 1.
static __device__ __forceinline__ int own_row() { return 16 * (threadIdx.x / 32 % 4) + (threadIdx.x & 31) / 4; }
static __device__ __forceinline__ int own_column() { return (threadIdx.x & 3) * 2; }

// The pair of row g + 8 `row` in columns 8 `j` and on.
static __device__ __forceinline__ u32& pair(Rounded& pairs, int row, int j) { return pairs[(2 * j + row) / 4][(2 * j + row) % 4]; }
static __device__ __forceinline__ u32 pair(const Rounded& pairs, int row, int j) { return pairs[(2 * j + row) / 4][(2 * j + row) % 4]; }
static __device__ __forceinline__ float low(u32 pair) { return KIND == 1 ? f16_low(pair) : bf16_low(pair); }
static __device__ __forceinline__ float high(u32 pair) { return KIND == 1 ? f16_high(pair) : bf16_high(pair); }
