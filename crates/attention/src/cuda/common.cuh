// What the kernels of attention share: the parameter, which keys a query sees, masks, dropout.
//
// STORAGE, KV_STORAGE and MASK_STORAGE (0 f32, 1 f16, 2 bf16), WIDTH, SCALE, MASK, DROPOUT, THRESHOLD, OFFSET and KEPT are constants
// that stand before this file.

constexpr int FULL = 0, CAUSAL = 1, ADDITIVE = 2, CACHED = 3;
constexpr float LOG2E = 1.44269504f;
static __device__ __forceinline__ float never() { return __int_as_float(0xff800000); }

typedef Stored<STORAGE>::Element Element;
typedef Stored<KV_STORAGE>::Element KeyElement;
typedef Stored<MASK_STORAGE>::Element MaskElement;

// Elements from one index to the next.
struct Strides {
    u64 batch, head, position;
};

// The parameter: 64-bit words, in the order in which the launch lists them.
struct Attention {
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

// How many keys a query sees.
static __device__ __forceinline__ int seen(const Attention& p, long long last, int query) {
    if constexpr (MASK == FULL || MASK == ADDITIVE) return (int)p.keys;
    const long long count = last + query + 1;
    return count < 0 ? 0 : count > (long long)p.keys ? (int)p.keys : (int)count;
}

// What is added to the scores of a query: its row of the mask.
static __device__ __forceinline__ const MaskElement* mask_row(const Attention& p, u64 sequence, u64 head, u64 query) {
    if constexpr (MASK != ADDITIVE) return nullptr;
    return p.g_mask + start(p.mask, sequence, head) + query * p.mask.position;
}

// A score as it is exponentiated, but for a factor: scaled if `SCALED`, masked, hidden.
template <bool SCALED, bool HIDES>
static __device__ __forceinline__ float masked_score(const Attention& p, u64 sequence, u64 head, long long last, float s, int query,
                                                     int key) {
    if constexpr (SCALED) s *= SCALE;
    if constexpr (MASK == ADDITIVE) {
        if (query < (int)p.queries && key < (int)p.keys) s += widen<MASK_STORAGE>(mask_row(p, sequence, head, query)[key]);
    }
    return HIDES && key >= seen(p, last, query) ? never() : s;
}

// A finite number for a row that has seen only -inf: the zeros it needs come out.
static __device__ __forceinline__ float shift_of(float maximum) { return maximum == never() ? 0.0f : maximum; }

// A row is deep if its largest score, as a power of 2, is below this, which only a mask makes of it: torch.finfo(float32).min, say, at all of its
// keys. Scores are rounded to multiples of 16 there (8 where probabilities are f16, which have fewer digits and less range), so that the keys of the
// largest score weigh the same each and all others nothing; and what a product rounds is too much for a power of 2, so scores are compared instead.
constexpr float DEEPEST = STORAGE == 1 ? -134217728.0f : -268435456.0f;
// Lower scores would not be finite as powers of 2.
constexpr float LOWEST = -1.70141183e38f;

static __device__ __forceinline__ bool is_deep(float maximum) { return MASK == ADDITIVE && maximum < DEEPEST && maximum != never(); }

// A score as a power of 2, for which it takes a factor: finite if the score is.
static __device__ __forceinline__ float power_of(float score, float factor) {
    if constexpr (MASK == ADDITIVE) {
        if (score < LOWEST && score != never()) score = LOWEST;
    }
    return score * factor;
}

// A score of a deep row of this maximum: 0 if it is the largest, else -inf, or NaN. Other rows keep theirs.
static __device__ __forceinline__ float levelled(float score, float maximum) {
    const float power = power_of(score, LOG2E);
    return power < maximum ? never() : power == maximum ? 0.0f : power;
}

// What levelled scores are shifted by; in other rows all scores.
static __device__ __forceinline__ float level_of(float maximum) {
    if constexpr (MASK == ADDITIVE) return maximum < DEEPEST ? 0.0f : maximum;
    return shift_of(maximum);
}

// What sums of a row are multiplied by when its maximum rises.
static __device__ __forceinline__ float fading(float before, float maximum) {
    if constexpr (MASK == ADDITIVE) {
        if (before == maximum) return 1.0f;
    }
    return ex2(before - level_of(maximum));
}

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
