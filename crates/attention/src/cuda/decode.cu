// Attention of few queries over many keys: memory's speed is what counts.
//
//   o = dropout(softmax(scale q k^T + mask)) v, keys in ranges that are joined in order: by the blocks of a cluster, which are the
//   ranges of the same rows, or by `attention_combine`
//
// - Numbers: products and sums in f32, in an order that sizes, positions and the number of ranges decide.
// - A block takes one range of keys of one head of keys, and up to ROWS rows of queries: queries times the heads that share
//   the keys, so that each key is read once for all of them.
// - LANES neighbouring lanes share a key, 16 bytes each (PARTS times): they are one stream with a softmax of its own over every
//   so many keys, FLIGHT keys at a time, all of their loads ahead of the arithmetic. Streams are joined at the end, first
//   in the warp, then in the block. Scores are powers of 2.
// - The first keys and values are asked for before earlier grids have ended. Only those of the new tokens are theirs, and the L2 sees
//   both. Not all of them: those of all blocks together would be more than the L2 holds, and be read twice.
// - Takes, of NVRTC 13.4 for sm_90a, heads of 64 in bf16: a row a block 80 registers and 1,072 bytes of shared memory, 24 of 64 warps; four rows 150
//   and 4,240, 12 warps; eight 233 and 8,464, 8 warps; 264 bytes of a row and range more where a cluster joins. No spills.
//
// ROWS and VECTOR (whether rows start at multiples of 16 bytes and end there) are constants that stand before this file.

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int PIECE = 16 / sizeof(KeyElement);
constexpr int PIECES = (WIDTH + PIECE - 1) / PIECE;
constexpr int LANES = PIECES <= 1 ? 1 : PIECES <= 2 ? 2 : PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
constexpr int PARTS = (PIECES + LANES - 1) / LANES;
constexpr int OWN = PARTS * PIECE;  // elements of a lane
constexpr int STREAMS = 32 / LANES * WARPS;
constexpr int FLIGHT = ROWS * PARTS > 4 ? 2 : 4;
// Blocks of a multiprocessor that registers are left for. Without a number the compiler wants more of them, and to save registers does one
// load after another.
constexpr int RESIDENT = ROWS * OWN <= 16 ? 4 : 1;
constexpr int JOINED = WIDTH + 2;  // floats of a row of a range: values, largest score, sum
constexpr int LINES = (WIDTH * sizeof(KeyElement) + 127) / 128;
constexpr int BROUGHT = 16384 / (LINES * 128);  // keys of a block that are asked for early, at most

// The parameter, and the positions once more if no kernel of the job makes them, else null.
struct Decode : Attention {
    const int* g_given_positions;
};

union Piece {
    uint4 whole;
    KeyElement elements[PIECE];
};

// The lane's part of a row; zeros beyond the width, and everywhere if the row is not `in`.
static __device__ __forceinline__ void load_row(Piece (&r)[PARTS], const KeyElement* g_row, int lane, bool in) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int first = (part * LANES + lane) * PIECE;
        if constexpr (VECTOR) {
            r[part].whole = make_uint4(0, 0, 0, 0);
            if (in && first < WIDTH) r[part].whole = *(const uint4*)(g_row + first);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i) r[part].elements[i] = in && first + i < WIDTH ? g_row[first + i] : (KeyElement)0;
        }
    }
}

static __device__ __forceinline__ float element(const Piece (&r)[PARTS], int i) {
    return widen<KV_STORAGE>(r[i / PIECE].elements[i % PIECE]);
}

// The lane's part of a row of queries, in pieces like those of keys.
static __device__ __forceinline__ void load_query(float (&r)[OWN], const Element* g_row, int lane, bool in) {
    if constexpr (STORAGE == KV_STORAGE) {
        Piece r_q[PARTS];
        load_row(r_q, (const KeyElement*)g_row, lane, in);
#pragma unroll
        for (int i = 0; i < OWN; ++i) r[i] = element(r_q, i);
    } else {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int column = (i / PIECE * LANES + lane) * PIECE + i % PIECE;
            r[i] = in && column < WIDTH ? widen<STORAGE>(g_row[column]) : 0.0f;
        }
    }
}

