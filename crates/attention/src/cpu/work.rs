//! The work of attention on the CPU.

use deuteron_codegen::cpu::count::with_epilogue;
use deuteron_codegen::cpu::emit::emit;
use deuteron_graph::Dtype;
use deuteron_matmul::cpu::work;
use deuteron_plan::{Class, LANES, Work};

use crate::block::LoweredAttentionBlock;
use crate::kernel::{AttentionKernel, AttentionShape};
use crate::rows::{AttentionRowsLaunch, LoweredAttentionRows};

/// Attention once more, then five products and an exponential for each score.
pub(super) fn backward_work(kernel: &AttentionKernel, shape: &AttentionShape) -> Work {
    let attention = kernel.sized(shape, 0);
    let forward = attention_work(kernel, shape);
    let mut work = Work { chunks: attention.backward_tasks().max(1) as f64, ..forward.clone() };
    work.products += 5.0 * attention.backward_tasks() as f64;
    work.matrix_flops += 2.5 * forward.matrix_flops;
    work.padded_flops += 2.5 * forward.padded_flops;
    for (sum, more) in work.vectors.iter_mut().zip(forward.vectors) {
        *sum += more;
    }
    // Gradients of queries are summed in memory of their own for each tile of keys.
    let scores = attention.computed_scores() * (shape.batch * shape.heads) as f64 / LANES as f64;
    work.add(Class::Simple, 3.0 * scores);
    work.add(Class::Move, 4.0 * scores);
    work
}

/// Two products and an exponential for each score that is seen; nothing is packed.
pub(super) fn attention_work(kernel: &AttentionKernel, shape: &AttentionShape) -> Work {
    let attention = kernel.sized(shape, 0);
    let heads = (shape.batch * shape.heads) as f64;
    let (seen, computed) = (attention.seen_scores() * heads, attention.computed_scores() * heads);
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
    if kernel.kv != Dtype::F32 {
        // Keys and values are widened for each tile of queries.
        work.add(Class::Convert, scores * 2.0 * width / attention.tile_queries() as f64);
    }
    if kernel.added().is_some() {
        work.add(Class::Move, 2.0 * scores);
        work.add(Class::Simple, scores);
    }
    let rules = kernel.scores;
    if rules.soft_cap.is_some() {
        work.add(Class::Tanh, scores);
        work.add(Class::Simple, 2.0 * scores);
    }
    // Of slopes a product and a sum; of a window and of documents comparisons.
    let compared = [rules.slopes, rules.window.is_some(), rules.documents].into_iter().filter(|&there| there).count();
    work.add(Class::Simple, 2.0 * compared as f64 * scores);
    if kernel.dropout.is_some() {
        work.add(Class::Random, scores);
        work.add(Class::Move, 2.0 * scores);
    }
    work
}

/// Attention, and the tile program of the row work once over its rows.
pub(super) fn rows_work(LoweredAttentionRows { kernel, launch }: LoweredAttentionRows) -> Work {
    let kernel = kernel.map(|body| emit(&body));
    let AttentionRowsLaunch { args, shape, .. } = &launch;
    let joined = kernel.epilogue.cols / kernel.attention.width;
    let rows = shape.batch * shape.heads / joined * shape.queries;
    let mut row_args = args[kernel.operands()..].to_vec();
    row_args.insert(kernel.result, args[0].internal(kernel.attention.dtype));
    with_epilogue(attention_work(&kernel.attention, shape), &kernel.epilogue, &row_args, rows)
}

/// Attention, and then the matmul of its rows with the weight.
pub(super) fn block_work(LoweredAttentionBlock { kernel, launch }: LoweredAttentionBlock) -> Work {
    let kernel = kernel.map(|body| emit(&body));
    let next = work::work(&kernel.product, &launch.matmul_launch(&kernel));
    Work { next: Some(Box::new(next)), ..attention_work(&kernel.attention, &launch.attention) }
}
