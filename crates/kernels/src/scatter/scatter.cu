// Rows added into a table: table[r] = sum of updates[p] over the positions p with indices[p] == r, in f32, in the order of
// the positions. The prelude defines KIND: 0 is f32, 1 is f16, 2 is bf16.
//
// The positions are sorted by row: a key is row << 32 | position, so that keys are distinct and their order is the
// order of the sums. A bitonic sort: pieces of up to PIECE keys in shared memory, longer distances in global memory.
// Then a warp finds the keys of its table row and adds up the updates. Rows without updates become zeros. Every
// element of the table is written exactly once, the same bits each time. An index outside of the table sorts behind
// every row and leaves its position in the fault word.

constexpr u64 NONE = ~0ull;
constexpr int SORT_THREADS = 1024;
constexpr int MERGE_THREADS = 256;
constexpr int ADD_THREADS = 256;
// Columns of one lane, and rows of updates that it has in flight.
constexpr int COLUMNS = 8;
constexpr int FLIGHT = 8;

struct Sort {
    const int* g_indices;
    u64* g_keys;
    u64* g_fault;
    u64 count;
    u64 rows;
    u64 piece;  // keys of a block, a power of two
};

struct Merge {
    u64* g_keys;
    u64 pairs;
    u64 order;     // keys of one ascending or descending stretch
    u64 distance;  // between the keys that are compared
};

struct Add {
    const u64* g_keys;
    const unsigned char* g_updates;
    unsigned char* g_table;
    u64 count;
    u64 cols;
    u64 rows;
};

__device__ __forceinline__ void exchange(u64* keys, u64 low, u64 distance, bool ascending) {
    const u64 a = keys[low], b = keys[low + distance];
    if ((a > b) == ascending) {
        keys[low] = b;
        keys[low + distance] = a;
    }
}

// One comparison of every pair of a piece, in shared memory.
__device__ __forceinline__ void compare(u64* s_keys, unsigned piece, u64 base, u64 order, unsigned distance) {
    for (unsigned pair = threadIdx.x; pair < piece / 2; pair += blockDim.x) {
        const unsigned low = 2 * pair - (pair & (distance - 1));
        exchange(s_keys, low, distance, ((base + low) & order) == 0);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS) scatter_sort(const __grid_constant__ Sort p) {
    extern __shared__ u64 s_keys[];
    const unsigned piece = (unsigned)p.piece;
    const u64 base = (u64)blockIdx.x * piece;
    for (unsigned i = threadIdx.x; i < piece; i += blockDim.x) {
        const u64 position = base + i;
        u64 key = NONE;
        if (position < p.count) {
            const int index = p.g_indices[position];
            if (index >= 0 && (u64)index < p.rows) {
                key = (u64)index << 32 | position;
            } else {
                atomicMin(p.g_fault, position * 256);
            }
        }
        s_keys[i] = key;
    }
    __syncthreads();
    for (unsigned order = 2; order <= piece; order *= 2) {
        for (unsigned distance = order / 2; distance > 0; distance /= 2) compare(s_keys, piece, base, order, distance);
    }
    for (unsigned i = threadIdx.x; i < piece; i += blockDim.x) p.g_keys[base + i] = s_keys[i];
}

// Distances larger than a piece: one pair per thread.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) scatter_merge_far(const __grid_constant__ Merge p) {
    const u64 pair = (u64)blockIdx.x * MERGE_THREADS + threadIdx.x;
    if (pair < p.pairs) {
        const u64 low = 2 * pair - (pair & (p.distance - 1));
        exchange(p.g_keys, low, p.distance, (low & p.order) == 0);
    }
}

// All smaller distances, one piece per block: `distance` is half of a piece.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) scatter_merge_near(const __grid_constant__ Merge p) {
    extern __shared__ u64 s_keys[];
    const unsigned piece = (unsigned)p.distance * 2;
    const u64 base = (u64)blockIdx.x * piece;
    for (unsigned i = threadIdx.x; i < piece; i += blockDim.x) s_keys[i] = p.g_keys[base + i];
    __syncthreads();
    for (unsigned distance = piece / 2; distance > 0; distance /= 2) compare(s_keys, piece, base, p.order, distance);
    for (unsigned i = threadIdx.x; i < piece; i += blockDim.x) p.g_keys[base + i] = s_keys[i];
}

