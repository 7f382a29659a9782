//! Attention with row work on its result.

use deuteron_attention::cpu::family;
use deuteron_attention::rows::{AttentionRowsLaunch, LoweredAttentionRows};
use deuteron_attention::{AttentionKernel, AttentionMask, AttentionResult, AttentionRows, AttentionShape, HeadStrides};
use deuteron_codegen::body::Exprs;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::{Access, ArgBinding, ArgSpec, Body, Expr, Stage};
use deuteron_device::{Cpu, Device, Job, Launching, NoStates, Place};
use deuteron_graph::{BinaryOp, Dtype};

use super::{argument, bytes, loaded};

/// Attention: two heads of width 2 side by side, two queries, one key.
pub fn heads() -> (AttentionKernel, AttentionShape) {
    let kernel = AttentionKernel {
        dtype: Dtype::F32,
        kv: Dtype::F32,
        width: 2,
        group: 1,
        scale: 1.0,
        mask: AttentionMask::Full,
        dropout: None,
        result: AttentionResult::Values,
    };
    let strides = |head, position| HeadStrides { batch: 0, head, position };
    let (q, k, o) = (strides(4, 2), strides(2, 2), strides(2, 4));
    let mask = HeadStrides::default();
    (kernel, AttentionShape { batch: 1, heads: 2, queries: 2, keys: 1, q, k, v: k, mask, o })
}

/// Twice a value.
fn twice(cols: usize) -> Body {
    let mut exprs = Exprs::default();
    let load = exprs.make(Expr::Load(0));
    let value = exprs.make(Expr::Binary(BinaryOp::Add, load, load));
    let spec = |written| ArgSpec { dtype: Dtype::F32, access: Access::Row, written };
    Body {
        cols,
        flat: false,
        args: vec![spec(false), spec(true)],
        exprs: exprs.finish(),
        axes: 0,
        row_values: 0,
        stages: vec![Stage::Store { value, arg: 1 }],
    }
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
        let mut executable = loaded(&cpu, job(&cpu, |_, _| {}, 4, 32)).unwrap();
        let memory = [&[0.0; 8][..], &[1.0, 2.0, 3.0, 4.0]].map(|values| cpu.upload(&bytes(values)).unwrap());
        // Twice: what is counted is counted anew.
        for _ in 0..2 {
            executable.poison().unwrap();
            executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
            let mut result = [0; 32];
            executable.read(0, &mut result).unwrap();
            assert_eq!(result.to_vec(), bytes(&[2.0, 4.0, 6.0, 8.0, 2.0, 4.0, 6.0, 8.0]));
        }
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
