// Attention on the matrix units, for 16-bit storage.
//
//   o = dropout(softmax(scale q k^T + mask)) v, a block a tile of queries of one head, tile after tile of keys
//
// - Numbers: products and sums in f32. The probabilities, before the division by their sum, are rounded to the storage type
//   for their product with v; nothing else is rounded before the result.
// - A warp owns 16 ATOMS rows of queries: its scores, its probabilities and its part of the result never leave registers.
//   Probabilities are the left operand of the second product as they lie.
// - Keys and values come by asynchronous copies, the next tile while this one is worked on.
// - Tiles that no query of the block sees are not read, those that no query of a warp sees are not worked on by it, and only
//   those that some query of the warp does not see whole are masked. Rows of keys and values beyond the last that is seen
//   are zeros in shared memory. Tiles of late queries, which see most, come first.
// - The largest score stays behind by up to 2^SLACK before sums are scaled anew.
// - Needs sm_80, WIDTH a multiple of 16, rows that start at multiples of 16 bytes.
// - Takes, of NVRTC 13.4 for sm_90a, causal, with 4 warps: heads of 64 with two sixteens of queries a warp 255 registers and 36,864 bytes of shared
//   memory, 8 of 64 warps; with one 166 and as many bytes, 12 warps; heads of 128 219 and 69,632, 8 warps. No spills.
//
// WARPS, ATOMS, KEYS (of a tile) and BLOCKS (of a multiprocessor, at least) are constants that stand before this file.

constexpr int THREADS = 32 * WARPS;
constexpr int QUERIES = 16 * ATOMS * WARPS;
constexpr int STAGE = 2 * KEYS * ROW;
constexpr bool HELD = WIDTH <= 128;  // queries stay in registers
constexpr float SLACK = 8.0f;

static_assert(2 * KEYS >= QUERIES, "queries pass through the second stage");

struct State {
    float o[ATOMS][WIDTH / 8][4];
    float maximum[ATOMS][2];
    float sum[ATOMS][2];
};

// Scores become probabilities, but for their sum; sums follow the largest score.
static __device__ __forceinline__ void soften(const Attention& p, const Place& at, State& r, float (&r_s)[ATOMS][KEYS / 8][4], int key) {
    float before[ATOMS][2];
    bool grows = false;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = fmaxf(r_s[atom][0][2 * half], r_s[atom][0][2 * half + 1]);
#pragma unroll
            for (int i = 1; i < KEYS / 8; ++i) {
                most = fmaxf(most, fmaxf(r_s[atom][i][2 * half], r_s[atom][i][2 * half + 1]));
            }
            most = fmaxf(most, shuffle_xor(most, 1));
            most = power_of(fmaxf(most, shuffle_xor(most, 2)), FACTOR);
            float& maximum = r.maximum[atom][half];
            before[atom][half] = maximum;
            if (most > maximum + SLACK) {
                maximum = most;
                grows = true;
            }
        }
    }
    if (any_of_warp(grows)) {
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Exactly 1 where the largest score stays.
                const float factor = fading(before[atom][half], r.maximum[atom][half]);
                r.sum[atom][half] *= factor;
#pragma unroll
                for (int i = 0; i < WIDTH / 8; ++i) {
                    r.o[atom][i][2 * half] *= factor;
                    r.o[atom][i][2 * half + 1] *= factor;
                }
            }
        }
    }
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = level_of(r.maximum[atom][half]);
            if (is_deep(r.maximum[atom][half])) level_row(r_s[atom], half, r.maximum[atom][half]);
            const u64 elements = row_elements(p, at.sequence, at.head, at.query + atom * 16 + half * 8) + key + (at.lane & 3) * 2;
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                float &a = r_s[atom][i][2 * half], &b = r_s[atom][i][2 * half + 1];
                a = ex2(fmaf(a, FACTOR, -shift));
                b = ex2(fmaf(b, FACTOR, -shift));
                r.sum[atom][half] += a + b;
                if constexpr (DROPOUT) drop2(a, b, elements + 8 * i, at.seed);
            }
        }
    }
}

template <bool HIDES>
static __device__ __forceinline__ void attend(const Attention& p, const Place& at, State& r, const u32 (&r_q)[STEPS][ATOMS][4],
                                              const Element* s_q, const Element* s_k, const Element* s_v, int key) {
    float r_s[ATOMS][KEYS / 8][4] = {};
    multiply_rows<HELD>(r_s, r_q, s_q, s_k, at.lane);
    if constexpr (HIDES || SCALED) mask_scores<HIDES>(p, at, r_s, key);
    soften(p, at, r, r_s, key);
    add_weighted(r.o, r_s, s_v, at.lane);
}

