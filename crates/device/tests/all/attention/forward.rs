//! Attention.

mod hopper;

use super::case::Case;
use super::shared::{ANY_SIZES, HIDDEN, check_compiled, lowered, microseconds, on_gpu, part, same};
use crate::support::attention::{
    MASKS, SEED, epsilon, errors_over_rounding, is_usual, named_kernel, philox, shape, widened,
};
use crate::support::{compiler, gpu};
use deuteron_attention::cuda::forward::{self, ForwardVariant, with_variant};
use deuteron_attention::cuda::hopper::{Groups, Walk};
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, HeadStrides};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_device::cuda::nvrtc::Compiler;
use deuteron_device::{Cuda, Device, Launching, Memory, NoStates};
use deuteron_graph::Dtype;
use deuteron_kernels::Backend;

// The compiler.

fn compile(compiler: &Compiler, kernels: &[(AttentionKernel, ForwardVariant, Arch)]) {
    let render = |kernel: &AttentionKernel, variant: &ForwardVariant, target: &CudaTarget| {
        with_variant(&lowered(kernel, shape(ANY_SIZES, kernel), |_| 0), variant, target)
    };
    let may_spill = |kernel: &AttentionKernel, variant: &ForwardVariant, _: u32| {
        matches!(variant, ForwardVariant::Tensor(_)) && kernel.width > 128
    };
    check_compiled(compiler, kernels, render, may_spill);
}

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm80, 1);
    let mut kernels = Vec::new();
    // Storage types, dropout and the other kernels take turns, and so do masks where models have no heads of that width: all
    // combinations would take minutes.
    for (index, width) in [32, 64, 80, 128, 256].into_iter().enumerate() {
        for (turn, mask) in MASKS.into_iter().enumerate() {
            let dtype = if (index + turn).is_multiple_of(2) { Dtype::Bf16 } else { Dtype::F16 };
            let kernel = named_kernel(dtype, width, mask, (index + turn) % 3 == 1);
            let variant = forward::choose(&lowered(&kernel, shape([2, 12, 300, 300], &kernel), |_| 0), &target);
            assert!(matches!(variant, ForwardVariant::Tensor(_)), "{variant:?}");
            if is_usual(width) || (index + turn) % 5 < 2 {
                kernels.push((kernel, variant, [Arch::Sm80, Arch::Sm90a][turn % 2]));
            }
            // Of single queries keys and values of both types.
            let single = [AttentionKernel { dtype: Dtype::F32, kv: Dtype::F32, ..kernel }, kernel][turn % 2];
            let kernel = AttentionKernel { kv: if index % 2 == 0 { single.kv } else { dtype }, ..single };
            if turn == index {
                kernels.push((kernel, ForwardVariant::Plain, Arch::Sm75));
            } else if (turn + index) % 3 == 0 {
                let variant = ForwardVariant::Decode { rows: [1, 2, 4, 8][turn % 4], vector: index != 3 };
                kernels.push((kernel, variant, [Arch::Sm75, Arch::Sm80, Arch::Sm90a][index % 3]));
            }
        }
    }
    // GPT-2, and one more token of it over a cache of a narrower type.
    let cached = AttentionKernel { kv: Dtype::Bf16, ..named_kernel(Dtype::F32, 64, AttentionMask::Cached, false) };
    for (variant, arch) in
        [(ForwardVariant::Plain, Arch::Sm80), (ForwardVariant::Decode { rows: 1, vector: true }, Arch::Sm90a)]
    {
        kernels.push((cached, variant, arch));
    }
    let kernel = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, false);
    for atoms in [1, 2] {
        let variant = ForwardVariant::Tensor(Tiles { warps: 4, atoms, keys: 64, blocks: 2 });
        kernels.extend([Arch::Sm80, Arch::Sm90a].map(|arch| (kernel, variant, arch)));
    }
    compile(&compiler, &kernels);
}

// The GPU.

