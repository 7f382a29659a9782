//! The gradient of attention.

use deuteron_attention::backward::LoweredBackward;
use deuteron_attention::cpu::family;
use deuteron_attention::{AttentionKernel, AttentionMask, AttentionShape};
use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::{Cpu, Job, Place};
use deuteron_graph::Dtype;

use super::attention::tiny;
use super::{argument, check, loaded};

/// One query of width 2 against two keys, and what is wrong with it.
fn job(cpu: &Cpu, change: impl Fn(&mut AttentionKernel, &mut AttentionShape), outputs: [usize; 3]) -> Option<Job> {
    let (mut kernel, mut shape) = tiny();
    change(&mut kernel, &mut shape);
    let args = (0..7).map(|position| argument(position > 3)).collect();
    let kernel = family::backward_kernel(LoweredBackward::apart(kernel, shape, args))?;
    let inputs = [0, 1, 1, 2].map(Place::Input);
    let places = inputs.into_iter().chain([0, 1, 2].map(Place::Output)).collect();
    Some(super::job(cpu, kernel, places, 3, &outputs))
}

#[test]
fn gradients_of_equal_scores() {
    let cpu = Cpu::with(2, Isa::detect());
    let inputs = [&[0.0, 0.0][..], &[1.0, 5.0, 3.0, 7.0], &[1.0, 0.0]];
    let gradients = [&[1.0, 1.0][..], &[0.0; 4], &[0.5, 0.0, 0.5, 0.0]];
    check(&cpu, job(&cpu, |_, _| {}, [8, 16, 16]), &inputs, &gradients);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let cpu = Cpu::with(1, Isa::detect());
    let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), outputs| {
        loaded(&cpu, job(&cpu, change, outputs)).is_none()
    };
    assert!(!refused(|_, _| {}, [8, 16, 16]));
    assert!(refused(|_, _| {}, [7, 16, 16]) && refused(|_, _| {}, [8, 15, 16]) && refused(|_, _| {}, [8, 16, 15]));
    assert!(refused(|_, shape| shape.queries = 2, [8, 16, 16]));
    assert!(refused(|_, shape| shape.keys = 3, [8, 16, 16]));
    assert!(refused(|kernel, shape| (kernel.group, shape.heads) = (2, 2), [16, 32, 32]), "keys of their own");
    assert!(refused(|kernel, _| kernel.width = 300, [4096; 3]));
    assert!(refused(|kernel, _| kernel.mask = AttentionMask::Additive(Dtype::F32), [8, 16, 16]));
}
