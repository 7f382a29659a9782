//! Probabilities of attention that are stored.

use super::case::Case;
use super::shared::{ANY_SIZES, HIDDEN, check_compiled, lowered, microseconds, on_gpu};
use crate::support::attention::{MASKS, epsilon, is_usual, named_kernel, shape};
use crate::support::{compiler, gpu};
use deuteron_attention::cuda::forward::{self, ForwardVariant, with_variant};
use deuteron_attention::cuda::scores::Scores;
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::kernel::LoweredAttention;
use deuteron_attention::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, HeadStrides,
};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_device::cuda::nvrtc::Compiler;
use deuteron_device::{Cuda, Device};
use deuteron_graph::Dtype;
use deuteron_kernels::Backend;

fn kernel(dtype: Dtype, width: usize, mask: AttentionMask) -> AttentionKernel {
    AttentionKernel { result: AttentionResult::Probabilities, ..named_kernel(dtype, width, mask, false) }
}

fn chosen(attention: &LoweredAttention, target: &CudaTarget) -> Scores {
    match forward::choose(attention, target) {
        ForwardVariant::Scores(scores) => scores,
        variant => panic!("{variant:?}"),
    }
}

// The compiler.

fn compile(compiler: &Compiler, kernels: &[(AttentionKernel, Scores, Arch)]) {
    let render = |kernel: &AttentionKernel, &scores: &Scores, target: &CudaTarget| {
        with_variant(&lowered(kernel, shape(ANY_SIZES, kernel), |_| 0), &ForwardVariant::Scores(scores), target)
    };
    check_compiled(compiler, kernels, render, |_, _, _| false);
}

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm80, 1);
    let mut kernels = Vec::new();
    // Storage types, row ends and architectures take turns, and so do masks where models have no heads of that width: all
    // combinations would take minutes.
    for (index, width) in [16, 64, 80, 128, 192, 256].into_iter().enumerate() {
        for (turn, mask) in MASKS.into_iter().enumerate() {
            let dtype = if (index + turn).is_multiple_of(2) { Dtype::Bf16 } else { Dtype::F16 };
            let own = kernel(dtype, width, mask);
            // Many queries and few, rows of eights and of all else.
            let few = ([9, 64, 40][index % 3], [300, 302, 301][turn % 3]);
            let (queries, keys) = [(1024, 1024), few][(index / 2 + turn) % 2];
            let scores = chosen(&lowered(&own, shape([2, 12, queries, keys], &own), |_| 0), &target);
            assert!(matches!(scores, Scores::Tensor { .. }), "{scores:?}");
            if is_usual(width) || (index + turn) % 3 == 0 {
                kernels.push((own, scores, [Arch::Sm80, Arch::Sm90a][(turn + index) % 2]));
            }
            if turn == index % 5 {
                kernels.push((own, Scores::Plain, Arch::Sm80));
                let single = AttentionKernel { dtype: Dtype::F32, kv: Dtype::F32, ..own };
                kernels.push((single, Scores::Plain, [Arch::Sm75, Arch::Sm90a][index % 2]));
            }
        }
    }
    // The ready-made op at every end of a row, and what is timed.
    let own = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    for together in [8, 4, 2, 1] {
        let tiles = Tiles { warps: 4, atoms: 1, keys: 64, blocks: 4 };
        kernels.push((own, Scores::Tensor { tiles, together }, Arch::Sm90a));
    }
    for tiles in TIMED {
        kernels.push((own, Scores::Tensor { tiles, together: 8 }, Arch::Sm90a));
    }
    compile(&compiler, &kernels);
}

// The GPU.

