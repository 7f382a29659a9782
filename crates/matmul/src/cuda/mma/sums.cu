// ---- what a warp multiplies

constexpr int WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 2;
constexpr int ATOMS = WARP_ROWS / 16, EIGHTS = WARP_COLUMNS / 8;
constexpr int STEPS = 2;  // of 32 bytes of K, in a stage

template <int K> struct TotalOf { typedef float Type; };
template <> struct TotalOf<3> { typedef int Type; };
typedef TotalOf<KIND>::Type Total;
typedef Total Totals[ATOMS][EIGHTS][4];

// Four words of an operand, as `mma` takes them. Of f32 these are numbers of TF32, and `rest` is what they leave.
struct Fragment {
    u32 words[4], rest[4];
};

// Neighbouring rows (or columns) of i8 that lie across: of four words with four K of two neighbours each, the first and the second one's.
static __device__ __forceinline__ void part_neighbours(u32 (&first)[2], u32 (&second)[2], const u32 (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        first[i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x6420);
        second[i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x7531);
    }
}
// Lines of K whose elements a lane gets together: 4t and 4t + 1 by one matrix, 4t + 2 and 4t + 3 by the next.
static __device__ __forceinline__ int line_of_i8(int lane) { return (lane & 7) / 2 * 4 + (lane & 1) + (lane >> 3 & 1) * 2 + (lane >> 4) * 16; }

// f32: the nearest number of TF32, and the rest, of which the matrix units take eleven bits. Both together are off by 2^-21 at most, with
// either sign. What is infinite or no number has a rest that is no number.
static __device__ __forceinline__ void split(Fragment& fragment) {
    if constexpr (KIND == 0 && !FMA) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 nearest = (fragment.words[i] + 0x1000u) & 0xffffe000u;
            fragment.rest[i] = __float_as_uint(__uint_as_float(fragment.words[i]) - __uint_as_float(nearest));
            fragment.words[i] = nearest;
        }
    }
}

// 16 rows of A, `atom` times 16 from a warp's first. Of i8 that lies across, row g of the fragment is row 2g of the 16, and row g + 8 is
// row 2g + 1.
static __device__ __forceinline__ void load_left(Fragment& fragment, const char* s_a, int row, int atom, int step, int lane) {
    u32(&r)[4] = fragment.words;
    if constexpr (!A_COLUMNS) {
        ldmatrix(r, s_a + Left::at(row + (lane & 15), 2 * step + (lane >> 4)) + atom * 16 * Left::PITCH);
    } else if constexpr (SIZE == 4) {
        const char* s_own = s_a + (lane & 3) * Left::PITCH + (row + lane / 4) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = *(const u32*)(s_own + (8 * step + i / 2 * 4) * Left::PITCH + (16 * atom + i % 2 * 8) * 4);
    } else if constexpr (SIZE == 2) {
        ldmatrix_transposed(r, s_a + Left::at((lane & 7) + (lane >> 4) * 8, row / 8 + (lane >> 3 & 1)) + 16 * step * Left::PITCH + 32 * atom);
    } else {
        u32 all[4], first[2], second[2];
        ldmatrix_transposed(all, s_a + Left::at(line_of_i8(lane), row / 16) + 32 * step * Left::PITCH + 16 * atom);
        part_neighbours(first, second, all);
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = i % 2 == 0 ? first[i / 2] : second[i / 2];
    }
    split(fragment);
}

