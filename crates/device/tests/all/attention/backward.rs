//! The gradient of attention.

use super::shared::{
    ANY_SIZES, HIDDEN, added, argument, check_compiled, hide, hopper, loaded, microseconds, on_gpu, outputs, part, same,
};
use crate::support::attention::{
    MASKS, Numbers, SEED, epsilon, errors_over_rounding, named_kernel, philox, shape, stored, widened,
};
use crate::support::{compiler, gpu};
use deuteron_attention::backward::LoweredBackward;
use deuteron_attention::cuda::backward::{self, BackwardTiles, BackwardVariant, SideTiles, with_variant};
use deuteron_attention::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, BackwardOperand, HeadStrides,
};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_device::cuda::nvrtc::Compiler;
use deuteron_device::{Cuda, Device, Executable, Memory};
use deuteron_graph::Dtype;
use deuteron_kernels::Backend;

use AttentionOperand::{K, Mask, Q, V};
use BackwardOperand::{Gradient, Operand, ResultGradient};

/// Those of training: no cache.
fn masks() -> impl Iterator<Item = AttentionMask> {
    MASKS.into_iter().filter(|&mask| mask != AttentionMask::Cached)
}

fn lowered(
    kernel: &AttentionKernel,
    shape: AttentionShape,
    offsets: impl Fn(BackwardOperand) -> usize,
) -> LoweredBackward {
    let binding = |operand: BackwardOperand| {
        argument(dtype_of(kernel, operand), matches!(operand, Gradient(_)), offsets(operand))
    };
    LoweredBackward::apart(*kernel, shape, kernel.backward_operands().map(binding).collect())
}

fn dtype_of(kernel: &AttentionKernel, operand: BackwardOperand) -> Dtype {
    match operand {
        Operand(operand) => kernel.operand_dtype(operand),
        ResultGradient | Gradient(_) => kernel.dtype,
    }
}

// The compiler.

fn compile(compiler: &Compiler, kernels: &[(AttentionKernel, BackwardVariant, Arch)]) {
    let render = |kernel: &AttentionKernel, variant: &BackwardVariant, target: &CudaTarget| {
        with_variant(&lowered(kernel, shape(ANY_SIZES, kernel), |_| 0), variant, target)
    };
    // Older compilers come a register or two short in tall tiles.
    let is_old = compiler.version() < (13, 4);
    let may_spill = |kernel: &AttentionKernel, &variant: &BackwardVariant, spilled: u32| {
        let is_wide = kernel.width > 128 && variant != BackwardVariant::Hopper;
        is_wide || (is_old && variant == tall() && spilled <= 64)
    };
    for cubin in check_compiled(compiler, kernels, render, may_spill) {
        assert_eq!(cubin.entries.len(), 2, "{:?}", cubin.entries);
    }
}

fn chosen(kernel: AttentionKernel, sizes: [usize; 4], arch: Arch) -> BackwardVariant {
    backward::choose(&lowered(&kernel, shape(sizes, &kernel), |_| 0), &CudaTarget::new(arch, 132))
}

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let mut kernels = Vec::new();
    // Storage types, architectures and dropout take turns, and so do masks but for the width of GPT-2: all combinations would take minutes.
    for (index, width) in [32, 64, 80, 128, 256].into_iter().enumerate() {
        for (turn, mask) in masks().enumerate() {
            let dropout = turn / 2 == 1;
            let odd = (index + turn + usize::from(dropout)) % 2;
            let (dtype, arch) = ([Dtype::Bf16, Dtype::F16][odd], [Arch::Sm80, Arch::Sm90a][(odd + turn) % 2]);
            let kernel = named_kernel(dtype, width, mask, dropout);
            let variant = chosen(kernel, [2, 12, 300, 300], arch);
            assert_ne!(variant, BackwardVariant::Plain);
            if width == 64 || (index + turn) % 2 == 0 {
                kernels.push((kernel, variant, arch));
            }
            if turn == index {
                let kernel =
                    AttentionKernel { dtype: [Dtype::F32, dtype][odd], kv: [Dtype::F32, dtype][odd], ..kernel };
                kernels.push((kernel, BackwardVariant::Plain, Arch::Sm75));
            }
        }
    }
    // GPT-2 and larger models in training: tall tiles where they fill the machine and warpgroups are not there or not for them.
    for width in [64, 128] {
        for arch in [Arch::Sm80, Arch::Sm90a] {
            let kernel = named_kernel(Dtype::Bf16, width, AttentionMask::Causal, false);
            kernels.push((kernel, chosen(kernel, [8, 12, 1024, 1024], arch), arch));
            kernels.push((kernel, chosen(kernel, [1, 12, 1024, 1024], arch), arch));
            let apart = chosen(kernel, [8, 12, 1024, 1025], arch);
            assert!(matches!(apart, BackwardVariant::Tensor(_)), "{apart:?}");
            kernels.push((kernel, apart, arch));
        }
        for (dtype, mask) in [(Dtype::Bf16, AttentionMask::Full), (Dtype::F16, AttentionMask::Causal)] {
            let kernel = named_kernel(dtype, width, mask, false);
            kernels.push((kernel, BackwardVariant::Hopper, Arch::Sm90a));
        }
    }
    // Masks and storage types take turns.
    for (turn, width) in [16, 32, 48, 80, 96, 112, 144, 160, 192, 208, 224, 240, 256, 256].into_iter().enumerate() {
        let mask = [AttentionMask::Full, AttentionMask::Causal][turn % 2];
        let dtype = [Dtype::Bf16, Dtype::F16][turn / 2 % 2];
        kernels.push((named_kernel(dtype, width, mask, false), BackwardVariant::Hopper, Arch::Sm90a));
    }
    compile(&compiler, &kernels);
}