impl Case {
    /// Each row in f64: its probabilities, how many keys it sees, and the largest sum of sizes of the terms of a score.
    fn probabilities(&self) -> Vec<(Vec<f64>, usize, f64)> {
        let AttentionKernel { width, group, scale, .. } = self.kernel;
        let AttentionShape { batch, heads, queries, keys, q, k, mask, .. } = self.shape;
        let [all_q, all_k] = [AttentionOperand::Q, AttentionOperand::K].map(|operand| self.values(operand));
        let added = self.added();
        let starts = [AttentionOperand::Q, AttentionOperand::K].map(|operand| self.offset(operand));
        let at = |strides: HeadStrides, b: usize, h: usize, i: usize| {
            b * strides.batch + h * strides.head + i * strides.position
        };
        let row = |r: usize| {
            let (b, h, i) = (r / queries / heads, r / queries % heads, r % queries);
            let seen = self.seen(b, i);
            let query = &all_q[starts[0] + at(q, b, h, i)..][..width];
            let (mut scores, mut largest) = (Vec::new(), 0.0_f64);
            for j in 0..seen {
                let key = &all_k[starts[1] + at(k, b, h / group, j)..][..width];
                let (mut score, mut size) = (0.0, 0.0);
                for (x, y) in query.iter().zip(key) {
                    let term = x * y * f64::from(scale);
                    score += term;
                    size += term.abs();
                }
                largest = largest.max(size);
                scores.push(score + added.get(at(mask, b, h, i) + j).copied().unwrap_or(0.0));
            }
            let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shift = if maximum == f64::NEG_INFINITY { 0.0 } else { maximum };
            let powers: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
            let sum: f64 = powers.iter().sum();
            let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
            // A hidden key is 0 but in a row that is NaN.
            let hidden = std::iter::repeat_n(0.0, keys - seen);
            (powers.into_iter().chain(hidden).map(|power| power * factor).collect(), seen, largest)
        };
        (0..batch * heads * queries).map(row).collect()
    }

    fn check_scores(&self, device: &Cuda, scores: Option<Scores>) {
        let variant = scores.map(ForwardVariant::Scores);
        let got = self.run(device, variant);
        let AttentionKernel { dtype, width, .. } = self.kernel;
        let keys = self.shape.keys;
        let least = if dtype == Dtype::F16 { f64::powi(2.0, -24) } else { f64::from(f32::MIN_POSITIVE) };
        for (r, (want, seen, largest)) in self.probabilities().into_iter().enumerate() {
            // A probability is off by what its score and the others are off, and by what their sum is; then it is rounded.
            let terms = (width as f64).sqrt() * largest + largest + (keys as f64).sqrt();
            let relative = 4.0 * f64::from(f32::EPSILON) * (terms + 4.0) + epsilon(dtype);
            for (j, (&got, want)) in got[r * keys..][..keys].iter().zip(want).enumerate() {
                let bound = if j < seen { relative * want + least } else { 0.0 };
                let same = got == want || (got - want).abs() <= bound || (got.is_nan() && want.is_nan());
                let (kernel, shape) = (&self.kernel, &self.shape);
                assert!(same, "row {r} key {j}: {got} for {want} within {bound:e}: {kernel:?} {shape:?} {variant:?}");
            }
        }
    }

    /// All kernels that can do it.
    fn score_variants(&self, device: &Cuda) -> Vec<Option<Scores>> {
        let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
        let mut variants = vec![None, Some(Scores::Plain)];
        if let Scores::Tensor { together, .. } = chosen(&self.lowered(), target) {
            let tiles = |warps, atoms, keys| Tiles { warps, atoms, keys, blocks: 1 };
            let cuts = [tiles(4, 1, 32), tiles(4, 1, 64), tiles(4, 2, 64), tiles(2, 1, 96)];
            variants.extend(cuts.map(|tiles| Some(Scores::Tensor { tiles, together })));
            variants.extend(
                [1, 2, 4]
                    .into_iter()
                    .filter(|&less| less < together)
                    .map(|together| Some(Scores::Tensor { tiles: tiles(4, 2, 64), together })),
            );
        }
        variants
    }
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
fn every_width_matches() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for width in [1, 8, 16, 17, 80, 96, 128, 192, 256] {
            Case::new(kernel(dtype, width, AttentionMask::Causal), [1, 2, 130, 136], 1.0).check_scores(&device, None);
        }
    }
}

