// The gradient of queries by warpgroups, and what the other kernel needs of each row.
//
// Heads of more than 80 go over the keys twice, for the statistics and then for dq. Others have registers to go once (ONCE):
//
//   dq / scale = sum of p (dp - delta) k = sum of p (dp - centre) k - (delta - centre) sum of p k
//
// whatever the centre is. It is the delta of the keys seen when it was last set, and it is set anew, and the sums so far with it, where
// a tile weighs half as much as all before it. So what is rounded is of the size of dp - delta, also where one key has all the weight.

constexpr bool ONCE = WIDTH <= 80;
// The largest score stays behind by up to so many powers of 2 before sums are scaled anew; f16 has none to spare for weighted slopes.
constexpr float SLACK = STORAGE == 1 ? 0.0f : 8.0f;

typedef Ring<OWN_QUERIES, KEY_STAGES, VALUE_STAGES, 0> QueryRing;
static_assert(QueryRing::BYTES == QUERIES_SHARED, "the host asks for as much");

// Later queries see more.
static __device__ __forceinline__ bool find_queries(const Mapped& p, int round, Work& work) {
    const Attention& of = p.backward.of;
    int rank;
    if (!find_work<OWN_QUERIES>(p, (int)of.heads, (int)of.queries, round, work, rank)) return false;
    work.first = (((int)of.queries + OWN_QUERIES - 1) / OWN_QUERIES - 1 - rank) * OWN_QUERIES;
    work.begin = 0;
    work.count = (keys_seen(of, min(work.first + OWN_QUERIES, (int)of.queries) - 1) + TILE - 1) / TILE;
    return true;
}

static __device__ __forceinline__ void fetch_for_queries(const Mapped& p, QueryRing ring) {
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_queries(p, round, work); ++round) {
        if (work.head < 0) continue;
        fetch_own(ring, &p.q, &p.slope, work, turn++);
        const int key_head = work.head / (int)p.backward.of.group;
        for (int i = 0; i < (ONCE ? 1 : 2) * work.count; ++i, ++at) {
            const int row = (i < work.count ? i : i - work.count) * TILE;
            ring.open(at, 0);
            load_rows<TILE>(ring.tile(at, 0), &p.k, ring.full(at, 0), row, key_head, work.sequence);
            ring.open(at, 1);
            load_rows<TILE>(ring.tile(at, 1), &p.v, ring.full(at, 1), row, key_head, work.sequence);
        }
    }
}

// Scores and slopes of a tile join the statistics.
static __device__ __forceinline__ void count(Statistics (&r)[2], const Scores& r_s, const Scores& r_slope) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = never();
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) most = fmaxf(most, fmaxf(r_s[4 * j + 2 * half], r_s[4 * j + 2 * half + 1]));
        raise(r[half], most * FACTOR);
        const float shift = shift_of(r[half].maximum);
        float sums[2] = {}, slopes[2] = {};
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int i = 4 * j + 2 * half + e;
                const float power = ex2(fmaf(r_s[i], FACTOR, -shift));
                sums[e] += power;
                slopes[e] = fmaf(power, r_slope[i], slopes[e]);
            }
        }
        r[half].sum += sums[0] + sums[1];
        r[half].slope += slopes[0] + slopes[1];
    }
}

// Keys of the tiles of a pass that a thread's queries see.
struct Seen {
    int tiles;             // that some query of the warpgroup sees
    int whole, end0, end1;  // keys that all of them see; that this thread's rows see, counted from its first column

    __device__ __forceinline__ void hide(Scores& r_s, int i) const {
        const int key = i * TILE;
        if (key + TILE > whole) ::hide(r_s, end0 - key, end1 - key);
    }
};

// The first pass of two: statistics of the rows.
template <int COUNT>
static __device__ __forceinline__ void count_tiles(float2 (&rows)[2], QueryRing ring, const Thread& thread, const Held<OWN_QUERIES, COUNT>& held, const Seen& sight, u32 at) {
    Statistics r[2];
    clear(r[0]);
    clear(r[1]);
    Scores r_s, r_slope;
#pragma unroll 1
    for (int i = 0; i < sight.tiles; ++i) {
        issue(r_s, r_slope, ring, thread, held, at + i);
        wgmma_wait<0>();
        pin(r_s);
        pin(r_slope);
        ring.release(at + i, 1);
        ring.release(at + i, 0);
        sight.hide(r_s, i);
        count(r, r_s, r_slope);
    }
    rows[0] = finish<4>(r[0]);
    rows[1] = finish<4>(r[1]);
}