struct Row {
    float q[OWN], o[OWN];
    float maximum, sum;
};

// Joins a stream that goes on elsewhere.
static __device__ __forceinline__ void join(Row& r, int mask) {
    const float maximum = shuffle_xor(r.maximum, mask), most = fmaxf(r.maximum, maximum), shift = shift_of(most);
    const float own = ex2(r.maximum - shift), other = ex2(maximum - shift);
    r.maximum = most;
    r.sum = r.sum * own + shuffle_xor(r.sum, mask) * other;
#pragma unroll
    for (int i = 0; i < OWN; ++i) r.o[i] = r.o[i] * own + shuffle_xor(r.o[i], mask) * other;
}

// The keys of a range: equal parts of those that the last row sees, in whole steps of all streams.
struct Range {
    int begin, end;
};

static __device__ __forceinline__ Range range_of(const Attention& p, u32 chunk, u32 split, long long last) {
    const u32 group = (u32)p.group, splits = (u32)p.splits;
    const u32 last_row = min(chunk * ROWS + ROWS, group * (u32)p.queries) - 1;
    const u32 used = (u32)seen(p, last, (int)(last_row / group));
    const u32 range = ((used + splits - 1) / splits + STREAMS - 1) / STREAMS * STREAMS;
    return {(int)min(split * range, used), (int)min(split * range + range, used)};
}

static __device__ __forceinline__ void bring_rows(const KeyElement* g_rows, u64 position, Range keys) {
    const int count = min(keys.end - keys.begin, BROUGHT);
    for (int line = threadIdx.x; line < count * LINES; line += THREADS) {
        prefetch_line((u64)(g_rows + (u64)(keys.begin + line / LINES) * position) + line % LINES * 128);
    }
}

