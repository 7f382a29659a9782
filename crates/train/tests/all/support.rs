//! What the tests share: small models and settings.

use deuteron::Optimizer;
use deuteron_gpt2::Config;
use deuteron_train::{Precision, Settings, StepOptions, sized};

pub const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };

/// Layers of 2 heads of 8 features, a vocabulary of an odd size. One layer is planned ten times as fast as two.
pub fn small(layers: usize) -> Config {
    sized(layers, 2, 16, 12, 37)
}

pub fn options(precision: Precision) -> StepOptions {
    let (optimizer, decay, memory) = (ADAMW, 0.1, None);
    StepOptions { batch: 2, sequence: 12, micro_batches: 1, precision, dropout: 0.0, optimizer, decay, memory }
}

pub fn settings() -> Settings {
    Settings { learning_rate: 3e-3, least_learning_rate: 3e-4, warmup: 2, seed: 7, ..Settings::usual(8, 2, 12) }
}