// Divides by the sums.
static __device__ __forceinline__ void finish(State& r) {
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = r.sum[atom][half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            const float end = ending(sum);
#pragma unroll
            for (int i = 0; i < WIDTH / 8; ++i) {
                float &a = r.o[atom][i][2 * half], &b = r.o[atom][i][2 * half + 1];
                // A row without a key is zeros whatever was multiplied by 0.
                a = sum == 0.0f ? 0.0f : a * end;
                b = sum == 0.0f ? 0.0f : b * end;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_tensor(const __grid_constant__ Parameter p) {
    extern __shared__ uint4 s_memory[];
    Element* s_stages = (Element*)s_memory;
    Element* s_q = s_stages + (HELD ? STAGE : 2 * STAGE);
    const u64 all_heads = p.batch * p.heads, head = blockIdx.x % all_heads;
    const int tile = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads);
    const int lane = threadIdx.x & 31, first = tile * QUERIES, end = min(first + QUERIES, (int)p.queries);
    const int warp_first = first + (int)threadIdx.x / 32 * 16 * ATOMS;
    Place at;
    at.sequence = head / p.heads;
    at.head = head % p.heads;
    at.query = warp_first + (lane >> 2);
    at.lane = lane;
    at.last = last_key(p, at.sequence);
    at.seed = DROPOUT ? (u32)*p.g_seed : 0;
    const Element* g_k = p.g_k + start(p.k, at.sequence, at.head / p.group);
    const Element* g_v = p.g_v + start(p.v, at.sequence, at.head / p.group);
    // Keys that the block works on, that the warp works on, and that all queries of the warp see.
    const int block_end = seen(p, at.last, end - 1), warp_whole = seen(p, at.last, warp_first);
    const int warp_end = warp_first < end ? seen(p, at.last, min(warp_first + 16 * ATOMS, end) - 1) : 0;

    State r;
#pragma unroll
    for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            r.maximum[atom][half] = never();
            r.sum[atom][half] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) r.o[atom][i][e] = 0.0f;
        }
    }

    load_rows<QUERIES, THREADS>(s_q, p.g_q + start(p.q, at.sequence, at.head), p.q.position, first, end);
    if (block_end > 0) {
        load_rows<KEYS, THREADS>(s_stages, g_k, p.k.position, 0, block_end);
        load_rows<KEYS, THREADS>(s_stages + KEYS * ROW, g_v, p.v.position, 0, block_end);
    }
    await_all_copies();
    __syncthreads();
    u32 r_q[STEPS][ATOMS][4];
    const Element* s_own = s_q + (int)threadIdx.x / 32 * 16 * ATOMS * ROW;
    if constexpr (HELD) {
        hold_left(r_q, s_own, lane);
        // The second stage is free once all warps have their queries.
        __syncthreads();
    }
    int stage = 0;
    for (int key = 0; key < block_end; key += KEYS) {
        if (key + KEYS < block_end) {
            Element* s_next = s_stages + (stage ^ 1) * STAGE;
            load_rows<KEYS, THREADS>(s_next, g_k, p.k.position, key + KEYS, block_end);
            load_rows<KEYS, THREADS>(s_next + KEYS * ROW, g_v, p.v.position, key + KEYS, block_end);
        }
        const Element *s_k = s_stages + stage * STAGE, *s_v = s_k + KEYS * ROW;
        if (key + KEYS <= warp_whole && warp_end > 0) {
            attend<false>(p, at, r, r_q, s_own, s_k, s_v, key);
        } else if (key < warp_end) {
            attend<true>(p, at, r, r_q, s_own, s_k, s_v, key);
        }
        await_all_copies();
        __syncthreads();
        stage ^= 1;
    }
    finish(r);
    Element* g_o = p.g_o + start(p.o, at.sequence, at.head);
    Element* s_o = s_stages + (int)threadIdx.x / 32 * 16 * ATOMS * ROW;
    store_rows(s_o, g_o, p.o.position, warp_first, (int)p.queries, r.o, lane);
    follow(p, at.sequence, at.head, first, end, s_memory);
}
