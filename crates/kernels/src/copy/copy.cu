// Strided copies of elements of ELEMENT bytes (the prelude defines it).
//
// copy_runs: the block is divided into runs that are contiguous on both sides; `lanes` threads move one run, 16 bytes at a
// time where both addresses allow it. Each thread has UNROLL loads in flight before its first store.
// copy_tiles: a transpose of two axes through a tile in shared memory, so that both sides are accessed along their
// contiguous axis.
//
// Every element of the destination is written exactly once. Offsets have 64 bits; numbers of runs and tiles have 31.

typedef unsigned long long u64;

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr int AXES = 8;
constexpr int TILE = 64;

// One axis. `divisor` holds a factor (low half) and a shift (high half): n / size = n * factor >> shift for n < 2^31.
struct Axis {
    u64 size;
    u64 divisor;
    u64 from;  // bytes between neighbours in the source
    u64 to;    // and in the destination
};

struct Runs {
    unsigned char* g_to;
    const unsigned char* g_from;
    u64 runs;
    u64 lanes;    // threads of a run, a power of two up to THREADS
    u64 grain;    // power of two up to 16 that divides the distance between any two runs
    u64 run;      // bytes from the start of a run to its end
    u64 chunk;    // longer runs are cut into pieces of this many bytes, numbered by the first axis
    u64 chunked;  // whether they are
    u64 rank;
    Axis axes[AXES];  // innermost first
};

struct Tiles {
    unsigned char* g_to;
    const unsigned char* g_from;
    u64 across;   // size of the axis that is contiguous in the source
    u64 along;    // size of the axis that is contiguous in the destination
    u64 from;     // bytes between neighbours of `along` in the source
    u64 to;       // bytes between neighbours of `across` in the destination
    u64 rank;
    Axis axes[AXES];  // innermost first: tiles of `along`, tiles of `across`, then the others
};

template <int BYTES> struct Element;
template <> struct Element<1> { typedef unsigned char Type; };
template <> struct Element<2> { typedef unsigned short Type; };
template <> struct Element<4> { typedef unsigned int Type; };
typedef Element<ELEMENT>::Type Scalar;

__device__ __forceinline__ unsigned divide(unsigned n, u64 divisor) {
    return (unsigned)(((u64)n * (unsigned)divisor) >> (unsigned)(divisor >> 32));
}

struct Span {
    const unsigned char* g_from;
    unsigned char* g_to;
    unsigned bytes;
};

__device__ __forceinline__ Span span(const Runs& p, unsigned run) {
    unsigned rest = run, first = 0;
    u64 from = 0, to = 0;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        if (axis < (int)p.rank) {
            const unsigned next = divide(rest, p.axes[axis].divisor);
            const unsigned index = rest - next * (unsigned)p.axes[axis].size;
            rest = next;
            from += index * p.axes[axis].from;
            to += index * p.axes[axis].to;
            if (axis == 0) first = index;
        }
    }
    u64 bytes = p.run;
    if (p.chunked) {
        const u64 left = p.run - first * p.chunk;
        bytes = left < p.chunk ? left : p.chunk;
    }
    return {p.g_from + from, p.g_to + to, (unsigned)bytes};
}

// The tail that does not fill a vector.
template <typename Vector>
__device__ __forceinline__ void tail(const Span& s, unsigned lane, unsigned lanes) {
    for (unsigned at = s.bytes / sizeof(Vector) * sizeof(Vector) + lane * ELEMENT; at < s.bytes; at += lanes * ELEMENT) {
        *(Scalar*)(s.g_to + at) = *(const Scalar*)(s.g_from + at);
    }
}

template <typename Vector>
__device__ __forceinline__ void move(const Runs& p) {
    const unsigned lanes = (unsigned)p.lanes, groups = THREADS / lanes;
    const unsigned lane = threadIdx.x & (lanes - 1), group = threadIdx.x / lanes;
    Vector r_values[UNROLL];
    if (p.chunk <= (u64)lanes * sizeof(Vector)) {
        // A thread has one vector of each run: several runs at once.
        const u64 step = (u64)gridDim.x * groups * UNROLL;
        for (u64 run = (u64)blockIdx.x * groups * UNROLL + group; run < p.runs; run += step) {
            Span spans[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                spans[u].bytes = 0;
                if (run + u * groups < p.runs) spans[u] = span(p, (unsigned)(run + u * groups));
                if ((lane + 1) * sizeof(Vector) <= spans[u].bytes) r_values[u] = __ldg((const Vector*)spans[u].g_from + lane);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if ((lane + 1) * sizeof(Vector) <= spans[u].bytes) *((Vector*)spans[u].g_to + lane) = r_values[u];
                if (sizeof(Vector) > ELEMENT && spans[u].bytes != 0) tail<Vector>(spans[u], lane, lanes);
            }
        }
    } else {
        for (u64 run = (u64)blockIdx.x * groups + group; run < p.runs; run += (u64)gridDim.x * groups) {
            const Span s = span(p, (unsigned)run);
            const unsigned vectors = s.bytes / sizeof(Vector);
            const Vector* g_from = (const Vector*)s.g_from;
            Vector* g_to = (Vector*)s.g_to;
            for (unsigned at = lane; at < vectors; at += lanes * UNROLL) {
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (at + u * lanes < vectors) r_values[u] = __ldg(g_from + at + u * lanes);
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (at + u * lanes < vectors) g_to[at + u * lanes] = r_values[u];
                }
            }
            if (sizeof(Vector) > ELEMENT) tail<Vector>(s, lane, lanes);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_runs(const __grid_constant__ Runs p) {
    // The largest power of two, up to 16, that divides every address: the same for all threads.
    const u64 bits = (u64)p.g_to | (u64)p.g_from | p.grain;
    if ((bits & 15) == 0) {
        move<uint4>(p);
    } else if ((bits & 7) == 0) {
        move<uint2>(p);
    } else if ((bits & 3) == 0) {
        move<unsigned int>(p);
    } else if ((bits & 1) == 0) {
        move<unsigned short>(p);
    } else {
        move<unsigned char>(p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_tiles(const __grid_constant__ Tiles p) {
    // With the padding, a column of the tile is in 32 different banks, for every element size.
    __shared__ Scalar s_tile[TILE][TILE + 4 / ELEMENT];
    constexpr int ROWS = TILE / (THREADS / 32), HALVES = TILE / 32;
    unsigned rest = blockIdx.x;
    unsigned tile[2] = {0, 0};
    u64 from = 0, to = 0;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        if (axis < (int)p.rank) {
            const unsigned next = divide(rest, p.axes[axis].divisor);
            const unsigned index = rest - next * (unsigned)p.axes[axis].size;
            rest = next;
            from += index * p.axes[axis].from;
            to += index * p.axes[axis].to;
            if (axis < 2) tile[axis] = index;
        }
    }
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    // The remaining size of both axes from this tile on.
    const u64 along = p.along - (u64)tile[0] * TILE, across = p.across - (u64)tile[1] * TILE;
    const unsigned char* g_from = p.g_from + from;
    unsigned char* g_to = p.g_to + to;
    Scalar r_values[ROWS][HALVES];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const unsigned row = warp + i * (THREADS / 32), column = lane + h * 32;
            if (row < along && column < across) r_values[i][h] = __ldg((const Scalar*)(g_from + row * p.from) + column);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            s_tile[warp + i * (THREADS / 32)][lane + h * 32] = r_values[i][h];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const unsigned row = warp + i * (THREADS / 32), column = lane + h * 32;
            if (row < across && column < along) *((Scalar*)(g_to + row * p.to) + column) = s_tile[column][row];
        }
    }
}