impl Case {
    /// The result in f64, and the sum of the sizes of its terms; the largest score.
    fn formula(&self) -> (Vec<[f64; 2]>, f64) {
        let AttentionKernel { width, group, scale, dropout, .. } = self.kernel;
        let AttentionShape { batch, heads, queries, keys, q, k, v, mask, .. } = self.shape;
        let all = [AttentionOperand::Q, AttentionOperand::K, AttentionOperand::V].map(|operand| self.values(operand));
        let added = self.added();
        let at = |operand: AttentionOperand, strides: HeadStrides, b: usize, h: usize, i: usize| {
            self.offset(operand) + b * strides.batch + h * strides.head + i * strides.position
        };
        let (mut result, mut largest) = (Vec::new(), 0.0_f64);
        for (b, h, i) in (0..batch * heads * queries).map(|r| (r / queries / heads, r / queries % heads, r % queries)) {
            let query = &all[0][at(AttentionOperand::Q, q, b, h, i)..][..width];
            let mut scores = Vec::new();
            for j in 0..self.seen(b, i) {
                let key = &all[1][at(AttentionOperand::K, k, b, h / group, j)..][..width];
                let terms = query.iter().zip(key).map(|(x, y)| x * y * f64::from(scale));
                largest = largest.max(terms.clone().map(f64::abs).sum());
                let shift = added.get(at(AttentionOperand::Mask, mask, b, h, i) + j).copied().unwrap_or(0.0);
                scores.push(terms.sum::<f64>() + shift);
            }
            let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shift = if maximum == f64::NEG_INFINITY { 0.0 } else { maximum };
            let sum: f64 = scores.iter().map(|score| (score - shift).exp()).sum();
            let mut row = vec![[0.0; 2]; width];
            for (j, score) in scores.iter().enumerate().filter(|_| sum != 0.0) {
                let element = (((b * heads + h) * queries + i) * keys + j) as u64;
                let kept = dropout.map_or(1.0, |rule| {
                    let word = philox(element / 4, [SEED, rule.offset])[(element % 4) as usize];
                    let keeps = f64::from(word) >= (rule.probability * 4_294_967_296.0).floor();
                    f64::from(u8::from(keeps)) / (1.0 - rule.probability)
                });
                let p = (score - shift).exp() / sum * kept;
                let value = &all[2][at(AttentionOperand::V, v, b, h / group, j)..][..width];
                for (to, x) in row.iter_mut().zip(value) {
                    to[0] += p * x;
                    to[1] += (p * x).abs();
                }
            }
            result.push(row);
        }
        // In the order in which the result lies.
        let mut lies = vec![[0.0; 2]; self.result_elements()];
        let o = self.shape.o;
        for (r, row) in result.into_iter().enumerate() {
            let start = at(AttentionOperand::O, o, r / queries / heads, r / queries % heads, r % queries);
            lies[start..start + width].copy_from_slice(&row);
        }
        (lies, largest)
    }

    fn check(&self, device: &Cuda, variant: Option<ForwardVariant>) {
        let (want, largest) = self.formula();
        let got = self.run(device, variant);
        let AttentionKernel { dtype, width, .. } = self.kernel;
        // A probability is off by what its score is off, and on matrix units by its own rounding; a sum by the root of its
        // terms; a few of each. Then the result is rounded.
        let terms = (width as f64).sqrt() * largest + largest + (self.shape.keys as f64).sqrt();
        let single =
            4.0 * f64::from(f32::EPSILON) * (terms + 4.0) + if dtype == Dtype::F32 { 0.0 } else { epsilon(dtype) };
        let least = if dtype == Dtype::F16 { f64::powi(2.0, -24) } else { f64::from(f32::MIN_POSITIVE) };
        for (at, (got, [want, size])) in got.into_iter().zip(want).enumerate() {
            let bound = single * size + epsilon(dtype) * want.abs() + least;
            let same = got == want || (got - want).abs() <= bound || (got.is_nan() && want.is_nan());
            assert!(same, "{at}: {got} for {want} within {bound:e}: {:?} {:?} {variant:?}", self.kernel, self.shape);
        }
    }
}

/// All kernels that can do a case.
fn variants(device: &Cuda, kernel: &AttentionKernel) -> Vec<Option<ForwardVariant>> {
    let mut variants = vec![None, Some(ForwardVariant::Plain)];
    let Backend::Cuda(target) = device.backend() else { return variants };
    if kernel.dtype != Dtype::F32
        && kernel.kv == kernel.dtype
        && kernel.width.is_multiple_of(16)
        && target.arch.is_ampere()
    {
        let tiles = [(1, 32), (1, 64), (2, 64)].into_iter().filter(|&(_, keys)| kernel.width <= 128 || keys == 32);
        variants.extend(
            tiles.map(|(atoms, keys)| Some(ForwardVariant::Tensor(Tiles { warps: 4, atoms, keys, blocks: 1 }))),
        );
    }
    variants.extend([1, 4, 8].map(|rows| Some(ForwardVariant::Decode { rows, vector: false })));
    variants
}