// The GPU.

/// One problem with its data.
struct Case {
    kernel: AttentionKernel,
    shape: AttentionShape,
    /// Elements of the arguments that are read, and where each starts.
    tensors: Vec<(BackwardOperand, Vec<f32>, usize)>,
}

/// A gradient: each element in f64, and the sum of the sizes of what it is made of.
type Sums = Vec<[f64; 2]>;

impl Case {
    fn new(kernel: AttentionKernel, sizes: [usize; 4], spread: f32) -> Case {
        let shape = shape(sizes, &kernel);
        let [batch, heads, queries, keys] = sizes;
        let mut numbers = Numbers(sizes.iter().fold(kernel.width as u64, |seed, &size| seed * 31 + size as u64));
        let rows = batch * heads * kernel.width;
        let key_rows = rows / kernel.group;
        let mut tensors = vec![
            (Operand(Q), numbers.take(rows * queries, spread), 0),
            (Operand(K), numbers.take(key_rows * keys, 1.0), 0),
            (Operand(V), numbers.take(key_rows * keys, 1.0), 0),
            (ResultGradient, numbers.take(rows * queries, 1.0), 0),
        ];
        if let AttentionMask::Additive(_) = kernel.mask {
            let mask = added(&mut numbers, [batch, queries, keys]);
            tensors.push((Operand(Mask), mask, 0));
        }
        Case { kernel, shape, tensors }
    }

    /// Keys of some rows are hidden by a finite number.
    fn hidden(mut self, hidden: f32) -> Case {
        let mask = self.tensors.iter_mut().find(|(operand, ..)| *operand == Operand(Mask));
        hide(&mut mask.unwrap().1, self.shape.keys, hidden);
        self
    }

    /// One of its sequences, which lie one after another.
    fn sequence(&self, index: usize) -> Case {
        let own = |values: &[f32]| part(values, self.shape.batch, index).to_vec();
        let tensors = self.tensors.iter().map(|(operand, values, start)| (*operand, own(values), *start)).collect();
        Case { kernel: self.kernel, shape: AttentionShape { batch: 1, ..self.shape }, tensors }
    }

    /// All heads of a sequence read the same keys and values.
    fn shared(kernel: AttentionKernel, sizes: [usize; 4]) -> Case {
        let mut case = Case::new(kernel, sizes, 1.0);
        let strides = HeadStrides { batch: sizes[3] * kernel.width, head: 0, position: kernel.width };
        (case.shape.k, case.shape.v) = (strides, strides);
        case
    }

    /// Queries, keys and values side by side in one tensor `[batch, positions, 3, heads, width]`, `start` elements in; the
    /// gradient of the result as `[batch, positions, heads, width]`.
    fn fused(kernel: AttentionKernel, [batch, heads, length]: [usize; 3], start: usize) -> Case {
        let mut case = Case::new(kernel, [batch, heads, length, length], 1.0);
        let row = 3 * heads * kernel.width;
        let strides = HeadStrides { batch: length * row, head: kernel.width, position: row };
        let o = HeadStrides { batch: length * row / 3, head: kernel.width, position: row / 3 };
        case.shape = AttentionShape { q: strides, k: strides, v: strides, o, ..case.shape };
        let all = Numbers(5).take(start + batch * length * row, 1.0);
        for (part, operand) in [Q, K, V].into_iter().enumerate() {
            case.tensors[part] = (Operand(operand), all.clone(), start + part * heads * kernel.width);
        }
        case
    }

