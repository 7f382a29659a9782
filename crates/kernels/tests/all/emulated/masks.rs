//! Attention under masks of large finite numbers, such as the smallest `f32`: a row whose keys are all masked weights those of its largest score,
//! each the same, as scores in f32 do in torch. A row of `-inf` alone is zeros.

use std::path::Path;

use deuteron_attention::backward::LoweredBackward;
use deuteron_attention::cuda::backward::{self, BackwardTiles, BackwardVariant, SideTiles};
use deuteron_attention::cuda::forward::{ForwardVariant, with_variant};
use deuteron_attention::cuda::scores::Scores;
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::kernel::{
    AttentionKernel, AttentionMask, AttentionResult, AttentionShape, HeadStrides, LoweredAttention,
};
use deuteron_attention::{AttentionOperand, BackwardOperand};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{ArgBinding, Kernel, Source};
use deuteron_emulator::{Lanes, Schedule};
use deuteron_graph::{Dtype, Graph};
use half::{bf16, f16};

use super::{attention, compiler, greedy, only};

/// What hides the keys of a sequence: beside the first scores have few digits, beside the second they are rounded to multiples of 8; the last
/// two, the smallest `bf16` and `f32`, overflow as powers of 2.
const HIDDEN: [f32; 6] = [-1e5, -1e8, -1e9, -1e30, -3.389_531_4e38, f32::MIN];
const HEADS: usize = 2;
/// Kinds of rows of a mask, which take turns.
const KINDS: usize = 8;
const WIDTH: usize = 16;
/// So small that scores do not reach half of what those beside -1e8 / 4 are rounded to.
const SCALE: f32 = 0.02;

/// What is added to the score of a key.
fn added(hidden: f32, query: usize, [key, keys]: [usize; 2], usual: f32) -> f32 {
    let never = f32::NEG_INFINITY;
    let hides = |hides: bool| if hides { hidden } else { usual };
    match query % KINDS {
        0 => hidden,
        1 => never,
        2 => usual,
        // Padding on the left, and on the right.
        3 => hides(key < keys / 2 + 2),
        4 => hides(key >= keys / 3),
        5 => [hidden, never][key % 2],
        6 => hides(key + 1 < keys),
        _ => [hidden, hidden / 4.0][key % 2],
    }
}

fn stored(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F16 => bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        Dtype::Bf16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        _ => bytes.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}

fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => f64::powi(2.0, -10),
        Dtype::Bf16 => f64::powi(2.0, -7),
        _ => f64::from(f32::EPSILON),
    }
}

/// A sequence for each number that hides, with its data.
struct Case {
    kernel: AttentionKernel,
    shape: AttentionShape,
    /// queries, keys, values, the gradient of the result, the mask
    bytes: [Vec<u8>; 5],
}

/// An element in f64, the sum of the sizes of its terms, and how far it is off where scores are.
type Element = [f64; 3];

/// Results and gradients.
#[derive(Default)]
struct Expected {
    values: Vec<Element>,
    probabilities: Vec<Element>,
    gradients: [Vec<Element>; 3],
}

impl Case {
    fn new(dtype: Dtype, mask: Dtype, [queries, keys]: [usize; 2]) -> Case {
        let kernel = AttentionKernel { scale: SCALE, ..attention::kernel(dtype, WIDTH, AttentionMask::Additive(mask)) };
        let batch = HIDDEN.len();
        let strides = |positions: usize| HeadStrides {
            batch: HEADS * positions * WIDTH,
            head: positions * WIDTH,
            position: WIDTH,
        };
        let (q, k, none) = (strides(queries), strides(keys), HeadStrides::default());
        let shape = AttentionShape {
            batch,
            heads: HEADS,
            queries,
            keys,
            q,
            k,
            v: k,
            mask: HeadStrides { batch: queries * keys, head: 0, position: keys },
            slopes: none,
            documents: none,
            o: q,
        };
        let mut state = 7_u64;
        let mut usual = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut tensor = |positions: usize| {
            let values: Vec<f32> = (0..batch * HEADS * positions * WIDTH).map(|_| usual()).collect();
            stored(dtype, &values)
        };
        let tensors = [tensor(queries), tensor(keys), tensor(keys), tensor(queries)];
        let rows = (0..batch * queries).map(|row| (HIDDEN[row / queries], row % queries));
        let values: Vec<f32> = rows
            .flat_map(|(hidden, query)| (0..keys).map(move |key| (hidden, query, key)))
            .map(|(hidden, query, key)| added(hidden, query, [key, keys], 3.0 * usual()))
            .collect();
        let [q, k, v, slope] = tensors;
        Case { kernel, shape, bytes: [q, k, v, slope, stored(mask, &values)] }
    }

