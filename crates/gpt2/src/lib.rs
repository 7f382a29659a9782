//! GPT-2: its sizes, the graph of a block and of the whole model, and what a real one needs: checkpoint, tokenizer, sampler.
//!
//! ```no_run
//! use deuteron_gpt2::{Checkpoint, Sampler, Sampling, Tokenizer, find_model, hub_folder};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hub = hub_folder(|name| std::env::var_os(name));
//! let folder = find_model("gpt2", hub.as_deref())?;
//! let checkpoint = Checkpoint::open(&folder)?;
//! let tokenizer = Tokenizer::open(&folder, checkpoint.config())?;
//! let prompt = tokenizer.encode("Hello, world");
//! let embedding = checkpoint.weight("wte.weight");
//! let mut sampler = Sampler::new(Sampling { temperature: 0.8, top_k: Some(40), ..Sampling::GREEDY })?;
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod checkpoint;
mod config;
mod config_file;
mod folder;
mod hub;
mod model;
mod safetensors;
mod sampler;
mod tokenizer;

pub use checkpoint::{Checkpoint, CheckpointError, TensorError, Weight};
pub use config::{Activation, Config, SizeError, UnknownModel};
pub use config_file::ConfigError;
pub use folder::FileError;
pub use hub::{HubError, find_model, hub_folder};
pub use model::{Options, block, model};
pub use safetensors::HeaderError;
pub use sampler::{Sampler, Sampling, SamplingError};
pub use tokenizer::{Decoder, END_OF_TEXT, FormatError, Tokenizer, TokenizerError};
