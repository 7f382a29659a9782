// ---- what follows the sums, element by element

constexpr int SHARE = COLUMNS / SPLIT;  // columns that a block of a cluster stores
// Floats from one row of sums that wait to be added to the next: eight rows of a warp's store are in different banks.
constexpr int PITCH = SHARE + (SHARE % 32 == 8 || SHARE % 32 == 24 ? 0 : 8);
static_assert(RIGHTS == 1 || (SPLIT == 1 && SIDES == 1), "a tile has all columns of every B that belong together");
static_assert(SPLIT == 1 || SPLIT * ROWS * PITCH * 4 <= AT_STAGED, "sums that are exchanged take the place of operands");

// V sums from shared memory.
static __device__ __forceinline__ F staged(const char* s_staged, int row, int column) {
    F sums;
    if constexpr (V == 8) {
        const uint4 words = *(const uint4*)(s_staged + staged_at(row, column / 8));
        const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < V; ++i) sums.v[i] = widen<KIND>((u16)(w[i / 2] >> 16 * (i & 1)));
    } else {
        const u16* s_own = (const u16*)(s_staged + staged_at(row, column / 8)) + column % 8;
#pragma unroll
        for (int i = 0; i < V; ++i) sums.v[i] = widen<KIND>(s_own[i]);
    }
    return sums;
}

// What follows V sums of a row; sums over rows go on in `columns`.
static __device__ __forceinline__ void follow(const Parameters& p, i64 row, int c, const F* sums, const tail::Shared& shared, const tail::Operands& operands, F* columns) {
#if COLUMN_SUMS > 0
    tail::run(p.tail, row, c, sums, shared, operands, columns);
#else
    tail::run(p.tail, row, c, sums, shared, operands);
#endif
}

// What follows V columns of every DOWN-th row of HIGH, of which `rows` are there; the first is number `first` of all, and `own` is the place
// of column c in the tile.
template <int HIGH, int DOWN, int TOGETHER, class Sums>
static __device__ __forceinline__ void finish_columns_of(const Parameters& p, i64 first, int rows, int c, int own, int down, Sums sums, F* columns) {
    const tail::Shared shared = tail::read_shared(p.tail, c);
    // Where all rows are there, no branch keeps the compiler from working on several vectors at once.
    if (HIGH % (DOWN * TOGETHER) == 0 && HIGH <= rows) {
#pragma unroll 1
        for (int start = down; start < HIGH; start += DOWN * TOGETHER) {
            tail::Operands operands[TOGETHER];
            F values[TOGETHER][RIGHTS];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) operands[i] = tail::read(p.tail, first + start + i * DOWN, c);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
#pragma unroll
                for (int right = 0; right < RIGHTS; ++right) values[i][right] = sums(start + i * DOWN, own, right);
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) follow(p, first + start + i * DOWN, c, values[i], shared, operands[i], columns);
        }
    } else {
#pragma unroll 1
        for (int r = down; r < HIGH && r < rows; r += DOWN) {
            F values[RIGHTS];
#pragma unroll
            for (int right = 0; right < RIGHTS; ++right) values[right] = sums(r, own, right);
            follow(p, first + r, c, values, shared, tail::read(p.tail, first + r, c), columns);
        }
    }
}

#if COLUMN_SUMS > 0
// Sums over the rows of 64 that a warp has, from column c on: threads with the same columns, ACROSS lanes apart, add theirs up, and one stores
// them. The kernel `finish` adds up those of all warps.
template <int ACROSS>
static __device__ __forceinline__ void put_columns(const Parameters& p, int batch, int row, int c, bool in, F* columns) {
    // Threads that have all columns of a piece together, and how many times 64 rows have as many.
    constexpr int GROUP = ACROSS < 32 ? 32 : ACROSS, GROUPS = 128 / GROUP;
    const u64 halves = (p.m + 63) / 64, parts = GROUPS * halves * (p.tail.rows / p.m);
    const u64 part = GROUPS * (batch * halves + row / 64) + threadIdx.x % 128 / GROUP;
#pragma unroll
    for (int k = 0; k < COLUMN_SUMS; ++k) {
#pragma unroll
        for (int away = ACROSS; away < 32; away *= 2) {
            columns[k] = lanes<F>([&](int i) { return columns[k].v[i] + shuffle_xor(columns[k].v[i], away); });
        }
        float* const g_part = (float*)p.tail.workspace + (k * parts + part) * N + c;
        if (in && threadIdx.x % GROUP < ACROSS) {
#pragma unroll
            for (int i = 0; i < V; ++i) g_part[i] = columns[k].v[i];
        }
    }
}
#endif