    fn expected(&self) -> Expected {
        let AttentionShape { queries, keys, .. } = self.shape;
        let AttentionMask::Additive(mask) = self.kernel.mask else { panic!("no mask") };
        let [q, k, v, slope] = [0, 1, 2, 3].map(|at| widened(self.kernel.dtype, &self.bytes[at]));
        let added = widened(mask, &self.bytes[4]);
        let heads = HIDDEN.len() * HEADS;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let row = |values: &'_ [f64], row: usize| values[row * WIDTH..][..WIDTH].to_vec();
        let mut expected = Expected {
            gradients: [queries, keys, keys].map(|n| vec![[0.0; 3]; heads * n * WIDTH]),
            ..Expected::default()
        };
        for (head, i) in (0..heads * queries).map(|r| (r / queries, r % queries)) {
            let (query, incoming) = (row(&q, head * queries + i), row(&slope, head * queries + i));
            let masks = &added[(head / HEADS * queries + i) * keys..][..keys];
            // In f32, as torch adds the mask.
            let score = |j: usize| {
                f64::from((dot(&query, &row(&k, head * keys + j)) * f64::from(SCALE)) as f32 + masks[j] as f32)
            };
            let scores: Vec<f64> = (0..keys).map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> =
                scores.iter().map(|s| if most == f64::NEG_INFINITY { 0.0 } else { (s - most).exp() }).collect();
            let sum = powers.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            let slopes: Vec<f64> = (0..keys).map(|j| dot(&incoming, &row(&v, head * keys + j))).collect();
            let delta = powers.iter().zip(&slopes).map(|(p, x)| p / sum * x).sum::<f64>();
            // A score as a power of 2 is rounded once more, unless that is more than all the digits it had.
            let place = 4.0 * f64::from(f32::EPSILON) * most.abs();
            let off = if place < 1.0 { place } else { 0.0 };
            let mut value = vec![[0.0; 3]; WIDTH];
            for j in 0..keys {
                let p = powers[j] / sum;
                let (weight, size) = (
                    p * (slopes[j] - delta) * f64::from(SCALE),
                    p * (slopes[j].abs() + delta.abs()) * f64::from(SCALE),
                );
                for c in 0..WIDTH {
                    let join = |to: &mut Element, weight: f64, size: f64, x: f64| {
                        *to = [to[0] + weight * x, to[1] + size * x.abs(), to[2] + off * size * x.abs()];
                    };
                    let (at_query, at_key) = ((head * queries + i) * WIDTH + c, (head * keys + j) * WIDTH + c);
                    join(&mut value[c], p, p, v[at_key]);
                    join(&mut expected.gradients[0][at_query], weight, size, k[at_key]);
                    join(&mut expected.gradients[1][at_key], weight, size, query[c]);
                    join(&mut expected.gradients[2][at_key], p, p, incoming[c]);
                }
                expected.probabilities.push([p, p, off * p]);
            }
            expected.values.extend(value);
        }
        expected
    }

    /// Whether every element is what rounding allows.
    fn compare(&self, what: &str, got: &[u8], want: &[Element]) {
        let dtype = self.kernel.dtype;
        let AttentionShape { queries, keys, .. } = self.shape;
        let terms = 8.0 + (queries.max(keys) as f64).sqrt();
        let single = 8.0 * f64::from(f32::EPSILON) * terms + if dtype == Dtype::F32 { 0.0 } else { epsilon(dtype) };
        let least = if dtype == Dtype::F16 { f64::powi(2.0, -22) } else { 1e-30 };
        let got = widened(dtype, got);
        assert_eq!(got.len(), want.len());
        for (at, (got, &[want, size, off])) in got.iter().zip(want).enumerate() {
            let bound = single * size + off + epsilon(dtype) * want.abs() + least;
            let row = at / if what == "probabilities" { keys } else { WIDTH };
            assert!(
                (got - want).abs() <= bound,
                "{what} {at}, row {row}: {got} for {want} within {bound:e}: {:?} {:?}",
                self.kernel,
                self.shape
            );
        }
    }

