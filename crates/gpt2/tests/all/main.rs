//! GPT-2 from outside: checkpoints, tokens, logits, downloads.

mod checkpoint;
mod config;
mod damaged;
mod download;
mod engines;
mod fuzz;
mod generate;
mod hub;
mod int8;
mod model_box;
mod sampler;
mod step;
mod support;
mod tokenizer;