// An element of the result. A row without a key is zeros whatever was multiplied by 0.
static __device__ __forceinline__ void store(const Attention& p, u64 sequence, u64 head, u64 query, int column, float value, float sum) {
    const float ended = sum == 0.0f ? 0.0f : value * ending(sum);
    p.g_o[start(p.o, sequence, head) + query * p.o.position + column] = narrow<STORAGE>(ended);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_decode(const __grid_constant__ Decode p) {
    extern __shared__ float s_joined[];
    __shared__ float s_o[WARPS][ROWS][WIDTH];
    __shared__ float s_maximum[WARPS][ROWS], s_sum[WARPS][ROWS];
    start_next();
    // Counts of 32 bits, as blocks have: a division of 64 is a hundred instructions, and all of them wait for the position.
    const u32 group = (u32)p.group, splits = (u32)p.splits, rows = group * (u32)p.queries, chunks = (rows + ROWS - 1) / ROWS;
    const u32 split = blockIdx.x % splits, chunk = blockIdx.x / splits % chunks;
    const u32 of_all = blockIdx.x / splits / chunks, key_heads = (u32)p.heads / group;
    const u32 sequence = of_all / key_heads, key_head = of_all % key_heads;
    const bool joins = p.splits > 1 && p.g_values == nullptr;
#if __CUDA_ARCH__ >= 900
    // Row i of the chunk is joined by block i of the cluster, or by the one that comes round to it.
    __shared__ u64 s_sent;
    if (joins) {
        if (threadIdx.x == 0) {
            mbarrier_init(shared_address(&s_sent), 1);
            fence_mbarrier_init();
        }
        cluster_arrive();
    }
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, stream = threadIdx.x / LANES;
    const KeyElement* g_k = p.g_k + start(p.k, sequence, key_head);
    const KeyElement* g_v = p.g_v + start(p.v, sequence, key_head);
    if (MASK != CACHED || p.g_given_positions != nullptr) {
        const long long last = MASK == CACHED ? p.g_given_positions[sequence] : last_key(p, sequence);
        const Range keys = range_of(p, chunk, split, last);
        bring_rows(g_k, p.k.position, keys);
        bring_rows(g_v, p.v.position, keys);
    }
    wait_for_previous();
    const u32 seed = DROPOUT ? (u32)*p.g_seed : 0;
    const long long last = last_key(p, sequence);

    // Rows are queries, and within a query the heads of the group.
    Row r[ROWS];
    int ends[ROWS];
    const MaskElement* g_masks[ROWS];
    u64 elements[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const u32 row = chunk * ROWS + i;
        const bool exists = row < rows;
        const u32 query = exists ? row / group : 0, head = key_head * group + (exists ? row % group : 0);
        load_query(r[i].q, p.g_q + start(p.q, sequence, head) + query * p.q.position, lane, exists);
#pragma unroll
        for (int e = 0; e < OWN; ++e) {
            r[i].q[e] *= SCALE * LOG2E;
            r[i].o[e] = 0.0f;
        }
        r[i].maximum = never();
        r[i].sum = 0.0f;
        ends[i] = exists ? seen(p, last, (int)query) : 0;
        g_masks[i] = mask_row(p, sequence, head, query);
        elements[i] = row_elements(p, sequence, head, query);
    }
    const auto [begin, end] = range_of(p, chunk, split, last);

    for (int key = begin + stream; any_of_warp(key < end); key += STREAMS * FLIGHT) {
        Piece r_k[FLIGHT][PARTS], r_v[FLIGHT][PARTS];
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int at = key + f * STREAMS;
            load_row(r_k[f], g_k + (u64)at * p.k.position, lane, at < end);
        }
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int at = key + f * STREAMS;
            load_row(r_v[f], g_v + (u64)at * p.v.position, lane, at < end);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float s[FLIGHT], most = r[i].maximum;
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                const int at = key + f * STREAMS;
                s[f] = 0.0f;
#pragma unroll
                for (int e = 0; e < OWN; ++e) s[f] = fmaf(r[i].q[e], element(r_k[f], e), s[f]);
#pragma unroll
                for (int mask = LANES / 2; mask > 0; mask /= 2) s[f] += shuffle_xor(s[f], mask);
                const bool sees = at < end && at < ends[i];
                if constexpr (MASK == ADDITIVE) {
                    if (sees) s[f] += power_of(widen<MASK_STORAGE>(g_masks[i][at]), LOG2E);
                }
                if (!sees) s[f] = never();
                most = fmaxf(most, s[f]);
            }
            const float shift = shift_of(most), factor = ex2(r[i].maximum - shift);
            r[i].maximum = most;
            r[i].sum *= factor;
#pragma unroll
            for (int e = 0; e < OWN; ++e) r[i].o[e] *= factor;
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                float probability = ex2(s[f] - shift);
                r[i].sum += probability;
                if constexpr (DROPOUT) {
                    if (!keeps(elements[i] + key + f * STREAMS, seed)) probability = 0.0f;
                }
#pragma unroll
                for (int e = 0; e < OWN; ++e) r[i].o[e] = fmaf(probability, element(r_v[f], e), r[i].o[e]);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int mask = LANES; mask < 32; mask *= 2) join(r[i], mask);
        if (threadIdx.x % 32 < LANES) {
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const int column = (e / PIECE * LANES + lane) * PIECE + e % PIECE;
                if (column < WIDTH) s_o[warp][i][column] = r[i].o[e];
            }
            if (lane == 0) {
                s_maximum[warp][i] = r[i].maximum;
                s_sum[warp][i] = r[i].sum;
            }
        }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (joins) {
        cluster_wait();
        const u32 own = (min(rows - chunk * ROWS, (u32)ROWS) + splits - 1 - split) / splits;
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared_address(&s_sent), own * splits * JOINED * (u32)sizeof(float));
    }
