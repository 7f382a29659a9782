//! Stored weights as an engine takes them.

use std::borrow::Cow;

use deuteron::{Dtype, Engine, Tensor};
use half::{bf16, f16};

use crate::checkpoint::{Checkpoint, Weight};

/// Every weight where the engine's kernels read it, in the order of [`Config::weights`](crate::Config::weights). A weight that
/// is stored as `dtype` is copied once, straight from the mapped file.
pub fn upload(engine: &Engine, checkpoint: &Checkpoint, dtype: Dtype) -> Result<Vec<Tensor>, deuteron::Error> {
    let names = checkpoint.config().weights();
    // An open checkpoint has every weight of its configuration.
    let weights = names.iter().filter_map(|(name, _)| checkpoint.weight(name));
    weights.map(|weight| Tensor::upload(engine, dtype, weight.shape.clone(), &converted(weight, dtype))).collect()
}

/// The elements of a weight as `dtype`, rounded once.
fn converted(weight: Weight<'_>, dtype: Dtype) -> Cow<'_, [u8]> {
    if weight.dtype == dtype {
        return Cow::Borrowed(weight.bytes);
    }
    let halves = || weight.bytes.as_chunks::<2>().0.iter();
    Cow::Owned(match weight.dtype {
        Dtype::F16 => encoded(halves().map(|&bytes| f16::from_le_bytes(bytes).to_f32()), dtype),
        Dtype::Bf16 => encoded(halves().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()), dtype),
        // A checkpoint stores no other.
        _ => encoded(weight.bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)), dtype),
    })
}

fn encoded(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::Bf16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}