fn check_kernels(device: &Cuda, dtype: Dtype) {
    for mask in MASKS {
        for sizes in [[2, 3, 129, 136], [1, 2, 33, 9], [2, 1, 70, 204]] {
            let case = Case::new(kernel(dtype, 64, mask), sizes, 1.0);
            case.score_variants(device).into_iter().for_each(|variant| case.check_scores(device, variant));
        }
        // Heads that share keys.
        let shared = AttentionKernel { group: 3, ..kernel(dtype, 32, mask) };
        Case::new(shared, [2, 6, 40, 77], 1.0).check_scores(device, None);
    }
    // Enough blocks for tall tiles.
    Case::new(kernel(dtype, 16, AttentionMask::Causal), [8, 40, 129, 136], 1.0).check_scores(device, None);
}

fn check_lengths(device: &Cuda, dtype: Dtype) {
    let lengths = [1, 17, 64, 127, 128, 129, 1000];
    let mut turn = 0;
    for queries in lengths {
        for keys in lengths.into_iter().chain([66, 68]) {
            // All masks where lengths are equal or a tile is whole; else they take turns.
            let all = queries == keys || keys % 64 == 2 || keys % 64 == 4;
            for mask in MASKS.into_iter().enumerate().filter(|(index, _)| all || index % 2 == turn % 2) {
                Case::new(kernel(dtype, 64, mask.1), [1, 2, queries, keys], 1.0).check_scores(device, None);
            }
            turn += 1;
        }
    }
}

#[test]
fn fused_operands_are_read_in_place() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for length in [3, 67, 200] {
            for start in [0, 8, 1] {
                let kernel = kernel(dtype, 32, AttentionMask::Causal);
                Case::fused(kernel, [2, 3, length], start).check_scores(&device, None);
            }
        }
    }
}

#[test]
fn extreme_scores_and_scales_hold() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for sizes in [[1, 2, 130, 130], [1, 2, 100, 136]] {
            for mask in [AttentionMask::Causal, AttentionMask::Full, AttentionMask::Additive(dtype)] {
                for scale in [0.125, -0.125, 0.0] {
                    let kernel = AttentionKernel { scale, ..kernel(dtype, 64, mask) };
                    Case::new(kernel, sizes, 1.0).check_scores(&device, None);
                }
                // Scores of about 1e4: one key of a row has all the weight.
                let case = Case::new(kernel(dtype, 64, mask), sizes, 1e4);
                case.score_variants(&device).into_iter().for_each(|variant| case.check_scores(&device, variant));
            }
        }
    }
}

#[test]
fn rows_whose_keys_are_all_hidden_are_even() {
    let Some(device) = gpu(true) else { return };
    for (dtype, mask) in
        [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)]
    {
        for sizes in [[2, 3, 129, 136], [1, 2, 33, 9]] {
            for hidden in HIDDEN {
                let case = Case::new(kernel(dtype, 64, AttentionMask::Additive(mask)), sizes, 1.0).hidden(hidden);
                case.score_variants(&device).into_iter().for_each(|variant| case.check_scores(&device, variant));
            }
        }
    }
}

#[test]
fn positions_outside_of_the_cache_see_nothing_or_all() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for sizes in [[2, 2, 1, 300], [2, 2, 100, 304]] {
            let mut case = Case::new(kernel(dtype, 64, AttentionMask::Cached), sizes, 1.0);
            case.positions = vec![-1000, i32::MAX];
            case.score_variants(&device).into_iter().for_each(|variant| case.check_scores(&device, variant));
        }
    }
}

