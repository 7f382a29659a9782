//! The settings of a run: two runs with equal settings on the same machine give the same bits.

use deuteron::Optimizer;
use deuteron_gpt2::Config;
use serde::{Deserialize, Serialize};

use crate::step::{Precision, StepOptions};

/// The settings of a run. They are stored with every checkpoint, and a resumed run must have the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// steps of the whole run
    pub steps: u64,
    /// sequences of a micro-batch
    pub batch: usize,
    /// tokens of each
    pub sequence: usize,
    /// micro-batches of a step
    pub accumulate: usize,
    /// f32, or bf16 with weights and moments in f32
    pub precision: Precision,
    /// probability that an element is dropped
    pub dropout: f64,
    /// adamw, sgd or lion
    pub optimizer: String,
    /// of the first moment; of SGD the momentum
    pub beta1: f64,
    /// of the second moment; of Lion of the moment
    pub beta2: f64,
    /// AdamW's epsilon
    pub epsilon: f64,
    /// weight decay
    pub weight_decay: f64,
    /// the highest learning rate
    pub learning_rate: f64,
    /// the learning rate at the end
    pub least_learning_rate: f64,
    /// steps until the highest learning rate
    pub warmup: u64,
    /// the largest norm of the gradient; none for no limit
    pub clip: Option<f64>,
    /// of weights, batches and dropout
    pub seed: u64,
    /// memory limit in bytes; none for no limit. It determines what the backward pass recomputes, and so the last bits.
    #[serde(default)]
    pub memory: Option<u64>,
}

/// A setting out of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name} must be {expected}, got {got}")]
pub struct SettingsError {
    /// the setting, as the command names it
    pub name: &'static str,
    /// its range
    pub expected: &'static str,
    /// the value found
    pub got: String,
}

impl Settings {
    /// The command's defaults: AdamW in f32 without dropout.
    pub fn usual(steps: u64, batch: usize, sequence: usize) -> Settings {
        Settings {
            steps,
            batch,
            sequence,
            accumulate: 1,
            precision: Precision::F32,
            dropout: 0.0,
            optimizer: "adamw".to_string(),
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            learning_rate: 1e-3,
            least_learning_rate: 1e-4,
            warmup: (steps / 20).min(2000),
            clip: Some(1.0),
            seed: 1,
            memory: None,
        }
    }

    /// Checks that every setting is in range and consistent with a model.
    pub fn check(&self, config: &Config) -> Result<(), SettingsError> {
        let refuse = |name, expected, got: &dyn ToString| Err(SettingsError { name, expected, got: got.to_string() });
        let counts = [
            ("--steps", usize::try_from(self.steps).unwrap_or(usize::MAX)),
            ("--batch", self.batch),
            ("--sequence", self.sequence),
            ("--accumulate", self.accumulate),
        ];
        for (name, count) in counts {
            // Tokens of a step are counted in i32 on the way.
            if !(1..=1 << 30).contains(&count) {
                return refuse(name, "from 1 to 2^30", &count);
            }
        }
        if self.sequence > config.context {
            return refuse("--sequence", "at most the model's context", &self.sequence);
        }
        if self.batch.saturating_mul(self.sequence) > i32::MAX as usize {
            return refuse("--batch times --sequence", "below 2^31", &self.batch.saturating_mul(self.sequence));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse("--dropout", "at least 0 and below 1", &self.dropout);
        }
        for (name, beta) in [("--beta1", self.beta1), ("--beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return refuse(name, "at least 0 and below 1", &beta);
            }
        }
        for (name, number) in [("--epsilon", self.epsilon), ("--learning-rate", self.learning_rate)] {
            if !(number > 0.0 && number.is_finite()) {
                return refuse(name, "above 0 and finite", &number);
            }
        }
        if !(0.0..=self.learning_rate).contains(&self.least_learning_rate) {
            return refuse("--least-learning-rate", "from 0 to --learning-rate", &self.least_learning_rate);
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return refuse("--weight-decay", "at least 0 and finite", &self.weight_decay);
        }
        if self.warmup > self.steps {
            return refuse("--warmup", "at most --steps", &self.warmup);
        }
        match self.clip {
            Some(clip) if !(clip > 0.0 && clip.is_finite()) => refuse("--clip", "above 0 and finite", &clip),
            _ => self.step().map(drop),
        }
    }

