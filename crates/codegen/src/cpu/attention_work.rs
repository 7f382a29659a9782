//! What attention does on the CPU.

use deuteron_graph::Dtype;
use deuteron_plan::{Class, LANES, Work};

use crate::attention::{AttentionKernel, AttentionMask, AttentionShape};

/// Two products and an exponential for each score that is seen; nothing is packed.
pub(super) fn attention_work(kernel: &AttentionKernel, shape: &AttentionShape) -> Work {
    let attention = kernel.sized(shape, 0);
    let heads = (shape.batch * shape.heads) as f64;
    let (seen, computed) = (attention.seen_scores() as f64 * heads, attention.computed_scores() as f64 * heads);
    let width = kernel.width as f64;
    let mut work = Work {
        chunks: attention.forward_tasks().max(1) as f64,
        last_chunk: 1.0,
        products: 2.0 * attention.forward_tasks() as f64,
        matrix_flops: 4.0 * seen * width,
        padded_flops: 4.0 * computed * width,
        matrix_bits: 8 * kernel.dtype.bytes() as u32,
        matrix_rows: shape.queries,
        ..Work::default()
    };
    let scores = computed / LANES as f64;
    work.add(Class::Exp, scores);
    if kernel.dtype != Dtype::F32 {
        // Keys and values are widened for each tile of queries.
        work.add(Class::Convert, scores * 2.0 * width / attention.tile_queries() as f64);
    }
    if let AttentionMask::Additive(_) = kernel.mask {
        work.add(Class::Move, 2.0 * scores);
        work.add(Class::Simple, scores);
    }
    if kernel.dropout.is_some() {
        work.add(Class::Random, scores);
        work.add(Class::Move, 2.0 * scores);
    }
    work
}
