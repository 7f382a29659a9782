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
    StepOptions { batch: 2, sequence: 12, micro_batches: 1, precision, dropout: 0.0, optimizer: ADAMW, decay: 0.1 }
}

pub fn settings() -> Settings {
    Settings {
        steps: 8,
        batch: 2,
        sequence: 12,
        accumulate: 1,
        precision: Precision::F32,
        dropout: 0.0,
        optimizer: "adamw".to_string(),
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        learning_rate: 3e-3,
        least_learning_rate: 3e-4,
        warmup: 2,
        clip: Some(1.0),
        seed: 7,
    }
}