    fn offset(&self, operand: BackwardOperand) -> usize {
        self.tensors.iter().find(|(known, ..)| *known == operand).map_or(0, |&(_, _, offset)| offset)
    }

    fn bytes(&self, operand: BackwardOperand) -> Vec<u8> {
        match self.tensors.iter().find(|(known, ..)| *known == operand) {
            Some((_, values, _)) => stored(dtype_of(&self.kernel, operand), values),
            None => SEED.to_le_bytes().to_vec(),
        }
    }

    /// Elements of the gradients.
    fn elements(&self) -> [usize; 3] {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let key_heads = heads / self.kernel.group;
        [(heads, queries), (key_heads, keys), (key_heads, keys)]
            .map(|(heads, positions)| batch * heads * positions * self.kernel.width)
    }

    /// Made ready by kernels, with its inputs.
    fn load(&self, device: &Cuda, variant: Option<BackwardVariant>) -> (Box<dyn Executable>, Vec<Memory>) {
        let gradient = lowered(&self.kernel, self.shape, |operand| self.offset(operand));
        let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
        let kernel = match variant {
            Some(variant) => with_variant(&gradient, &variant, target),
            None => backward::kernel(&gradient, target),
        };
        let operands: Vec<BackwardOperand> = self.kernel.backward_operands().collect();
        let inputs: Vec<Vec<u8>> = operands[..operands.len() - 3].iter().map(|&operand| self.bytes(operand)).collect();
        loaded(device, kernel, &inputs, self.gradient_bytes().to_vec())
    }

    fn gradient_bytes(&self) -> [usize; 3] {
        self.elements().map(|elements| elements * self.kernel.dtype.bytes())
    }

    /// Runs it, twice and once more as a graph; the bits must be the same. Gradients of queries, keys and values.
    fn run(&self, device: &Cuda, variant: Option<BackwardVariant>) -> [Vec<f64>; 3] {
        let (mut executable, memory) = self.load(device, variant);
        let all = outputs(&mut *executable, &memory, &self.gradient_bytes());
        [0, 1, 2].map(|output| widened(self.kernel.dtype, &all[output]))
    }

    /// The rows of an operand: by sequence, head and position.
    fn rows(&self, operand: BackwardOperand, strides: HeadStrides) -> impl Fn(usize, usize, usize) -> Vec<f64> {
        let (values, offset) = (widened(dtype_of(&self.kernel, operand), &self.bytes(operand)), self.offset(operand));
        let width = self.kernel.width;
        move |b, h, i| values[offset + b * strides.batch + h * strides.head + i * strides.position..][..width].to_vec()
    }

    /// Whether a probability is kept, divided by how many are.
    fn kept(&self, [b, h, i, j]: [usize; 4]) -> f64 {
        let AttentionShape { heads, queries, keys, .. } = self.shape;
        let element = (((b * heads + h) * queries + i) * keys + j) as u64;
        self.kernel.dropout.map_or(1.0, |rule| {
            let word = philox(element / 4, [SEED, rule.offset])[(element % 4) as usize];
            let keeps = f64::from(word) >= (rule.probability * 4_294_967_296.0).floor();
            f64::from(u8::from(keeps)) / (1.0 - rule.probability)
        })
    }

