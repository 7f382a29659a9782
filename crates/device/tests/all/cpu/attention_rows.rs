//! Attention with row work on its result.

use deuteron_attention::cpu::family;
use deuteron_attention::rows::{AttentionRowsLaunch, LoweredAttentionRows};
use deuteron_attention::{AttentionKernel, AttentionRows, AttentionShape, HeadStrides};
use deuteron_codegen::body::Exprs;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::{ArgBinding, Body, Expr, Stage};
use deuteron_device::{Cpu, Job, Place};
use deuteron_graph::BinaryOp;

use super::attention::tiny;
use super::{argument, body, check, loaded};

/// Attention: two heads of width 2 side by side, two queries, one key.
pub fn heads() -> (AttentionKernel, AttentionShape) {
    let (kernel, shape) = tiny();
    let strides = |head, position| HeadStrides { batch: 0, head, position };
    let (q, k, o) = (strides(4, 2), strides(2, 2), strides(2, 4));
    (kernel, AttentionShape { heads: 2, queries: 2, keys: 1, q, k, v: k, o, ..shape })
}

/// Twice a value.
fn twice(cols: usize) -> Body {
    let mut exprs = Exprs::default();
    let load = exprs.make(Expr::Load(0));
    let value = exprs.make(Expr::Binary(BinaryOp::Add, load, load));
    body(cols, exprs, 0, vec![Stage::Store { value, arg: 1 }])
}

/// Twice the result of attention, and what is wrong with it.
fn job(
    cpu: &Cpu,
    change: impl Fn(&mut AttentionKernel, &mut AttentionShape),
    cols: usize,
    result: usize,
) -> Option<Job> {
    let (mut attention, mut shape) = heads();
    change(&mut attention, &mut shape);
    let arg = |position: usize| ArgBinding {
        leading: if position == 3 { vec![(2, 4)] } else { Vec::new() },
        ..argument(position == 3)
    };
    let kernel = family::rows_kernel(LoweredAttentionRows {
        kernel: AttentionRows { attention, epilogue: twice(cols), result: 0, norm: None },
        launch: AttentionRowsLaunch { args: (0..4).map(arg).collect(), shape, axes: Vec::new() },
    })?;
    let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Output(0)];
    Some(super::job(cpu, kernel, places, 2, &[result]))
}

#[test]
fn one_key_gives_its_values_in_rows() {
    for threads in [1, 3] {
        let cpu = Cpu::with(threads, Isa::detect());
        let inputs = [&[0.0; 8][..], &[1.0, 2.0, 3.0, 4.0]];
        check(&cpu, job(&cpu, |_, _| {}, 4, 32), &inputs, &[&[2.0, 4.0, 6.0, 8.0, 2.0, 4.0, 6.0, 8.0]]);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let cpu = Cpu::with(1, Isa::detect());
    let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), cols, result| {
        loaded(&cpu, job(&cpu, change, cols, result)).is_none()
    };
    assert!(!refused(|_, _| {}, 4, 32));
    assert!(refused(|_, _| {}, 4, 31), "a result of 32 bytes");
    assert!(refused(|_, _| {}, 8, 64) && refused(|_, _| {}, 3, 64), "rows that are no whole heads");
    assert!(refused(|_, shape| shape.o.position = 5, 4, 32) && refused(|_, shape| shape.o.head = 3, 4, 32));
    assert!(refused(|_, shape| (shape.batch, shape.o.batch) = (2, 16), 4, 64), "beyond the last row");
    assert!(refused(|kernel, _| kernel.width = 0, 4, 32) && refused(|kernel, _| kernel.group = 3, 4, 32));
}
