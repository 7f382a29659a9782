// Gradients of the losses of `forward.cuh` with respect to A and B, from their own and from those of logsumexp. With logits Z computed again,
//
//   S[i, j] = d_logsumexp[i] e^(Z[i, j] - logsumexp[i]) - d_loss[i] (KEPT [j = target[i]] + SPREAD),   d_A = S B^T,   d_B = A^T S
//
// where d_logsumexp holds what reaches logsumexp by the loss too. Slopes S of some columns, all rows, are stored at a time, in the storage
// type of the operands: `slopes.cu` follows their logits. Then d_B of these columns is done (`final.cu`), and their share of d_A is added to
// f32 sums in memory (`resume.cu`, `shares.cu`), which the last columns' share completes.
//
// - Columns come in one order, so sums do too.
// - Each of these is the matmul of `hopper/` in a namespace of its own, with constants of its own. KEPT and SPREAD stand before.

constexpr float LOG2_E = 1.4426950408889634f;

namespace tail {
struct Parameters {
    const int* targets;        // [m]
    const float* logsumexp;    // [m]
    const float* d_logsumexp;  // [m]
    const float* d_loss;       // [m]
    u64 logsumexp_stride, d_logsumexp_stride, d_loss_stride;
    u64 first, width;          // columns of Z that have slopes now
    u16* stored;               // what is stored, rounded: slopes, d_B of these columns or d_A
    u64 pitch;                 // elements from one row of it to the next
    float* sums;               // f32 of d_A, whole tiles of it
    u64 sums_pitch;
    u64 is_last;               // of all columns
};
}  // namespace tail