    /// The gradients in f64, and the largest score. `least` is what the smallest weight may be off.
    fn formula(&self, least: f64) -> ([Sums; 3], f64) {
        let AttentionKernel { width, scale, mask: kind, .. } = self.kernel;
        let AttentionShape { batch, heads, queries, keys, q, k, v, mask, o, .. } = self.shape;
        let [q, k, v] = [(Q, q), (K, k), (V, v)].map(|(operand, strides)| self.rows(Operand(operand), strides));
        let gradient = self.rows(ResultGradient, o);
        let added = match kind {
            AttentionMask::Additive(dtype) => widened(dtype, &self.bytes(Operand(Mask))),
            AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => Vec::new(),
        };
        let scale = f64::from(scale);
        let mut sums = self.elements().map(|elements| vec![[0.0; 2]; elements]);
        let mut largest = 0.0_f64;
        let group = self.kernel.group;
        for (b, h) in (0..batch * heads).map(|head| (head / heads, head % heads)) {
            let own_keys: Vec<_> = (0..keys).map(|j| (k(b, h / group, j), v(b, h / group, j))).collect();
            for i in 0..queries {
                let (query, slope) = (q(b, h, i), gradient(b, h, i));
                let seen = match kind {
                    AttentionMask::Causal => {
                        (i as i64 + keys as i64 - queries as i64 + 1).clamp(0, keys as i64) as usize
                    }
                    _ => keys,
                };
                let row = b * mask.batch + h * mask.head + i * mask.position;
                let score = |j: usize, key: &[f64]| dot(&query, key)[0] * scale + added.get(row + j).unwrap_or(&0.0);
                let scores: Vec<f64> = own_keys[..seen].iter().enumerate().map(|(j, (key, _))| score(j, key)).collect();
                let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|score| (score - maximum).exp()).sum();
                if maximum == f64::NEG_INFINITY {
                    continue;
                }
                let of_keys = scores.iter().zip(&own_keys).enumerate().map(|(j, (score, (key, value)))| {
                    largest = largest.max(dot(&query, key)[1] * scale.abs());
                    let kept = self.kept([b, h, i, j]);
                    ((score - maximum).exp() / total, kept, dot(&slope, value).map(|x| x * kept))
                });
                let of_keys: Vec<(f64, f64, [f64; 2])> = of_keys.collect();
                let delta = of_keys.iter().fold([0.0; 2], |[sum, size], (p, _, [x, y])| [sum + p * x, size + p * y]);
                for (j, (p, kept, [x, y])) in of_keys.into_iter().enumerate() {
                    let weight = [p * (x - delta[0]) * scale, (p * (y + delta[1]) + least) * scale.abs()];
                    let at_query = ((b * heads + h) * queries + i) * width;
                    // A head of keys has the sums over its group.
                    let at_key = ((b * heads + h) / group * keys + j) * width;
                    add(&mut sums[0][at_query..][..width], weight, &own_keys[j].0);
                    add(&mut sums[1][at_key..][..width], weight, &query);
                    add(&mut sums[2][at_key..][..width], [p * kept, p * kept + least], &slope);
                }
            }
        }
        (sums, largest)
    }

    fn check(&self, device: &Cuda, variant: Option<BackwardVariant>) {
        let AttentionKernel { dtype, width, .. } = self.kernel;
        let least = if dtype == Dtype::F16 { f64::powi(2.0, -24) } else { f64::from(f32::MIN_POSITIVE) };
        let (want, largest) = self.formula(if dtype == Dtype::F32 { least } else { least / epsilon(dtype) });
        let got = self.run(device, variant);
        // A probability is off by what its score is off, and on matrix units by its own rounding; a sum by the root of its
        // terms; a few of each. Then the result is rounded.
        let positions = (self.shape.keys.max(self.shape.queries * self.kernel.group) as f64).sqrt();
        let terms = (width as f64).sqrt() * (largest + 1.0) + largest + positions;
        let single =
            4.0 * f64::from(f32::EPSILON) * (terms + 4.0) + if dtype == Dtype::F32 { 0.0 } else { epsilon(dtype) };
        for ((got, want), of) in got.iter().zip(want).zip(["queries", "keys", "values"]) {
            for (at, (got, [want, size])) in got.iter().zip(want).enumerate() {
                let bound = single * size + epsilon(dtype) * want.abs() + least;
                let same = *got == want || (got - want).abs() <= bound;
                let Case { kernel, shape, .. } = self;
                assert!(same, "{of} {at}: {got} for {want} within {bound:e}: {kernel:?} {shape:?} {variant:?}");
            }
        }
    }
}

/// The product, and the sum of the sizes of its terms.
fn dot(a: &[f64], b: &[f64]) -> [f64; 2] {
    a.iter().zip(b).fold([0.0; 2], |[sum, size], (x, y)| [sum + x * y, size + (x * y).abs()])
}

fn add(to: &mut [[f64; 2]], [weight, size]: [f64; 2], values: &[f64]) {
    for (to, x) in to.iter_mut().zip(values) {
        *to = [to[0] + weight * x, to[1] + size * x.abs()];
    }
}

