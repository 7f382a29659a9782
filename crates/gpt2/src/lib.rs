//! GPT-2: its sizes, the graph of a block and of the whole model, checkpoints, tokenizer, sampler, and text from all of them.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use deuteron::Engine;
//! use deuteron_gpt2::{Checkpoint, GenerateOptions, Gpt2, Sampling, Tokenizer, Weights, find_model, hub_folder};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hub = hub_folder(|name| std::env::var_os(name));
//! let folder = find_model("gpt2", hub.as_deref())?;
//! let checkpoint = Checkpoint::open(&folder)?;
//! let tokenizer = Tokenizer::open(&folder, checkpoint.config())?;
//! let mut gpt2 = Gpt2::new(&Engine::cpu(), &checkpoint, Weights::F32)?;
//! let prompt = tokenizer.encode("Hello, world");
//! let sampling = Sampling { temperature: 0.8, top_k: Some(40), ..Sampling::GREEDY };
//! let options = GenerateOptions { max_tokens: 32, sampling, end_of_text: tokenizer.end_of_text() };
//! let texts = gpt2.generate(&[prompt], &options, |_, _| ControlFlow::Continue(()))?;
//! println!("{}", tokenizer.decode(&texts[0].tokens)?);
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod bench;
mod cache;
mod checkpoint;
mod config;
mod config_file;
mod download;
mod folder;
mod generate;
mod gpt2;
mod hub;
mod model;
mod model_box;
mod perplexity;
mod quantize;
mod safetensors;
mod sampler;
mod save;
mod tokenizer;
mod transfer;
mod weights;

pub use bench::{BenchOptions, BenchReport, LayerTime, Phase, PlanTimes, bench};
pub use checkpoint::{Checkpoint, CheckpointError, TensorError, Weight};
pub use config::{Config, SizeError, UnknownModel};
pub use config_file::ConfigError;
pub use deuteron::Activation;
pub use download::{DownloadError, Hub};
pub use folder::FileError;
pub use generate::{GenerateOptions, Generation, Stop};
pub use gpt2::{Error, Gpt2, Times};
pub use hub::{HubError, find_model, hub_folder};
pub use model::{Options, Piece, Start, block, loss, model, next_logits};
pub use perplexity::Prediction;
pub use safetensors::HeaderError;
pub use sampler::{Sampler, Sampling, SamplingError};
pub use save::{SaveError, TensorFile, write_checkpoint, write_tensors};
pub use tokenizer::{Decoder, END_OF_TEXT, FormatError, Tokenizer, TokenizerError};
pub use weights::{UnknownWeights, Weights, upload};
