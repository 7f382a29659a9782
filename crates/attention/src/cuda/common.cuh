// What the kernels of attention share: the parameter, which keys a query sees, masks, dropout.
//
// STORAGE, KV_STORAGE and MASK_STORAGE (0 f32, 1 f16, 2 bf16), WIDTH, SCALE, MASK, DROPOUT, THRESHOLD, OFFSET and KEPT are constants
// that stand before this file; of the work on scores CAP and WINDOW (0 for none), SLOPED, ADDS_BIAS and DOCUMENTS.

constexpr int FULL = 0, CAUSAL = 1, ADDITIVE = 2, CACHED = 3;
// Whether a score is more than a product with a factor, whether something is added to it, and whether keys are sifted by more than causality.
constexpr bool CAPPED = CAP > 0.0f, ADDED = MASK == ADDITIVE || ADDS_BIAS, CHANGED = CAPPED || SLOPED || ADDED, SIFTED = WINDOW > 0 || DOCUMENTS;
constexpr float LOG2E = 1.44269504f;
static __device__ __forceinline__ float never() { return __int_as_float(0xff800000); }

typedef Stored<STORAGE>::Element Element;
typedef Stored<KV_STORAGE>::Element KeyElement;
typedef Stored<MASK_STORAGE>::Element MaskElement;

// Elements from one index to the next.
struct Strides {
    u64 batch, head, position;
};

// Operands of the work on scores: none take no room.
template <bool THERE> struct ScoreOperands {};
template <> struct ScoreOperands<true> {
    const float* g_slopes;
    const int* g_documents;
    // Of sequences and heads.
    u64 slope_strides[2], document_strides[2];
};

// The parameter: 64-bit words, in the order in which the launch lists them.
struct Attention : ScoreOperands<SLOPED || DOCUMENTS> {
    const Element* g_q;
    const KeyElement* g_k;
    const KeyElement* g_v;
    const MaskElement* g_mask;
    const int* g_seed;
    const int* g_positions;
    Element* g_o;
    // Of ranges of keys: largest score and sum of each row, then rows of values.
    float* g_sums;
    float* g_values;
    u64 batch, heads, group, queries, keys, splits;
    Strides q, k, v, mask, o;
};

static __device__ __forceinline__ u64 start(const Strides& strides, u64 sequence, u64 head) {
    return sequence * strides.batch + head * strides.head;
}

// The last key that query 0 of a sequence sees; below 0 if it sees none. Later queries see one more each.
static __device__ __forceinline__ long long last_key(const Attention& p, u64 sequence) {
    if constexpr (MASK == CACHED) return p.g_positions[sequence];
    return (long long)p.keys - (long long)p.queries;
}

static __device__ __forceinline__ int bounded_key(const Attention& p, long long key) {
    return key < 0 ? 0 : key > (long long)p.keys ? (int)p.keys : (int)key;
}

// The end of the keys that a query sees.
static __device__ __forceinline__ int seen(const Attention& p, long long last, int query) {
    constexpr bool FORWARD = MASK == FULL || MASK == ADDITIVE;
    if constexpr (FORWARD && WINDOW == 0) return (int)p.keys;
    return bounded_key(p, last + query + (FORWARD ? WINDOW : 1));
}

// The first key that a query sees.
static __device__ __forceinline__ int first_seen(const Attention& p, long long last, int query) {
    if constexpr (WINDOW == 0) return 0;
    return bounded_key(p, last + query + 1 - WINDOW);
}

static __device__ __forceinline__ float slope_of_head(const ScoreOperands<false>&, u64, u64) { return 0.0f; }
static __device__ __forceinline__ float slope_of_head(const ScoreOperands<true>& p, u64 sequence, u64 head) {
    return p.g_slopes[sequence * p.slope_strides[0] + head * p.slope_strides[1]];
}

static __device__ __forceinline__ int document(const ScoreOperands<false>&, u64, u64, long long) { return 0; }
static __device__ __forceinline__ int document(const ScoreOperands<true>& p, u64 sequence, u64 head, long long key) {
    return p.g_documents[sequence * p.document_strides[0] + head * p.document_strides[1] + key];
}

// The least and the largest document of some keys.
struct Documents {
    int low, high;
};

// Those of keys from `first` to before `end`, in every lane of a warp.
static __device__ __forceinline__ Documents documents_of(const Attention& p, u64 sequence, u64 head, long long first, long long end) {
    Documents r = {0x7fffffff, -0x7fffffff - 1};
    if constexpr (DOCUMENTS) {
        for (long long key = first + (threadIdx.x & 31); key < end; key += 32) {
            const int own = document(p, sequence, head, key);
            r.low = min(r.low, own);
            r.high = max(r.high, own);
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) {
            r.low = min(r.low, shuffle_xor(r.low, mask));
            r.high = max(r.high, shuffle_xor(r.high, mask));
        }
    }
    return r;
}