fn tensor(queries: SideTiles, keys: SideTiles) -> Option<BackwardVariant> {
    Some(BackwardVariant::Tensor(BackwardTiles { queries, keys, parts: 1 }))
}

const LOW: SideTiles = SideTiles { warps: 4, atoms: 1, tile: 64, inner: 32, blocks: 2, held: true };
const TALL: SideTiles = SideTiles { atoms: 2, inner: 16, ..LOW };
const TALL_LOADED: SideTiles = SideTiles { atoms: 2, held: false, ..LOW };

fn tall() -> BackwardVariant {
    BackwardVariant::Tensor(BackwardTiles { queries: TALL, keys: TALL_LOADED, parts: 1 })
}

/// All kernels that can do a case of heads of 64.
fn variants(device: &Cuda, kernel: &AttentionKernel) -> Vec<Option<BackwardVariant>> {
    let mut variants = vec![None, Some(BackwardVariant::Plain)];
    let Backend::Cuda(target) = device.backend() else { return variants };
    if kernel.dtype != Dtype::F32 && target.arch.is_ampere() {
        let small = SideTiles { warps: 2, tile: 16, inner: 16, held: false, ..LOW };
        let halves = BackwardTiles { queries: small, keys: small, parts: 2 };
        variants.extend([tensor(LOW, LOW), Some(tall()), Some(BackwardVariant::Tensor(halves))]);
    }
    variants
}

/// Whatever stands beside it, as for attention.
#[test]
fn a_gradient_has_the_same_bits_alone() {
    let Some(device) = gpu(true) else { return };
    for (dtype, mask) in [Dtype::Bf16, Dtype::F32, Dtype::F16].into_iter().zip(masks()) {
        let (kernel, sizes) = (named_kernel(dtype, 64, mask, false), [3, 2, 129, 129]);
        let case = Case::new(kernel, sizes, 1.0);
        for variant in variants(&device, &kernel) {
            let whole = case.run(&device, variant);
            for index in 0..sizes[0] {
                let alone = case.sequence(index).run(&device, variant);
                let equal = whole.iter().zip(&alone).all(|(whole, alone)| same(part(whole, sizes[0], index), alone));
                assert!(equal, "{index} of {sizes:?}: {kernel:?} {variant:?}");
            }
        }
    }
}

// Tests by storage type: the compiler takes one source at a time in a process, and tests may be run one a process.

#[test]
fn every_f32_gradient_kernel_matches() {
    on_gpu(check_kernels, Dtype::F32);
}

#[test]
fn every_f16_gradient_kernel_matches() {
    on_gpu(check_kernels, Dtype::F16);
}

#[test]
fn every_bf16_gradient_kernel_matches() {
    on_gpu(check_kernels, Dtype::Bf16);
}

#[test]
fn every_f32_gradient_length_matches() {
    on_gpu(check_lengths, Dtype::F32);
}

#[test]
fn every_f16_gradient_length_matches() {
    on_gpu(check_lengths, Dtype::F16);
}

#[test]
fn every_bf16_gradient_length_matches() {
    on_gpu(check_lengths, Dtype::Bf16);
}

#[test]
fn every_f32_gradient_width_matches() {
    on_gpu(check_widths, Dtype::F32);
}

#[test]
fn every_f16_gradient_width_matches() {
    on_gpu(check_widths, Dtype::F16);
}

#[test]
fn every_bf16_gradient_width_matches() {
    on_gpu(check_widths, Dtype::Bf16);
}

fn check_kernels(device: &Cuda, dtype: Dtype) {
    for (turn, mask) in masks().enumerate() {
        for (width, sizes) in [(64, [2, 3, 129, 129]), (40, [1, 2, 33, 9]), (80, [2, 1, 70, 200])] {
            let kernel = named_kernel(dtype, width, mask, turn % 2 == 1);
            let case = Case::new(kernel, sizes, 1.0);
            // Each way takes a compilation: all of them for the width that models have.
            let variants = if width == 64 { variants(device, &kernel) } else { vec![None] };
            variants.into_iter().for_each(|variant| case.check(device, variant));
        }
    }
}

