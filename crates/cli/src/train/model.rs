//! The model to train: sizes and tokenizer by arguments, or a checkpoint.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::{Engine, Tensor};
use deuteron_gpt2::{Checkpoint, Config, Tokenizer, Weights, upload};
use deuteron_train::{Error, fresh_weights, sized, vocabulary};

use crate::model::stored;
use crate::show;

/// Sizes of a model that a CPU trains in minutes: 4.9 million parameters with one token per byte.
const SMALL: [usize; 4] = [6, 8, 256, 256];

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArguments {
    /// Start from a model: box, a folder as Hugging Face lays it out, or a name in its local cache. Otherwise from scratch
    #[arg(long, value_name = "DIR|NAME", conflicts_with_all = ["size", "layers", "heads", "width", "context", "tokenizer"])]
    model: Option<String>,
    /// Sizes of a named model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or box
    #[arg(long, value_name = "NAME", conflicts_with_all = ["layers", "heads", "width"])]
    size: Option<String>,
    /// Transformer blocks [default: 6]
    #[arg(long)]
    layers: Option<usize>,
    /// Attention heads [default: 8]
    #[arg(long)]
    heads: Option<usize>,
    /// Width of the residual stream [default: 256]
    #[arg(long)]
    width: Option<usize>,
    /// Longest sequence [default: 256; that of --size]
    #[arg(long)]
    context: Option<usize>,
    /// bytes (one token per byte, 257 in all), bpe:TOKENS (a byte-pair vocabulary of that size, built from FILE), gpt2, or a
    /// model's folder, to use its tokenizer [default: bytes]
    #[arg(long, value_name = "bytes|bpe:TOKENS|gpt2|DIR")]
    tokenizer: Option<String>,
}

/// The model to train.
pub struct Model {
    pub config: Config,
    pub tokenizer: Tokenizer,
    /// where weights start from, if that is not a seed
    start: Option<Checkpoint>,
}

impl ModelArguments {
    /// `files` are those that are trained on.
    pub fn open(&self, files: &[PathBuf]) -> Result<Model> {
        if let Some(name) = &self.model {
            let (checkpoint, tokenizer) = stored(name)?;
            return Ok(Model { config: *checkpoint.config(), tokenizer, start: Some(checkpoint) });
        }
        let tokenizer = self.tokenizer(files)?;
        let config = match &self.size {
            Some(name) => {
                let known = Config::find(name)?;
                let (vocabulary, context) = (tokenizer.tokens(), self.context.unwrap_or(known.context));
                let own = Config { vocabulary, context, ..known };
                if own == known { known } else { Config { name: Config::OTHER, ..own } }
            }
            None => {
                let [layers, heads, width, context] = SMALL;
                let or = |given: Option<usize>, default| given.unwrap_or(default);
                let (layers, heads) = (or(self.layers, layers), or(self.heads, heads));
                sized(layers, heads, or(self.width, width), or(self.context, context), tokenizer.tokens())
            }
        };
        config.check()?;
        Ok(Model { config, tokenizer, start: None })
    }

    fn tokenizer(&self, files: &[PathBuf]) -> Result<Tokenizer> {
        match self.tokenizer.as_deref() {
            None | Some("bytes") => Ok(Tokenizer::byte_level()),
            Some("gpt2") => Ok(Tokenizer::gpt2()),
            Some(words) if let Some(tokens) = words.strip_prefix("bpe:") => {
                let tokens = tokens.parse();
                let tokens =
                    tokens.with_context(|| format!("tokenizer `{words}`: expected a number, such as bpe:2048"))?;
                Ok(show::spinning("making a vocabulary", || vocabulary(files, tokens))?)
            }
            Some(folder) => {
                let folder = Path::new(folder);
                let files = ["tokenizer.json", "vocab.json"];
                if !files.iter().any(|file| folder.join(file).exists()) {
                    bail!(
                        "tokenizer `{}`: expected bytes, bpe:TOKENS, gpt2, or a folder with a tokenizer.json or a vocab.json",
                        folder.display()
                    );
                }
                // As many rows as the tokenizer has tokens: it fits any.
                Ok(Tokenizer::open(folder, &Config { vocabulary: usize::MAX, ..Config::SMALL })?)
            }
        }
    }
}

impl Model {
    /// The weights that training starts from.
    pub fn weights(&self, engine: &Engine, seed: u64) -> Result<Vec<Tensor>, Error> {
        match &self.start {
            Some(checkpoint) => Ok(upload(engine, checkpoint, Weights::F32)?),
            None => fresh_weights(engine, &self.config, seed),
        }
    }
}