// Slopes of the scores of a tile as weights; the scores are there.
static __device__ __forceinline__ void make_weights(Weights& r_weights, Scores& r_s, Scores& r_slope, const float2 (&rows)[2], QueryRing ring, const Seen& sight,
                                                    u32 at, int i) {
    sight.hide(r_s, i);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) r_s[j] = ex2(fmaf(r_s[j], FACTOR, -rows[j / 2 & 1].x));
    wgmma_wait<0>();
    pin(r_slope);
    ring.release(at + i, 1);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) r_s[j] = slope_of(r_s[j], r_slope[j], rows[j / 2 & 1].y);
    narrow_weights(r_weights, r_s);
}

// The second pass: dq, but for the scale.
template <int COUNT>
static __device__ __forceinline__ void add_dq(Result& r_dq, const float2 (&rows)[2], QueryRing ring, const Thread& thread, const Held<OWN_QUERIES, COUNT>& held, const Seen& sight, u32 at) {
    Scores r_s, r_slope;
    Weights r_weights;
    clear(r_dq);
    if (sight.tiles == 0) return;
    issue(r_s, r_slope, ring, thread, held, at);
    wait_scores(r_s);
    const int last = sight.tiles - 1;
#pragma unroll 1
    for (int i = 0; i < last; ++i) {
        make_weights(r_weights, r_s, r_slope, rows, ring, sight, at, i);
        issue_weighted(r_dq, r_weights, ring.tile(at + i, 0));
        issue_one<0>(r_s, ring, thread, held, at + i + 1);
        if constexpr (WIDE) {
            // Slopes take the registers of weights.
            wgmma_wait<0>();
            pin(r_s);
            pin(r_dq);
            ring.release(at + i, 0);
            issue_one<1>(r_slope, ring, thread, held, at + i + 1);
        } else {
            issue_one<1>(r_slope, ring, thread, held, at + i + 1);
            wait_scores(r_s);
            pin(r_dq);
            ring.release(at + i, 0);
        }
    }
    make_weights(r_weights, r_s, r_slope, rows, ring, sight, at, last);
    issue_weighted(r_dq, r_weights, ring.tile(at + last, 0));
    wgmma_wait<0>();
    pin(r_dq);
    ring.release(at + last, 0);
}

// What a pass that goes over the keys once has of a thread's two rows. Sums are of the keys that the thread has seen.
struct Running {
    float maximum[2], sum[2], slope[2];
    float centre[2];
    Result weighted, plain;  // sums of p (dp - centre) k and of p k
};

// Sums of the tile join those of the row over all lanes, and the centre becomes its delta so far.
static __device__ __forceinline__ void set_centre(Running& r, const float (&factor)[2], const float (&sum)[2], const float (&slope)[2]) {
    float moved[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        r.sum[half] *= factor[half];
        r.slope[half] *= factor[half];
        float all = r.sum[half] + sum[half], slopes = r.slope[half] + slope[half];
        all += shuffle_xor(all, 1);
        slopes += shuffle_xor(slopes, 1);
        all += shuffle_xor(all, 2);
        slopes += shuffle_xor(slopes, 2);
        const float centre = all > 0.0f ? slopes / all : 0.0f;
        moved[half] = r.centre[half] - centre;
        r.centre[half] = centre;
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) {
        r.plain[i] *= factor[i / 2 & 1];
        r.weighted[i] = fmaf(moved[i / 2 & 1], r.plain[i], r.weighted[i] * factor[i / 2 & 1]);
    }
}

// A tile, whose scores are there, becomes weights; its slopes are on their way, and nothing else is.
static __device__ __forceinline__ void weigh(Running& r, Weights& r_p, Weights& r_weighted, Scores& r_s, Scores& r_slope, const Seen& sight, int i) {
    sight.hide(r_s, i);
    float factor[2], sum[2] = {}, slope[2] = {};
    bool moves = raise_maxima(r.maximum, factor, r_s, FACTOR, SLACK);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) {
        r_s[j] = ex2(fmaf(r_s[j], FACTOR, -shift_of(r.maximum[j / 2 & 1])));
        sum[j / 2 & 1] += r_s[j];
    }
    wgmma_wait<0>();
    pin(r_slope);
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) {
        r_slope[j] *= r_s[j];
        slope[j / 2 & 1] += r_slope[j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) moves |= 2.0f * sum[half] > r.sum[half] * factor[half];
    if (any_of_warp(moves)) set_centre(r, factor, sum, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        r.sum[half] += sum[half];
        r.slope[half] += slope[half];
    }
#pragma unroll
    for (int j = 0; j < TILE / 2; ++j) r_slope[j] = fmaf(-r.centre[j / 2 & 1], r_s[j], r_slope[j]);
    narrow_weights(r_p, r_s);
    narrow_weights(r_weighted, r_slope);
}

