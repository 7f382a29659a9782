// Writes rows into a cache, from each sequence's position on. The prelude defines ELEMENT, the bytes of an element.
//
// append_rows: a warp per row, 16 bytes per lane if all addresses are aligned. Rows that do not fit at their position are
// not written; the fault word then names the sequence.
// append_copy: copies the whole cache to the result, if the cache is not updated in place.
//
// Every element is written exactly once by each kernel. Offsets have 64 bits.

typedef unsigned long long u64;

constexpr int THREADS = 256;
constexpr int AXES = 6;
constexpr int UNROLL = 4;

template <int BYTES> struct Element;
template <> struct Element<1> { typedef unsigned char Type; };
template <> struct Element<2> { typedef unsigned short Type; };
template <> struct Element<4> { typedef unsigned int Type; };
typedef Element<ELEMENT>::Type Scalar;

struct Axis {
    u64 size;
    u64 stride;  // bytes between neighbours in the new rows
};

struct Rows {
    unsigned char* g_result;
    const unsigned char* g_rows;
    const int* g_positions;
    u64* g_fault;
    u64 count;      // new rows of all blocks
    u64 sequences;
    u64 places;     // number of positions at which the rows of a sequence fit
    u64 rows;       // of a block
    u64 stride;     // bytes between new rows
    u64 capacity;   // rows of a block in the cache
    u64 bytes;      // of a row
    u64 batch;      // the axis of the sequences
    u64 rank;
    Axis axes[AXES];  // outermost first
};

struct Copy {
    unsigned char* g_result;
    const unsigned char* g_cache;
    u64 bytes;
};

template <typename Vector>
__device__ __forceinline__ void move(unsigned char* g_to, const unsigned char* g_from, u64 bytes, unsigned lane) {
    for (u64 at = lane * sizeof(Vector); at < bytes; at += 32 * sizeof(Vector)) {
        *(Vector*)(g_to + at) = *(const Vector*)(g_from + at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append_rows(const __grid_constant__ Rows p) {
    start_next();
    wait_for_previous();
    const unsigned lane = threadIdx.x & 31;
    const u64 item = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (item < p.sequences && lane == 0) {
        const int position = p.g_positions[item];
        if (position < 0 || (u64)position >= p.places) atomicMin(p.g_fault, item * 256 + 2);
    }
    if (item >= p.count) return;
    const u64 block = item / p.rows, row = item - block * p.rows;
    u64 rest = block, from = row * p.stride, sequence = 0;
#pragma unroll
    for (int axis = AXES - 1; axis >= 0; --axis) {
        if (axis < (int)p.rank) {
            const u64 next = rest / p.axes[axis].size, index = rest - next * p.axes[axis].size;
            rest = next;
            from += index * p.axes[axis].stride;
            if (axis == (int)p.batch) sequence = index;
        }
    }
    const int position = p.g_positions[sequence];
    if (position < 0 || (u64)position >= p.places) return;
    unsigned char* g_to = p.g_result + (block * p.capacity + (u64)position + row) * p.bytes;
    const unsigned char* g_from = p.g_rows + from;
    if ((((u64)g_to | (u64)g_from | p.bytes) & 15) == 0) {
        move<uint4>(g_to, g_from, p.bytes, lane);
    } else {
        move<Scalar>(g_to, g_from, p.bytes, lane);
    }
}

template <typename Vector>
__device__ __forceinline__ void copy(const Copy& p) {
    const u64 vectors = p.bytes / sizeof(Vector), step = (u64)gridDim.x * THREADS;
    const Vector* g_from = (const Vector*)p.g_cache;
    Vector* g_to = (Vector*)p.g_result;
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < vectors; at += step * UNROLL) {
        Vector r_values[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (at + u * step < vectors) r_values[u] = g_from[at + u * step];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (at + u * step < vectors) g_to[at + u * step] = r_values[u];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append_copy(const __grid_constant__ Copy p) {
    start_next();
    wait_for_previous();
    if ((((u64)p.g_cache | (u64)p.g_result | p.bytes) & 15) == 0) {
        copy<uint4>(p);
    } else {
        copy<Scalar>(p);
    }
}
