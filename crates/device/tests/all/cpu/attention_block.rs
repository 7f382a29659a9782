//! Attention with a projection of its result.

use deuteron_attention::AttentionBlock;
use deuteron_attention::block::{AttentionBlockLaunch, LoweredAttentionBlock};
use deuteron_attention::cpu::family;
use deuteron_codegen::body::Exprs;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::{ArgBinding, Body, Expr, MatmulShape, Stage};
use deuteron_device::{Cpu, Job, Place};
use deuteron_graph::{BinaryOp, Dtype, ReduceOp};
use deuteron_matmul::{Epilogue, Matmul};

use super::attention_rows::heads;
use super::{argument, body, check, loaded};

/// What can be wrong with a job.
struct Parts {
    lowered: LoweredAttentionBlock,
    result: usize,
}

/// The sums less the largest of their row.
fn less_largest() -> Body {
    let mut exprs = Exprs::default();
    let load = exprs.make(Expr::Load(0));
    let largest = exprs.make(Expr::RowValue(0));
    let value = exprs.make(Expr::Binary(BinaryOp::Sub, load, largest));
    let reduced = Stage::RowReduce { op: ReduceOp::Max, value: load, into: 0 };
    body(3, exprs, 1, vec![reduced, Stage::Store { value, arg: 1 }])
}

/// Two heads of width 2 side by side, two queries, one key, by a weight of three columns.
fn parts() -> Parts {
    let (attention, shape) = heads();
    let product = Matmul {
        left: Dtype::F32,
        right: Dtype::F32,
        result: Dtype::F32,
        rights: 1,
        routed: false,
        prologue: None,
        epilogue: Some(Epilogue { body: less_largest(), sums: vec![0] }),
    };
    let arg = |position: usize| ArgBinding {
        leading: if position == 4 { vec![(2, 3)] } else { Vec::new() },
        ..argument(position == 4)
    };
    let launch = AttentionBlockLaunch {
        args: (0..5).map(arg).collect(),
        attention: shape,
        product: MatmulShape { m: 2, n: 3, k: 4, batch: vec![], a: (4, 1), b: (3, 1), c: (3, 1) },
        axes: Vec::new(),
    };
    let kernel = AttentionBlock { attention, product, norm: None };
    Parts { lowered: LoweredAttentionBlock { kernel, launch }, result: 24 }
}

fn job(cpu: &Cpu, change: impl Fn(&mut Parts)) -> Option<Job> {
    let mut parts = parts();
    change(&mut parts);
    let kernel = family::block_kernel(parts.lowered)?;
    let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Input(2), Place::Output(0)];
    Some(super::job(cpu, kernel, places, 3, &[parts.result]))
}

#[test]
fn one_key_gives_its_values_by_the_weight() {
    for threads in [1, 3] {
        let cpu = Cpu::with(threads, Isa::detect());
        let weight = [1.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0];
        let inputs = [&[0.0; 8][..], &[1.0, 2.0, 3.0, 4.0], &weight];
        // Sums 5, 2 and 5 in both rows.
        check(&cpu, job(&cpu, |_| {}), &inputs, &[&[0.0, -3.0, 0.0, 0.0, -3.0, 0.0]]);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let cpu = Cpu::with(1, Isa::detect());
    let refused = |change: fn(&mut Parts)| loaded(&cpu, job(&cpu, change)).is_none();
    assert!(!refused(|_| {}));
    assert!(refused(|parts| parts.result = 23), "a result of 24 bytes");
    assert!(refused(|parts| parts.lowered.launch.product.m = 3), "rows that attention does not give");
    assert!(refused(|parts| parts.lowered.launch.product.k = 5), "columns that attention does not give");
    assert!(refused(|parts| parts.lowered.launch.product.a = (5, 1)), "rows further apart than those of attention");
    assert!(refused(|parts| parts.lowered.launch.product.n = 4), "columns that what follows has not");
    assert!(refused(|parts| parts.lowered.launch.product.batch = vec![[1, 0, 0, 0]]), "more than one matmul");
    assert!(refused(|parts| parts.lowered.kernel.product.rights = 2), "more than one weight");
    assert!(refused(|parts| parts.lowered.kernel.product.left = Dtype::F16), "another dtype than that of attention");
    assert!(refused(|parts| parts.lowered.kernel.attention.width = 0), "no width");
    assert!(refused(|parts| parts.lowered.kernel.attention.group = 3), "heads are a multiple of key heads");
    let written = |parts: &mut Parts| parts.lowered.kernel.product.epilogue.as_mut().unwrap().sums = vec![1];
    assert!(refused(written), "sums that are written");
}