// The first of tiles, from `at` to before `end`, that may share a document with `own`. The document of `at` is that of key `at + offset`.
template <int ROWS>
static __device__ __forceinline__ int next_tile(const Attention& p, u64 sequence, u64 head, const Documents& own, int at, int end,
                                                long long offset) {
    if constexpr (DOCUMENTS) {
        for (; at < end; at += ROWS) {
            const Documents others = documents_of(p, sequence, head, offset + at, offset + min(at + ROWS, end));
            if (own.low <= others.high && others.low <= own.high) break;
        }
    }
    return at;
}

// A scaled score as soft cap and slopes leave it.
static __device__ __forceinline__ float bent_score(const Attention& p, u64 sequence, u64 head, long long last, float s, int query, int key) {
    if constexpr (CAPPED) s = CAP * tanhf(s * (1.0f / CAP));
    if constexpr (SLOPED) {
        // The score of a query that there is not stays small: its power is multiplied by zeros.
        if (query < (int)p.queries) s = fmaf(slope_of_head(p, sequence, head), (float)(key - last - query), s);
    }
    return s;
}

// What the slope of a scaled score is multiplied by for the soft cap.
static __device__ __forceinline__ float bend_of(float s) {
    if constexpr (!CAPPED) return 1.0f;
    const float bent = tanhf(s * (1.0f / CAP));
    return fmaf(-bent, bent, 1.0f);
}

// Whether a window or documents hide a key.
static __device__ __forceinline__ bool is_hidden(const Attention& p, u64 sequence, u64 head, long long last, int query, int key) {
    if constexpr (WINDOW > 0) {
        const long long distance = key - last - query;
        if (distance <= -WINDOW || distance >= WINDOW) return true;
    }
    if constexpr (DOCUMENTS) {
        if (query >= (int)p.queries || key >= (int)p.keys) return false;
        return document(p, sequence, head, key) != document(p, sequence, head, last + query);
    }
    return false;
}

// What is added to the scores of a query: its row of the mask.
static __device__ __forceinline__ const MaskElement* mask_row(const Attention& p, u64 sequence, u64 head, u64 query) {
    if constexpr (!ADDED) return nullptr;
    return p.g_mask + start(p.mask, sequence, head) + query * p.mask.position;
}

// A score as it is exponentiated, but for a factor: scaled if `SCALED`, masked, hidden.
template <bool SCALED, bool HIDES>
static __device__ __forceinline__ float masked_score(const Attention& p, u64 sequence, u64 head, long long last, float s, int query,
                                                     int key) {
    if constexpr (SCALED) s *= SCALE;
    s = bent_score(p, sequence, head, last, s, query, key);
    if constexpr (ADDED) {
        if (query < (int)p.queries && key < (int)p.keys) s += widen<MASK_STORAGE>(mask_row(p, sequence, head, query)[key]);
    }
    return HIDES && (key >= seen(p, last, query) || is_hidden(p, sequence, head, last, query, key)) ? never() : s;
}

// A finite number for a row that has seen only -inf: the zeros it needs come out.
static __device__ __forceinline__ float shift_of(float maximum) { return maximum == never() ? 0.0f : maximum; }

// What ends a row: division by the sum of all probabilities, and what dropout multiplies by.
static __device__ __forceinline__ float ending(float sum) { return sum == 0.0f ? 0.0f : KEPT / sum; }

// The index of key 0 of a row of probabilities among all of them.
static __device__ __forceinline__ u64 row_elements(const Attention& p, u64 sequence, u64 head, u64 query) {
    return ((sequence * p.heads + head) * p.queries + query) * p.keys;
}

static __device__ __forceinline__ bool keeps(u64 element, u32 seed) {
    return word(philox(element >> 2, seed, OFFSET), (u32)element & 3) >= THRESHOLD;
}

// Drops what is to be dropped of two neighbouring probabilities.
static __device__ __forceinline__ void drop2(float& first, float& second, u64 element, u32 seed) {
    const u32 lane = (u32)element & 3;
    const Words4 words = philox(element >> 2, seed, OFFSET);
    u32 next = word(words, (lane + 1) & 3);
    if (lane == 3) next = philox((element >> 2) + 1, seed, OFFSET).w[0];
    if (word(words, lane) < THRESHOLD) first = 0.0f;
    if (next < THRESHOLD) second = 0.0f;
}