    /// The parameters of a step.
    pub fn step(&self) -> Result<StepOptions, SettingsError> {
        let Settings { batch, sequence, accumulate, precision, dropout, beta1, beta2, epsilon, memory, .. } = *self;
        let optimizer = match self.optimizer.as_str() {
            "adamw" => Optimizer::AdamW { beta1, beta2, eps: epsilon },
            "sgd" => Optimizer::Sgd { momentum: beta1 },
            "lion" => Optimizer::Lion { beta1, beta2 },
            other => {
                let (name, expected) = ("--optimizer", "adamw, sgd or lion");
                return Err(SettingsError { name, expected, got: format!("`{other}`") });
            }
        };
        let decay = self.weight_decay;
        Ok(StepOptions { batch, sequence, micro_batches: accumulate, precision, dropout, optimizer, decay, memory })
    }

    /// The learning rate of a step, from 0: a linear warm-up to the highest, then half a cosine to the lowest.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let part = (step - self.warmup) as f64 / (self.steps - self.warmup).max(1) as f64;
        let share = 0.5 * (1.0 + (std::f64::consts::PI * part.min(1.0)).cos());
        self.least_learning_rate + share * (self.learning_rate - self.least_learning_rate)
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> u64 {
        (self.accumulate * self.batch * self.sequence) as u64
    }
}

/// Floating-point operations of a step per token: six per matmul weight, plus attention.
pub fn flops_per_token(config: &Config, sequence: usize) -> f64 {
    let tables = (config.vocabulary + config.context) * config.hidden;
    let matrices = config.parameters() - tables - if config.tied { 0 } else { config.vocabulary * config.hidden };
    let head = config.vocabulary * config.hidden;
    // Causal: half of the scores.
    6.0 * (matrices + head) as f64 + 6.0 * (config.layers * config.hidden * sequence) as f64
}

/// A GPT-2 of these sizes, of tokens of a vocabulary.
pub fn sized(layers: usize, heads: usize, hidden: usize, context: usize, vocabulary: usize) -> Config {
    Config { name: Config::OTHER, layers, heads, hidden, vocabulary, context, ..Config::SMALL }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn settings() -> Settings {
        Settings { warmup: 10, ..Settings::usual(100, 2, 8) }
    }

    #[test]
    fn the_rate_rises_in_a_line_and_falls_as_a_cosine() {
        let settings = settings();
        let near = |step, rate: f64| assert!((settings.rate(step) - rate).abs() < 1e-12, "{step}");
        near(0, 1e-4);
        near(9, 1e-3);
        near(10, 1e-3);
        near(55, 0.5 * (1e-3 + 1e-4));
        near(100, 1e-4);
        assert!((11..100).all(|step| settings.rate(step) < settings.rate(step - 1)));
        let without = Settings { warmup: 0, ..settings.clone() };
        assert_eq!(without.rate(0), 1e-3);
    }

    #[test]
    fn a_setting_out_of_range_is_named() {
        let good = settings();
        let config = sized(1, 1, 8, 8, 257);
        assert_eq!(good.check(&config), Ok(()));
        let bad = [
            (Settings { steps: 0, ..good.clone() }, "--steps"),
            (Settings { sequence: 9, ..good.clone() }, "--sequence"),
            (Settings { dropout: 1.0, ..good.clone() }, "--dropout"),
            (Settings { beta2: f64::NAN, ..good.clone() }, "--beta2"),
            (Settings { learning_rate: 0.0, ..good.clone() }, "--learning-rate"),
            (Settings { least_learning_rate: 1.0, ..good.clone() }, "--least-learning-rate"),
            (Settings { warmup: 101, ..good.clone() }, "--warmup"),
            (Settings { clip: Some(0.0), ..good.clone() }, "--clip"),
            (Settings { weight_decay: -1.0, ..good.clone() }, "--weight-decay"),
            (Settings { optimizer: "adam".to_string(), ..good.clone() }, "--optimizer"),
        ];
        for (settings, name) in bad {
            assert!(settings.check(&config).unwrap_err().to_string().starts_with(name), "{name}");
        }
    }

    #[test]
    fn work_of_a_token_is_near_six_times_the_parameters() {
        let flops = flops_per_token(&Config::SMALL, 1024);
        let six = 6.0 * Config::SMALL.parameters() as f64;
        assert!((0.95..1.15).contains(&(flops / six)), "{}", flops / six);
    }
}
