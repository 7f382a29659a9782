// What the two kernels for the gradients of keys and values share: `hopper_dkv.cu`, and `hopper_dkv_wide.cu` of wide heads. A block goes over the queries
// that see its keys, of all heads that read them, with the statistics that `hopper_dq.cu` leaves.

// Wide heads: probabilities on their way from one warpgroup to the other, of two tiles, and four barriers.
constexpr int SENT_BYTES = TILE * OWN_KEYS * 4;
typedef Ring<OWN_KEYS, QUERY_STAGES, SLOPE_STAGES, WIDE ? 2 * SENT_BYTES + 32 : 0> KeyRing;
static_assert(KeyRing::BYTES == KEYS_SHARED, "the host asks for as much");

// Earlier keys are seen by more.
static __device__ __forceinline__ bool find_keys(const Mapped& p, int round, Work& work) {
    const Attention& of = p.backward.of;
    int rank;
    if (!find_work<OWN_KEYS>(p, (int)of.heads / (int)of.group, (int)of.keys, round, work, rank)) return false;
    work.first = rank * OWN_KEYS;
    work.begin = first_query(of, last_key(of, 0), work.first);
    work.count = ((int)of.queries - work.begin + TILE - 1) / TILE;
    return true;
}

static __device__ __forceinline__ void fetch_for_keys(const Mapped& p, KeyRing ring) {
    const int group = (int)p.backward.of.group, queries = (int)p.backward.of.queries;
    u32 at = 0;
    Work work;
    // One loop, of turns that are each a head of a round: few registers are left here.
    for (int turn = 0; find_keys(p, turn / group, work) && work.head >= 0; ++turn) {
        const int head = work.head * group + turn % group;
        if (turn % group == 0) fetch_own(ring, &p.k, &p.v, work, turn / group);
        for (int row = work.begin; row < queries; row += TILE, ++at) {
            ring.open(at, 0, ROWS_BYTES);
            load_rows<TILE>(ring.tile(at, 0), &p.q, ring.full(at, 0), row, head, work.sequence);
            bulk_load(ring.rows(at), rows_of(p, work.sequence, head) + row, ROWS_BYTES, ring.full(at, 0));
            ring.open(at, 1);
            load_rows<TILE>(ring.tile(at, 1), &p.slope, ring.full(at, 1), row, head, work.sequence);
        }
    }
}

// Probabilities of a tile, keys in rows; `hidden` is how many of the tile's queries, counted from this thread's first column, do not
// see its first row.
template <bool HIDES>
static __device__ __forceinline__ void make_probabilities(Scores& r_s, const float4* s_rows, int hidden) {
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
        const float4 rows = s_rows[4 * j];  // of two queries
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& s = r_s[4 * j + e];
            s = ex2(fmaf(s, FACTOR, e % 2 ? -rows.z : -rows.x));
            if (HIDES && 8 * j + e % 2 < hidden + e / 2 * 8) s = 0.0f;
        }
    }
}