fn check_lengths(device: &Cuda, dtype: Dtype) {
    for mask in [AttentionMask::Causal, AttentionMask::Full] {
        let kernel = named_kernel(dtype, 64, mask, false);
        for length in [1, 17, 64, 127, 128, 129, 1000] {
            Case::new(kernel, [1, 2, length, length], 1.0).check(device, None);
        }
        // Other numbers of queries than of keys: of more queries than keys the first see none.
        for [queries, keys] in
            [[1, 300], [3, 64], [200, 65], [65, 200], [130, 1], [200, 72], [72, 200], [321, 65], [65, 321]]
        {
            Case::new(kernel, [2, 2, queries, keys], 1.0).check(device, None);
        }
        let wide = AttentionKernel { width: 128, ..kernel };
        for [queries, keys] in [[64, 64], [129, 129], [200, 72], [72, 200], [1000, 1000]] {
            Case::new(wide, [1, 3, queries, keys], 1.0).check(device, None);
        }
        Case::shared(kernel, [2, 4, 130, 130]).check(device, None);
        Case::new(named_kernel(dtype, 64, mask, true), [2, 2, 130, 67], 1.0).check(device, None);
        // Enough blocks for tall tiles, and for warpgroups to go on to a second one.
        let many = Case::new(kernel, [2, 68, 129, 129], 1.0);
        many.check(device, None);
        let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
        if dtype != Dtype::F32 && target.arch.is_ampere() {
            many.check(device, Some(tall()));
        }
    }
}

fn check_widths(device: &Cuda, dtype: Dtype) {
    for width in [1, 8, 16, 32, 96, 112, 128, 176, 192, 256] {
        for dropout in [false, true] {
            let kernel = named_kernel(dtype, width, AttentionMask::Causal, dropout);
            Case::new(kernel, [1, 2, 130, 130], 1.0).check(device, None);
        }
    }
}

#[test]
fn fused_operands_are_read_in_place() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for length in [3, 67, 200] {
            for start in [0, 8, 1] {
                for width in [32, 64, 160] {
                    let kernel = named_kernel(dtype, width, AttentionMask::Causal, false);
                    Case::fused(kernel, [2, 3, length], start).check(&device, None);
                }
            }
        }
    }
}

#[test]
fn extreme_scores_and_scales_hold() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        for scale in [0.125, -0.125, 0.0] {
            let kernel = AttentionKernel { scale, ..named_kernel(dtype, 64, AttentionMask::Causal, false) };
            Case::new(kernel, [1, 2, 130, 130], 1.0).check(&device, None);
        }
        // Scores of about 1e4: one key of a row has all the weight, and slopes cancel.
        let kernel = named_kernel(dtype, 64, AttentionMask::Full, false);
        let got = Case::new(kernel, [1, 2, 130, 130], 1e4).run(&device, None);
        assert!(got.iter().flatten().all(|x| x.is_finite()), "{dtype}");
    }
}

/// The gradient of a mean where all keys are hidden by the smallest number.
#[test]
fn rows_whose_keys_are_all_hidden_have_the_gradient_of_a_mean() {
    let Some(device) = gpu(true) else { return };
    for (dtype, mask) in
        [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)]
    {
        let kernel = named_kernel(dtype, 64, AttentionMask::Additive(mask), false);
        for sizes in [[2, 3, 129, 129], [2, 1, 70, 200]] {
            for hidden in HIDDEN {
                let case = Case::new(kernel, sizes, 1.0).hidden(hidden);
                variants(&device, &kernel).into_iter().for_each(|variant| case.check(&device, variant));
            }
        }
        let dropped = named_kernel(dtype, 64, AttentionMask::Additive(mask), true);
        Case::new(dropped, [2, 3, 129, 129], 1.0).hidden(f32::MIN).check(&device, None);
    }
}

/// Every odd length, both masks, groups of 1 to 8 heads.
fn check_warpgroups(dtype: Dtype, width: usize) {
    let Some(device) = hopper() else { return };
    for mask in [AttentionMask::Causal, AttentionMask::Full] {
        let kernel = |group: usize| AttentionKernel { group, ..named_kernel(dtype, width, mask, false) };
        let check = |group: usize, sizes: [usize; 4]| {
            Case::new(kernel(group), sizes, 1.0).check(&device, Some(BackwardVariant::Hopper));
        };
        for (turn, length) in [1, 2, 17, 64, 127, 128, 129, 1000].into_iter().enumerate() {
            let group = [1, 2, 4, 8][turn % 4];
            check(group, [1 + turn % 2, 8, length, length]);
        }
        check(4, [1, 4, 1500, 1500]);
        // More keys than queries, and more queries than keys, of which the first see none if causal.
        for (group, [queries, keys]) in [(2, [72, 200]), (4, [200, 72]), (1, [65, 321]), (8, [321, 65]), (2, [127, 1])]
        {
            check(group, [2, 8, queries, keys]);
        }
        if mask == AttentionMask::Full {
            check(2, [1, 4, 1, 129]);
            check(4, [1, 4, 129, 17]);
        }
        // More blocks than run at once.
        check(2, [3, 68, 300, 300]);
    }
}

