
// Matmuls of few rows of 16-bit operands on the matrix units of a warp: C[rows, N] = A[rows, K] B[K, N], every weight read once.
//
// - A block has strips of COLUMNS columns, one after another; K is cut into SPLIT parts, one a block of a cluster, which have one strip.
// - A chunk of weights is DEEP of K and all columns of a strip. Chunks of a strip go round the warps, and each warp copies and multiplies its
//   own: no barrier is between them. STAGES chunks of each warp are in flight, the first ones before A is there.
// - A is held as it is stored: copied, or made there by `head`. Sums are added up over the warps, then over the parts, in order.
// - A chunk lies in lines as in memory. Pieces of 16 bytes change places, so that eight lines at one place are in different banks.

constexpr int WARPS = THREADS / 32;
constexpr int DEEP = 32;
constexpr int LINES = BY_ROWS ? DEEP : COLUMNS;
constexpr int PIECES = (BY_ROWS ? COLUMNS : DEEP) / 8;
constexpr int CHUNK = 2 * DEEP * COLUMNS;
constexpr int CHUNKS = (PART + DEEP - 1) / DEEP;
constexpr int ROUNDS = (CHUNKS + WARPS - 1) / WARPS;
// Bytes from one row of A to the next; floats from one row of a warp's sums to the next.
constexpr int LEFT = 2 * CHUNKS * DEEP + 16;
constexpr int PITCH = COLUMNS + 4;
constexpr int VECTORS = M * COLUMNS / V;
typedef Stored<KIND>::Element Element;
static_assert(PIECES == 2 || PIECES == 4 || PIECES == 8, "lines of 32, 64 or 128 bytes");

struct Parameters {
    head::Parameters head;
    tail::Parameters tail;
    u64 left, left_row;              // address, bytes from row to row
    u64 right, right_next;           // address, bytes from line to line
    u64 rows;
    u64 right_given;                 // address, or 0 if a kernel of the job makes it
    struct { u64 address, bytes, strip; } shared[SHARED];
};

static __device__ __forceinline__ int place(int line, int piece) { return (line * PIECES + (piece ^ line / (8 / PIECES) % PIECES)) * 16; }

// Rows of A, columns first .. last, and zeros around them.
static __device__ __forceinline__ void fill_left(const Parameters& p, char* s_left, int first, int last) {
    constexpr int EIGHTS = LEFT / 16 - 1;
    const int rows = (int)p.rows;
    for (int e = threadIdx.x; e < M * EIGHTS; e += THREADS) {
        const int row = e / EIGHTS, k = first + e % EIGHTS * 8;
        const bool in = row < rows && k < last;
        if (HEAD && in) continue;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (!HEAD && in) eight = *(const uint4*)((const char*)p.left + row * p.left_row + k * 2);
        *(uint4*)(s_left + row * LEFT + e % EIGHTS * 16) = eight;
    }
#if HEAD
    for (int start = 0; start < rows; start += head::ROWS) {
        head::run(p.head, [&](int row, int column, float x) {
            if (column >= first && column < last) *(Element*)(s_left + row * LEFT + (column - first) * 2) = narrow<KIND>(x);
        }, start);
    }
#endif
}

// Adds the products of a chunk and what lies beside it in A.
static __device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 8][4], const char* s_left, const char* s_chunk, int lane) {
    const int down = lane % 8, odd = lane / 8 & 1, high = lane / 16;
#pragma unroll
    for (int step = 0; step < DEEP / 16; ++step) {
        u32 a[4];
        ldmatrix(a, s_left + (down + 8 * odd) * LEFT + step * 32 + high * 16);
#pragma unroll
        for (int pair = 0; pair < COLUMNS / 16; ++pair) {
            u32 b[4];
            if constexpr (BY_ROWS) ldmatrix_transposed(b, s_chunk + place(step * 16 + down + 8 * odd, pair * 2 + high));
            else ldmatrix(b, s_chunk + place(pair * 16 + down + 8 * high, step * 2 + odd));
            mma<KIND>(sums[pair * 2], a, b[0], b[1]);
            mma<KIND>(sums[pair * 2 + 1], a, b[2], b[3]);
        }
    }
}

