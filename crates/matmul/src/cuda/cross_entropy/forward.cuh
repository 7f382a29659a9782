// The loss of each row of logits Z[m, n] = A[m, k] B[k, n], which are never stored: `statistics.cu` follows the sums of a tile of the matmul in
// `hopper/`, `combine.cu` makes rows of tiles.
//
//   logsumexp[i] = log sum_j e^Z[i, j]
//   loss[i] = logsumexp[i] - KEPT Z[i, target[i]] - SPREAD sum_j Z[i, j],   0 where target[i] is `ignored`
//
// - Z is rounded to the storage type of the operands, all else is f32. Exponentials of a tile are relative to the row's largest logit there.
// - Partials of a row lie side by side, one per column of tiles, and are combined in one order: lanes of a warp, then a tree.
// - A target that is neither a column of Z nor `ignored` is a fault; its row is NaN.
//
// KEPT (1 - label smoothing) and SPREAD (label smoothing / n) are constants that stand before this file.

constexpr float LOG2_E = 1.4426950408889634f;

namespace tail {
// A row of a tile.
struct Partial {
    float most, sum;  // the largest logit, and the sum of e^(logit - most)
};

struct Parameters {
    const int* targets;  // [m]
    Partial* partials;   // [m, column tiles]
    float* totals;       // [m, column tiles]: the sum of logits; only where SPREAD is not 0
    float* picked;       // [m]: the logit of the target; written where it is a column
    u64 classes;         // n
};
}  // namespace tail

static __device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
// What numbers are relative to in their exponent.
static __device__ __forceinline__ float shift_of(float most) { return most == minus_infinity() ? 0.0f : most; }
