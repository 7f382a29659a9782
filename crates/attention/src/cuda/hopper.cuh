// What the kernels by warpgroups share: rows of heads loaded and stored, scores in registers.

// A row has pieces of 64 elements (128 bytes); of several pieces the first ones of all rows come first. Beyond the width there are zeros, which no
// product reads.
constexpr int PIECES = (WIDTH + 63) / 64, PADDED = PIECES * 64;
static_assert(WIDTH % 16 == 0, "products are of sixteens of columns");

// Loads a tile of ROWS rows of one head, from `row` on. Whole pieces are one copy.
template <int ROWS>
static __device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, u32 barrier, int row, int head, int sequence) {
    if constexpr (PIECES > 1 && WIDTH == PADDED) {
        tma_load_5d(to, map, barrier, 0, row, 0, head, sequence);
    } else {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            tma_load_4d(to + piece * ROWS * 128, map, barrier, piece * 64, row, head, sequence);
        }
    }
}

// Sixteen rows of a warp on their way out, through shared memory in whole pieces of 16 bytes, swizzled. BEYOND: bytes to the next 64
// columns. First sixteen columns at a time, as a product leaves them; then up to `rows` of them all.
template <int BEYOND> static __device__ __forceinline__ void stage_pairs(char* s_rows, int lane, int step, const u32 (&pairs)[4]) {
    const int row = lane & 15, piece = step % 4 * 2 + (lane >> 4);
    stmatrix(s_rows + step / 4 * BEYOND + row * 128 + ((piece ^ (row & 7)) << 4), pairs);
}
template <int BEYOND>
static __device__ __forceinline__ void store_staged(const char* s_rows, int lane, Element* g_to, u64 stride, int rows) {
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
        const int piece = lane + 32 * i, row = piece / (WIDTH / 8), column = piece % (WIDTH / 8);
        if (row < rows) {
            const char* s_from = s_rows + column / 8 * BEYOND + row * 128 + ((column % 8 ^ (row & 7)) << 4);
            *(uint4*)(g_to + (u64)row * stride + column * 8) = *(const uint4*)s_from;
        }
    }
}

// The same of zeros.
static __device__ __forceinline__ void store_zeros(Element* g_to, u64 stride, int rows) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
        const int piece = lane + 32 * i, row = piece / (WIDTH / 8), column = piece % (WIDTH / 8);
        if (row < rows) *(uint4*)(g_to + (u64)row * stride + column * 8) = uint4{};
    }
}

// Scores as a product leaves them: two rows of a thread, eight apart, and keys 8 j and the next one from its first on.

// Hides keys from `end` on, of each of the two rows. `end` counts from this thread's first key.
template <int N> static __device__ __forceinline__ void hide(float (&r_s)[N], int end0, int end1) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * j + e >= end0) r_s[4 * j + e] = never();
            if (8 * j + e >= end1) r_s[4 * j + 2 + e] = never();
        }
    }
}

// The largest score of one of the two rows, over all lanes.
template <int N> static __device__ __forceinline__ float largest(const float (&r_s)[N], int half) {
    // Two chains: a maximum waits for the one before it.
    float most = fmaxf(r_s[2 * half], r_s[2 * half + 1]), other = fmaxf(r_s[4 + 2 * half], r_s[5 + 2 * half]);
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
        most = fmaxf(most, fmaxf(r_s[4 * j + 2 * half], r_s[4 * j + 2 * half + 1]));
        other = fmaxf(other, fmaxf(r_s[4 * j + 4 + 2 * half], r_s[4 * j + 5 + 2 * half]));
    }
    most = fmaxf(most, other);
    most = fmaxf(most, shuffle_xor(most, 1));
    return fmaxf(most, shuffle_xor(most, 2));
}

// Raises the largest scores of the two rows where some score of this tile is larger by `slack` powers of 2; `scale` makes powers of 2 of
// scores. True where sums have to be multiplied by the factors.
template <int N>
static __device__ __forceinline__ bool raise_maxima(float (&maximum)[2], float (&factor)[2], const float (&r_s)[N], float scale, float slack) {
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float most = largest(r_s, half) * scale, before = maximum[half];
        if (most > before + slack) {
            maximum[half] = most;
            grows = true;
        }
        // Exactly 1 where the largest score stays.
        factor[half] = ex2(before - shift_of(maximum[half]));
    }
    return any_of_warp(grows);
}
