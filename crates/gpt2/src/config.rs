//! The sizes of a GPT-2: the four published ones, the built-in model's, or those of a `config.json`.

use deuteron::{Activation, Shape};

/// Sizes of a GPT-2, and the few options of its variants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// name on the command line; [`Config::OTHER`] for sizes without one
    pub name: &'static str,
    /// transformer blocks
    pub layers: usize,
    /// attention heads
    pub heads: usize,
    /// width of the residual stream
    pub hidden: usize,
    /// tokens
    pub vocabulary: usize,
    /// longest sequence
    pub context: usize,
    /// width inside the MLP, if it is not `4 * hidden`
    pub inner: Option<usize>,
    /// activation between the two matmuls of the MLP
    pub activation: Activation,
    /// epsilon of layer norms
    pub epsilon: f64,
    /// whether scores are divided by the root of a head's features
    pub scaled: bool,
    /// whether the head is the token embedding; otherwise it is a weight of its own, `lm_head.weight`
    pub tied: bool,
}

/// An unknown model name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown model `{0}`; expected gpt2, gpt2-medium, gpt2-large, gpt2-xl or box")]
pub struct UnknownModel(pub String);

/// A size outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SizeError {
    /// Zero, or larger than any GPT-2.
    #[error("`{key}` must be from 1 to {most}, got {got}")]
    Range {
        /// the key of `config.json`
        key: &'static str,
        /// the largest allowed
        most: usize,
        /// the value found
        got: u64,
    },
    /// Heads share the hidden features equally.
    #[error("`n_head` must divide `n_embd`, got {heads} heads and {hidden} features")]
    Heads {
        /// heads
        heads: usize,
        /// features
        hidden: usize,
    },
    /// A layer norm needs a positive number that does not swallow the variance.
    #[error("`layer_norm_epsilon` must be above 0 and at most 1, got {0}")]
    Epsilon(f64),
}

impl Config {
    /// 124 million parameters.
    pub const SMALL: Config = Config::sized("gpt2", 12, 12, 768);
    /// 355 million parameters.
    pub const MEDIUM: Config = Config::sized("gpt2-medium", 24, 16, 1024);
    /// 774 million parameters.
    pub const LARGE: Config = Config::sized("gpt2-large", 36, 20, 1280);
    /// 1558 million parameters.
    pub const XL: Config = Config::sized("gpt2-xl", 48, 25, 1600);
    /// 2.7 million parameters, built into the program: [`Checkpoint::in_the_box`](crate::Checkpoint::in_the_box).
    pub const BOX: Config = Config { vocabulary: 2048, context: 256, ..Config::sized("box", 5, 6, 192) };
    /// All sizes that have a name.
    pub const ALL: [Config; 5] = [Config::SMALL, Config::MEDIUM, Config::LARGE, Config::XL, Config::BOX];
    /// The name of any other size.
    pub const OTHER: &'static str = "gpt2-other";

    /// Largest allowed sizes: about ten times the largest GPT-2, so that no product of two of them overflows.
    pub(crate) const MOST_LAYERS: usize = 1 << 10;
    pub(crate) const MOST_FEATURES: usize = 1 << 17;
    pub(crate) const MOST_TOKENS: usize = 1 << 24;

    const fn sized(name: &'static str, layers: usize, heads: usize, hidden: usize) -> Config {
        Config {
            name,
            layers,
            heads,
            hidden,
            vocabulary: 50257,
            context: 1024,
            inner: None,
            activation: Activation::GeluTanh,
            epsilon: 1e-5,
            scaled: true,
            tied: true,
        }
    }

    /// The sizes with this name.
    pub fn find(name: &str) -> Result<Config, UnknownModel> {
        Config::ALL.into_iter().find(|config| config.name == name).ok_or_else(|| UnknownModel(name.to_string()))
    }

    /// Features of one head.
    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }

    /// Width inside the MLP.
    pub fn inner(&self) -> usize {
        self.inner.unwrap_or(4 * self.hidden)
    }

    /// Number of parameters, a tied head counted once.
    pub fn parameters(&self) -> usize {
        let (c, inner) = (self.hidden, self.inner());
        let block = 4 * c * c + 2 * c * inner + 9 * c + inner;
        let tables = if self.tied { self.vocabulary } else { 2 * self.vocabulary } + self.context;
        self.layers * block + tables * c + 2 * c
    }

    /// Every weight: its name in the graph and its shape. Matrices are `[in, out]`, tables one row per token or position.
    pub fn weights(&self) -> Vec<(String, Shape)> {
        let (hidden, inner) = (self.hidden, self.inner());
        let mut weights = vec![
            ("wte.weight".to_string(), Shape::from([self.vocabulary, hidden])),
            ("wpe.weight".to_string(), Shape::from([self.context, hidden])),
        ];
        let mut pair = |name: String, weight: Shape, bias: usize| {
            weights.push((format!("{name}.weight"), weight));
            weights.push((format!("{name}.bias"), Shape::from([bias])));
        };
        for layer in 0..self.layers {
            pair(format!("h.{layer}.ln_1"), Shape::from([hidden]), hidden);
            pair(format!("h.{layer}.attn.c_attn"), Shape::from([hidden, 3 * hidden]), 3 * hidden);
            pair(format!("h.{layer}.attn.c_proj"), Shape::from([hidden, hidden]), hidden);
            pair(format!("h.{layer}.ln_2"), Shape::from([hidden]), hidden);
            pair(format!("h.{layer}.mlp.c_fc"), Shape::from([hidden, inner]), inner);
            pair(format!("h.{layer}.mlp.c_proj"), Shape::from([inner, hidden]), hidden);
        }
        pair("ln_f".to_string(), Shape::from([hidden]), hidden);
        if !self.tied {
            weights.push(("lm_head.weight".to_string(), Shape::from([self.vocabulary, hidden])));
        }
        weights
    }

    /// Checks that all sizes are in range and consistent.
    pub fn check(&self) -> Result<(), SizeError> {
        let sizes = [
            ("n_layer", self.layers, Config::MOST_LAYERS),
            ("n_head", self.heads, Config::MOST_FEATURES),
            ("n_embd", self.hidden, Config::MOST_FEATURES),
            ("n_inner", self.inner(), 4 * Config::MOST_FEATURES),
            ("n_positions", self.context, Config::MOST_TOKENS),
            ("vocab_size", self.vocabulary, Config::MOST_TOKENS),
        ];
        for (key, size, most) in sizes {
            if !(1..=most).contains(&size) {
                return Err(SizeError::Range { key, most, got: size as u64 });
            }
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(SizeError::Heads { heads: self.heads, hidden: self.hidden });
        }
        if !(self.epsilon > 0.0 && self.epsilon <= 1.0) {
            return Err(SizeError::Epsilon(self.epsilon));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_models() {
        let millions: Vec<usize> = Config::ALL.iter().map(|config| config.parameters() / 1_000_000).collect();
        assert_eq!(millions, [124, 354, 774, 1557, 2]);
    }

    #[test]
    fn parameters_are_the_elements_of_the_weights() {
        let odd = Config { inner: Some(77), tied: false, ..Config::SMALL };
        for config in Config::ALL.into_iter().chain([odd]) {
            let elements: usize = config.weights().iter().map(|(_, shape)| shape.elements()).sum();
            assert_eq!(config.parameters(), elements, "{config:?}");
            assert_eq!(config.check(), Ok(()));
        }
    }
}
