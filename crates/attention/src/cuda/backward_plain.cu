// The gradient of attention for any storage, any width, any strides, in f32 arithmetic, by computing scores again.
//
// - Numbers: products and sums in f32, in an order that the sizes alone decide. Of a row the largest score and the sum stay apart: a
//   logsumexp would be rounded to the size of the scores. Delta is counted from the slope of the largest score: where one key has most of
//   the weight, what is left of its slope is as exact as the weights of the others.
// - `backward_queries`: a block 64 queries, all keys twice: statistics of its rows, which it leaves for the other kernel, then
//   dq. `backward_keys`: a block 64 keys, all queries that see it: dk and dv.
// - Tiles that no row of the block sees, or is seen by, are not read. Blocks with most to do come first.

// Scores of 4 x 4 pairs, and slopes of probabilities where those are kept, else 0.
struct Pairs {
    float s[4][4], slope[4][4];
    bool kept[4][4];
};

// Queries are rows, or keys are; `row` and `column` are the first of this thread, rows follow by one and columns by sixteen.
template <bool QUERIES>
static __device__ __forceinline__ void compute(Pairs& r, Memory& s, const Attention& p, u64 of_all, u32 seed,
                                               const Tile<STORAGE> (&left)[2], const Tile<STORAGE> (&right)[2], int row, int column) {
    r = Pairs{};
    multiply_tiles(r.s, s, left[0], right[0]);
    multiply_tiles(r.slope, s, left[1], right[1]);
    const u64 sequence = of_all / p.heads, head = of_all % p.heads;
    const long long last = last_key(p, sequence);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int query = QUERIES ? row + i : column + 16 * j, key = QUERIES ? column + 16 * j : row + i;
            r.s[i][j] = masked_score<true, true>(p, sequence, head, last, r.s[i][j], query, key);
            r.kept[i][j] = !DROPOUT || keeps(row_elements(p, sequence, head, query) + key, seed);
            r.slope[i][j] = !r.kept[i][j] ? 0.0f : DROPOUT ? r.slope[i][j] * KEPT : r.slope[i][j];
        }
    }
}

// Statistics whose slopes are counted from a centre, the slope of the largest score so far.
struct Centred {
    float maximum, sum, slope, centre;

    // Scores follow of which one, as a power of 2, and its slope are given: the largest.
    __device__ __forceinline__ void raise(float most, float its_slope) {
        if (!(most > maximum)) return;
        const float factor = fading(maximum, most);
        maximum = most;
        sum *= factor;
        // What is not finite is no centre: it would reach keys of no weight.
        move(isfinite(its_slope) ? its_slope : 0.0f, factor);
    }
    __device__ __forceinline__ void move(float to, float factor) {
        slope = fmaf(centre - to, sum, slope * factor);
        centre = to;
    }
    __device__ __forceinline__ void add(float power, float its_slope) {
        sum += power;
        slope = fmaf(power, its_slope - centre, slope);
    }
};

// What makes slopes of the scores of a row, in place of `g_rows`. The shift of a deep row is its largest score.
struct __align__(16) Ended {
    float shift, factor, centre, delta;

    __device__ __forceinline__ float probability(float score) const {
        return ex2(fmaf(is_deep(shift) ? levelled(score, shift) : score, LOG2E, -level_of(shift))) * factor;
    }
    __device__ __forceinline__ float slope(float probability, float of_probability) const {
        return probability * (of_probability - centre - delta);
    }
};

// Joins what sixteen lanes have seen of a row.
static __device__ __forceinline__ Ended end_row(Centred r) {
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) {
        Centred other = {shuffle_xor(r.maximum, mask), shuffle_xor(r.sum, mask), shuffle_xor(r.slope, mask), shuffle_xor(r.centre, mask)};
        const float most = fmaxf(r.maximum, other.maximum), of_own = fading(r.maximum, most), of_other = fading(other.maximum, most);
        r.sum *= of_own;
        other.sum *= of_other;
        // Both lanes take the same one.
        const bool mine = r.maximum != other.maximum ? r.maximum > other.maximum : r.centre > other.centre;
        const float centre = mine ? r.centre : other.centre;
        r.move(centre, of_own);
        other.move(centre, of_other);
        r.maximum = most;
        r.sum += other.sum;
        r.slope += other.slope;
    }
    const bool seen = r.sum != 0.0f;
    return {shift_of(r.maximum), seen ? 1.0f / r.sum : 0.0f, r.centre, seen ? r.slope / r.sum : 0.0f};
}

