
// Two matmuls of few rows and the work between them: C[rows, N] = tail(middle(A[rows, K] B1[K, F]) B2[F, N]). Hidden values, the rows of
// `middle`, stay in the block that makes them.
//
// - A block has UNITS units of 16 hidden columns. It multiplies A by those columns of B1, does the work between, and multiplies by those rows
//   of B2: its share of every sum of C. A cluster adds up its shares through distributed shared memory, each block some columns of C; the
//   last cluster adds up those of all clusters from the workspace. Both add in the order of the blocks, whoever comes last.
// - Every weight is read once, by one block, past the registers: SLOTS halves of units are in flight, the first ones before A is there.
// - A unit of weights lies as 16 long lines or as many lines of 16, as the operand does in memory. Long lines are padded by 16 bytes, of short
//   lines every other four have their halves exchanged: so what `ldmatrix` reads together is in different banks.

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int UNIT = 16;
constexpr int MATRICES = M / 16;
// Bytes from one row of A to the next, of hidden values likewise; floats from one row of a warp's sums to the next.
constexpr int LEFT = 2 * K + 16;
constexpr int HIDDEN = 2 * UNIT + 16;
constexpr int PITCH = UNIT + 4;
// Bytes of a slot: a unit of either operand.
constexpr int SLOT = 32 * (K > N ? K : N) + 256;
// Columns of C that a block of a cluster adds up, and pairs of columns of eight that a warp multiplies.
constexpr int SHARE = (N / 16 + CLUSTER - 1) / CLUSTER * 16;
constexpr int PAIRS = (N / 16 + WARPS - 1) / WARPS;
typedef Stored<KIND>::Element Element;

struct Parameters {
    head::Parameters head;
    middle::Parameters middle;
    tail::Parameters tail;
    u64 left, left_row;                                  // address, bytes from row to row
    struct { u64 address, line, unit, given; } right[2]; // bytes from line to line and from unit to unit; 0 if a kernel of the job makes it
    u64 rows;
    u64 counters, shares;                                // of clusters that have stored theirs, one a block of a cluster; what they stored
    struct { u64 address, bytes, strip, by_rank; } shared[SHARED];
};

// What all rows share beside the weights: the whole of it, or what a block or a rank of the clusters reads.
static __device__ __forceinline__ void prefetch_shared(const Parameters& p, u64 rank) {
#pragma unroll
    for (int i = 0; i < SHARED; ++i) {
        const u64 bytes = p.shared[i].bytes, own = p.shared[i].strip, first = (p.shared[i].by_rank ? rank : blockIdx.x) * own;
        if (p.shared[i].address != 0 && first < bytes) prefetch_range(p.shared[i].address + first, own == 0 ? bytes : min(own, bytes - first));
    }
}

// Where 8 elements of a unit lie: `inner` of its 16, `outer` of the LENGTH others. The one along lines is a multiple of 8.
template <int LENGTH, bool LONG> static __device__ __forceinline__ int place(int inner, int outer) {
    return LONG ? inner * (2 * LENGTH + 16) + outer * 2 : outer * 32 + ((inner / 8 ^ (outer >> 2 & 1)) << 4);
}

template <int LENGTH, bool LONG> static __device__ __forceinline__ void copy_unit(u32 s_slot, const char* g_unit, u64 line) {
    constexpr int ALONG = LONG ? LENGTH / 8 : 2;
#pragma unroll 4
    for (int e = threadIdx.x; e < 2 * LENGTH; e += THREADS) {
        const int at = e / ALONG, eight = e % ALONG;
        copy_async<16>(s_slot + (LONG ? place<LENGTH, LONG>(at, eight * 8) : place<LENGTH, LONG>(eight * 8, at)), g_unit + at * line + eight * 16, true);
    }
}

// 16 by 16 elements of a row-major matrix, as the left operand of `mma`.
static __device__ __forceinline__ void load_left(u32 (&a)[4], const char* s_first, int row_bytes, int lane) {
    ldmatrix(a, s_first + (lane % 8 + (lane / 8 & 1) * 8) * row_bytes + lane / 16 * 16);
}

