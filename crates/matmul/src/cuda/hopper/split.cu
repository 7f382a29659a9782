// ---- operands of f32, split once into numbers of TF32
//
// A number of TF32 is an f32 whose 13 lowest bits are zero. x becomes the nearest one, and the nearest one of the rest: pi, 0x40490fdb, becomes
// 0x40490000, which is 3.140625, and 0x3a7dc000 for the rest of 0.00096774; both together are 2^-22 more than it. So they are off by at most one in the
// last place of x, if x is not below 2^-114: a subnormal rest is a multiple of 2^-136. What is near the largest f32, infinite or NaN is cut off instead:
// it stays what it is, and sums of what is not finite are done again without rests.
//
// Of each matrix there are two in the workspace, one behind the other: nearest numbers, and rests. Both have a line along K for each row of A or
// column of B, of `pitch` floats, which begins at a multiple of 128 bytes.

struct Whole {
    const char* g_from;
    char* g_to;
    u64 line, along, matrix;      // bytes from a row of A or column of B to the next, along K, from matrix to matrix
    u64 lines, k, pitch;          // of a matrix; floats of a line, and of one of the result
    u64 matrices, blocks;         // how many there are, and how many blocks have them
};
struct SplitParameters {
    Whole operands[2];
};

struct Halves {
    u32 nearest, rest;
};
static __device__ __forceinline__ Halves split(u32 x) {
    const auto round = [](u32 w) { return (w + 0x1000u) & 0xffffe000u; };
    const u32 size = x & 0x7fffffffu;
    const u32 nearest = size >= 0x7f7ff000u ? x & 0xffffe000u : round(x);
    const float rest = __uint_as_float(x) - __uint_as_float(nearest);
    return {nearest, round(__float_as_uint(rest))};
}

// Four numbers of a line, from place c on, and where they go.
static __device__ __forceinline__ void store_split(const Whole& from, u32 matrix, u32 line, u32 c, const u32 (&x)[4]) {
    u32 nearest[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Halves halves = split(x[i]);
        nearest[i] = halves.nearest, rest[i] = halves.rest;
    }
    char* const g_to = from.g_to + ((2 * matrix * from.lines + line) * from.pitch + c) * 4;
    Access<16>::store(g_to, nearest);
    Access<16>::store(g_to + from.lines * from.pitch * 4, rest);
}

// Lines that are contiguous along K: a thread has four numbers at a time.
static __device__ __forceinline__ void split_lines(const Whole& from, u32 block) {
    constexpr int TOGETHER = 4;
    const u32 k = (u32)from.k, lines = (u32)from.lines, fours = (k + 3) / 4, all = (u32)from.matrices * lines * fours;
    u32 x[TOGETHER][4];
    u32 line[TOGETHER], c[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const u32 at = (block * TOGETHER + i) * 256 + threadIdx.x;
        line[i] = at / fours, c[i] = at % fours * 4;
        if (at >= all) continue;
        const char* g_from = from.g_from + line[i] / lines * from.matrix + line[i] % lines * from.line + c[i] * 4ull;
        if (c[i] + 4 <= k && (u64)g_from % 16 == 0) {
            Access<16>::load(x[i], g_from);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[i][j] = 0;
                if (c[i] + j < k) Access<4>::load_again(&x[i][j], g_from + 4 * j);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        if ((block * TOGETHER + i) * 256 + threadIdx.x < all) store_split(from, line[i] / lines, line[i] % lines, c[i], x[i]);
    }
}

// Others: 64 lines by 64 of K pass through shared memory, where a row is one of K.
static __device__ __forceinline__ void split_across(const Whole& from, u32 block, u32 (&s_tile)[64][65]) {
    const u32 k = (u32)from.k, lines = (u32)from.lines, wide = (k + 63) / 64, high = (lines + 63) / 64;
    const u32 first = block % wide * 64, top = block / wide % high * 64, matrix = block / wide / high;
    const u32 x = threadIdx.x % 64, y = threadIdx.x / 64;
    const char* const g_from = from.g_from + matrix * from.matrix + (top + x) * from.line + first * from.along;
#pragma unroll
    for (u32 step = 0; step < 16; ++step) {
        const u32 i = y + 4 * step;
        u32 word = 0;
        if (top + x < lines && first + i < k) Access<4>::load(&word, g_from + i * from.along);
        s_tile[i][x] = word;
    }
    __syncthreads();
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
        const u32 at = threadIdx.x + 256 * step;
        const u32 line = at / 16, c = at % 16 * 4;
        const u32 four[4] = {s_tile[c][line], s_tile[c + 1][line], s_tile[c + 2][line], s_tile[c + 3][line]};
        if (top + line < lines && first + c < k) store_split(from, matrix, top + line, first + c, four);
    }
}

extern "C" __global__ void __launch_bounds__(256) split_tf32(const __grid_constant__ SplitParameters p) {
    __shared__ u32 s_tile[64][65];
    start_next();
    wait_for_previous();
    const bool second = blockIdx.x >= p.operands[0].blocks;
    const Whole& from = p.operands[second ? 1 : 0];
    const u32 block = blockIdx.x - (second ? (u32)p.operands[0].blocks : 0);
    if (from.along == 4) split_lines(from, block);
    else split_across(from, block, s_tile);
}
