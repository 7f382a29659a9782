//! Attention alone.

use deuteron_attention::cpu::family;
use deuteron_attention::kernel::LoweredAttention;
use deuteron_attention::{AttentionKernel, AttentionMask, AttentionResult, AttentionShape, HeadStrides, ScoreRules};
use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::{Cpu, Device, DeviceError, Job, Launching, NoStates, Place};
use deuteron_graph::Dtype;

use super::{argument, bytes, check, loaded};

/// One query of width 2 against two keys.
pub fn tiny() -> (AttentionKernel, AttentionShape) {
    let strides = HeadStrides { batch: 4, head: 4, position: 2 };
    let (dtype, mask) = (Dtype::F32, AttentionMask::Full);
    let result = AttentionResult::Values;
    let kernel = AttentionKernel {
        dtype,
        kv: dtype,
        width: 2,
        group: 1,
        scale: 1.0,
        mask,
        scores: ScoreRules::NONE,
        dropout: None,
        result,
    };
    let (q, k, v, o) = (strides, strides, strides, strides);
    let mask = HeadStrides::default();
    let none = HeadStrides::default();
    let shape =
        AttentionShape { batch: 1, heads: 1, queries: 1, keys: 2, q, k, v, mask, slopes: none, documents: none, o };
    (kernel, shape)
}

/// The same, and what is wrong with it.
fn job(cpu: &Cpu, change: impl Fn(&mut AttentionKernel, &mut AttentionShape), result: usize) -> Option<Job> {
    let (mut kernel, mut shape) = tiny();
    change(&mut kernel, &mut shape);
    let args = (0..4).map(|position| argument(position == 3)).collect();
    let kernel = family::kernel(LoweredAttention { kernel, shape, args })?;
    let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Output(0)];
    Some(super::job(cpu, kernel, places, 2, &[result]))
}

#[test]
fn equal_keys_give_the_mean_of_the_values() {
    let cpu = Cpu::with(2, Isa::detect());
    let inputs = [&[0.0, 0.0][..], &[1.0, 5.0, 3.0, 7.0]];
    let mut executable = check(&cpu, job(&cpu, |_, _| {}, 8), &inputs, &[&[2.0, 6.0]]);
    let short = [&[0.0, 0.0][..], &[1.0, 5.0, 3.0]].map(|values| cpu.upload(&bytes(values)).unwrap());
    let refused = executable.run(&|index| &short[index], &mut NoStates, Launching::Eager);
    assert_eq!(refused, Err(DeviceError::InputSize { input: 1, expected: 16, got: 12 }));
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let cpu = Cpu::with(1, Isa::detect());
    let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), result| {
        loaded(&cpu, job(&cpu, change, result)).is_none()
    };
    assert!(!refused(|_, _| {}, 8));
    assert!(refused(|_, _| {}, 7), "a result of 8 bytes");
    assert!(refused(|_, shape| shape.queries = 2, 8));
    assert!(refused(|kernel, _| kernel.group = 2, 8), "heads are a multiple of key heads");
    assert!(refused(|kernel, _| kernel.width = 300, 4096));
    assert!(refused(|kernel, _| kernel.dtype = Dtype::I8, 8) && refused(|kernel, _| kernel.kv = Dtype::I8, 8));
    assert!(refused(|kernel, _| kernel.mask = AttentionMask::Additive(Dtype::F32), 8), "an argument is missing");
    let stored = job(&cpu, |kernel, _| kernel.result = AttentionResult::Probabilities, 8);
    assert!(stored.is_none(), "a GPU's kernel");
}