// The right operands of two `mma` side by side: of B1 16 of K, all columns of the unit; of B2 all rows of the unit, 16 columns.
static __device__ __forceinline__ void load_first(u32 (&b)[4], const char* s_unit, int k, int lane) {
    const int down = lane % 8, odd = lane / 8 & 1, high = lane / 16;
    if constexpr (LONG_FIRST) ldmatrix(b, s_unit + place<K, true>(down + 8 * high, k + 8 * odd));
    else ldmatrix_transposed(b, s_unit + place<K, false>(8 * high, k + down + 8 * odd));
}
static __device__ __forceinline__ void load_second(u32 (&b)[4], const char* s_unit, int column, int lane) {
    const int down = lane % 8, odd = lane / 8 & 1, high = lane / 16;
    if constexpr (LONG_SECOND) ldmatrix_transposed(b, s_unit + place<N, true>(down + 8 * odd, column + 8 * high));
    else ldmatrix(b, s_unit + place<N, false>(8 * odd, column + down + 8 * high));
}

// Rows of A as they are or as `head` makes them, and zeros behind the last one.
static __device__ __forceinline__ void fill_left(const Parameters& p, char* s_left) {
    const int rows = (int)p.rows;
    for (int e = threadIdx.x; e < (M - rows) * (K / 8); e += THREADS) {
        *(uint4*)(s_left + (rows + e / (K / 8)) * LEFT + e % (K / 8) * 16) = make_uint4(0, 0, 0, 0);
    }
#if HEAD
    for (int first = 0; first < rows; first += head::ROWS) {
        head::run(p.head, [&](int row, int column, float x) { *(Element*)(s_left + row * LEFT + column * 2) = narrow<KIND>(x); }, first);
    }
#else
    for (int e = threadIdx.x; e < rows * (K / 8); e += THREADS) {
        const int row = e / (K / 8), eight = e % (K / 8);
        *(uint4*)(s_left + row * LEFT + eight * 16) = *(const uint4*)((const char*)p.left + row * p.left_row + eight * 16);
    }
#endif
}

static __device__ __forceinline__ F four(const float* s) { return lanes<F>([&](int i) { return s[i]; }); }
static __device__ __forceinline__ F both(const F& x, const F& y) { return lanes<F>([&](int i) { return x.v[i] + y.v[i]; }); }

static __device__ __forceinline__ void finish(const Parameters& p, int row, int column, const F& sum) {
    tail::run(p.tail, row, column, &sum, tail::read_shared(p.tail, column), tail::read(p.tail, row, column));
}