    fn run(&self, name: &str, kernel: &Kernel, arguments: &[&[u8]], results: usize) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(format!("masks_{name}"));
        let schedule = Schedule { resident: 8, lanes: Lanes::Together, seeds: 1..2 };
        let ran = deuteron_emulator::run(compiler().unwrap(), &folder, kernel, arguments, &schedule);
        let mut all = ran.unwrap_or_else(|error| panic!("{name}: {error}")).results;
        all.split_off(arguments.len() - results)
    }

    fn bindings<T>(&self, operands: Vec<T>, of: impl Fn(&T) -> (Dtype, bool)) -> Vec<ArgBinding> {
        let mut graph = Graph::new("test");
        let mut binding = |(at, operand): (usize, &T)| {
            let base = graph.input(&format!("x{at}"), Dtype::F32, [1]).unwrap();
            let (dtype, written) = of(operand);
            ArgBinding { base, dtype, written, offset: 0, leading: Vec::new(), table_rows: 0 }
        };
        operands.iter().enumerate().map(&mut binding).collect()
    }

    fn check_forward(&self, name: &str, variant: ForwardVariant) {
        if compiler().is_none() {
            return;
        }
        let is_stored = matches!(variant, ForwardVariant::Scores(_));
        let AttentionShape { queries, keys, .. } = self.shape;
        let (mut kernel, mut shape, mut columns) = (self.kernel, self.shape, WIDTH);
        if is_stored {
            columns = keys;
            kernel.result = AttentionResult::Probabilities;
            shape.o = HeadStrides { batch: HEADS * queries * keys, head: queries * keys, position: keys };
        }
        let operands = kernel.operands();
        let args = self
            .bindings(operands.to_vec(), |&operand| (kernel.operand_dtype(operand), operand == AttentionOperand::O));
        let attention = LoweredAttention { kernel, shape, args };
        let made = with_variant(&attention, &variant, &CudaTarget::new(Arch::Sm90a, 132));
        let result = vec![0xff; HIDDEN.len() * HEADS * queries * columns * kernel.dtype.bytes()];
        let [q, k, v, _, mask] = self.bytes.each_ref().map(Vec::as_slice);
        let arguments: Vec<&[u8]> = if is_stored { vec![q, k, mask, &result] } else { vec![q, k, v, mask, &result] };
        let results = self.run(name, &made, &arguments, 1);
        let expected = self.expected();
        let (what, want) =
            if is_stored { ("probabilities", expected.probabilities) } else { ("values", expected.values) };
        self.compare(what, &results[0], &want);
    }

    fn check_gradient(&self, name: &str, variant: BackwardVariant) {
        if compiler().is_none() {
            return;
        }
        use BackwardOperand::{Gradient, Operand, ResultGradient};
        let kernel = self.kernel;
        let args = self.bindings(kernel.backward_operands().collect(), |&operand| match operand {
            Operand(operand) => (kernel.operand_dtype(operand), false),
            ResultGradient => (kernel.dtype, false),
            Gradient(_) => (kernel.dtype, true),
        });
        let gradient = LoweredBackward::apart(kernel, self.shape, args);
        let made = backward::with_variant(&gradient, &variant, &CudaTarget::new(Arch::Sm90a, 132));
        let [q, k, v, slope, mask] = self.bytes.each_ref().map(Vec::as_slice);
        let empty = [q, k, v].map(|bytes| vec![0xff; bytes.len()]);
        let results = self.run(name, &made, &[q, k, v, mask, slope, &empty[0], &empty[1], &empty[2]], 3);
        let expected = self.expected();
        for ((got, want), of) in results.iter().zip(&expected.gradients).zip(["queries", "keys", "values"]) {
            self.compare(of, got, want);
        }
    }
}

const TENSOR: ForwardVariant = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 32, blocks: 2 });
const DECODE: ForwardVariant = ForwardVariant::Decode { rows: 4, vector: true };

#[test]
fn results_of_every_storage() {
    let sizes = [19, 150];
    Case::new(Dtype::F32, Dtype::F32, sizes).check_forward("plain_f32", ForwardVariant::Plain);
    Case::new(Dtype::F16, Dtype::Bf16, sizes).check_forward("plain_f16", ForwardVariant::Plain);
    Case::new(Dtype::F16, Dtype::F32, sizes).check_forward("tensor_f16", TENSOR);
    Case::new(Dtype::Bf16, Dtype::Bf16, sizes).check_forward("tensor_bf16", TENSOR);
    // The smallest f16 is an ordinary number.
    Case::new(Dtype::Bf16, Dtype::F16, sizes).check_forward("tensor_f16_mask", TENSOR);
}

