// ---- what sums begin with: zeros

static __device__ __forceinline__ void begin(const Parameters&, const Tile&, Accumulator (&sums)[HALVES][COLUMNS / 2]) { clear(sums); }