#[test]
fn every_bf16_gradient_by_warpgroups_matches_64() {
    check_warpgroups(Dtype::Bf16, 64);
}

#[test]
fn every_f16_gradient_by_warpgroups_matches_64() {
    check_warpgroups(Dtype::F16, 64);
}

#[test]
fn every_bf16_gradient_by_warpgroups_matches_128() {
    check_warpgroups(Dtype::Bf16, 128);
}

#[test]
fn every_f16_gradient_by_warpgroups_matches_128() {
    check_warpgroups(Dtype::F16, 128);
}

#[test]
fn every_bf16_gradient_by_warpgroups_matches_192() {
    check_warpgroups(Dtype::Bf16, 192);
}

#[test]
fn every_f16_gradient_by_warpgroups_matches_192() {
    check_warpgroups(Dtype::F16, 192);
}

#[test]
fn every_bf16_gradient_by_warpgroups_matches_256() {
    check_warpgroups(Dtype::Bf16, 256);
}

#[test]
fn every_f16_gradient_by_warpgroups_matches_256() {
    check_warpgroups(Dtype::F16, 256);
}

/// Zeros stand in shared memory beyond the width, and nothing of them is stored.
#[test]
fn every_width_of_a_gradient_by_warpgroups_matches() {
    let Some(device) = hopper() else { return };
    for (turn, width) in [16, 32, 48, 80, 96, 112, 144, 160, 176, 208, 224, 240].into_iter().enumerate() {
        for mask in [AttentionMask::Causal, AttentionMask::Full] {
            let dtype = [Dtype::Bf16, Dtype::F16][(turn + usize::from(mask == AttentionMask::Full)) % 2];
            for (group, [queries, keys]) in [(1, [129, 129]), (2, [1500, 1500]), (4, [127, 255]), (1, [200, 72])] {
                let kernel = AttentionKernel { group, ..named_kernel(dtype, width, mask, false) };
                Case::new(kernel, [2, 4, queries, keys], 1.0).check(&device, Some(BackwardVariant::Hopper));
            }
        }
    }
}

/// torch's math path computes in f32 and rounds once: its error is that of rounding.
#[test]
fn errors_are_at_most_three_times_those_of_the_math_path() {
    let Some(device) = gpu(true) else { return };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let wide = [(128, AttentionMask::Causal), (192, AttentionMask::Full), (256, AttentionMask::Causal)];
        for (width, mask) in [(64, AttentionMask::Causal), (64, AttentionMask::Full)].into_iter().chain(wide) {
            let case = Case::new(named_kernel(dtype, width, mask, false), [1, 2, 512, 512], 1.0);
            let (want, _) = case.formula(0.0);
            for variant in [None, tensor(LOW, LOW)] {
                for ((got, want), of) in case.run(&device, variant).iter().zip(&want).zip(["queries", "keys", "values"])
                {
                    let want: Vec<f64> = want.iter().map(|&[value, _]| value).collect();
                    let [mean, largest] = errors_over_rounding(dtype, got, &want);
                    let name = format!("{of} {dtype} {width} {mask:?} {variant:?}");
                    println!("{name}: {mean:.2} times the error of the math path, {largest:.2} the largest");
                    assert!(mean <= 3.0 && largest <= 3.0, "{name}: {mean} {largest}");
                }
            }
        }
    }
}

#[test]
fn nan_stays_in_its_row_and_head() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        let kernel = named_kernel(dtype, 64, AttentionMask::Full, false);
        let mut case = Case::new(kernel, [1, 2, 100, 100], 1.0);
        // The gradient of the result of query 20 of the first head.
        case.tensors[3].1[20 * 64] = f32::NAN;
        let [queries, keys, values] = case.run(&device, None);
        let head = 100 * 64;
        let is_hit = |at: usize| (20 * 64..21 * 64).contains(&at);
        assert!(queries.iter().enumerate().all(|(at, x)| x.is_nan() == is_hit(at)), "{dtype} queries");
        assert!(keys.iter().enumerate().all(|(at, x)| x.is_nan() == (at < head)), "{dtype} keys");
        assert!(values.iter().enumerate().all(|(at, x)| x.is_nan() == (at < head && at % 64 == 0)), "{dtype} values");
    }
}