#[test]
fn nan_takes_its_rows_and_no_others() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for mask in MASKS {
            for (queries, keys) in [(200, 200), (150, 333)] {
                let mut case = Case::new(kernel(dtype, 64, mask), [1, 2, queries, keys], 1.0);
                // A key that the last queries see, if any is hidden; a query; a mask of +inf in some row.
                case.tensors[1].1[(keys - 20) * 64 + 3] = f32::NAN;
                case.tensors[0].1[(queries + 7) * 64] = f32::INFINITY;
                if let Some((_, added)) = case.tensors.get_mut(2) {
                    added[11 * keys + 5] = f32::INFINITY;
                }
                for variant in case.score_variants(&device) {
                    case.check_scores(&device, variant);
                    let got = case.run(&device, variant.map(ForwardVariant::Scores));
                    let row = |r: usize| &got[r * keys..][..keys];
                    assert!(row(queries - 1).iter().all(|x| x.is_nan()), "{dtype} {mask:?} {variant:?}");
                    assert!(row(queries).iter().all(|x| x.is_finite()), "{dtype} {mask:?} {variant:?}");
                }
            }
        }
    }
}

#[test]
fn what_a_cache_does_not_hold_yet_is_not_read() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for queries in [1, 6, 100] {
            let mut case = Case::new(kernel(dtype, 64, AttentionMask::Cached), [1, 2, queries, 400], 1.0);
            case.positions = vec![150];
            for head in 0..2 {
                case.tensors[1].1[(head * 400 + 150 + queries) * 64..(head + 1) * 400 * 64].fill(f32::NAN);
            }
            case.score_variants(&device).into_iter().for_each(|variant| case.check_scores(&device, variant));
        }
    }
}

/// How blocks might be cut otherwise.
const TIMED: [Tiles; 5] = [
    Tiles { warps: 4, atoms: 2, keys: 64, blocks: 3 },
    Tiles { warps: 8, atoms: 2, keys: 64, blocks: 2 },
    Tiles { warps: 8, atoms: 1, keys: 64, blocks: 2 },
    Tiles { warps: 4, atoms: 1, keys: 64, blocks: 4 },
    Tiles { warps: 4, atoms: 2, keys: 128, blocks: 3 },
];

/// Not a test of right or wrong: `cargo test -p deuteron-device --test all attention -- --ignored --nocapture` where a GPU is.
#[test]
#[ignore = "prints times"]
fn tiles_side_by_side() {
    let Some(device) = gpu(true) else { return };
    let print = |kernel: AttentionKernel, sizes: [usize; 4], variants: &[Option<Scores>]| {
        let case = Case::new(kernel, sizes, 1.0);
        for &variant in variants {
            let (mut executable, memory) = case.load(&device, variant.map(ForwardVariant::Scores));
            let us = microseconds(&mut *executable, &memory);
            let rate = case.result_bytes() as f64 / us * 1e-3;
            let (dtype, mask) = (kernel.dtype, kernel.mask);
            println!(
                "{:8.1} us, {rate:6.0} GB/s written  {sizes:?} {mask:?} {dtype} of {}, {variant:?}",
                us, kernel.width
            );
        }
    };
    let cut = TIMED.map(|tiles| Some(Scores::Tensor { tiles, together: 8 }));
    let variants: Vec<Option<Scores>> = [None].into_iter().chain(cut).collect();
    for mask in [AttentionMask::Causal, AttentionMask::Full] {
        print(kernel(Dtype::Bf16, 64, mask), [8, 12, 1024, 1024], &variants);
        print(kernel(Dtype::Bf16, 64, mask), [1, 12, 1024, 1024], &variants);
        print(kernel(Dtype::Bf16, 64, mask), [1, 22, 768, 768], &variants);
        print(kernel(Dtype::Bf16, 64, mask), [1, 4, 4096, 4096], &variants);
        print(kernel(Dtype::Bf16, 128, mask), [8, 16, 1024, 1024], &variants[..1]);
        print(kernel(Dtype::Bf16, 64, mask), [8, 12, 1023, 1023], &variants[..1]);
        print(kernel(Dtype::F32, 64, mask), [8, 12, 1024, 1024], &variants[..1]);
    }
    for mask in [Dtype::Bf16, Dtype::F32] {
        print(kernel(Dtype::Bf16, 64, AttentionMask::Additive(mask)), [8, 12, 1024, 1024], &variants);
    }
}
