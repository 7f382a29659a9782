// Dropout on lanes.

// Which of V elements from `first` on are kept. IN_STEP: `first` is always a multiple of the smaller of V and 4.
template <bool IN_STEP> static __device__ __forceinline__ B keep(u64 first, u32 seed, u32 offset, u32 threshold) {
    B kept;
    if constexpr (IN_STEP && V >= 4) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            const Words4 words = philox((first + i) >> 2, seed, offset);
#pragma unroll
            for (int k = 0; k < 4; ++k) kept.v[i + k] = words.w[k] >= threshold;
        }
    } else if constexpr (IN_STEP) {
        const Words4 words = philox(first >> 2, seed, offset);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            kept.v[i] = word(words, (u32)(first & 3) + i) >= threshold;
        }
    } else {
        u64 block = first >> 2;
        Words4 words = philox(block, seed, offset);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const u64 e = first + i;
            if ((e >> 2) != block) {
                block = e >> 2;
                words = philox(block, seed, offset);
            }
            kept.v[i] = word(words, (u32)(e & 3)) >= threshold;
        }
    }
    return kept;
}