// Tests by storage type: the compiler takes one source at a time in a process, and tests may be run one a process.

#[test]
fn every_f32_kernel_matches() {
    on_gpu(check_kernels, Dtype::F32);
}

#[test]
fn every_f16_kernel_matches() {
    on_gpu(check_kernels, Dtype::F16);
}

#[test]
fn every_bf16_kernel_matches() {
    on_gpu(check_kernels, Dtype::Bf16);
}

#[test]
fn every_f32_length_matches() {
    on_gpu(check_lengths, Dtype::F32);
}

#[test]
fn every_f16_length_matches() {
    on_gpu(check_lengths, Dtype::F16);
}

#[test]
fn every_bf16_length_matches() {
    on_gpu(check_lengths, Dtype::Bf16);
}

#[test]
fn every_f32_width_matches() {
    on_gpu(check_widths, Dtype::F32);
}

#[test]
fn every_f16_width_matches() {
    on_gpu(check_widths, Dtype::F16);
}

#[test]
fn every_bf16_width_matches() {
    on_gpu(check_widths, Dtype::Bf16);
}

#[test]
fn every_kernel_over_keys_of_another_type_matches() {
    let Some(device) = gpu(true) else { return };
    for kv in [Dtype::Bf16, Dtype::F16] {
        for (width, sizes) in [(64, [2, 3, 129, 129]), (40, [1, 2, 1, 1000]), (17, [1, 2, 33, 9]), (64, [2, 3, 5, 700])]
        {
            let cached = named_kernel(Dtype::F32, width, AttentionMask::Cached, false);
            for kernel in
                [AttentionKernel { kv, ..cached }, AttentionKernel { kv, mask: AttentionMask::Full, ..cached }]
            {
                let variants = if width == 64 { variants(&device, &kernel) } else { vec![None] };
                variants.into_iter().for_each(|variant| Case::new(kernel, sizes, 1.0).check(&device, variant));
            }
        }
    }
}

fn check_kernels(device: &Cuda, dtype: Dtype) {
    for (turn, mask) in MASKS.into_iter().enumerate() {
        for (width, sizes) in [(64, [2, 3, 129, 129]), (40, [1, 2, 33, 9]), (80, [2, 1, 70, 200]), (17, [1, 1, 1, 1])] {
            let kernel = named_kernel(dtype, width, mask, turn % 2 == 1);
            let case = Case::new(kernel, sizes, 1.0);
            // Each way takes a compilation: all of them for the width that models have.
            let variants = if width == 64 { variants(device, &kernel) } else { vec![None] };
            variants.into_iter().for_each(|variant| case.check(device, variant));
        }
    }
}

fn check_lengths(device: &Cuda, dtype: Dtype) {
    for length in [1, 17, 64, 127, 128, 129, 1000] {
        for mask in MASKS {
            Case::new(named_kernel(dtype, 64, mask, false), [1, 3, length, length], 1.0).check(device, None);
        }
        // Few queries over many keys, heads that share them.
        for (queries, group) in [(1, 1), (1, 3), (2, 1), (5, 3), (8, 1)] {
            let kernel = AttentionKernel { group, ..named_kernel(dtype, 64, AttentionMask::Cached, false) };
            Case::new(kernel, [2, 3, queries, length], 1.0).check(device, None);
        }
    }
}

fn check_widths(device: &Cuda, dtype: Dtype) {
    for width in [1, 8, 16, 96, 112, 128, 192, 256] {
        for dropout in [false, true] {
            let kernel = named_kernel(dtype, width, AttentionMask::Causal, dropout);
            Case::new(kernel, [1, 2, 130, 130], 1.0).check(device, None);
            Case::new(kernel, [1, 2, 3, 777], 1.0).check(device, None);
        }
    }
}

