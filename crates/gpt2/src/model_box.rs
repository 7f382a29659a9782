//! The built-in model: weights, sizes and tokenizer are part of the program. `box/README.md` describes how they were trained.

use std::path::Path;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::Config;
use crate::tokenizer::{Tokenizer, TokenizerError};

static CONFIG: &str = include_str!("../box/config.json");
static WEIGHTS: &[u8] = include_bytes!("../box/model.safetensors");
static TOKENIZER: &str = include_str!("../box/tokenizer.json");

impl Checkpoint {
    /// The built-in model. Nothing is read from disk.
    pub fn in_the_box() -> Result<Checkpoint, CheckpointError> {
        Checkpoint::included(Path::new(Config::BOX.name), CONFIG, WEIGHTS)
    }
}

impl Tokenizer {
    /// That of [`Checkpoint::in_the_box`].
    pub fn in_the_box() -> Result<Tokenizer, TokenizerError> {
        let path = || Path::new(Config::BOX.name).join("tokenizer.json");
        Tokenizer::from_json(TOKENIZER).map_err(|problem| TokenizerError::Format { path: path(), problem })
    }
}