// Rows of a gradient, times a factor.
static __device__ __forceinline__ void store(Element* g_to, u64 stride, const float (&r)[4][COLUMNS], float factor, int row, int end) {
    const int x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = x + 16 * c;
            if (row + i < end && column < WIDTH) g_to[(row + i) * stride + column] = narrow<STORAGE>(r[i][c] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_queries(const __grid_constant__ Backward p) {
    __shared__ __align__(16) Memory s;
    const Attention& of = p.of;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const u64 all_heads = of.batch * of.heads, of_all = blockIdx.x % all_heads;
    const u64 sequence = of_all / of.heads, head = of_all % of.heads;
    const int first = (int)(gridDim.x / all_heads - 1 - blockIdx.x / all_heads) * TILE;
    const int end = min(first + TILE, (int)of.queries), row = first + 4 * y;
    const int keys = seen(of, last_key(of, sequence), end - 1);
    const u32 seed = DROPOUT ? (u32)*of.g_seed : 0;
    const Tile<STORAGE> own[2] = {{of.g_q + start(of.q, sequence, head), of.q.position, first, end},
                                  {of.g_o + start(of.o, sequence, head), of.o.position, first, end}};
    Tile<STORAGE> facing[2] = {{of.g_k + start(of.k, sequence, head), of.k.position, 0, keys},
                               {of.g_v + start(of.v, sequence, head), of.v.position, 0, keys}};

    Pairs r;
    Centred r_statistics[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r_statistics[i] = {never(), 0.0f, 0.0f, 0.0f};
    for (int key = 0; key < keys; key += TILE) {
        facing[0].first = facing[1].first = key;
        compute<true>(r, s, of, of_all, seed, own, facing, row, key + x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float most = r.s[i][0], its_slope = r.slope[i][0];
#pragma unroll
            for (int j = 1; j < 4; ++j) {
                its_slope = r.s[i][j] > most ? r.slope[i][j] : its_slope;
                most = fmaxf(most, r.s[i][j]);
            }
            r_statistics[i].raise(power_of(most, LOG2E), its_slope);
            const float maximum = r_statistics[i].maximum, shift = level_of(maximum);
            if (is_deep(maximum)) {
#pragma unroll
                for (int j = 0; j < 4; ++j) r.s[i][j] = levelled(r.s[i][j], maximum);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) r_statistics[i].add(ex2(fmaf(r.s[i][j], LOG2E, -shift)), r.slope[i][j]);
        }
    }
    Ended r_rows[4], *g_rows = (Ended*)p.g_rows + of_all * of.queries;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r_rows[i] = end_row(r_statistics[i]);
        if (x == 0 && row + i < end) g_rows[row + i] = r_rows[i];
    }

    float r_dq[4][COLUMNS] = {};
    for (int key = 0; key < keys; key += TILE) {
        facing[0].first = facing[1].first = key;
        compute<true>(r, s, of, of_all, seed, own, facing, row, key + x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s.weights[4 * y + i][x + 16 * j] = r_rows[i].slope(r_rows[i].probability(r.s[i][j]), r.slope[i][j]);
            }
        }
        add_weighted(r_dq, s, facing[0]);
    }
    store(p.g_dq + start(p.dq, sequence, head), p.dq.position, r_dq, SCALE, row, end);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ Backward p) {
    __shared__ __align__(16) Memory s;
    const Attention& of = p.of;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const u64 all_heads = of.batch * of.heads, of_all = blockIdx.x % all_heads;
    const u64 sequence = of_all / of.heads, head = of_all % of.heads;
    const int first = (int)(blockIdx.x / all_heads) * TILE, keys = (int)of.keys, queries = (int)of.queries, row = first + 4 * y;
    const u32 seed = DROPOUT ? (u32)*of.g_seed : 0;
    const Tile<STORAGE> own[2] = {{of.g_k + start(of.k, sequence, head), of.k.position, first, keys},
                                  {of.g_v + start(of.v, sequence, head), of.v.position, first, keys}};
    Tile<STORAGE> facing[2] = {{of.g_q + start(of.q, sequence, head), of.q.position, 0, queries},
                               {of.g_o + start(of.o, sequence, head), of.o.position, 0, queries}};
    const Ended* g_rows = (const Ended*)p.g_rows + of_all * of.queries;

    Pairs r;
    float r_dk[4][COLUMNS] = {}, r_dv[4][COLUMNS] = {};
    for (int query = first_query(of, last_key(of, sequence), first); query < queries; query += TILE) {
        facing[0].first = facing[1].first = query;
        compute<false>(r, s, of, of_all, seed, own, facing, row, query + x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = query + x + 16 * j;
            // Zeros beyond the last query: its slopes are zeros too, so nothing is added.
            const Ended ended = at < queries ? g_rows[at] : Ended{};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float probability = ended.probability(r.s[i][j]);
                r.slope[i][j] = ended.slope(probability, r.slope[i][j]);
                s.weights[4 * y + i][x + 16 * j] = r.kept[i][j] ? probability : 0.0f;
            }
        }
        add_weighted(r_dv, s, facing[1]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; ++i) s.weights[4 * y + i / 4][x + 16 * (i % 4)] = r.slope[i / 4][i % 4];
        add_weighted(r_dk, s, facing[0]);
    }
    store(p.g_dk + start(p.dk, sequence, head), p.dk.position, r_dk, SCALE, row, keys);
    store(p.g_dv + start(p.dv, sequence, head), p.dv.position, r_dv, DROPOUT ? KEPT : 1.0f, row, keys);
}
