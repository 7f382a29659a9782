
// Products of 1 to 8 rows: C[rows, N] = A[rows, K] B[K, N], every weight read once.
//
// - A block holds the rows of A that it needs as floats in shared memory: copied, or made there by `head`. Bytes it holds as bytes.
// - Sums are f32, in an order that the constants alone decide; `tail` gets them, V columns of a row at a time. Those of bytes are exact.
// - Weights are loaded one step ahead, and the first ones before A is there: they do not depend on it. Where no kernel of the job
//   makes them, they are on their way before earlier grids have ended, and so is what all rows share beside them.
//
// M is the number of rows, rounded up to a power of two; LEFT the floats or bytes from one row of A to the next.

constexpr int WARPS = THREADS / 32;
// Elements of 16 bytes of B.
constexpr int WIDE = 16 / Right::SIZE;
constexpr bool BYTES = Right::SIZE == 1;

// An element of A in shared memory, and a sum.
template <bool> struct Types { typedef float Held; typedef float Total; };
template <> struct Types<true> { typedef signed char Held; typedef int Total; };
typedef Types<BYTES>::Held Held;
typedef Types<BYTES>::Total Total;

struct Parameters {
    head::Parameters head;
    tail::Parameters tail;
    u64 left, left_row, left_column; // address, bytes from row to row and from column to column
    u64 right, right_next;           // address, bytes from row to row, or from column to column
    u64 rows;
    u64 right_given;                 // address, or 0 if a kernel of the job makes it
    struct { u64 address, bytes, strip; } shared[SHARED];
};

struct Weights { u32 w[4]; };

static __device__ __forceinline__ float element(F32, const u32* w, int i) { return __uint_as_float(w[i]); }
static __device__ __forceinline__ float element(Bf16, const u32* w, int i) { return i & 1 ? bf16_high(w[i / 2]) : bf16_low(w[i / 2]); }
static __device__ __forceinline__ float element(F16, const u32* w, int i) { return i & 1 ? f16_high(w[i / 2]) : f16_low(w[i / 2]); }

static __device__ __forceinline__ float element(I8, const u32* w, int i) { return (float)(signed char)(w[i / 4] >> 8 * (i & 3)); }

// One piece of 16 bytes or less.
template <int A> static __device__ __forceinline__ void load_piece(u32* w, int i, const char* p) {
    if constexpr (A == 1) w[i / 4] |= load_u8(p + i) << (8 * (i & 3));
    else if constexpr (A == 2) w[i / 2] |= load_u16(p + 2 * i) << (16 * (i & 1));
    else Access<A>::load(w + i * (A / 4), p + i * A);
}

// 16 bytes, as far as `count` elements reach; zeros beyond. ACCESS divides what is there, so a piece is there or not.
static __device__ __forceinline__ Weights load_weights(const char* p, int count) {
    Weights r = {{0, 0, 0, 0}};
#pragma unroll
    for (int i = 0; i < 16 / ACCESS; ++i) {
        if (i * (ACCESS / Right::SIZE) < count) load_piece<ACCESS>(r.w, i, p);
    }
    return r;
}

// Where element k of a row of A lies. By columns, a lane reads 8 neighbours as two vectors: those of all lanes lie side by side.
static __device__ __forceinline__ int left_at(int k) {
    return BY_ROWS || BYTES || WIDE == 4 ? k : (k & ~255) | ((k & 4) << 5) | ((k & 248) >> 1) | (k & 3);
}

// Rows of A, columns first .. last, and zeros around them.
static __device__ __forceinline__ void fill_left(const Parameters& p, Held* s_left, int first, int last) {
    if (HEAD) {
        for (int e = threadIdx.x; e < M * LEFT; e += THREADS) {
            const int row = e / LEFT, k = e % LEFT;
            if (row >= (int)p.rows || first + k >= last) s_left[row * LEFT + left_at(k)] = 0;
        }
        head::run(p.head, [&](int row, int column, float x) {
            if (column >= first && column < last) s_left[row * LEFT + left_at(column - first)] = (Held)x;
        });
        return;
    }
    constexpr int COUNT = LEFT_ACCESS / Left::SIZE;
#pragma unroll 4
    for (int e = threadIdx.x; e < M * (LEFT / COUNT); e += THREADS) {
        const int row = e / (LEFT / COUNT), k = e % (LEFT / COUNT) * COUNT;
        u32 w[4] = {0, 0, 0, 0};
        if (row < (int)p.rows && first + k < last) {
            load_piece<LEFT_ACCESS>(w, 0, (const char*)p.left + row * p.left_row + (first + k) * p.left_column);
        }
        if constexpr (BYTES && LEFT_ACCESS >= 4) {
#pragma unroll
            for (int i = 0; i < COUNT / 4; ++i) ((u32*)(s_left + row * LEFT + k))[i] = w[i];
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) s_left[row * LEFT + left_at(k + i)] = (Held)element(Left{}, w, i);
        }
    }
}

// Adds COUNT values of lanes that differ in the bits MASK, MASK / 2 ... LAST. Half of the values goes to the other lane at each
// step, so that a lane ends with COUNT over the number of lanes, or with one: those of its own bits, highest first.
template <int COUNT, int MASK, int LAST, class T> static __device__ __forceinline__ void add_lanes(T* values) {
    if constexpr (MASK >= LAST && COUNT > 1) {
        const bool upper = threadIdx.x & MASK;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const T given = upper ? values[i] : values[i + COUNT / 2];
            const T kept = upper ? values[i + COUNT / 2] : values[i];
            values[i] = kept + shuffle_xor(given, MASK);
        }
        add_lanes<COUNT / 2, MASK / 2, LAST>(values);
    } else if constexpr (MASK >= LAST) {
        values[0] += shuffle_xor(values[0], MASK);
        add_lanes<1, MASK / 2, LAST>(values);
    }
}