// 16 columns of B, `pair` times 16 from a warp's first: two words for the first eight, two for the others. Of i8 that lies across, the
// first eight are the even ones.
static __device__ __forceinline__ void load_right(Fragment& fragment, const char* s_b, int column, int pair, int step, int lane) {
    u32(&r)[4] = fragment.words;
    if constexpr (!B_ROWS) {
        ldmatrix(r, s_b + Right::at(column + (lane & 7) + (lane >> 4) * 8, 2 * step + (lane >> 3 & 1)) + pair * 16 * Right::PITCH);
    } else if constexpr (SIZE == 4) {
        const char* s_own = s_b + (lane & 3) * Right::PITCH + (column + lane / 4) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = *(const u32*)(s_own + (8 * step + i % 2 * 4) * Right::PITCH + (16 * pair + i / 2 * 8) * 4);
    } else if constexpr (SIZE == 2) {
        ldmatrix_transposed(r, s_b + Right::at(lane & 15, column / 8 + (lane >> 4)) + 16 * step * Right::PITCH + 32 * pair);
    } else {
        u32 all[4], first[2], second[2];
        ldmatrix_transposed(all, s_b + Right::at(line_of_i8(lane), column / 16) + 32 * step * Right::PITCH + 16 * pair);
        part_neighbours(first, second, all);
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = i < 2 ? first[i] : second[i - 2];
    }
    split(fragment);
}

// c += a b of 16 x 8 and 8 x 8 in f32, in the order of K: each number comes from the lane that has it.
static __device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int lane) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int own = lane / 4 * 4 + k % 4, left = (lane & 3) * 8 + k % 4;
        float x[2], y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[i] = __uint_as_float(shuffle(a[k / 4 * 2 + i], own));
            y[i] = __uint_as_float(shuffle(k < 4 ? b0 : b1, left + 4 * i));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = fmaf(x[i / 2], y[i % 2], c[i]);
    }
}

// Adds the product of 16 rows and eight columns, of which `half` of a fragment is.
template <int K>
static __device__ __forceinline__ void add(typename TotalOf<K>::Type (&c)[4], const Fragment& a, const Fragment& b, int half, int lane) {
    const u32 b0 = b.words[2 * half], b1 = b.words[2 * half + 1];
    if constexpr (K == 3) {
        mma_i8(c, a.words, b0, b1);
    } else if constexpr (K != 0) {
        mma<K>(c, a.words, b0, b1);
    } else {
        multiply_add(c, a.words, b0, b1, lane);
    }
}

// Adds 32 bytes of K of a stage to a warp's sums, from its first row and column in the tile on.
static __device__ __forceinline__ void multiply(Totals& sums, const char* s_stage, int row, int column, int step, int lane) {
    Fragment left[ATOMS];
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) load_left(left[atom], s_stage, row, atom, step, lane);
#pragma unroll
    for (int pair = 0; pair < EIGHTS / 2; ++pair) {
        Fragment right;
        load_right(right, s_stage + Left::BYTES, column, pair, step, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) add<KIND>(sums[atom][2 * pair + half], left[atom], right, half, lane);
        }
    }
}

// The same of all of a stage, where sums stay f32: the matrix units add no more than a stage, since they round towards zero, and over all of K
// that would be an error of its own. Of f32 in three passes: the small products first; what both rests make is below the last bit.
template <int K, class C> static __device__ __forceinline__ void multiply_stage(C& sums, const char* s_stage, int row, int column, int lane) {
    Fragment left[STEPS][ATOMS];
#pragma unroll
    for (int i = 0; i < STEPS * ATOMS; ++i) load_left(left[i / ATOMS][i % ATOMS], s_stage, row, i % ATOMS, i / ATOMS, lane);
#pragma unroll
    for (int pair = 0; pair < EIGHTS / 2; ++pair) {
        Fragment right[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) load_right(right[step], s_stage + Left::BYTES, column, pair, step, lane);
#pragma unroll
        for (int i = 0; i < 2 * ATOMS; ++i) {
            const int atom = i % ATOMS, half = i / ATOMS;
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if constexpr (K == 0) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    mma_tf32(part, left[step][atom].rest, right[step].words[2 * half], right[step].words[2 * half + 1], part);
                    mma_tf32(part, left[step][atom].words, right[step].rest[2 * half], right[step].rest[2 * half + 1], part);
                }
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const u32 b0 = right[step].words[2 * half], b1 = right[step].words[2 * half + 1];
                if constexpr (K == 0) {
                    mma_tf32(part, left[step][atom].words, b0, b1, part);
                } else {
                    mma<K>(part, left[step][atom].words, b0, b1);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[atom][2 * pair + half][j] += part[j];
        }
    }
}