/// Ranges of keys are joined in a cluster, or by a grid of their own.
#[test]
fn results_of_few_queries() {
    Case::new(Dtype::F32, Dtype::F32, [8, 150]).check_forward("decode_f32", DECODE);
    Case::new(Dtype::F16, Dtype::F32, [8, 150])
        .check_forward("decode_f16", ForwardVariant::Decode { rows: 1, vector: false });
    Case::new(Dtype::Bf16, Dtype::Bf16, [8, 5000]).check_forward("decode_bf16", DECODE);
}

#[test]
fn probabilities_of_every_storage() {
    let tensor = |together| {
        ForwardVariant::Scores(Scores::Tensor { tiles: Tiles { warps: 4, atoms: 1, keys: 32, blocks: 1 }, together })
    };
    Case::new(Dtype::F32, Dtype::F32, [19, 150]).check_forward("scores_f32", ForwardVariant::Scores(Scores::Plain));
    Case::new(Dtype::Bf16, Dtype::F32, [19, 150])
        .check_forward("scores_plain_bf16", ForwardVariant::Scores(Scores::Plain));
    Case::new(Dtype::F16, Dtype::F32, [19, 152]).check_forward("scores_f16", tensor(8));
    Case::new(Dtype::Bf16, Dtype::Bf16, [19, 151]).check_forward("scores_bf16", tensor(1));
}

#[test]
fn gradients_of_every_storage() {
    let low = SideTiles { warps: 4, atoms: 1, tile: 64, inner: 32, blocks: 2, held: true };
    let small = SideTiles { warps: 2, tile: 16, inner: 16, held: false, ..low };
    let tensor = |queries, keys| BackwardVariant::Tensor(BackwardTiles { queries, keys, parts: 1 });
    Case::new(Dtype::F32, Dtype::F32, [19, 150]).check_gradient("gradient_f32", BackwardVariant::Plain);
    Case::new(Dtype::F16, Dtype::F32, [19, 150]).check_gradient("gradient_f16", tensor(low, low));
    Case::new(Dtype::Bf16, Dtype::Bf16, [75, 70]).check_gradient("gradient_bf16", tensor(small, low));
}

/// Rows of a generated kernel, in a warp and in a block: the mask is added, and then the largest is subtracted.
#[test]
fn softmax_of_rows() {
    let Some(compiler) = compiler() else { return };
    for (dtype, keys) in [(Dtype::F32, 150), (Dtype::F16, 33), (Dtype::Bf16, 1500)] {
        let (sequences, queries) = (HIDDEN.len(), KINDS);
        let text = format!(
            "x = input {dtype}[{sequences},{queries},{keys}] ; m = input f32[{sequences},{queries},{keys}]
c = cast x f32 ; s = add c m ; p = softmax s ; y = cast p {dtype} ; out y"
        );
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error:?}"));
        let (source, launch, _) = only(&graph, &greedy(&graph), 132);
        let rows = sequences * queries;
        let usual = |at: usize| (at * 37 % 101) as f32 / 101.0;
        let x = stored(dtype, &(0..rows * keys).map(|at| 0.8 * usual(at)).collect::<Vec<f32>>());
        let of_row = |row: usize| {
            (0..keys)
                .map(move |key| added(HIDDEN[row / queries], row % queries, [key, keys], 3.0 * usual(row + 7 * key)))
        };
        let mask: Vec<f32> = (0..rows).flat_map(of_row).collect();
        let bytes = [x.clone(), stored(Dtype::F32, &mask), vec![0xff; x.len()]];
        let arguments: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(format!("masks_softmax_{dtype}"));
        let schedule = Schedule { resident: 8, lanes: Lanes::Together, seeds: 1..2 };
        let kernel = Kernel::new(Source::Cuda(source), launch);
        let ran = deuteron_emulator::run(compiler, &folder, &kernel, &arguments, &schedule);
        let got = widened(dtype, ran.unwrap_or_else(|error| panic!("{dtype}: {error}")).results.last().unwrap());
        let x = widened(dtype, &x);
        for row in 0..rows {
            let scores = (row * keys..(row + 1) * keys).map(|at| f64::from(x[at] as f32 + mask[at]));
            let scores: Vec<f64> = scores.collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> =
                scores.iter().map(|s| if most == f64::NEG_INFINITY { 0.0 } else { (s - most).exp() }).collect();
            let sum = powers.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            for (key, power) in powers.iter().enumerate() {
                let (got, want) = (got[row * keys + key], power / sum);
                let bound = (epsilon(dtype) + 64.0 * f64::from(f32::EPSILON)) * want + f64::powi(2.0, -24);
                assert!((got - want).abs() <= bound, "{dtype} row {row} key {key}: {got} for {want}");
            }
        }
    }
}