#[test]
fn without_queries_or_keys_gradients_are_zeros() {
    let Some(device) = gpu(true) else { return };
    for dtype in Dtype::FLOATS {
        let kernel = named_kernel(dtype, 64, AttentionMask::Full, false);
        for sizes in [[1, 2, 0, 70], [1, 2, 70, 0]] {
            let got = Case::new(kernel, sizes, 1.0).run(&device, None);
            assert!(got.iter().flatten().all(|&x| x == 0.0), "{dtype} {sizes:?}");
        }
    }
}

/// Not a test of right or wrong: `cargo test -p deuteron-device --test all attention -- --ignored --nocapture` where a GPU is.
#[test]
#[ignore = "prints times"]
fn backward_tiles_side_by_side() {
    let Some(device) = gpu(true) else { return };
    let three = SideTiles { blocks: 3, ..LOW };
    let high = SideTiles { inner: 64, ..LOW };
    let tall_half = SideTiles { inner: 32, ..TALL };
    let narrow = [
        None,
        Some(tall()),
        tensor(TALL, TALL),
        tensor(tall_half, TALL_LOADED),
        tensor(LOW, LOW),
        tensor(three, three),
        tensor(high, high),
        tensor(TALL, three),
        tensor(three, TALL_LOADED),
    ];
    let short = SideTiles { tile: 32, ..LOW };
    let loaded = SideTiles { held: false, ..short };
    let wide_variants = [
        None,
        tensor(short, loaded),
        tensor(SideTiles { inner: 16, ..short }, loaded),
        tensor(short, SideTiles { inner: 16, ..loaded }),
    ];
    let causal = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, false);
    let wide = named_kernel(Dtype::Bf16, 128, AttentionMask::Causal, false);
    let single = named_kernel(Dtype::F32, 64, AttentionMask::Causal, false);
    let dropped = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, true);
    let print = |kernel: AttentionKernel, sizes: [usize; 4], variants: &[Option<BackwardVariant>]| {
        let case = Case::new(kernel, sizes, 1.0);
        for &variant in variants {
            let (mut executable, memory) = case.load(&device, variant);
            let us = microseconds(&mut *executable, &memory);
            let variant = variant.map_or("as chosen".to_string(), |variant| format!("{variant:?}"));
            println!("{:8.1} us  {sizes:?} {} of {}, {variant}", us, kernel.dtype, kernel.width);
        }
    };
    print(causal, [8, 12, 1024, 1024], &narrow);
    print(causal, [1, 12, 1024, 1024], &narrow);
    print(causal, [4, 12, 4096, 4096], &narrow);
    let shared = |width: usize| AttentionKernel { width, group: 4, ..causal };
    print(shared(128), [1, 32, 4096, 4096], &[None]);
    print(shared(64), [1, 32, 4096, 4096], &[None]);
    for width in [80, 96] {
        let other = AttentionKernel { width, ..causal };
        print(other, [8, 16, 1024, 1024], &[None, wide_variants[1]]);
    }
    print(wide, [4, 16, 4096, 4096], &wide_variants);
    print(wide, [8, 16, 1024, 1024], &wide_variants[..2]);
    let low = SideTiles { tile: 16, inner: 16, blocks: 1, held: false, ..LOW };
    let halves = BackwardTiles { queries: low, keys: SideTiles { warps: 2, ..low }, parts: 2 };
    for width in [144, 160, 192, 224, 256] {
        let other = AttentionKernel { width, ..causal };
        let variants = [None, (width % 32 == 0).then_some(BackwardVariant::Tensor(halves))];
        print(other, [8, 16, 1024, 1024], if variants[1].is_some() { &variants } else { &variants[..1] });
    }
    print(AttentionKernel { width: 256, ..causal }, [4, 8, 4096, 4096], &[None]);
    print(shared(256), [1, 16, 4096, 4096], &[None]);
    print(dropped, [8, 12, 1024, 1024], &[None]);
    print(single, [8, 12, 1024, 1024], &[None]);
}
