//! Weights to start from.

use deuteron::reference::Generator;
use deuteron::{Dtype, Engine, Tensor};
use deuteron_gpt2::Config;

use crate::data::mixed;
use crate::error::Error;

/// The initial standard deviation of weights, as in GPT-2.
const DEVIATION: f64 = 0.02;

/// Initial weights as in GPT-2: normal, with projections into the residual stream divided by the root of their number; biases 0, scales of norms 1.
pub fn fresh_weights(engine: &Engine, config: &Config, seed: u64) -> Result<Vec<Tensor>, Error> {
    config.check()?;
    let residual = DEVIATION / ((2 * config.layers) as f64).sqrt();
    let weights = config.weights().into_iter().zip(0..).map(|((name, shape), position)| {
        let mut generator = Generator::new(mixed(&[seed, position]));
        let deviation = if name.ends_with(".c_proj.weight") { residual } else { DEVIATION };
        let constant = match shape.rank() {
            1 => Some(f64::from(u8::from(name.ends_with(".weight")))),
            _ => None,
        };
        let count = shape.elements();
        let tensor =
            Tensor::build(Dtype::F32, shape, count, |_| constant.unwrap_or_else(|| deviation * generator.normal()))?;
        Ok(tensor.to_device(engine)?)
    });
    weights.collect()
}