// The only pass: statistics of the rows, and dq, but for the scale.
template <int COUNT>
static __device__ __forceinline__ void go_once(Result& r_dq, float2 (&rows)[2], QueryRing ring, const Thread& thread, const Held<OWN_QUERIES, COUNT>& held, const Seen& sight, u32 at) {
    Running r;
    r.maximum[0] = r.maximum[1] = never();
    r.sum[0] = r.sum[1] = r.slope[0] = r.slope[1] = r.centre[0] = r.centre[1] = 0.0f;
    clear(r.weighted);
    clear(r.plain);
    if (sight.tiles > 0) {
        Scores r_s, r_slope;
        Weights r_p, r_weighted;
        issue(r_s, r_slope, ring, thread, held, at);
        wait_scores(r_s);
        const int last = sight.tiles - 1;
#pragma unroll 1
        for (int i = 0; i < last; ++i) {
            weigh(r, r_p, r_weighted, r_s, r_slope, sight, i);
            issue_weighted(r.plain, r_p, ring.tile(at + i, 0));
            issue_weighted(r.weighted, r_weighted, ring.tile(at + i, 0));
            issue(r_s, r_slope, ring, thread, held, at + i + 1);
            wait_scores(r_s);
            pin(r.plain);
            pin(r.weighted);
            ring.release(at + i, 0);
        }
        weigh(r, r_p, r_weighted, r_s, r_slope, sight, last);
        issue_weighted(r.plain, r_p, ring.tile(at + last, 0));
        issue_weighted(r.weighted, r_weighted, ring.tile(at + last, 0));
        wgmma_wait<0>();
        pin(r.plain);
        pin(r.weighted);
        ring.release(at + last, 0);
    }
    float end[2], rest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows[half] = finish<4>({r.maximum[half], r.sum[half], r.slope[half]});
        float sum = r.sum[half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        end[half] = ending(sum);
        rest[half] = r.centre[half] - rows[half].y;
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) {
        // A row without a key is zeros whatever was multiplied by 0.
        const float slope = fmaf(rest[i / 2 & 1], r.plain[i], r.weighted[i]);
        r_dq[i] = end[i / 2 & 1] == 0.0f ? 0.0f : slope * end[i / 2 & 1];
    }
}

static __device__ __forceinline__ void work_on_queries(const Mapped& p, QueryRing ring, char* s_base) {
    const Attention& of = p.backward.of;
    const Thread thread = find_thread(ring);
    const int queries = (int)of.queries;
    u32 at = 0, turn = 0;
    Work work;
    for (int round = 0; find_queries(p, round, work); ++round) {
        if (work.head < 0) continue;
        const int first = work.first + thread.group * 64, row = work.first + thread.row;
        const int last = min(first + 64, queries) - 1;
        const Seen sight = {first < queries ? (keys_seen(of, last) + TILE - 1) / TILE : 0, keys_seen(of, first),
                            keys_seen(of, row) - thread.column, keys_seen(of, row + 8) - thread.column};
        mbarrier_wait(ring.own_full(), turn++ & 1);
        Result r_dq;
        float2 rows[2];
        if constexpr (!ONCE) {
            Held<OWN_QUERIES, COUNTED_HELD> held;
            held.load(s_base, thread);
            count_tiles(rows, ring, thread, held, sight, at);
            skip_tiles(ring, at + sight.tiles, at + work.count);
            at += work.count;
        }
        Held<OWN_QUERIES, QUERIES_HELD> held;
        held.load(s_base, thread);
        if constexpr (FREED) release_own(ring, thread);
        if constexpr (ONCE) {
            go_once(r_dq, rows, ring, thread, held, sight, at);
        } else {
            add_dq(r_dq, rows, ring, thread, held, sight, at);
        }
        skip_tiles(ring, at + sight.tiles, at + work.count);
        at += work.count;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Zeros beyond the last query: its slopes are zeros too, so nothing is added.
            const bool exists = row + half * 8 < queries;
            if (thread.column == 0) rows_of(p, work.sequence, work.head)[row + half * 8] = exists ? rows[half] : make_float2(0.0f, 0.0f);
        }
        if constexpr (!FREED) named_barrier_sync(GROUP_BARRIER + thread.group, 128);
        Element* g_dq = p.backward.g_dq + start(p.backward.dq, work.sequence, work.head);
        store_gradient(ring, s_base, find_thread(ring), 0, g_dq, p.backward.dq.position, work.first, queries, r_dq, SCALE);
        if constexpr (!FREED) release_own(ring, thread);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_queries(const __grid_constant__ Mapped p) {
    extern __shared__ char s_memory[];
    char* s_base = s_memory + (-shared_address(s_memory) & 1023);
    const QueryRing ring = make_ring<QueryRing>(s_base);
    if (threadIdx.x >= MULTIPLIERS) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == MULTIPLIERS) fetch_for_queries(p, ring);
    } else {
        setmaxnreg_inc<240>();
        work_on_queries(p, ring, s_base);
    }
}