// The hidden values of a unit: the warps share K, and their sums are added up in order.
static __device__ __forceinline__ void make_hidden(const Parameters& p, const char* s_left, const char* s_unit, float* s_sums, char* s_hidden, int unit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = threadIdx.x * V / UNIT, own = threadIdx.x * V % UNIT, column = unit * UNIT + own;
    const bool live = row < (int)p.rows;
    // What is read beside the sums is on its way while they are made.
    middle::Shared shared = {};
    middle::Operands operands = {};
    if (live) shared = middle::read_shared(p.middle, column), operands = middle::read(p.middle, row, column);
    float sums[MATRICES][2][4] = {};
#pragma unroll 2
    for (int k = warp * 16; k < K; k += WARPS * 16) {
        u32 b[4];
        load_first(b, s_unit, k, lane);
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            u32 a[4];
            load_left(a, s_left + i * 16 * LEFT + k * 2, LEFT, lane);
            mma<KIND>(sums[i][0], a, b[0], b[1]);
            mma<KIND>(sums[i][1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) {
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            float* const s = s_sums + (warp * M + i * 16 + lane / 4) * PITCH + eight * 8 + lane % 4 * 2;
            const float(&x)[4] = sums[i][eight];
            *(float2*)s = make_float2(x[0], x[1]);
            *(float2*)(s + 8 * PITCH) = make_float2(x[2], x[3]);
        }
    }
    __syncthreads();
    if (!live) return;
    F sum = four(s_sums + row * PITCH + own);
#pragma unroll
    for (int i = 1; i < WARPS; ++i) sum = both(sum, four(s_sums + (i * M + row) * PITCH + own));
    middle::run(p.middle, row, column, &sum, shared, operands, [&](int row, int column, float x) {
        *(Element*)(s_hidden + row * HIDDEN + (column - unit * UNIT) * 2) = narrow<KIND>(x);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_pair(const __grid_constant__ Parameters p) {
    extern __shared__ float4 s_dynamic[];
    __shared__ u32 s_last;
    char* const s_memory = (char*)s_dynamic;
    char* const s_left = s_memory + SLOTS * SLOT;
    float* const s_sums = (float*)(s_left + M * LEFT);
    char* const s_hidden = (char*)(s_sums + WARPS * M * PITCH);
    start_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = (int)p.rows;
    const int first = blockIdx.x * UNITS, halves = 2 * max(0, min(UNITS, F_COLUMNS / UNIT - first));
    const u32 rank = cluster_rank();
    auto copy = [&](int half) {
        if (half < halves) {
            const auto& right = p.right[half % 2];
            const u32 s_slot = shared_address(s_memory + half % SLOTS * SLOT);
            const char* const g_unit = (const char*)right.address + (first + half / 2) * right.unit;
            if (half % 2 == 0) copy_unit<K, LONG_FIRST>(s_slot, g_unit, right.line);
            else copy_unit<N, LONG_SECOND>(s_slot, g_unit, right.line);
        }
        commit_copies();
    };
    if (p.right[0].given == 0 || p.right[1].given == 0) wait_for_previous();
    for (int half = 0; half < SLOTS; ++half) copy(half);
    prefetch_shared(p, rank);
    wait_for_previous();
    fill_left(p, s_left);
    for (int e = threadIdx.x; e < M * HIDDEN / 16; e += THREADS) *(uint4*)(s_hidden + e * 16) = make_uint4(0, 0, 0, 0);
    float sums[PAIRS][MATRICES][2][4] = {};
    for (int half = 0; half < halves; ++half) {
        const char* const s_unit = s_memory + half % SLOTS * SLOT;
        await_copies<SLOTS - 1>();
        __syncthreads();
        if (half % 2 == 0) {
            make_hidden(p, s_left, s_unit, s_sums, s_hidden, first + half / 2);
        } else {
            u32 a[MATRICES][4];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) load_left(a[i], s_hidden + i * 16 * HIDDEN, HIDDEN, lane);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                const int column = (warp + pair * WARPS) * 16;
                if (column < N) {
                    u32 b[4];
                    load_second(b, s_unit, column, lane);
#pragma unroll
                    for (int i = 0; i < MATRICES; ++i) {
                        mma<KIND>(sums[pair][i][0], a[i], b[0], b[1]);
                        mma<KIND>(sums[pair][i][1], a[i], b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads();
        copy(half + SLOTS);
    }
    // Shares of the cluster's blocks take the place of weights and A, when all blocks have done with them.
    float* const s_shares = (float*)s_memory;
    await_copies<0>();
    cluster_barrier();
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const int column = (warp + pair * WARPS) * 16;
        if (column < N) {
            const u32 there = remote(s_shares + rank * M * SHARE + column % SHARE, column / SHARE);
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = i * 16 + part % 2 * 8 + lane / 4, own = part / 2 * 8 + lane % 4 * 2;
                    const float(&x)[4] = sums[pair][i][part / 2];
                    if (row < rows) store_remote2(there + (row * SHARE + own) * 4, x[part % 2 * 2], x[part % 2 * 2 + 1]);
                }
            }
        }
    }
    __syncwarp();
    cluster_barrier();
    const int start = rank * SHARE, vectors = max(0, min(SHARE, N - start)) / V;
    for (int e = threadIdx.x; e < rows * vectors; e += THREADS) {
        const int row = e / vectors, own = e % vectors * V;
        F sum = four(s_shares + row * SHARE + own);
#pragma unroll
        for (int i = 1; i < CLUSTER; ++i) sum = both(sum, four(s_shares + (i * M + row) * SHARE + own));
        if (CLUSTERS == 1) finish(p, row, start + own, sum);
        else *(float4*)((float*)p.shares + ((i64)(blockIdx.x / CLUSTER) * M + row) * N + start + own) = make_float4(sum.v[0], sum.v[1], sum.v[2], sum.v[3]);
    }
    if (CLUSTERS == 1) return;
    __syncthreads();
    u32* const g_counter = (u32*)p.counters + rank;
    if (threadIdx.x == 0) s_last = add_acq_rel(g_counter, 1) == CLUSTERS - 1;
    __syncthreads();
    if (!s_last) return;
    if (threadIdx.x == 0) *g_counter = 0;
    for (int e = threadIdx.x; e < rows * vectors; e += THREADS) {
        const int row = e / vectors, column = start + e % vectors * V;
        const float* const g_first = (const float*)p.shares + (i64)row * N + column;
        F sum = four(g_first);
#pragma unroll
        for (int i = 1; i < CLUSTERS; ++i) sum = both(sum, four(g_first + (i64)i * M * N));
        finish(p, row, column, sum);
    }
}