template <int> struct Storage;
template <> struct Storage<0> {
    typedef unsigned int Bits;
    static __device__ __forceinline__ float load(Bits x) { return __uint_as_float(x); }
    static __device__ __forceinline__ Bits store(float x) { return __float_as_uint(x); }
};
template <> struct Storage<1> {
    typedef unsigned short Bits;
    static __device__ __forceinline__ float load(Bits x) { return from_f16(x); }
    static __device__ __forceinline__ Bits store(float x) { return to_f16(x); }
};
template <> struct Storage<2> {
    typedef unsigned short Bits;
    static __device__ __forceinline__ float load(Bits x) { return __uint_as_float((unsigned)x << 16); }
    static __device__ __forceinline__ Bits store(float x) {
        const unsigned bits = __float_as_uint(x);
        return x != x ? (Bits)(bits >> 16 | 0x40) : (Bits)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};
typedef Storage<KIND> Type;
typedef Type::Bits Bits;

// The COLUMNS columns of one lane.
union Columns {
    Bits bits[COLUMNS];
    uint4 vectors[sizeof(Bits) * COLUMNS / 16];
};

// Neighbouring columns where rows start at multiples of 16 bytes; else 32 columns apart, the last ones masked.
template <bool VECTOR>
__device__ __forceinline__ void load(Columns& r, const Bits* g_row, unsigned lane, u64 left) {
    if (VECTOR) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(Columns) / 16); ++i) {
            r.vectors[i] = __ldg((const uint4*)(g_row + lane * COLUMNS) + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) r.bits[i] = lane + 32 * i < left ? __ldg(g_row + lane + 32 * i) : (Bits)0;
    }
}

template <bool VECTOR>
__device__ __forceinline__ void store(Bits* g_row, const Columns& r, unsigned lane, u64 left) {
    if (VECTOR) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(Columns) / 16); ++i) *((uint4*)(g_row + lane * COLUMNS) + i) = r.vectors[i];
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (lane + 32 * i < left) g_row[lane + 32 * i] = r.bits[i];
        }
    }
}

// The first key that is not below `wanted`, by a 33-way search: all lanes probe at once.
__device__ __forceinline__ u64 lower_bound(const u64* g_keys, u64 count, u64 wanted, unsigned lane) {
    u64 first = 0, last = count;
    while (first < last) {
        const u64 step = (last - first + 32) / 33;
        const u64 at = first + (lane + 1) * step - 1;
        const bool below = at < last && __ldg(g_keys + at) < wanted;
        const int passed = __popc(__ballot_sync(0xffffffffu, below));
        const u64 end = first + (u64)(passed + 1) * step - 1;
        first += (u64)passed * step;
        // Lane `passed`, if any, has probed the key at `end`.
        if (passed < 32 && end < last) last = end;
    }
    return first;
}

template <bool VECTOR>
__device__ __forceinline__ void add(const Add& p, u64 row, u64 begin, u64 column, unsigned lane) {
    const u64 left = p.cols - column;
    // A lane whose columns do not exist still takes part in the shuffles.
    const bool active = VECTOR ? (lane + 1) * COLUMNS <= left : lane < left;
    const Bits* g_updates = (const Bits*)p.g_updates + column;
    float sums[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sums[i] = 0.0f;
    for (u64 start = begin;; start += 32) {
        const u64 key = start + lane < p.count ? __ldg(p.g_keys + start + lane) : NONE;
        // Sorted: the keys of this row come first.
        const int here = __popc(__ballot_sync(0xffffffffu, key >> 32 == row));
        const unsigned position = (unsigned)key;
        for (int base = 0; base < here; base += FLIGHT) {
            Columns r_rows[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) {
                const u64 from = __shfl_sync(0xffffffffu, position, (base + i) & 31);
                if (base + i < here && active) load<VECTOR>(r_rows[i], g_updates + from * p.cols, lane, left);
            }
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) {
                if (base + i < here && active) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) sums[c] += Type::load(r_rows[i].bits[c]);
                }
            }
        }
        if (here < 32) break;
    }
    Columns r_sums;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) r_sums.bits[i] = Type::store(sums[i]);
    if (active) store<VECTOR>((Bits*)p.g_table + row * p.cols + column, r_sums, lane, left);
}

extern "C" __global__ void __launch_bounds__(ADD_THREADS) scatter_add(const __grid_constant__ Add p) {
    const unsigned lane = threadIdx.x & 31;
    const u64 row = (u64)blockIdx.x * (ADD_THREADS / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const u64 begin = lower_bound(p.g_keys, p.count, row << 32, lane);
    const bool vector = (((u64)p.g_updates | (u64)p.g_table | p.cols * sizeof(Bits)) & 15) == 0 && p.cols % COLUMNS == 0;
    for (u64 column = (u64)blockIdx.y * 32 * COLUMNS; column < p.cols; column += (u64)gridDim.y * 32 * COLUMNS) {
        if (vector) {
            add<true>(p, row, begin, column, lane);
        } else {
            add<false>(p, row, begin, column, lane);
        }
    }
}