/// A kernel gives a sequence the same bits whatever stands beside it. Which kernel is chosen may depend on how many there are; and so does,
/// for few queries, how keys are cut into ranges, so that kernel is left out.
#[test]
fn a_sequence_has_the_same_bits_alone() {
    let Some(device) = gpu(true) else { return };
    for (dtype, mask) in [Dtype::Bf16, Dtype::F32, Dtype::F16].into_iter().cycle().zip(MASKS) {
        let kernel = named_kernel(dtype, 64, mask, false);
        for sizes in [[3, 2, 129, 129], [3, 2, 20, 300]] {
            let case = Case::new(kernel, sizes, 1.0);
            let cuts = |variant: &Option<ForwardVariant>| matches!(variant, Some(ForwardVariant::Decode { .. }));
            for variant in variants(&device, &kernel).into_iter().filter(|variant| !cuts(variant)) {
                let whole = case.run(&device, variant);
                for index in 0..sizes[0] {
                    let alone = case.sequence(index).run(&device, variant);
                    assert!(
                        same(part(&whole, sizes[0], index), &alone),
                        "{index} of {sizes:?}: {kernel:?} {variant:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn fused_operands_are_read_in_place() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for length in [3, 67, 200] {
            for start in [0, 8, 1] {
                let kernel = named_kernel(dtype, 32, AttentionMask::Causal, false);
                Case::fused(kernel, [2, 3, length], start).check(&device, None);
            }
        }
    }
}

#[test]
fn extreme_scores_and_scales_hold() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for sizes in [[1, 2, 130, 130], [1, 2, 2, 500]] {
            for scale in [0.125, -0.125, 0.0] {
                let kernel = AttentionKernel { scale, ..named_kernel(dtype, 64, AttentionMask::Causal, false) };
                Case::new(kernel, sizes, 1.0).check(&device, None);
            }
            // Scores of about 1e4: one key of a row has all the weight.
            let kernel = named_kernel(dtype, 64, AttentionMask::Full, false);
            let got = Case::new(kernel, sizes, 1e4).run(&device, None);
            assert!(got.iter().all(|x| x.is_finite() && x.abs() <= 3.01), "{dtype} {sizes:?}");
        }
    }
}

/// The mean of the values where all keys are hidden by the smallest number, as where they are hidden alike.
#[test]
fn rows_whose_keys_are_all_hidden_are_means() {
    let Some(device) = gpu(true) else { return };
    for (dtype, mask) in
        [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)]
    {
        let kernel = named_kernel(dtype, 64, AttentionMask::Additive(mask), false);
        for sizes in [[2, 3, 129, 129], [1, 2, 8, 500], [1, 2, 7, 3000]] {
            for hidden in HIDDEN {
                let case = Case::new(kernel, sizes, 1.0).hidden(hidden);
                variants(&device, &kernel).into_iter().for_each(|variant| case.check(&device, variant));
            }
        }
        let dropped = named_kernel(dtype, 64, AttentionMask::Additive(mask), true);
        Case::new(dropped, [2, 3, 129, 129], 1.0).hidden(f32::MIN).check(&device, None);
    }
}

/// torch's math path computes in f32 and rounds once: its error is that of rounding.
#[test]
fn errors_are_at_most_twice_those_of_the_math_path() {
    let Some(device) = gpu(true) else { return };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for (width, mask) in [(64, AttentionMask::Causal), (64, AttentionMask::Full), (128, AttentionMask::Causal)] {
            let case = Case::new(named_kernel(dtype, width, mask, false), [1, 2, 512, 512], 1.0);
            let want: Vec<f64> = case.formula().0.iter().map(|&[value, _]| value).collect();
            for variant in [None, Some(ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 }))] {
                let [mean, largest] = errors_over_rounding(dtype, &case.run(&device, variant), &want);
                println!(
                    "{dtype} {width} {mask:?} {variant:?}: {mean:.2} times the error of the math path, {largest:.2} the largest"
                );
                assert!(mean <= 2.0 && largest <= 2.0, "{dtype} {width} {mask:?} {variant:?}: {mean} {largest}");
            }
        }
    }
}

#[test]
fn positions_outside_of_the_cache_see_nothing_or_all() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for sizes in [[2, 2, 1, 300], [2, 2, 100, 300]] {
            let mut case = Case::new(named_kernel(dtype, 64, AttentionMask::Cached, false), sizes, 1.0);
            case.positions = vec![-1000, i32::MAX];
            case.check(&device, None);
        }
    }
}