// A warp's sums go to shared memory, and are zeros again.
static __device__ __forceinline__ void stage(float (&sums)[COLUMNS / 8][4], float* s_own, int lane) {
#pragma unroll
    for (int eight = 0; eight < COLUMNS / 8; ++eight) {
        float(&x)[4] = sums[eight];
        float* const s = s_own + lane / 4 * PITCH + eight * 8 + lane % 4 * 2;
        *(float2*)s = make_float2(x[0], x[1]);
        *(float2*)(s + 8 * PITCH) = make_float2(x[2], x[3]);
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_strips(const __grid_constant__ Parameters p) {
    extern __shared__ float4 s_dynamic[];
    char* const s_chunks = (char*)s_dynamic;
    constexpr int WEIGHTS = WARPS * STAGES * CHUNK, SUMS = WARPS * M * PITCH * 4;
    char* const s_left = s_chunks + (ONE_STRIP && SUMS > WEIGHTS ? SUMS : WEIGHTS);
    // Where there is no other strip, sums take the place of weights.
    float* const s_sums = (float*)(ONE_STRIP ? s_chunks : s_left + M * LEFT);
    start_next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = blockIdx.x % SPLIT, step = gridDim.x / SPLIT, start = blockIdx.x / SPLIT;
    const int first = part * PART, last = min(first + PART, K);
    const int items = (STRIPS - start + step - 1) / step * ROUNDS;
#if __CUDA_ARCH__ >= 900
    __shared__ u64 s_sent;
    if (SPLIT > 1) prepare_exchange(&s_sent);
#endif
    auto copy = [&](int item) {
        const int column = (start + item / ROUNDS * step) * COLUMNS, chunk = item % ROUNDS * WARPS + warp;
        if (item < items && chunk < CHUNKS) {
            const int k = first + chunk * DEEP;
            const u32 s_chunk = shared_address(s_chunks + (warp * STAGES + item % STAGES) * CHUNK);
#pragma unroll
            for (int e = lane; e < LINES * PIECES; e += 32) {
                const int line = e / PIECES, along = e % PIECES * 8;
                const int inner = k + (BY_ROWS ? line : along), across = column + (BY_ROWS ? along : line);
                const bool in = inner < last && across < N;
                const char* const g_piece = (const char*)p.right + (i64)(BY_ROWS ? inner : across) * (i64)p.right_next + (BY_ROWS ? across : inner) * 2;
                copy_async<16>(s_chunk + place(line, e % PIECES), in ? g_piece : (const char*)p.right, in);
            }
        }
        commit_copies();
    };
    if (p.right_given == 0) wait_for_previous();
    for (int item = 0; item < STAGES; ++item) copy(item);
    prefetch_shared(p, start);
    wait_for_previous();
    fill_left(p, s_left, first, last);
    __syncthreads();
    float sums[COLUMNS / 8][4] = {};
    for (int item = 0; item < items; ++item) {
        const int chunk = item % ROUNDS * WARPS + warp;
        await_copies<STAGES - 1>();
        __syncwarp();
        if (chunk < CHUNKS) multiply(sums, s_left + chunk * DEEP * 2, s_chunks + (warp * STAGES + item % STAGES) * CHUNK, lane);
        __syncwarp();
        copy(item + STAGES);
        if (item % ROUNDS != ROUNDS - 1) continue;
        if (ONE_STRIP) __syncthreads();
        stage(sums, s_sums + warp * M * PITCH, lane);
        __syncthreads();
        const int column = (start + item / ROUNDS * step) * COLUMNS;
        auto sum_of = [&](int e) { return add_pieces(s_sums + e * V / COLUMNS * PITCH + e * V % COLUMNS, WARPS, M * PITCH); };
        auto finish_sum = [&](int e, const F& sum) { finish(p, e * V / COLUMNS, column + e * V % COLUMNS, sum); };
#if __CUDA_ARCH__ >= 900
        if (SPLIT > 1) {
            static_assert(SPLIT == 1 || ONE_STRIP, "parts lie behind A");
            float* const s_parts = (float*)(s_left + M * LEFT);
            exchange<SPLIT, VECTORS>(part, s_parts, &s_sent, sum_of, finish_sum);
            return;
        }
#endif
        for (int e = threadIdx.x; e < VECTORS; e += THREADS) finish_sum(e, sum_of(e));
        __syncthreads();
    }
}
