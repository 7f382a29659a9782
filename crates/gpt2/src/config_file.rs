//! `config.json` of a Hugging Face folder.

use deuteron::Activation;
use serde::Deserialize;
use serde_json::Value;

use crate::config::{Config, SizeError};

/// Why a `config.json` is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// No JSON, or no such keys.
    #[error("not the configuration of a GPT-2: {0}")]
    Json(String),
    /// Another architecture.
    #[error("`model_type` is `{0}`; only gpt2 is supported")]
    ModelType(String),
    /// An unsupported activation.
    #[error("`activation_function` is `{0}`; expected gelu_new, gelu_pytorch_tanh, gelu, relu or silu")]
    Activation(String),
    /// An unsupported setting.
    #[error("`{key}` is {got}; only {expected} is supported")]
    Unsupported {
        /// the key
        key: &'static str,
        /// its value
        got: String,
        /// the supported value
        expected: &'static str,
    },
    /// A size out of range.
    #[error(transparent)]
    Size(#[from] SizeError),
}

/// The keys that matter. Missing keys have the library's defaults; sizes are required.
#[derive(Deserialize)]
struct File {
    model_type: Option<String>,
    n_layer: u64,
    n_head: u64,
    n_embd: u64,
    vocab_size: u64,
    n_positions: Option<u64>,
    n_ctx: Option<u64>,
    n_inner: Option<u64>,
    activation_function: Option<String>,
    layer_norm_epsilon: Option<f64>,
    scale_attn_weights: Option<bool>,
    tie_word_embeddings: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    reorder_and_upcast_attn: Option<bool>,
    add_cross_attention: Option<bool>,
    pruned_heads: Option<Value>,
    quantization_config: Option<Value>,
}

impl Config {
    /// The sizes in a `config.json`.
    pub fn from_json(text: &str) -> Result<Config, ConfigError> {
        let file: File = serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        file.refuse_others()?;
        let positions = file.n_positions.or(file.n_ctx);
        let Some(positions) = positions else {
            return Err(ConfigError::Json("missing field `n_positions`".to_string()));
        };
        let hidden = size("n_embd", file.n_embd, Config::MOST_FEATURES)?;
        let inner = file.n_inner.map(|inner| size("n_inner", inner, 4 * Config::MOST_FEATURES)).transpose()?;
        let config = Config {
            name: Config::OTHER,
            layers: size("n_layer", file.n_layer, Config::MOST_LAYERS)?,
            heads: size("n_head", file.n_head, Config::MOST_FEATURES)?,
            hidden,
            vocabulary: size("vocab_size", file.vocab_size, Config::MOST_TOKENS)?,
            context: size("n_positions", positions, Config::MOST_TOKENS)?,
            inner: inner.filter(|&inner| inner != 4 * hidden),
            activation: activation(file.activation_function.as_deref().unwrap_or("gelu_new"))?,
            epsilon: file.layer_norm_epsilon.unwrap_or(1e-5),
            scaled: file.scale_attn_weights.unwrap_or(true),
            tied: file.tie_word_embeddings.unwrap_or(true),
        };
        config.check()?;
        let published = Config::ALL.into_iter().find(|known| Config { name: known.name, ..config } == *known);
        Ok(published.unwrap_or(config))
    }
}

impl File {
    fn refuse_others(&self) -> Result<(), ConfigError> {
        if let Some(other) = self.model_type.as_deref().filter(|&name| name != "gpt2") {
            return Err(ConfigError::ModelType(other.to_string()));
        }
        let switches = [
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx),
            ("reorder_and_upcast_attn", self.reorder_and_upcast_attn),
            ("add_cross_attention", self.add_cross_attention),
        ];
        for (key, switch) in switches {
            if switch == Some(true) {
                return Err(ConfigError::Unsupported { key, got: "true".to_string(), expected: "false" });
            }
        }
        for (key, value) in [("pruned_heads", &self.pruned_heads), ("quantization_config", &self.quantization_config)] {
            let empty = |value: &Value| value.as_object().is_some_and(|object| object.is_empty());
            if let Some(value) = value.as_ref().filter(|value| !empty(value)) {
                return Err(ConfigError::Unsupported { key, got: value.to_string(), expected: "{}" });
            }
        }
        Ok(())
    }
}

fn size(key: &'static str, got: u64, most: usize) -> Result<usize, SizeError> {
    let size = usize::try_from(got).ok().filter(|size| (1..=most).contains(size));
    size.ok_or(SizeError::Range { key, most, got })
}

fn activation(name: &str) -> Result<Activation, ConfigError> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::GeluErf),
        "relu" => Ok(Activation::Relu),
        "silu" | "swish" => Ok(Activation::Silu),
        other => Err(ConfigError::Activation(other.to_string())),
    }
}