// What follows HIGH x WIDE sums of a tile whose first one is at (row, column) of the batch's matrix. COUNT threads share them, this one is
// number `thread`: it has V columns of each piece of 64, in every DOWN-th row. `sums(row, column, right)` gives V of them.
template <int HIGH, int WIDE, int COUNT, class Sums>
static __device__ __forceinline__ void finish_area(const Parameters& p, int batch, int row, int column, int thread, Sums sums) {
    constexpr int PIECE = WIDE < 64 ? WIDE : 64, ACROSS = PIECE / V, DOWN = COUNT / ACROSS, TOGETHER = 4;
    const i64 first = (i64)batch * (i64)p.m + row;
    const int rows = (int)p.m - row, across = thread % ACROSS * V, down = thread / ACROSS;
#pragma unroll 1
    for (int piece = 0; piece < WIDE; piece += PIECE) {
        const int own = piece + across, c = column + own;
        F columns[COLUMN_SUMS + 1] = {};
        const bool in = down < DOWN && own < WIDE && c < N;
        if (in) finish_columns_of<HIGH, DOWN, TOGETHER>(p, first, rows, c, own, down, sums, columns);
#if COLUMN_SUMS > 0
        static_assert(HIGH == 64 && COUNT == 128 && PIECE == 64, "warps store their sums over rows");
        if (rows > 0) put_columns<ACROSS>(p, batch, row, c, in, columns);
#endif
    }
}

// Sums of all 64 rows of a half, and what follows them. The warpgroup does it together.
static __device__ __forceinline__ void finish_half(const Parameters& p, const Tile& tile, int row, char* s_staged, int warpgroup, const Rounded& pairs) {
    stage(s_staged, pairs);
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
    finish_area<64, COLUMNS / RIGHTS, 128>(p, tile.batch, row, tile.column, threadIdx.x % 128, [&](int r, int c, int right) {
        return staged(s_staged, r, right * (COLUMNS / RIGHTS) + c);
    });
    named_barrier_sync(STAGED_BARRIER + warpgroup, 128);
}

// What follows a whole tile of a warpgroup.
static __device__ __forceinline__ void finish_tile(const Parameters& p, const Tile& tile, char* s_staged, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2]) {
    Rounded pairs[HALVES];
    round_tile(pairs, sums);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) finish_half(p, tile, tile.row + 64 * half, s_staged, warpgroup, pairs[half]);
}

// Sends this thread's sums to the blocks of the cluster that own their columns, behind those of lower blocks.
static __device__ __forceinline__ void send(const float* s_parts, int warpgroup, const float (&sums)[COLUMNS / 2]) {
    const int lane = threadIdx.x & 31, row = 64 * warpgroup + 16 * (threadIdx.x / 32 % 4) + lane / 4, part = (int)cluster_rank();
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        const int owner = 8 * j / SHARE, column = 8 * j % SHARE + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 there = remote(s_parts + (part * ROWS + row + 8 * i) * PITCH + column, owner);
            store_remote2(there, sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
        }
    }
}

// V sums of all parts, first to last, rounded.
static __device__ __forceinline__ F added(const float* s_parts, int row, int column) {
    F total = lanes<F>([&](int i) { return s_parts[row * PITCH + column + i]; });
#pragma unroll
    for (int part = 1; part < SPLIT; ++part) {
        total = lanes<F>([&](int i) { return total.v[i] + s_parts[(part * ROWS + row) * PITCH + column + i]; });
    }
    return lanes<F>([&](int i) { return widen<KIND>(narrow<KIND>(total.v[i])); });
}

// Beside the sums, nothing comes to shared memory.
static __device__ __forceinline__ void fetch_more(const Parameters&, Ring, const Tile&, u32) {}

// What the warps that do not multiply do meanwhile.
static __device__ __forceinline__ void stand_by() {
    if constexpr (SPLIT > 1) {
        __syncwarp();
        cluster_barrier();
        cluster_barrier();
    }
}

// All of a warpgroup's sums of the block's only tile, from row `top` of the tile on, or its share of them.
static __device__ __forceinline__ void finish_part(const Parameters& p, Ring, char* s_base, const Tile& tile, int top, int, int warpgroup, const float (&sums)[HALVES][COLUMNS / 2], u32) {
    if constexpr (SPLIT == 1) {
        finish_tile(p, {tile.batch, tile.row + top, tile.column}, s_base + AT_STAGED + warpgroup * STAGED_BYTES, warpgroup, sums);
    } else {
        // At the same place in every block, whatever the others moved their stages by.
        extern __shared__ char s_dynamic[];
        const float* const s_parts = (const float*)s_dynamic;
        const int part = (int)(blockIdx.x % SPLIT);
        cluster_barrier();
        send(s_parts, warpgroup, sums[0]);
        cluster_barrier();
        finish_area<ROWS, SHARE, MULTIPLIERS>(p, tile.batch, tile.row, tile.column + part * SHARE, threadIdx.x - 128, [&](int r, int c, int) { return added(s_parts, r, c); });
    }
}
