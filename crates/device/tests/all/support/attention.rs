//! Problems of attention: kernels, sizes, numbers.

use deuteron_attention::kernel::DropoutRule;
use deuteron_attention::{AttentionKernel, AttentionMask, AttentionResult, AttentionShape, HeadStrides, ScoreRules};
use deuteron_graph::Dtype;
use half::{bf16, f16};

pub const MASKS: [AttentionMask; 5] = [
    AttentionMask::Full,
    AttentionMask::Causal,
    AttentionMask::Cached,
    AttentionMask::Additive(Dtype::F32),
    AttentionMask::Additive(Dtype::Bf16),
];
pub const DROPOUT: DropoutRule = DropoutRule { probability: 0.4, offset: 9 };
pub const SEED: u32 = 1_234_567;

/// Whether models have heads of this width.
pub fn is_usual(width: usize) -> bool {
    matches!(width, 64 | 128)
}

pub fn named_kernel(dtype: Dtype, width: usize, mask: AttentionMask, dropout: bool) -> AttentionKernel {
    let scale = 1.0 / (width as f32).sqrt();
    let (dropout, result) = (dropout.then_some(DROPOUT), AttentionResult::Values);
    AttentionKernel { dtype, kv: dtype, width, group: 1, scale, mask, scores: ScoreRules::NONE, dropout, result }
}

/// Contiguous `[batch, heads, positions, width]`.
pub fn shape(sizes: [usize; 4], kernel: &AttentionKernel) -> AttentionShape {
    let [batch, heads, queries, keys] = sizes;
    let strides = |heads: usize, positions: usize| HeadStrides {
        batch: heads * positions * kernel.width,
        head: positions * kernel.width,
        position: kernel.width,
    };
    let (q, k) = (strides(heads, queries), strides(heads / kernel.group, keys));
    let mask = match kernel.mask {
        AttentionMask::Additive(_) => HeadStrides { batch: queries * keys, head: 0, position: keys },
        AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => HeadStrides::default(),
    };
    let o = match kernel.result {
        AttentionResult::Values => q,
        AttentionResult::Probabilities => {
            HeadStrides { batch: heads * queries * keys, head: queries * keys, position: keys }
        }
    };
    let none = HeadStrides::default();
    AttentionShape { batch, heads, queries, keys, q, k, v: k, mask, slopes: none, documents: none, o }
}

pub fn stored(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F16 => bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        Dtype::Bf16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        _ => bytes.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}

/// The distance of 1 to the next number.
pub fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => f64::powi(2.0, -10),
        Dtype::Bf16 => f64::powi(2.0, -7),
        _ => f64::from(f32::EPSILON),
    }
}

/// Numbers that look random and are the same each time, of about the size of one.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> f32 {
        let mut uniform = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1 << 24) as f32
        };
        2.0 * (uniform() + uniform() + uniform() - 1.5)
    }

    pub fn take(&mut self, count: usize, factor: f32) -> Vec<f32> {
        (0..count).map(|_| self.next() * factor).collect()
    }
}

/// Philox4x32-10, from the paper.
pub fn philox(index: u64, key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut x, mut y]) = ([index as u32, (index >> 32) as u32, 0, 0], key);
    for _ in 0..10 {
        let (even, odd) = (0xD251_1F53_u64 * u64::from(a), 0xCD9E_8D57_u64 * u64::from(c));
        (a, b, c, d) = ((odd >> 32) as u32 ^ b ^ x, odd as u32, (even >> 32) as u32 ^ d ^ y, even as u32);
        (x, y) = (x.wrapping_add(0x9E37_79B9), y.wrapping_add(0xBB67_AE85));
    }
    [a, b, c, d]
}

/// Errors of a result over those of the exact one rounded to storage, which is what torch's math path gives (it computes in f32): the root
/// mean square, and the largest.
pub fn errors_over_rounding(dtype: Dtype, got: &[f64], want: &[f64]) -> [f64; 2] {
    let single: Vec<f32> = want.iter().map(|&x| x as f32).collect();
    let rounded = widened(dtype, &stored(dtype, &single));
    let errors = |values: &[f64]| {
        values
            .iter()
            .zip(want)
            .map(|(x, y)| (x - y).abs())
            .fold([0.0, 0.0_f64], |[sum, most], x| [sum + x * x, most.max(x)])
    };
    let ([own, own_most], [other, other_most]) = (errors(got), errors(&rounded));
    [(own / other).sqrt(), own_most / other_most]
}