#endif
    for (int i = 0; i < ROWS && chunk * ROWS + i < rows; ++i) {
        float most = s_maximum[0][i], sum = 0.0f, weights[WARPS];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s_maximum[w][i]);
        const float shift = shift_of(most);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            weights[w] = ex2(s_maximum[w][i] - shift);
            sum = fmaf(s_sum[w][i], weights[w], sum);
        }
        const u32 row = chunk * ROWS + i, query = row / group, head = key_head * group + row % group;
        const u64 part = ((sequence * p.heads + head) * p.queries + query) * p.splits + split;
#if __CUDA_ARCH__ >= 900
        const u32 joiner = i % splits;
        float* const s_row = s_joined + (i * splits + split) * JOINED;
#endif
        for (int column = threadIdx.x; column < WIDTH; column += THREADS) {
            float value = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) value = fmaf(s_o[w][i][column], weights[w], value);
            if (p.splits == 1) {
                store(p, sequence, head, query, column, value, sum);
            } else if (!joins) {
                p.g_values[part * WIDTH + column] = value;
            }
#if __CUDA_ARCH__ >= 900
            if (joins) store_remote_async(s_row + column, value, joiner, &s_sent);
#endif
        }
        if (threadIdx.x == 0 && p.splits > 1 && !joins) {
            p.g_sums[2 * part] = most;
            p.g_sums[2 * part + 1] = sum;
        }
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0 && joins) {
            store_remote_async(s_row + WIDTH, most, joiner, &s_sent);
            store_remote_async(s_row + WIDTH + 1, sum, joiner, &s_sent);
        }
#endif
    }
#if __CUDA_ARCH__ >= 900
    if (!joins) return;
    await_remote_stores(&s_sent);
    for (int i = (int)split; i < ROWS && chunk * ROWS + i < rows; i += (int)splits) {
        const float* const s_row = s_joined + i * splits * JOINED;
        float most = never();
        for (int other = 0; other < (int)splits; ++other) most = fmaxf(most, s_row[other * JOINED + WIDTH]);
        const float shift = shift_of(most);
        const u32 row = chunk * ROWS + i, query = row / group, head = key_head * group + row % group;
        for (int column = threadIdx.x; column < WIDTH; column += THREADS) {
            float value = 0.0f, sum = 0.0f;
            for (int other = 0; other < (int)splits; ++other) {
                const float* const s_part = s_row + other * JOINED;
                const float weight = ex2(s_part[WIDTH] - shift);
                sum = fmaf(s_part[WIDTH + 1], weight, sum);
                value = fmaf(s_part[column], weight, value);
            }
            store(p, sequence, head, query, column, value, sum);
        }
    }
#endif
}

// A warp a row of the result.
extern "C" __global__ void __launch_bounds__(THREADS) attention_combine(const __grid_constant__ Decode p) {
    start_next();
    wait_for_previous();
    const u64 row = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.batch * p.heads * p.queries) return;
    const float* g_sums = p.g_sums + 2 * row * p.splits;
    const float* g_values = p.g_values + row * p.splits * WIDTH;
    float most = never(), sum = 0.0f;
    for (int split = lane; split < (int)p.splits; split += 32) most = fmaxf(most, g_sums[2 * split]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, shuffle_xor(most, mask));
    const float shift = shift_of(most);
    float r_o[(WIDTH + 31) / 32] = {};
#pragma unroll 4
    for (int split = 0; split < (int)p.splits; ++split) {
        const float weight = ex2(g_sums[2 * split] - shift);
        sum = fmaf(g_sums[2 * split + 1], weight, sum);
#pragma unroll
        for (int i = 0; i < (WIDTH + 31) / 32; ++i) {
            const int column = lane + 32 * i;
            if (column < WIDTH) r_o[i] = fmaf(g_values[(u64)split * WIDTH + column], weight, r_o[i]);
        }
    }
    const u64 query = row % p.queries, head = row / p.queries % p.heads, sequence = row / p.queries / p.heads;
#pragma unroll
    for (int i = 0; i < (WIDTH + 31) / 32; ++i) {
        const int column = lane + 32 * i;
        if (column < WIDTH) store(p, sequence, head, query, column, r_o[i], sum);
    }
}
