//! The forms of weights, and the conversion of stored weights.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use deuteron::memory::{OutOfMemory, caught, reserved};
use deuteron::{Dtype, Engine, Shape, Tensor};
use half::{bf16, f16};

use crate::checkpoint::{Checkpoint, Weight};
use crate::quantize::{Bytes, columns, rows};

/// The form of a model's weights, and the dtype that it computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weights {
    /// weights and activations `f32`
    F32,
    /// weights and activations `f16`
    F16,
    /// weights and activations `bf16`
    Bf16,
    /// Matrices are bytes with one scale per output column, the token table bytes with one scale per token; biases, norms and positions
    /// are `f32`. Activations are `f32`; each row is quantised to int8 with one scale before a matmul, whose sums are exact. Queries, keys and
    /// values are `bf16`, and so are the cache and the inner layer, which halves their traffic.
    ///
    /// Against `f32`, on the four small random models of the tests, whose weights are far from trained ones: logits are off by less
    /// than [`Weights::INT8_LOGIT_ERROR`] of their spread, and perplexity by less than [`Weights::INT8_PERPLEXITY_ERROR`]. With
    /// the sizes of GPT-2 and seeded weights logits are off by 2 % of their spread.
    Int8,
}

/// An unknown form of weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown weights `{0}`; expected f32, f16, bf16 or int8")]
pub struct UnknownWeights(pub String);

impl Weights {
    /// Tolerance of a logit of [`Weights::Int8`] against that of [`Weights::F32`], as a share of the spread (largest minus smallest)
    /// of its row's logits.
    pub const INT8_LOGIT_ERROR: f64 = 0.1;
    /// Tolerance of the perplexity of [`Weights::Int8`] against that of [`Weights::F32`], relative to it.
    pub const INT8_PERPLEXITY_ERROR: f64 = 0.02;

    /// All forms.
    pub const ALL: [Weights; 4] = [Weights::F32, Weights::F16, Weights::Bf16, Weights::Int8];

    /// The name in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Weights::Int8 => "int8",
            Weights::F32 | Weights::F16 | Weights::Bf16 => self.activations().name(),
        }
    }

    /// The storage type of activations.
    pub fn activations(self) -> Dtype {
        match self {
            Weights::F32 | Weights::Int8 => Dtype::F32,
            Weights::F16 => Dtype::F16,
            Weights::Bf16 => Dtype::Bf16,
        }
    }
}

impl Weights {
    /// The storage type of the KV cache.
    pub fn cache(self) -> Dtype {
        match self {
            Weights::Int8 => Dtype::Bf16,
            Weights::F32 | Weights::F16 | Weights::Bf16 => self.activations(),
        }
    }
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Weights {
    type Err = UnknownWeights;
    fn from_str(text: &str) -> Result<Self, UnknownWeights> {
        Weights::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| UnknownWeights(text.to_string()))
    }
}

/// Every weight in memory that the engine's kernels read, in the order of the graph's inputs: that of
/// [`Config::weights`](crate::Config::weights), with the scales of int8 weights after them. A weight that needs no conversion is
/// copied once, directly from the mapped file, whose memory is released at once, so memory never holds two copies of the model.
pub fn upload(engine: &Engine, checkpoint: &Checkpoint, kind: Weights) -> Result<Vec<Tensor>, deuteron::Error> {
    let mut tensors = Vec::new();
    for (name, _) in checkpoint.config().weights() {
        // An open checkpoint has every weight of its configuration.
        let Some(weight) = checkpoint.weight(&name) else { continue };
        push(&mut tensors, engine, &name, weight, kind)?;
        checkpoint.release(&name);
    }
    Ok(tensors)
}

/// Appends a weight in its form.
pub(crate) fn push(
    tensors: &mut Vec<Tensor>,
    engine: &Engine,
    name: &str,
    weight: Weight<'_>,
    kind: Weights,
) -> Result<(), deuteron::Error> {
    let quantized = match name {
        _ if kind != Weights::Int8 || weight.shape.rank() < 2 || name == "wpe.weight" => None,
        "wte.weight" | "lm_head.weight" => Some(caught(|| rows(weight))?),
        _ => Some(caught(|| columns(weight))?),
    };
    let Some(Bytes { bytes, scales, width }) = quantized else {
        let dtype = kind.activations();
        tensors.push(Tensor::upload(engine, dtype, weight.shape.clone(), &converted(weight, dtype)?)?);
        return Ok(());
    };
    tensors.push(Tensor::upload(engine, Dtype::I8, Shape::from([scales.len(), width]), &bytes)?);
    let scale_bytes = encoded(scales.iter().copied(), Dtype::F32)?;
    tensors.push(Tensor::upload(engine, Dtype::F32, Shape::from([scales.len()]), &scale_bytes)?);
    Ok(())
}

/// The elements of a weight as `dtype`, rounded once.
fn converted(weight: Weight<'_>, dtype: Dtype) -> Result<Cow<'_, [u8]>, OutOfMemory> {
    if weight.dtype == dtype {
        return Ok(Cow::Borrowed(weight.bytes));
    }
    let halves = || weight.bytes.as_chunks::<2>().0.iter();
    let bytes = match weight.dtype {
        Dtype::F16 => encoded(halves().map(|&bytes| f16::from_le_bytes(bytes).to_f32()), dtype),
        Dtype::Bf16 => encoded(halves().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()), dtype),
        // A checkpoint stores no other.
        _ => encoded(weight.bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)), dtype),
    };
    Ok(Cow::Owned(bytes?))
}

fn encoded(values: impl ExactSizeIterator<Item = f32>, dtype: Dtype) -> Result<Vec<u8>, OutOfMemory> {
    let mut bytes = reserved(values.len() * dtype.bytes())?;
    match dtype {
        Dtype::F16 => bytes.extend(values.flat_map(|value| f16::from_f32(value).to_le_bytes())),
        Dtype::Bf16 => bytes.extend(values.flat_map(|value| bf16::from_f32(value).to_le_bytes())),
        _ => bytes.extend(values.flat_map(f32::to_le_bytes)),
    }
    Ok(bytes)
}