#[test]
fn what_a_cache_does_not_hold_yet_is_not_read_and_nan_is_kept() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for queries in [1, 6, 100] {
            let kernel = named_kernel(dtype, 64, AttentionMask::Cached, false);
            let mut case = Case::new(kernel, [1, 2, queries, 400], 1.0);
            case.positions = vec![150];
            let (seen, keys) = (150 + queries, 400);
            for (_, values) in &mut case.tensors[1..] {
                for head in 0..2 {
                    values[(head * keys + seen) * 64..(head + 1) * keys * 64].fill(f32::NAN);
                }
            }
            case.check(&device, None);
            // A key that all queries see.
            case.tensors[1].1[20 * 64] = f32::NAN;
            let got = case.run(&device, None);
            assert!(got[..queries * 64].iter().all(|x| x.is_nan()), "{dtype} {queries}");
            assert!(got[queries * 64..].iter().all(|x| x.is_finite()), "{dtype} {queries}");
        }
    }
}

/// Not a test of right or wrong: `cargo test -p deuteron-device --test all attention -- --ignored --nocapture` where a GPU is.
#[test]
#[ignore = "prints times"]
fn tiles_side_by_side() {
    let Some(device) = gpu(true) else { return };
    let tiles = |warps, atoms, keys, blocks| Some(ForwardVariant::Tensor(Tiles { warps, atoms, keys, blocks }));
    let prompt =
        [None, tiles(4, 2, 64, 2), tiles(4, 1, 64, 2), tiles(4, 1, 64, 3), tiles(8, 1, 64, 1), tiles(4, 1, 32, 3)];
    let step = |rows| [Some(ForwardVariant::Decode { rows, vector: true })];
    let causal = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, false);
    let wide = named_kernel(Dtype::Bf16, 128, AttentionMask::Causal, false);
    let single = named_kernel(Dtype::F32, 64, AttentionMask::Causal, false);
    let dropped = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, true);
    let print = |kernel: AttentionKernel, sizes: [usize; 4], variants: &[Option<ForwardVariant>]| {
        let case = Case::new(kernel, sizes, 1.0);
        for &variant in variants {
            let (mut executable, memory) = case.load(&device, variant);
            let us = microseconds(&mut *executable, &memory);
            let variant = variant.map_or("as chosen".to_string(), |variant| format!("{variant:?}"));
            println!("{:8.1} us  {sizes:?} {} of {}, {variant}", us, kernel.dtype, kernel.width);
        }
    };
    print(causal, [8, 12, 1024, 1024], &prompt);
    print(causal, [1, 12, 1024, 1024], &prompt);
    print(causal, [4, 12, 4096, 4096], &prompt);
    print(dropped, [8, 12, 1024, 1024], &prompt[..3]);
    print(wide, [8, 16, 1024, 1024], &[None, tiles(4, 1, 32, 2), tiles(8, 1, 64, 1)]);
    for mask in [AttentionMask::Causal, AttentionMask::Full] {
        for sizes in [[8, 16, 1024, 1024], [4, 16, 4096, 4096], [2, 32, 2048, 2048], [24, 24, 512, 512]] {
            let walks =
                [Walk::InTurn, Walk::Drawn].map(|walk| Some(ForwardVariant::Hopper(Groups { walk, ..Groups::WIDE })));
            print(AttentionKernel { mask, ..wide }, sizes, &walks);
        }
    }
    for width in [32, 48, 80, 96, 112, 192, 256] {
        let other = AttentionKernel { width, ..causal };
        let warps = match width {
            0..=64 => tiles(4, 2, 64, 2),
            65..=128 => tiles(4, 1, 64, 2),
            _ => tiles(4, 1, 32, 1),
        };
        print(other, [8, 16, 1024, 1024], &[None, warps]);
        print(AttentionKernel { mask: AttentionMask::Full, ..other }, [8, 16, 1024, 1024], &[None, warps]);
    }
    print(single, [8, 12, 1024, 1024], &[None]);
    for (batch, keys) in [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 16384), (32, 4096)] {
        print(causal, [batch, 12, 1, keys], &step(1));
    }
    print(AttentionKernel { group: 4, ..wide }, [8, 32, 1, 4096], &step(4));
}
