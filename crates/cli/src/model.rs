//! A trained GPT-2 that the user names.

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::Engine;
use deuteron_gpt2::{Checkpoint, Config, Gpt2, Hub, HubError, Tokenizer, Weights, find_model, hub_folder};

use crate::show;

/// The sizes of gpt2 with weights made from a seed.
pub const SYNTHETIC: &str = "synthetic";

/// Which model, and the form of its weights.
#[derive(Args)]
pub struct ModelArguments {
    /// box, the small model that is part of this command; a folder as Hugging Face lays it out; a name in its local cache, such as gpt2; or
    /// synthetic, the sizes of gpt2 with weights made from a seed
    #[arg(long, value_name = "DIR|NAME", default_value = Config::BOX.name)]
    pub model: String,
    /// First fetch the model from the Hugging Face Hub into its cache, with `curl`; HF_ENDPOINT and HF_TOKEN are respected
    #[arg(long)]
    download: bool,
    /// Type of the weights. With f32, f16 and bf16, activations have the same type; int8 weights have one scale per column and f32 activations
    #[arg(long, default_value = "f32")]
    pub weights: Weights,
}

impl ModelArguments {
    /// The model on an engine. The seed is of synthetic weights.
    pub fn open(&self, engine: &Engine, seed: u64) -> Result<(Gpt2, Tokenizer)> {
        if self.download {
            self.fetch()?;
        }
        if self.model == SYNTHETIC {
            let gpt2 = Gpt2::synthetic(engine, &Config::SMALL, self.weights, seed)?;
            return Ok((gpt2, Tokenizer::gpt2()));
        }
        let (checkpoint, tokenizer) = stored(&self.model)?;
        Ok((Gpt2::new(engine, &checkpoint, self.weights)?, tokenizer))
    }

    /// Prints which model runs and how to choose another, unless the user named a folder or a cached model.
    pub fn introduce(&self) {
        if self.model == Config::BOX.name {
            let millions = Config::BOX.parameters() as f64 / 1e6;
            errln!(
                "model: box, {millions:.1} M parameters trained on Shakespeare, built into this command; --top-k 40 samples, --model gpt2 --download fetches GPT-2"
            );
        }
    }

    fn fetch(&self) -> Result<()> {
        if [Config::BOX.name, SYNTHETIC].contains(&self.model.as_str()) {
            bail!(
                "--download fetches a model of the Hugging Face Hub; name one, such as --model gpt2; got {}",
                self.model
            );
        }
        let hub = hub_folder(|name| std::env::var_os(name));
        let cache = hub.as_deref().context("--download needs a cache; set HF_HOME or HOME to a folder")?;
        let bar = show::progress(None);
        Hub::new(|name| std::env::var(name).ok()).download(&self.model, cache, |file| {
            bar.set_message(format!("fetching {file}"));
        })?;
        bar.finish_and_clear();
        Ok(())
    }
}

/// The built-in model, or one from a folder or from the cache.
pub fn stored(name: &str) -> Result<(Checkpoint, Tokenizer)> {
    if name == Config::BOX.name {
        return Ok((Checkpoint::in_the_box()?, Tokenizer::in_the_box()?));
    }
    let hub = hub_folder(|name| std::env::var_os(name));
    let folder = match find_model(name, hub.as_deref()) {
        Err(error @ HubError::NotFound { .. }) => {
            bail!("{error}; or use the built-in model: --model {}", Config::BOX.name)
        }
        found => found?,
    };
    let checkpoint = Checkpoint::open(&folder)?;
    let tokenizer = Tokenizer::open(&folder, checkpoint.config())?;
    Ok((checkpoint, tokenizer))
}
