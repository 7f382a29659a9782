// What the kernels of probabilities share: the sum of a row as it grows, and what makes probabilities of its scores.
//
//   o = softmax(scale q k^T + mask), stored
//
// - A row that sees no key, or only scores of -inf, is zeros. A score of NaN or +inf makes its whole row NaN, hidden keys too, as
//   0 times NaN. A hidden key is 0 otherwise, whatever it holds.

// The largest score of a thread may stay behind by a factor of up to 2^SLACK, so that most tiles leave the sum as it is.
constexpr float SLACK = 8.0f;

// Of a row, as far as a thread has seen it: about the largest score, as a power of 2, and the sum of powers below it.
struct RowSum {
    float largest, sum;
};

// A probability is 2^(score - shift) factor; the factor is NaN if the row is. The shift of a deep row is its largest score.
struct Ending {
    float shift, factor;
};

static __device__ __forceinline__ void clear(RowSum& r) {
    r.largest = never();
    r.sum = 0.0f;
}

// Scores follow of which `most` is the largest, as a power of 2.
static __device__ __forceinline__ void raise(RowSum& r, float most) {
    if (most > r.largest + SLACK) {
        r.sum *= ex2(r.largest - most);
        r.largest = most;
    }
}

// Joins what LANES neighbouring lanes have seen of a row; all of them get the same bits.
template <int LANES> static __device__ __forceinline__ Ending finish(RowSum r) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float most = fmaxf(r.largest, shuffle_xor(r.largest, mask));
        r.sum *= fading(r.largest, most);
        r.sum += shuffle_xor(r.sum, mask);
        r.largest = most;
    }
    return Ending{shift_of(r.largest), ending(r.sum)};
}

// The probability of a score, levelled where the row is deep, whose power of 2 takes this factor.
static __device__ __forceinline__ float probability(float score, float power, const Ending& row) {
    return ex2(fmaf(score, power, -level_of(row.shift))) * row.factor;
}
