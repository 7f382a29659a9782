// Philox4x32-10 (Salmon et al., SC'11): element e takes word e % 4 of the block whose counter is e / 4. Every kernel with dropout
// uses it.

struct Words4 { u32 w[4]; };

// The four words of a block. `seed` and `offset` are the two key words.
static __device__ __forceinline__ Words4 philox(u64 block, u32 seed, u32 offset) {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = 0, c3 = 0, k0 = seed, k1 = offset;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 even = (u64)0xd2511f53u * c0, odd = (u64)0xcd9e8d57u * c2;
        c0 = (u32)(odd >> 32) ^ c1 ^ k0;
        c1 = (u32)odd;
        c2 = (u32)(even >> 32) ^ c3 ^ k1;
        c3 = (u32)even;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return Words4{{c0, c1, c2, c3}};
}

// Word `lane` of a block, by selects: an index known only at run time would move the words to local memory. `lane` is below 4.
static __device__ __forceinline__ u32 word(const Words4& words, u32 lane) {
    const u32 low = lane & 1 ? words.w[1] : words.w[0], high = lane & 1 ? words.w[3] : words.w[2];
    return lane & 2 ? high : low;
}
